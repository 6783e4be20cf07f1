"""Stages 08 and 09 on the recordings of benchmarks/engine_runs.py, as a user runs them: replay, then verdict.

    python benchmarks/verdicts.py [--device cuda] [--share 0/6]   replay every record that has no replay yet

Each record gets a folder of its own beside it with benchmark.json and the replay; the benchmarks that judge records read them
there. A replay of one record takes one to two minutes on one core, and five seconds on a GPU.
"""

import argparse
import json
from pathlib import Path

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import write_json
from eagle3_lib.params import ReplayParams
from eagle3_lib.paths import project_path, short_path
from eagle3_lib.stages import replay
from eagle3_lib.verdict import diagnose, replayed

RUNS = "runs/engine_runs"


def replay_of(path: Path, device: str = "cpu") -> dict:
    """The replay of one record; made once."""
    record = json.loads(path.read_text())
    folder = path.with_name(f"{path.stem}.judged")
    found = folder / "replay" / "replay.json"
    if not found.is_file():
        write_json(folder / "benchmark.json", _benchmark(record))
        params = ReplayParams(
            run="engine_runs",
            name=Path(record["drafter"]).name,
            out=short_path(folder / "replay"),
            drafter=record.get("served", record["drafter"]),
            target=record["target"],
            benchmark=short_path(folder),
            dtype=record["dtype"] if record["dtype"] == "bfloat16" else "float32",
            device=device,
        )
        replay.run(params)
    return replayed.read(found)


def _benchmark(record: dict) -> dict:
    """A record as stage 07 would have written it."""
    positions = record["num_speculative_tokens"]
    requests = [
        {
            "id": request["id"],
            "prompt_ids": request["prompt_ids"],
            "output_ids": request["output_ids"],
            "accepted": request["per_step_accepted"],
            "drafted": [positions]
            * len(request["per_step_accepted"]),  # K is fixed, and no answer nears the context's end
        }
        for request in record["requests"]
    ]
    return {
        "engine": "vllm",
        "version": record["engine"].removeprefix("vllm "),
        "mode": "eagle3",
        "target": record["target"],
        "dtype": record["dtype"],
        "positions": positions,
        "sampling": {"temperature": 0},
        "requests": requests,
    }


def verdict_of(path: Path) -> diagnose.Verdict:
    """Stage 09's verdict on one record."""
    return diagnose.judge(replay_of(path))


def records() -> list[Path]:
    """Every record of a run with drafts, judged or not."""
    paths = project_path(RUNS).glob("**/*.json")
    return sorted(path for path in paths if path.name != "config.json" and ".judged" not in str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", default="0/1", help="every n-th record from the k-th on, as k/n")
    options = parser.parse_args()
    first, step = map(int, options.share.split("/"))
    for path in records()[first::step]:
        try:
            verdict = diagnose.judge(replay_of(path, options.device))
        except Eagle3Error as error:  # a drafter whose config.json wants tensors that are not there
            print(short_path(path), "|", error, flush=True)
            continue
        print(short_path(path), "|", verdict.kind, "|", verdict.fault, verdict.ties, flush=True)


if __name__ == "__main__":
    main()
