"""What each grade of evidence tells: the recordings of benchmarks/engine_runs.py, stripped of what a lower grade does not have.

    python benchmarks/grades.py      after benchmarks/verdicts.py, whose replays it reads

Every recording of the real vLLM tells its rounds. Its histograms (rounds by accepted count, of each request) and its counters
(the same of all requests together) follow from them, and are judged as an engine's that tells no more. The verdict from the
rounds is what they are held against: a healthy engine must not be called faulty, and a fault must be named rightly or not at all.
Every fault of the catalogue is judged a second time without its own entry, which makes it one that the catalogue does not have: any
name is wrong then. Writes benchmarks/results/grades.json.
"""

import collections
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3_lib.drafter import checkpoint
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets
from eagle3_lib.verdict import acceptance, changes, diagnose, hypotheses, pooled, replayed, suspects
from eagle3_lib.verdict.changes import HEALTHY as CORRECT
from eagle3_lib.verdict.emitted import Told

RUNS, KEPT = "runs/engine_runs", "runs/grades"
PAIRS = (
    "base_on_its_own_text",
    "base_on_Python",
    "finetuned_on_Python",
    "MLA",
    "base_on_its_own_text_in_bfloat16",
    "finetuned_on_the_base's_own_text",
)
GRADES = ("histograms", "counters")
NO_ALARM = (diagnose.HEALTHY, diagnose.WEAK, diagnose.NOT_ENOUGH, diagnose.CANNOT_TELL, diagnose.NOTHING)


def records(pair: str) -> list[tuple[Path, dict]]:
    """The recordings of a pair that have been replayed, and what they hold."""
    paths = sorted(project_path(f"{RUNS}/{pair}").glob("*.json"))
    judged = [path for path in paths if path.with_name(f"{path.stem}.judged").joinpath("replay/replay.json").is_file()]
    return [(path, json.loads(path.read_text())) for path in judged]


def key(request: dict) -> str:
    return ",".join(map(str, [*request["prompt_ids"], -1, *request["output_ids"]]))


def own(pair: str, found: list[tuple[Path, dict]]) -> dict[str, dict]:
    """For each text of a pair's recordings, what a replay of it without rounds holds; kept. Most recordings share their texts."""
    path = project_path(f"{KEPT}/{pair}.json")
    kept: dict[str, dict] = json.loads(path.read_text()) if path.is_file() else {}
    texts = {key(request): request for _, record in found for request in record["requests"]}
    missing = [request for name, request in texts.items() if name not in kept]
    if missing:
        record = found[0][1]
        dtype = torch.bfloat16 if record["dtype"] == "bfloat16" else torch.float32
        target = targets.load(targets.resolve(record["target"]), dtype)
        drafter = checkpoint.load_for(record["drafter"], record["target"], target, dtype)
        tried = suspects.suspects(drafter, changes.TargetParts.of(target))
        setups = {name: suspect.setup for name, suspect in tried.items()}
        asked = [{"id": "", **request, "accepted": None} for request in missing]
        told = Told(dtype=record["dtype"])
        examined = hypotheses.examining(
            target, drafter, asked, record["num_speculative_tokens"], None, told, 1, setups, own=True
        )
        for (request, _), asked_one in tqdm(zip(examined, asked, strict=True), total=len(asked), desc=pair):
            kept[key(asked_one)] = dict(request)
        write_json(path, kept)
    return kept


def stripped(record: dict, kept: dict[str, dict], grade: str) -> dict[str, Any]:
    """The replay of a recording of which nothing is known but histograms or counters."""
    positions, requests = record["num_speculative_tokens"], []
    for request in record["requests"]:
        histogram = [request["per_step_accepted"].count(count) for count in range(positions + 1)]
        accepted = request["per_step_accepted"]
        totals = {"rounds": len(accepted), "accepted": sum(accepted), "drafted": positions * len(accepted)}
        known = {"id": request["id"], "histogram": histogram if grade == "histograms" else None, "totals": totals}
        requests.append(kept[key(request)] | known)
    rounds = [request["per_step_accepted"] for request in record["requests"]]
    counted = acceptance.request_counts(rounds, positions).sum(0).astype(int).tolist()
    counters = {"rounds": counted[0], "drafted": positions * counted[0], "accepted": counted[1:]}
    return {
        "drafter": Path(record["drafter"]).name,
        "positions": positions,
        "dtype": record["dtype"],
        "evidence": grade,
        "sampling": {"temperature": 0},
        "counters": counters if grade == "counters" else None,
        "requests": requests,
    }


def without(replay: dict, fault: str) -> dict:
    """The same replay by a catalogue that does not have this fault, nor those that draft the very same."""
    own = [request["own_rounds"] for request in replay["requests"]]
    same = {name for name in own[0] if name != CORRECT and all(some[name] == some[fault] for some in own)}
    requests = [
        request | {"own_rounds": {name: some for name, some in request["own_rounds"].items() if name not in same}}
        for request in replay["requests"]
    ]
    return replay | {"requests": requests}


def outcome(verdict: diagnose.Verdict, rounds: diagnose.Verdict) -> str:
    """What a lower grade's verdict is beside the one from rounds: named, tied, open, no alarm or wrong."""
    faulty = rounds.kind in diagnose.OF_ENGINE
    if verdict.kind == diagnose.FAULT:
        right = {verdict.fault, *verdict.ties} & {rounds.fault, *rounds.ties} - {None}
        if rounds.kind != diagnose.FAULT or not right:
            return "wrong"
        return "named with ties" if verdict.ties else "named"
    if verdict.kind == diagnose.UNKNOWN:
        return "not named" if faulty or rounds.kind in (diagnose.SMALL, diagnose.NOTHING) else "wrong"
    if verdict.kind == rounds.kind:
        return "the same"
    if verdict.kind == diagnose.NO_ALARM:
        return "no alarm" if rounds.kind == diagnose.HEALTHY else f"no alarm, {rounds.kind}"
    if verdict.kind in (diagnose.CANNOT_TELL, diagnose.NOT_ENOUGH):
        return "cannot tell"
    return "missed" if faulty or rounds.kind == diagnose.SMALL else f"{rounds.kind} is {verdict.kind}"


def judged(pair: str) -> list[dict]:
    """One row for each recording and grade."""
    rows, found = [], records(pair)
    kept = own(pair, found)
    for path, record in found:
        rounds = diagnose.judge(replayed.read(path.with_name(f"{path.stem}.judged") / "replay/replay.json"))
        row: dict[str, Any] = {
            "pair": pair,
            "record": path.stem,
            "fault": record["fault"],
            "where": record.get("where"),
        }
        row["rounds"] = {"kind": rounds.kind, "fault": rounds.fault, "ties": rounds.ties}
        row["departing"] = rounds.evidence["departing"]
        for grade in GRADES:
            replay = stripped(record, kept, grade)
            verdict = pooled.judge(replay)
            row[grade] = {"kind": verdict.kind, "fault": verdict.fault, "ties": verdict.ties}
            row[grade] |= {"outcome": outcome(verdict, rounds), "unlike": verdict.evidence.get("departing")}
            if record["fault"] in replay["requests"][0]["own_rounds"] and record.get("where") == "everywhere":
                row[grade]["without its entry"] = pooled.judge(without(replay, record["fault"])).kind
        rows.append(row)
    return rows


def main() -> None:
    rows = [row for pair in PAIRS for row in judged(pair)]
    outcomes = {grade: dict(collections.Counter(row[grade]["outcome"] for row in rows)) for grade in GRADES}
    removed = {
        grade: dict(
            collections.Counter(
                row[grade].get("without its entry") for row in rows if "without its entry" in row[grade]
            )
        )
        for grade in GRADES
    }
    print(json.dumps({"outcomes": outcomes, "without its entry": removed}, indent=1))
    result = {
        "command": "python benchmarks/grades.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "recordings": len(rows),
        "outcomes": outcomes,
        "without its entry": removed,
        "rows": rows,
    }
    write_json(project_path("benchmarks/results/grades.json"), result)


if __name__ == "__main__":
    main()
