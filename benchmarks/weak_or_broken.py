"""The same low acceptance, two causes: a weak drafter on a healthy engine, and a good drafter on a broken engine.

    python benchmarks/weak_or_broken.py      after `make demo`, whose data, features and drafter it uses

The weak drafter is the base one after a few training steps on the quickstart's domain; the good one is the
quickstart's. The engine is the real vLLM, once as it is and once with a fault of eagle3_lib/engines/shims.py that brings the
good drafter down to about the weak one's acceptance. Writes benchmarks/results/weak_or_broken.json.
"""

import datetime
import json
import sys

from fault_matrix import POSITIONS, RUNS, TARGET, examine, run_engine

from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import TrainParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import train
from eagle3_lib.targets.answers import read_answers
from eagle3_lib.verdict import diagnose

GOOD, WEAK = "runs/quickstart/train/drafter", "runs/fault_matrix/weak"
WEAK_TRAINING = {"epochs": 1, "batch_size": 6, "learning_rate": 3.0e-4}  # 15 steps
FAULT = "norm_output flipped"
REQUESTS = 16


def held_out() -> str:
    path = project_path(RUNS) / "held_out" / "prompts.json"
    answers = [a for a in read_answers("runs/quickstart/generate") if a.split == "held_out"][:REQUESTS]
    write_json(path, {"requests": [{"prompt_ids": answer.prompt_ids} for answer in answers]})
    return str(path)


def main() -> None:
    if not project_path(GOOD).is_dir():
        sys.exit(f"{GOOD}: no such folder; run `make demo` first")
    if not project_path(WEAK).is_dir():
        train.run(TrainParams(features="runs/quickstart/extract", target=TARGET, out=WEAK, **WEAK_TRAINING))
    prompts, verdicts = held_out(), []
    for name, fault, drafter in (
        ("weak drafter, healthy engine", "none", f"{WEAK}/drafter"),
        ("good drafter, healthy engine", "none", GOOD),
        ("good drafter, broken engine", FAULT, GOOD),
    ):
        replay = examine(run_engine(name, fault, drafter, prompts=prompts)) | {"drafter": name}
        verdicts.append(diagnose.judge(replay))
        print(verdicts[-1].kind, "|", verdicts[-1].sentence, flush=True)
    result = {
        "command": "python benchmarks/weak_or_broken.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "positions": POSITIONS,
        "fault": FAULT,
        "weak_training": WEAK_TRAINING,
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "together": diagnose.judge_together(verdicts),
    }
    write_json(project_path("benchmarks/results/weak_or_broken.json"), result)
    print(json.dumps(result["together"], indent=1))


if __name__ == "__main__":
    main()
