"""Stage 08: replay one drafter on the tokens that an engine emitted, and judge the engine's rounds."""

import dataclasses
from typing import Any

import torch
from tqdm import tqdm

from .. import results
from ..drafter import checkpoint
from ..drafter.model import Drafter
from ..engines import measured, options, timing
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..params import ReplayParams, SamplingSettings
from ..paths import project_path, short_path, usable_path
from ..results import Benchmark, Cost, PlainTokens, Replay, VerdictFile
from ..targets import targets
from ..verdict import begun, changes, diagnose, emitted, hypotheses, lossless, pooled, replayed, suspects
from ..verdict.card import Asked, Card
from ..verdict.emitted import Told
from ..verdict.rounds import at_context_limit


def run(params: ReplayParams, expect_length: float | None = None) -> Replay:
    """Replay one drafter on the tokens that the engine emitted, lay its rounds beside the engine's, and judge them.

    Where the engine tells no rounds, each hypothesis makes its own of the same tokens, and what the engine counted is judged.

    Writes replay.json (:class:`eagle3_lib.results.Replay`), verdict.json (:class:`eagle3_lib.results.VerdictFile`) and card.json
    (:class:`eagle3_lib.results.StoredCard`).

    Args:
        expect_length: the mean acceptance length that the card must hold the run against; None: no gate.
    Raises:
        Eagle3Error: the benchmark is missing, was of plain or n-gram decoding, or of another target; its rounds cannot be
            those of its K; its token ids are not the target's; or its engine was set to accept otherwise than by the target.
    """
    rounds = measured.read_rounds(params.benchmark)
    bench, where = rounds.bench, short_path(project_path(params.benchmark) / "benchmark.json")
    if bench["target"] != params.target:
        raise Eagle3Error(f"{where}: target: found {bench['target']!r}, expected {params.target!r}")
    inputs = {"benchmark": project_path(params.benchmark) / "benchmark.json", "drafter": project_path(params.drafter)}
    with stage("replay", params, inputs) as notes:
        dtype = getattr(torch, params.dtype)
        folder = targets.resolve(params.target)
        target = targets.load(folder, dtype, params.device)
        measured.refuse_unknown_ids(bench, target.get_input_embeddings().weight.shape[0], where)
        drafter = checkpoint.load_for(params.drafter, params.target, target, dtype)
        rounded = emitted.coarser(bench.get("dtype", emitted.UNTOLD), params.dtype)
        told = Told(rounds.sampling, rounded, targets.end_ids(folder))
        ranks = options.tensor_parallel(bench.get("engine_args", []))
        tried = suspects.suspects(drafter, changes.TargetParts.of(target, ranks))
        header = _header(params, rounds, told) | {
            "suspects": [suspects.told(suspect, params.drafter) for suspect in tried.values()],
            "untold_defaults": {
                name: value for name, value in targets.sampling_defaults(folder).items() if name not in rounds.told
            },
        }
        path = project_path(params.out) / "replay.json"
        tally, emissions = replayed.Tally(bench["positions"]), []
        own = rounds.without_rounds
        setups = {name: suspect.setup for name, suspect in tried.items() if own or suspect.fault is None}
        examined = hypotheses.examining(
            target, drafter, bench["requests"], bench["positions"], None, told, ranks, setups, own
        )
        with replayed.Writer(path, header) as writer:
            for request, emission in tqdm(examined, total=len(bench["requests"]), desc="replay", mininterval=2):
                if emission:
                    emissions.append(emission)
                tally.add(request)
                writer.add(request)
            sampled = None
            if emissions:
                sampled = lossless.judge(lossless.Emission.join(emissions), told.sampling.temperature)
            plain = _plain(params, bench, target, drafter, told)
            summary = {**tally.summary(), "sampled": sampled, "plain": plain}
            if own:
                summary["engine_acceptance"] = pooled.engine_acceptance(bench, rounds.grade)
            writer.finish(summary)
        found = begun.find(replayed.read(path), target, drafter, bench["requests"], ranks)
        if found:
            with replayed.Writer(path, header | {"since": found.since}) as writer:
                for request in found.requests(replayed.read(path)):
                    writer.add(request)
                writer.finish(summary)
        result = replayed.read(path)
        judged = judge(params, bench, result)
        write_json(project_path(params.out) / "verdict.json", judged)
        shown = _card(params, bench, result, judged, expect_length)
        write_json(project_path(params.out) / "card.json", {"schema": results.CARD_SCHEMA, **shown.as_dict()})
        notes |= tally.agreement | {"verdict": judged["verdict"]["kind"]}
    return result


def _header(params: ReplayParams, rounds: measured.Rounds, told: Told) -> dict[str, Any]:
    """What replay.json says before its requests."""
    bench = rounds.bench
    check = bench.get("cross_check") or {}
    return {
        "drafter": params.name,
        "engine": params.engine,
        "target": params.target,
        "positions": bench["positions"],
        "dtype": told.dtype,
        "sampling": told.sampling.model_dump(),
        "evidence": rounds.grade,
        "prompts_in_chunks": measured.prompts_in_chunks(bench),
        "at_limit": sum(at_context_limit(request, bench) for request in bench["requests"]),
        "contradictions": check.get("contradictions", []),
        "counters": check.get("counters") if rounds.grade == pooled.COUNTERS else None,
        "other_rounds": check.get("other_rounds", 0),
        "drafts_vary": measured.drafts_vary(bench),
    }


def judge(params: ReplayParams, bench: Benchmark, replay: Replay) -> VerdictFile:
    """The verdict on a replay; weakness is judged where the engine's plain decoding was timed beside it."""
    cost = _cost(params, bench, replay)
    break_even = cost["break_even_length"] if cost else None
    of_counts = replay.get("evidence") in pooled.GRADES
    verdict = pooled.judge(replay, break_even) if of_counts else diagnose.judge(replay, break_even)
    return {"schema": results.VERDICT_SCHEMA, "verdict": verdict.as_dict(), "cost": cost}


def _card(
    params: ReplayParams, bench: Benchmark, replay: Replay, judged: VerdictFile, expect_length: float | None
) -> Card:
    name = bench.get("engine", params.engine)
    folder, measured_in, drafter = (usable_path(place) for place in (params.out, params.benchmark, params.drafter))
    asked = Asked(name, drafter, params.target, measured_in, bench["positions"], params.run)
    files = [f"{measured_in}/benchmark.json", f"{folder}/replay.json", f"{folder}/verdict.json"]
    grade = replay.get("evidence", "told")
    found = Card.of(judged["verdict"], judged["cost"], grade, asked, files, expect_length)
    return dataclasses.replace(found, engine=params.engine)


def _cost(params: ReplayParams, bench: Benchmark, replay: Replay) -> Cost | None:
    plain = _plain_run(params, bench)
    if plain is None or not timing.is_timed(plain) or not timing.is_timed(bench):
        return None
    return timing.cost(plain, bench, replay) if replay["engine_acceptance"]["rounds"] else None


def _plain_run(params: ReplayParams, bench: Benchmark) -> Benchmark | None:
    """The same engine's plain decoding of the same target, where it was measured."""
    if not params.plain or not (project_path(params.plain) / "benchmark.json").is_file():
        return None
    found = measured.read(params.plain)
    return found if found["target"] == bench["target"] else None


def _plain(params: ReplayParams, bench: Benchmark, target: Any, drafter: Drafter, told: Told) -> PlainTokens | None:
    """How the tokens of plain decoding compare with the target's, where they were asked for in the same way."""
    found = _plain_run(params, bench)
    if found is None:
        return None
    where = f"{params.plain}/benchmark.json: sampling"
    asked = {"temperature": found["temperature"]} if "temperature" in found else {}
    if SamplingSettings.check({**asked, **found.get("sampling", {})}, where) != told.sampling:
        return None
    return emitted.plain(target, drafter.config.boundaries[0], found["requests"], told)


def verdict(params: ReplayParams) -> VerdictFile:
    """The verdict.json that the stage wrote.

    Raises:
        Eagle3Error: there is none, or it is of another version.
    """
    return read_verdict(params.out)


def read_verdict(folder: str) -> VerdictFile:
    """verdict.json of a folder of stage 08; see :func:`verdict`."""
    path = project_path(folder) / "verdict.json"
    return results.check(VerdictFile, results.read_json(path), short_path(path), results.VERDICT_SCHEMA)


def emitted_words(params: ReplayParams, request_id: str | int) -> list[str]:
    """The tokens of one measured answer as text."""
    requests = measured.read(params.benchmark)["requests"]
    (output_ids,) = (request["output_ids"] for request in requests if request["id"] == request_id)
    tokenizer = targets.load_tokenizer(targets.resolve(params.target))
    return [tokenizer.decode([token]) for token in output_ids]
