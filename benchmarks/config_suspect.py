"""Is a wrong config.json named, and no right one? Drafters whose config.json was changed, served by the real vLLM.

    python benchmarks/engine_runs.py       records the runs (runs/engine_runs/config)
    python benchmarks/config_suspect.py    judges them

The engine obeys the changed config.json, so that its rounds are those of a correct engine. Here every other value is
replayed at the same rounds (eagle3_lib/verdict/suspects.py). A row is one changed config.json: the field that is named, whether
it is the changed one, and how much more its value accepts. Healthy drafters, whose config.json describes them, must
name none.
Writes benchmarks/results/config_suspect.json.
"""

import argparse
import datetime
import functools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter
from eagle3_lib.engines import measured
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets
from eagle3_lib.verdict import changes, suspects

RECORDS = "runs/engine_runs/config"
RESULT = "benchmarks/results/config_suspect.json"
SMOLLM2, MLA = "models/SmolLM2-135M-Instruct", "targets/tiny-mla"
BASE, FINETUNED = "drafters/smollm2-135m-eagle3", "runs/quickstart/train/drafter"
ZOO, RECORDED = "runs/healthy_zoo", "tests/data/vllm_cpu_replay.json"
HEALTHY = {  # name: target, drafter, and the texts with the rounds of the engine that made them
    "base on its own text": (SMOLLM2, BASE, RECORDED),
    "base on Python": (SMOLLM2, BASE, f"{ZOO}/defaults/base/16 at once"),
    "finetuned on Python": (SMOLLM2, FINETUNED, f"{ZOO}/defaults/finetuned/16 at once"),
    "finetuned on the base's text": (SMOLLM2, FINETUNED, RECORDED),
    "MLA public": (MLA, "drafters/tiny-mla-public", f"{ZOO}/mla/public/asked"),
    "MLA public with noise": (MLA, f"{ZOO}/tiny-mla-noise", f"{ZOO}/mla/public with noise/asked"),
}
SWITCHES = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")


@functools.cache
def target_of(name: str):
    return targets.load(targets.resolve(name))


def served_drafter(record: dict, target) -> Drafter:
    """The drafter as the engine loaded it: a norm that only its config.json has, without a tensor, has unit weights."""
    try:
        return checkpoint.load_for(record["served"], record["target"], target)
    except Eagle3Error as error:
        if "missing tensors" not in str(error):
            raise
    drafter = checkpoint.load_for(record["drafter"], record["target"], target)
    return changes.variant(drafter, **{name: record["config"][name] for name in SWITCHES if name in record["config"]})


def judged(record: dict) -> dict:
    """One changed config.json."""
    target = target_of(record["target"])
    requests = [request | {"accepted": request["per_step_accepted"]} for request in record["requests"]]
    found = suspects.examine(target, served_drafter(record, target), requests, record["num_speculative_tokens"])
    suspect, changed = found.suspect, set(record["config"])
    row = {"config": record["name"], "pair": record["pair"], "field": sorted(changed), "rounds": found.slots}
    return row | best(found) | {"right": suspect is not None and suspect.field in changed}


def best(found: suspects.Examined) -> dict:
    """What is named, and what the best of all suspects gains, named or not."""
    first = found.scores[0]
    return {
        "named": found.suspect.field if found.suspect else None,
        "value": found.suspect.value if found.suspect else None,
        "best": first["name"],
        "gain": first["gain"],
        "accepted": first["accepted"],
        "of_config": first["of_config"],
        "ties": first["ties"],
    }


def healthy(name: str) -> dict:
    """One drafter whose config.json describes it."""
    target_name, folder, texts = HEALTHY[name]
    target, steps = target_of(target_name), 4
    if texts == RECORDED:
        requests = json.loads(project_path(texts).read_text())["requests"]
        if folder == BASE:  # the rounds are this drafter's
            requests = [request | {"accepted": request["per_step_accepted"]} for request in requests]
    else:
        bench = measured.read_rounds(texts).bench
        requests, steps = bench["requests"], bench["positions"]
    found = suspects.examine(target, checkpoint.load_for(folder, target_name, target), requests, steps)
    where = "the engine's rounds" if "accepted" in requests[0] else "every place of the answers"
    return {"drafter": folder, "pair": name, "compared": where, "rounds": found.slots} | best(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", default=RECORDS, help="folder of the engine's records")
    parser.add_argument("--out", default=RESULT)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    records = [json.loads(path.read_text()) for path in sorted(project_path(options.records).glob("*/*.json"))]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        served = [record for record in records if "served" in record]
        right_found = pool.map(healthy, HEALTHY)
        rows = list(pool.map(judged, served))
        right_ones = list(right_found)
    for row in [*rows, *right_ones]:
        print(json.dumps(row), flush=True)
    result = {
        "command": "python benchmarks/config_suspect.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "rows": rows,
        "healthy": right_ones,
        "right": sum(row["right"] for row in rows),
        "wrong": sum(row["named"] is not None and not row["right"] for row in rows),
        "false_alarms": sum(row["named"] is not None for row in right_ones),
    }
    write_json(Path(project_path(options.out)), result)


if __name__ == "__main__":
    main()
