"""Stage 07: one engine in one mode over HTTP: the tokens it emits, its rounds, its throughput and latency.

Two parts under one server. Acceptance: every held-out prompt once, several at a time where the engine tells the rounds
of each request, else one at a time, so that a streamed chunk is a step. An engine may still join two steps in one chunk;
its own totals of the request, or its counters around it, show that, and the request is asked again. Time: some of the prompts, at each concurrency,
in several repeats after a warm-up; their tokens are checked against the first part's.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from ..compat import launch
from ..drafter import checkpoint
from ..engines import base, meaning, serving
from ..engines.timing import throughput
from ..errors import Eagle3Error
from ..files import folder_hash, write_json
from ..journal import Journal
from ..manifest import stage
from ..params import BenchmarkParams, SamplingSettings
from ..paths import project_path
from ..results import BENCHMARK_SCHEMA, Benchmark, Counters, CrossCheck, MeasuredRequest, Speed, Totals
from ..targets import targets
from ..targets.answers import Answer, read_answers, samples_file
from ..targets.identity import target_identity
from ..verdict import acceptance
from ..verdict.rounds import contradiction, counters_contradict, histogram_fits, told_rounds, totals_fit

CHUNK_TRIES = 3
COUNTER_TRIES, COUNTER_WAIT_S = 20, 0.05


def run(params: BenchmarkParams) -> Benchmark:
    """Measure one mode and write benchmark.json.

    Returns:
        {"schema", "engine", "version", "mode", "target", "dtype", "sampling", "speculative_options", "engine_args",
        "max_model_len", "load_s", "left_out", "clean_room", "positions", "evidence": "told" or "chunks", "cross_check", "requests": [{"id", "prompt_ids", "output_ids", "accepted", "drafted", ...}], "timed":
        [{"concurrency", "repeat", "id", "tokens", "seconds", "first_token_s"}], "waves": [{"concurrency", "repeat",
        "tokens", "wall_s"}], "summary"}.
        ``steps`` of a timed request are its decode steps after prefill, rounds where the engine speculates; clean_room is
        empty without a GPU.
    Raises:
        Eagle3Error: a drafter that does not fit the target, no held-out prompts, or a server that fails.
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    if params.drafter:
        check_drafter(params.drafter, params.target, folder)
    speculation = base.Speculation(
        params.mode, params.drafter, params.num_speculative_tokens, params.speculative_options
    )
    if params.mode != "plain":
        words = [*serving.speculative_words(params, speculation), *params.engine_args]
        meaning.refuse(params.engine, params.speculative_options, words, os.environ, params.temperature)
    prompts = [answer for answer in read_answers(params.data) if answer.split == "held_out"]
    if len(prompts) < params.timed_prompts:
        raise Eagle3Error(
            f"{params.data}: found {len(prompts)} held-out samples, expected at least timed_prompts = {params.timed_prompts}"
        )
    inputs = {"prompts": samples_file(params.data)} | (
        {"drafter": project_path(params.drafter)} if params.drafter else {}
    )
    settings = params.model_dump(exclude={"out", "port", "start_timeout_s", "stall_timeout_s"})
    settings |= {role: folder_hash(path) for role, path in inputs.items()}
    settings["target_identity"] = target_identity(params.target)
    with stage("benchmark", params, inputs) as notes:
        journal = Journal(out / "finished.jsonl", settings)
        with launch.serve(params, folder, out / "server.log", speculation) as server:
            before = serving.counters(server)
            requests, fresh = measure_acceptance(server, prompts, params, journal)
            told = sum(len(request["accepted"] or []) for request in fresh)
            check = cross_check(fresh, before, _counters_after(server, before, told), params.num_speculative_tokens)
            timed, waves = _measure_time(server, prompts[: params.timed_prompts], params, journal)
        measured = {"cross_check": check, "requests": requests, "timed": timed, "waves": waves}
        result = cast(Benchmark, describe(server, params) | measured)
        _check_same_tokens(result)
        result["summary"] = summarise(result)
        write_json(out / "benchmark.json", result)
        journal.delete()
        notes |= {"load_s": server.load_s, **result["summary"]}
    return result


def describe(server: base.Server, params: BenchmarkParams) -> dict:
    """What benchmark.json says of the engine and of how it was asked."""
    return {
        "schema": BENCHMARK_SCHEMA,
        "engine": server.engine,
        "version": server.version,
        "mode": params.mode,
        "target": params.target,
        "dtype": params.dtype,
        "sampling": params.settings().model_dump(),
        "speculative_options": params.speculative_options,
        "engine_args": params.engine_args,
        "max_model_len": params.max_model_len,
        "load_s": server.load_s,
        "left_out": list(server.left_out),
        "clean_room": server.room,
        "positions": 0 if params.mode == "plain" else params.num_speculative_tokens,
        "evidence": "told" if _tells(server, params) else "chunks",
    }


def summarise(result: Benchmark) -> Speed:
    """Throughput and latency at one request at a time, throughput by concurrency, and acceptance."""
    tokens, seconds = throughput(result["timed"])
    alone = [row for row in result["timed"] if row["concurrency"] == 1]
    latencies = np.array([row["seconds"] for row in alone])
    after_first = np.array([(row["seconds"] - row["first_token_s"]) / max(row["tokens"] - 1, 1) for row in alone])
    levels = sorted({wave["concurrency"] for wave in result["waves"]})
    rates = {
        level: [w["tokens"] / w["wall_s"] for w in result["waves"] if w["concurrency"] == level] for level in levels
    }
    summary: Speed = {
        "tokens_per_s": acceptance.bootstrap(lambda t, s: t.sum(-1) / s.sum(-1), tokens, seconds),
        "by_concurrency": {str(level): [round(rate, 3) for rate in rates[level]] for level in levels},
        "latency_s": {
            "median": round(float(np.median(latencies)), 4),
            "p90": round(float(np.quantile(latencies, 0.9)), 4),
        },
        "first_token_s": round(float(np.median([row["first_token_s"] for row in alone])), 4),
        "time_per_output_token_s": round(float(np.median(after_first)), 5),
    }
    told = [request for request in result["requests"] if request["accepted"] is not None]
    if result["positions"] and any(request["accepted"] for request in told):
        rounds, drafted = [told_rounds(request) for request in told], [request.get("drafted") for request in told]
        summary["acceptance"] = acceptance.summary(rounds, result["positions"], drafted)
    return summary


def cross_check(
    requests: Sequence[MeasuredRequest], before: Counters | None, after: Counters | None, positions: int = 0
) -> CrossCheck:
    """The rounds of the requests beside what the engine counted otherwise.

    Args:
        positions: K.
    Returns:
        counters: the engine's counters over the part, where it has them; histograms_equal, totals_equal: in how many
        requests, of all that carry some, they are those of the rounds; contradictions: sentences, [] where all fits.
    """
    rounds = [request for request in requests if request.get("accepted") is not None]
    told = [request for request in rounds if request.get("histogram")]
    summed = [request for request in rounds if request.get("totals")]
    contradicted = [(request, contradiction(request, positions)) for request in rounds]
    sentences = [f"request {request['id']}: {said}" for request, said in contradicted if said]
    counted = _since(before, after) if after else None
    if counted:
        comparable = all(request.get("tries", 1) == 1 and request.get("accepted") is not None for request in requests)
        said = counters_contradict(rounds, counted, positions) if comparable else None
        sentences += [said] if said else []
    return {
        "counters": counted,
        "histograms": len(told),
        "histograms_equal": sum(histogram_fits(request, positions) for request in told),
        "totals": len(summed),
        "totals_equal": sum(totals_fit(request, positions) for request in summed),
        "contradictions": sentences,
    }


def _since(before: Counters | None, after: Counters) -> Counters:
    """What an engine's counters rose by."""
    if before is None:
        return after
    accepted = [a - b for a, b in zip(after["accepted"], before["accepted"], strict=True)]
    return {
        "rounds": after["rounds"] - before["rounds"],
        "drafted": after["drafted"] - before["drafted"],
        "accepted": accepted,
    }


def check_drafter(drafter: str, target: str, folder: Path) -> None:
    """Refuse a drafter that does not fit the target in ``folder``.

    Raises:
        Eagle3Error: see :func:`eagle3_lib.drafter.checkpoint.check_fits`.
    """
    config = targets.load_config(folder)
    loaded = checkpoint.load(drafter, config.num_hidden_layers)
    checkpoint.check_fits(loaded.drafter.config, config, drafter, target)


def measure_acceptance(
    server: base.Server, prompts: list[Answer], params: BenchmarkParams, journal: Journal
) -> tuple[list[MeasuredRequest], list[MeasuredRequest]]:
    """The requests in the order of ``prompts``, and those of them that this server answered now."""

    def one(prompt: Answer) -> MeasuredRequest:
        started = {"started_s": round(time.time(), 3)}  # since the epoch: answers of a resumed run keep their order
        if params.mode == "plain" or _tells(server, params):
            answer = serving.complete(server, prompt.prompt_ids, params.max_tokens, sampling=sampling)
            return cast(MeasuredRequest, {"id": prompt.id, **asdict(answer), **started})
        return cast(MeasuredRequest, {**_by_chunks(server, prompt, params), **started})

    sampling = params.settings()
    done = {row["request"]["id"]: row["request"] for row in journal.rows if "request" in row}
    todo, fresh = [prompt for prompt in prompts if prompt.id not in done], []
    together = params.concurrency if params.mode == "plain" or _tells(server, params) else 1
    with ThreadPoolExecutor(together) as pool:
        for request in tqdm(pool.map(one, todo), total=len(todo), desc=f"{params.mode}: acceptance", mininterval=2):
            journal.add({"request": request})
            fresh.append(request)
    done |= {request["id"]: request for request in fresh}
    return [done[prompt.id] for prompt in prompts], fresh


def _tells(server: base.Server, params: BenchmarkParams) -> bool:
    """Whether each answer will carry its rounds: vLLM leaves them out of one that a stop string ended."""
    return server.tells_rounds and not params.sampling.get("stop")


def _by_chunks(server: base.Server, prompt: Answer, params: BenchmarkParams) -> MeasuredRequest:
    """One answer alone, its rounds read off the stream; asked again while the engine's own totals contradict them.

    N-gram speculation has many steps without drafts, which are chunks and no rounds: its answers are asked once, and the
    counters over all of them say what was accepted.
    """
    if params.mode == "ngram":
        answer = serving.complete(server, prompt.prompt_ids, params.max_tokens, sampling=params.settings())
        answer.accepted = answer.rounds_from_chunks()
        return cast(MeasuredRequest, {"id": prompt.id, **asdict(answer), "tries": 1})
    return ask_alone(
        server, prompt.id, prompt.prompt_ids, params.num_speculative_tokens, params.max_tokens, params.settings()
    )


def ask_alone(
    server: base.Server,
    name: str,
    prompt_ids: list[int],
    positions: int,
    max_tokens: int,
    sampling: SamplingSettings,
    salts: Sequence[str] = ("",) * CHUNK_TRIES,
) -> MeasuredRequest:
    """One answer with no other request under way, its rounds read off the stream and held against the engine's totals.

    It is asked again while the totals, of the answer or by the counters around it, contradict the rounds: the engine, or a
    client that lags, may have joined two steps in one chunk.

    Args:
        name: the request's id.
        positions: K.
        salts: of each try, at least one; see :func:`eagle3_lib.engines.base.complete`.
    """
    for tries, salt in enumerate(salts, 1):
        before = serving.counters(server)
        answer = serving.complete(server, prompt_ids, max_tokens, sampling=sampling, salt=salt)
        answer.accepted = answer.rounds_from_chunks()
        if answer.totals is None and before is not None:
            answer.totals = _totals_around(server, before, len(answer.accepted))
        totals = answer.totals or {}
        if "drafted" in totals and totals["drafted"] == positions * totals["rounds"]:
            answer.drafted = [positions] * len(answer.accepted)
        request = cast(MeasuredRequest, {"id": name, **asdict(answer), "tries": tries})
        if not contradiction(request, positions):
            break
    return request


def _totals_around(server: base.Server, before: Counters, rounds: int) -> Totals:
    """{"rounds", "accepted", "drafted"} that the engine's counters rose by."""
    rise = _since(before, _counters_after(server, before, rounds) or before)
    return {"rounds": rise["rounds"], "drafted": rise["drafted"], "accepted": sum(rise["accepted"])}


def _counters_after(server: base.Server, before: Counters | None, rounds: int) -> Counters | None:
    """The engine's counters, once they have risen by so many rounds: they come a moment after the last chunk."""
    for _ in range(COUNTER_TRIES):
        after = serving.counters(server)
        if after is None or _since(before, after)["rounds"] >= rounds:
            break
        time.sleep(COUNTER_WAIT_S)
    return after


def _measure_time(
    server: base.Server, prompts: list[Answer], params: BenchmarkParams, journal: Journal
) -> tuple[list[dict], list[dict]]:
    waves = {(row["wave"]["concurrency"], row["wave"]["repeat"]): row for row in journal.rows if "wave" in row}
    sampling = params.settings()
    for concurrency in params.timed_concurrency:

        def one(prompt: Answer, alone: bool = concurrency == 1) -> tuple[str, base.Completion]:
            answer = serving.complete(server, prompt.prompt_ids, params.timed_tokens, sampling=sampling, stream=alone)
            return prompt.id, answer

        todo = [repeat for repeat in range(params.repeats) if (concurrency, repeat) not in waves]
        with ThreadPoolExecutor(concurrency) as pool:
            if todo:
                list(pool.map(one, prompts[:concurrency]))  # warm-up, not counted
            for repeat in tqdm(todo, desc=f"{params.mode}: {concurrency} at a time", mininterval=2):
                place, started = {"concurrency": concurrency, "repeat": repeat}, time.monotonic()
                answers = list(pool.map(one, prompts))
                wall_s = round(time.monotonic() - started, 5)
                tokens = sum(len(answer.output_ids) for _, answer in answers)
                timed = [place | _timed_row(prompt_id, answer) for prompt_id, answer in answers]
                waves[concurrency, repeat] = {"wave": place | {"tokens": tokens, "wall_s": wall_s}, "timed": timed}
                journal.add(waves[concurrency, repeat])
    rows = [waves[place] for place in sorted(waves)]
    return [timed for row in rows for timed in row["timed"]], [row["wave"] for row in rows]


def _timed_row(prompt_id: str, answer: base.Completion) -> dict:
    return {
        "id": prompt_id,
        "output_ids": answer.output_ids,
        "tokens": len(answer.output_ids),
        "steps": len(answer.accepted or answer.chunks[1:]),
        "seconds": round(answer.seconds, 5),
        "first_token_s": round(answer.first_token_s, 5),
    }


def _check_same_tokens(result: Any) -> None:
    """Note how many timed answers differ from the start of the acceptance part's (batching may change rounding)."""
    whole = {request["id"]: request["output_ids"] for request in result["requests"]}
    result["timed_differs"] = sum(row["output_ids"] != whole[row["id"]][: row["tokens"]] for row in result["timed"])
    for row in result["timed"]:
        del row["output_ids"]
