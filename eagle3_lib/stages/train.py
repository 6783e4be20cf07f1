"""Stage 05: train a drafter on stored features (:mod:`eagle3_lib.training.trainer`).

One process, or several under torchrun or accelerate, run the same code and follow the same curve::

    torchrun --nproc-per-node 8 -m eagle3_lib.stages.train runs/NAME/params/train.yaml
"""

import contextlib
import sys

import yaml

from ..features.store import Store
from ..manifest import stage
from ..params import TrainParams
from ..paths import project_path, short_path
from ..training.trainer import Progress, Trainer, make_accelerator
from ..training.trainer import guesses as guesses  # for the notebook


def run(params: TrainParams, on_progress: Progress = lambda log, evaluations: None) -> dict:
    """Train; replay held-out samples on the way; go on from the last checkpoint when killed.

    Args:
        on_progress: called with the log (a row a step) and the evaluations so far: before the first step, after each
            evaluation, and about once a minute.
    Returns:
        the manifest's notes: acceptance before and after each evaluation, and the paired gain.
    Raises:
        Eagle3Error: sizes that do not fit, no samples, a loss or gradient that is not finite, an epoch in which nothing
            was taught, or memory that does not suffice; the last checkpoint stays whole.
    """
    inputs = {"features": project_path(params.features) / "index.json", "drafter": project_path(params.drafter)}
    accelerator = make_accelerator(params)
    writing: contextlib.AbstractContextManager[dict] = (
        stage("train", params, inputs) if accelerator.is_main_process else contextlib.nullcontext({})
    )
    with writing as notes:
        store = Store(project_path(params.features))
        trainer = Trainer(params, accelerator, store)
        trainer.fit(on_progress)
        notes |= trainer.summary()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return notes


def main() -> None:
    """``python -m eagle3_lib.stages.train PARAMS.yaml``: the flat parameters of the stage, as in runs/NAME/params/train.yaml."""
    if len(sys.argv) != 2:
        raise SystemExit(main.__doc__)
    path = project_path(sys.argv[1])
    run(TrainParams.check(yaml.safe_load(path.read_text()), short_path(path)))


if __name__ == "__main__":
    main()
