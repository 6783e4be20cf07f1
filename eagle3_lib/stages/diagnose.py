"""Stage 09: what the report says. It reads the result files of the other stages and computes nothing anew."""

import json
from pathlib import Path

from ..engines import clean_room, measured
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..params import DiagnoseParams
from ..paths import project_path, short_path
from ..reports.report import by_concurrency, cost, latency, round_costs, speedup, step_time
from ..targets.answers import Answer, read_answers
from ..verdict import acceptance, break_even, diagnose, replayed

SCHEMA = 2
OF_REPLAY = (
    "positions",
    "engine_acceptance",
    "replay_acceptance",
    "agreement",
    "dtype",
    "sampling",
    "sampled",
    "plain",
)


def run(params: DiagnoseParams) -> dict:
    """Bring the stages' results together, judge each drafter in each engine, and write report.json.

    Returns:
        {"schema", "run", "finding", "engines": {engine: {"drafters", "throughput", "tokens", "verdicts", ...}},
        "training", "profile", "audit", "stages"}.
    Raises:
        Eagle3Error: a result file is missing.
    """
    folder = project_path(params.folder)
    with stage("diagnose", params) as notes:
        engines = {engine: _engine(folder, engine, params.drafters) for engine in params.engines}
        sentences = [
            " ".join([f"{engine} {result['version']}: {verdict['sentence']}", *verdict["warnings"]])
            for engine, result in engines.items()
            for verdict in result["verdicts"]
        ]
        report = {
            "schema": SCHEMA,
            "run": params.run,
            "finding": " ".join(sentences),
            "engines": engines,
            "training": _manifest(folder / "train").get("notes"),
            "generated": _manifest(folder / "generate").get("notes"),
            "extracted": _manifest(folder / "extract").get("notes"),
            "coverage": _read(folder / "extract" / "coverage.json"),
            "profile": _read(folder / "profile" / "profile.json"),
            "preflight": _read(folder / "preflight" / "preflight.json"),
            "audit": {name: _read(folder / "audit" / name / "audit.json") for name in params.drafters},
            "stages": _stages(folder),
        }
        write_json(project_path(params.out) / "report.json", report)
        notes |= {"finding": report["finding"]}
    return report


def _engine(folder: Path, engine: str, drafters: list[str]) -> dict:
    runs = {mode: measured.read(folder / "benchmark" / engine / mode) for mode in ("plain", "ngram", *drafters)}
    replays = {name: replayed.read(folder / "replay" / engine / name / "replay.json") for name in drafters}
    for name, replay in replays.items():
        diagnose.check_same(runs[name], replay)
    drafted = [name for name, replay in replays.items() if replay["engine_acceptance"]["rounds"]]
    result = {
        "version": runs["plain"]["version"],
        "drafters": {name: {key: replay.get(key) for key in OF_REPLAY} for name, replay in replays.items()},
        "ngram_acceptance": runs["ngram"]["summary"].get("acceptance"),
        "evidence": {mode: {key: run[key] for key in ("evidence", "cross_check")} for mode, run in runs.items()},
        "throughput": {mode: run["summary"] | {"load_s": run["load_s"]} for mode, run in runs.items()},
        "speedup": {mode: speedup(runs["plain"], run) for mode, run in runs.items() if mode != "plain"},
        "speedup_by_concurrency": {
            mode: by_concurrency(runs["plain"], run) for mode, run in runs.items() if mode != "plain"
        },
        "cost": {name: cost(runs["plain"], runs[name], replays[name]) for name in drafted},
        "latency": {mode: latency(run) for mode, run in runs.items()},
        "step_s": {mode: step_time(runs[mode]) for mode in ("plain", *drafters)},
        "tokens": _tokens(runs, replays),
        "clean_room": {mode: clean_room.told(run.get("clean_room", {})) for mode, run in runs.items()},
    }
    result["break_even"] = {
        name: break_even.of_run(
            replay["positions"],
            replay["engine_acceptance"]["curve"]["value"],
            round_costs(runs[name], result["speedup_by_concurrency"][name], result["cost"][name]),
        )
        for name, replay in replays.items()
        if name in drafted
    }
    break_even_lengths = {name: found["break_even_length"] for name, found in result["cost"].items()}
    verdicts = [diagnose.judge(replay, break_even_lengths.get(name)) for name, replay in replays.items()]
    result["verdicts"] = [verdict.as_dict() for verdict in verdicts]
    result["together"] = diagnose.judge_together(verdicts)
    if len(drafted) == len(drafters) > 1:
        first, last = (
            [request["accepted"] or [] for request in runs[name]["requests"]] for name in (drafters[0], drafters[-1])
        )
        positions = runs[drafters[0]]["positions"]
        result["length_gain"] = {
            "of": drafters[-1],
            "over": drafters[0],
            **acceptance.paired_length_difference(last, first, positions),
        }
    return result


def _tokens(runs: dict[str, dict], replays: dict[str, dict]) -> dict:
    """Are the emitted tokens the same in every mode, and the target's own greedy choice?"""
    plain = {request["id"]: request["output_ids"] for request in runs["plain"]["requests"]}
    differing = {
        mode: sum(request["output_ids"] != plain.get(request["id"]) for request in run["requests"])
        for mode, run in runs.items()
        if mode != "plain" and not run.get("sampling", {}).get("temperature")  # draws differ by chance
    }
    return {
        "requests": len(plain),
        "tokens": sum(map(len, plain.values())),
        "requests_differing_from_plain": differing,
        "tokens_not_the_targets_choice": {
            name: replay["agreement"]["tokens_not_greedy"]
            for name, replay in replays.items()
            if not replay.get("sampled")
        },
    }


def _stages(folder: Path) -> list[dict]:
    """Stage, seconds and provenance of every manifest of the run, in the order they ran."""
    manifests = sorted(
        (json.loads(path.read_text()) for path in folder.rglob("manifest.json")), key=lambda m: m["started"]
    )
    return [
        {
            "stage": m["stage"],
            "of": short_path(m["params"]["out"]),
            "seconds": m["seconds"],
            "started": m["started"],
            "git": m["git"],
        }
        for m in manifests
    ]


def _manifest(folder: Path) -> dict:
    return _read(folder / "manifest.json")


def _read(path: Path) -> dict:
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run the stage that writes it first")
    return json.loads(path.read_text())


def answers(params: DiagnoseParams) -> list[Answer]:
    """The target's answers of stage 03 of the run."""
    return read_answers(project_path(params.folder) / "generate")
