"""Stage 09: the report. It brings the results of the other stages together and computes nothing anew.

It reports what there is: a run without stage 02, or with one drafter replayed and nothing timed, gets a report of that, and
``missing`` says what it leaves out.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import results
from ..engines import clean_room, measured, timing
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..params import DiagnoseParams
from ..paths import project_path, short_path
from ..results import (
    Benchmark,
    BreakEven,
    Cost,
    DrafterReport,
    EmittedTokens,
    EngineReport,
    Gain,
    Replay,
    Report,
    StageRun,
    VerdictFile,
)
from ..targets.answers import Answer, read_answers
from ..verdict import acceptance, break_even, diagnose, replayed
from .replay import read_verdict

PLAIN, NGRAM = "plain", "ngram"
SECTIONS = {  # of the report: the file, and the stage that writes it
    "training": ("train/manifest.json", "05"),
    "generated": ("generate/manifest.json", "03"),
    "extracted": ("extract/manifest.json", "04"),
    "coverage": ("extract/coverage.json", "04"),
    "profile": ("profile/profile.json", "02"),
    "preflight": ("preflight/preflight.json", "01"),
}
NOTES = ("training", "generated", "extracted")  # sections that are a manifest's notes


def run(params: DiagnoseParams) -> Report:
    """Bring the stages' results together and write report.json (:class:`eagle3_lib.results.Report`).

    Raises:
        Eagle3Error: no drafter of the run was replayed and nothing was measured, a result file is damaged or of another
            version, or a replay is of other tokens than the run.
    """
    folder = project_path(params.folder)
    with stage("diagnose", params) as notes:
        missing: list[str] = []
        found = {engine: _engine(folder, engine, params.drafters, missing) for engine in params.engines}
        engines = {engine: result for engine, result in found.items() if result is not None}
        if not engines:
            raise Eagle3Error(
                f"{params.folder}: found no benchmark.json and no replay.json of {', '.join(params.engines)}; expected the "
                f"results of stage 07 or 08"
            )
        sentences = [
            " ".join([f"{engine} {result['version']}: {verdict['sentence']}", *verdict["warnings"]])
            for engine, result in engines.items()
            for verdict in result["verdicts"]
        ]
        sections = {name: _section(folder, name, missing) for name in SECTIONS}
        report: Report = {
            "schema": results.REPORT_SCHEMA,
            "run": params.run,
            "finding": " ".join(sentences),
            "engines": engines,
            "missing": missing,
            "training": sections["training"],
            "generated": sections["generated"],
            "extracted": sections["extracted"],
            "coverage": sections["coverage"],
            "profile": sections["profile"],
            "preflight": sections["preflight"],
            "audit": _audits(folder, params.drafters, missing),
            "stages": _stages(folder),
        }
        write_json(project_path(params.out) / "report.json", report)
        notes |= {"finding": report["finding"]}
    return report


def _section(folder: Path, name: str, missing: list[str]) -> dict[str, Any] | None:
    file, number = SECTIONS[name]
    if not (folder / file).is_file():
        missing.append(f"{name}: stage {number} has not run")
        return None
    values = _object(folder / file)
    if name not in NOTES:
        return values
    notes: dict[str, Any] = _object(folder / file, "notes")["notes"]
    return notes


def _object(path: Path, *fields: str) -> dict[str, Any]:
    """A JSON file that holds an object with these fields.

    Raises:
        Eagle3Error: it holds something else.
    """
    values = results.read_json(path)
    if not isinstance(values, dict) or not values:
        raise Eagle3Error(f"{short_path(path)}: found {values!r:.40}, expected the fields that its stage writes")
    for name in fields:
        if name not in values:
            raise Eagle3Error(f"{short_path(path)}: {name}: found none, expected this field")
    return values


def _audits(folder: Path, drafters: Iterable[str], missing: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in drafters:
        path = folder / "audit" / name / "audit.json"
        if path.is_file():
            found[name] = _object(path, "engine")
        else:
            missing.append(f"audit of {name}: stage 06 has not run")
    return found


def _engine(folder: Path, engine: str, drafters: list[str], missing: list[str]) -> EngineReport | None:
    """What one engine's results say together; None where there are none."""
    runs: dict[str, Benchmark] = {}
    for mode in (PLAIN, NGRAM, *drafters):
        if (folder / "benchmark" / engine / mode / "benchmark.json").is_file():
            runs[mode] = measured.read(folder / "benchmark" / engine / mode)
        else:
            missing.append(f"{engine}, {mode}: stage 07 has not run")
    replays: dict[str, Replay] = {}
    judged: dict[str, VerdictFile] = {}
    for name in drafters:
        where = folder / "replay" / engine / name
        if not (where / "replay.json").is_file():
            missing.append(f"{engine}, {name}: stage 08 has not run")
            continue
        replays[name], judged[name] = replayed.read(where / "replay.json"), read_verdict(str(where))
        for file, of in (
            ("replay.json", replays[name]["drafter"]),
            ("verdict.json", judged[name]["verdict"]["drafter"]),
        ):
            if of != name:
                raise Eagle3Error(f"{short_path(where / file)}: drafter: found {of!r}, expected {name!r}")
        if name in runs:
            diagnose.check_same(runs[name], replays[name])
    if not runs and not replays:
        return None
    timed = {mode: run for mode, run in runs.items() if timing.is_timed(run)}
    plain = timed.get(PLAIN)
    others = {mode: run for mode, run in timed.items() if plain is not None and mode != PLAIN}
    beside = {mode: run for mode, run in others.items() if timing.are_paired(runs[PLAIN], run)}
    missing += [f"{engine}, {mode}: its speed, timed otherwise than plain decoding" for mode in others.keys() - beside]
    missing += [f"{engine}, {mode}: its speed, not timed" for mode in runs.keys() - timed.keys()]
    costs = {name: found["cost"] for name, found in judged.items() if found["cost"] and name in beside}
    by_concurrency = {mode: timing.by_concurrency(runs[PLAIN], run) for mode, run in beside.items()}
    verdicts = [found["verdict"] for found in judged.values()]
    return {
        "version": next((run["version"] for run in runs.values() if "version" in run), None),
        "drafters": {name: _drafter(replay) for name, replay in replays.items()},
        "ngram_acceptance": runs[NGRAM]["summary"].get("acceptance") if NGRAM in timed else None,
        "evidence": {
            mode: {"evidence": run.get("evidence", "told"), "cross_check": run.get("cross_check")}
            for mode, run in runs.items()
        },
        "throughput": {mode: {**run["summary"], "load_s": run["load_s"]} for mode, run in timed.items()},
        "speedup": {mode: timing.speedup(runs[PLAIN], run) for mode, run in beside.items()},
        "speedup_by_concurrency": by_concurrency,
        "cost": costs,
        "latency": {mode: timing.latency(run) for mode, run in timed.items()},
        "step_s": {mode: timing.step_time(run) for mode, run in timed.items() if mode != NGRAM},
        "tokens": _tokens(runs, replays) if PLAIN in runs else None,
        "clean_room": {
            mode: clean_room.told(run["clean_room"])
            for mode, run in runs.items()
            if "others" in run.get("clean_room", {})
        },
        "break_even": {
            name: _break_even(replays[name], timed[name], by_concurrency[name], costs[name]) for name in costs
        },
        "verdicts": verdicts,
        "together": diagnose.judge_together([diagnose.Verdict.of(verdict) for verdict in verdicts]),
        "length_gain": _length_gain(runs, replays, drafters),
    }


def _drafter(replay: Replay) -> DrafterReport:
    return {
        "positions": replay["positions"],
        "engine_acceptance": replay["engine_acceptance"],
        "replay_acceptance": replay["replay_acceptance"],
        "agreement": replay["agreement"],
        "dtype": replay.get("dtype"),
        "sampling": replay.get("sampling"),
        "sampled": replay.get("sampled"),
        "plain": replay.get("plain"),
    }


def _break_even(
    replay: Replay, run: Benchmark, speedups: dict[str, results.Interval], cost: Cost
) -> dict[str, BreakEven]:
    curve = replay["engine_acceptance"]["curve"]["value"] or []
    return break_even.of_run(replay["positions"], curve, timing.round_costs(run, speedups, cost))


def _length_gain(runs: dict[str, Benchmark], replays: dict[str, Replay], drafters: list[str]) -> Gain | None:
    """Mean acceptance length of the last drafter over the first, where both accepted something in the engine."""
    drafted = [name for name, replay in replays.items() if replay["engine_acceptance"]["rounds"] and name in runs]
    told = all(any(request["accepted"] for request in runs[name]["requests"]) for name in drafted)
    if len(drafters) < 2 or drafted != drafters or not told:
        return None
    first, last = (
        [request["accepted"] or [] for request in runs[name]["requests"]] for name in (drafters[0], drafters[-1])
    )
    gain = acceptance.paired_length_difference(last, first, runs[drafters[0]]["positions"])
    return {"of": drafters[-1], "over": drafters[0], **gain}


def _tokens(runs: dict[str, Benchmark], replays: dict[str, Replay]) -> EmittedTokens:
    """Are the emitted tokens the same in every mode, and the target's own greedy choice?"""
    plain = {request["id"]: request["output_ids"] for request in runs[PLAIN]["requests"]}
    differing = {
        mode: sum(request["output_ids"] != plain.get(request["id"]) for request in run["requests"])
        for mode, run in runs.items()
        if mode != PLAIN and not run.get("sampling", {}).get("temperature")  # draws differ by chance
    }
    return {
        "requests": len(plain),
        "tokens": sum(map(len, plain.values())),
        "requests_differing_from_plain": differing,
        "tokens_not_the_targets_choice": {
            name: replay["agreement"]["tokens_not_greedy"]
            for name, replay in replays.items()
            if not replay.get("sampled") and "tokens_not_greedy" in replay["agreement"]
        },
    }


def _stages(folder: Path) -> list[StageRun]:
    """Stage, seconds and provenance of every manifest of the run, in the order they ran."""
    fields = ("stage", "params", "seconds", "started", "git")
    manifests = [_object(path, *fields) for path in folder.rglob("manifest.json")]
    return [
        {
            "stage": m["stage"],
            "of": short_path(m["params"]["out"]),
            "seconds": m["seconds"],
            "started": m["started"],
            "git": m["git"],
        }
        for m in sorted(manifests, key=lambda m: m["started"])
    ]


def answers(params: DiagnoseParams) -> list[Answer]:
    """The target's answers of stage 03 of the run; [] where it has none."""
    folder = project_path(params.folder) / "generate"
    return read_answers(folder) if (folder / "samples.parquet").is_file() else []
