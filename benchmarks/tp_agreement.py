"""Does tensor parallelism change what a drafter is given? vLLM on a CPU: tokens, rounds and replay at tp 1, 2 and 3.

    OMP_NUM_THREADS=1 python benchmarks/tp_agreement.py

Boundaries are captured between layers. Where a rank captures its part before the sum over ranks, tokens stay right and the
drafts change; the replay, which runs in one process, shows it. SmolLM2-135M with its base drafter at tp 1; the same two
with a KV group of zero weights, which two ranks can share, at tp 2; and at tp 3 with 64 more draft tokens of zero weights,
since 8192 do not divide by 3 (recipes/divisible.py). They are the same functions, so tokens and rounds must be equal.
Then that wrong capture on purpose, at tp 2 (partial_capture.py). Stages 07 and 08 on a few recorded prompts, greedy,
float32, K = 4, and the verdict of stage 09 on each. Runs that exist are kept in runs/tp_agreement. Speed is not measured:
ranks share cores. Writes benchmarks/results/tp_agreement.json.
"""

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import NamedTuple

from eagle3_lib.files import write_json, write_text
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BASE_DRAFTER, BenchmarkParams, ReplayParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import benchmark, replay
from eagle3_lib.targets import targets
from eagle3_lib.verdict import diagnose
from recipes import divisible

RUN, PROMPTS = "tp_agreement", "tests/data/vllm_cpu_replay.json"
DATA = f"runs/{RUN}/generate"
DRAFTER_OF_3, DRAFT_TOKENS_OF_3 = "models/smollm2-135m-8256-tokens-eagle3", 8256


class Setup(NamedTuple):
    """A target, its drafter, over how many ranks both are divided, and vLLM's worker extension."""

    target: str
    drafter: str
    ranks: int = 1
    extension: str = ""

    @property
    def engine_args(self) -> list[str]:
        words = ["--tensor-parallel-size", str(self.ranks)] if self.ranks > 1 else []
        return words + (["--worker-extension-cls", self.extension] if self.extension else [])


SETUPS = {
    "tp1": Setup(targets.SMOLLM2, BASE_DRAFTER),
    "tp2": Setup(divisible.TARGET, divisible.DRAFTER, 2),
    "tp3": Setup(targets.SMOLLM2, DRAFTER_OF_3, 3),
    "tp2_wrong": Setup(divisible.TARGET, divisible.DRAFTER, 2, "partial_capture.Extension"),
}


def write_prompts(count: int) -> None:
    """Recorded prompts as stage 07 reads them: held-out answers."""
    requests = json.loads(project_path(PROMPTS).read_text())["requests"][1 : count + 1]
    rows = [
        {"id": str(number), "split": "held_out", "prompt": "", "prompt_ids": request["prompt_ids"], "output_ids": []}
        | {"text": "", "finish_reason": "length", "seconds": 0.0}
        for number, request in enumerate(requests)
    ]
    write_text(project_path(DATA) / "samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def serve(name: str, tokens: int, start_timeout_s: int) -> dict:
    """Stage 07 with the drafter; no more of its timed part than it asks for."""
    setup = SETUPS[name]
    params = BenchmarkParams(
        run=RUN,
        setup=name,
        mode="base",
        target=setup.target,
        drafter=setup.drafter,
        engine_args=setup.engine_args,
        data=DATA,
        max_tokens=tokens,
        timed_prompts=2,
        timed_tokens=2,
        max_model_len=256,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=start_timeout_s,
    )
    kept = project_path(params.out) / "benchmark.json"
    return json.loads(kept.read_text()) if kept.is_file() else benchmark.run(params)


def replayed(name: str) -> dict:
    """Stage 08: what a correct engine accepts on these tokens."""
    setup = SETUPS[name]
    params = ReplayParams(run=RUN, name="base", engine=name, target=setup.target, drafter=setup.drafter)
    kept = project_path(params.out) / "replay.json"
    return json.loads(kept.read_text()) if kept.is_file() else replay.run(params)


def row(name: str, served: dict, compared: dict, first: dict) -> dict:
    """What one setup did, beside the replay and beside the first setup's tokens and rounds."""
    verdict = diagnose.judge(compared).as_dict()
    pairs = list(zip(served["requests"], first["requests"], strict=True))
    return {
        "setup": name,
        **SETUPS[name]._asdict(),
        "load_s": served["load_s"],
        "requests": len(pairs),
        "tokens": sum(len(request["output_ids"]) for request, _ in pairs),
        "requests_with_the_first_setups_tokens": sum(a["output_ids"] == b["output_ids"] for a, b in pairs),
        "requests_with_the_first_setups_rounds": sum(a["accepted"] == b["accepted"] for a, b in pairs),
        **compared["agreement"],
        "engine_by_position": compared["engine_acceptance"]["curve"]["value"],
        "replay_by_position": compared["replay_acceptance"]["curve"]["value"],
        "engine_mean_length": compared["engine_acceptance"]["mean_length"],
        "replay_mean_length": compared["replay_acceptance"]["mean_length"],
        "verdict": {key: verdict[key] for key in ("kind", "sentence", "fault")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--start-timeout", type=int, default=500, help="seconds; every rank is an interpreter that loads"
    )
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the engine's workers find partial_capture
    divisible.main()
    layers = targets.load_config(targets.resolve(targets.SMOLLM2)).num_hidden_layers
    divisible.with_more_tokens(BASE_DRAFTER, DRAFTER_OF_3, DRAFT_TOKENS_OF_3, layers)
    write_prompts(options.prompts)
    served = {name: serve(name, options.tokens, options.start_timeout) for name in SETUPS}
    rows = [row(name, served[name], replayed(name), served["tp1"]) for name in SETUPS]
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/tp_agreement.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "dtype": "float32",
        "num_speculative_tokens": served["tp1"]["positions"],
        "rows": rows,
        "requests": {
            name: [{key: r[key] for key in ("id", "prompt_ids", "output_ids", "accepted")} for r in run["requests"]]
            for name, run in served.items()
        },
    }
    write_json(project_path(f"benchmarks/results/{RUN}.json"), result)
    for found in rows:
        print(
            f"{found['setup']}: {found['equal']} of {found['rounds']} rounds equal the replay ({found['cut']} cut); "
            f"tokens as at tp 1 in {found['requests_with_the_first_setups_tokens']} of {found['requests']} requests; "
            f"{found['verdict']['kind']}"
        )


if __name__ == "__main__":
    main()
