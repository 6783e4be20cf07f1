"""Stage 07: one engine in one mode over HTTP: the tokens it emits, its rounds, its throughput and latency.

Two parts under one server. Acceptance: every held-out prompt once, several at a time where the engine tells the rounds
of each request, else one at a time, so that a streamed chunk is a round. Time: some of the prompts, at each concurrency,
in several repeats after a warm-up; their tokens are checked against the first part's.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import acceptance, checkpoint, engines, targets
from .answers import Answer, read_answers, samples_file
from .errors import Eagle3Error
from .journal import Journal
from .measured import throughput
from .params import BenchmarkParams
from .provenance import folder_hash, project_path, stage, write_json

SCHEMA = 1


def run(params: BenchmarkParams) -> dict:
    """Measure one mode and write benchmark.json.

    Returns:
        {"schema", "engine", "version", "mode", "target", "load_s", "left_out", "clean_room", "positions", "evidence":
        "told" or "chunks", "cross_check", "requests": [{"id", "prompt_ids", "output_ids", "accepted", "drafted", ...}], "timed":
        [{"concurrency", "repeat", "id", "tokens", "seconds", "first_token_s"}], "waves": [{"concurrency", "repeat",
        "tokens", "wall_s"}], "summary"}.
        ``steps`` of a timed request are its decode steps after prefill, rounds where the engine speculates; clean_room is
        empty without a GPU.
    Raises:
        Eagle3Error: a drafter that does not fit the target, no held-out prompts, or a server that fails.
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    if params.drafter:
        _check_drafter(params, folder)
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
    with stage("benchmark", params, inputs) as notes:
        journal = Journal(out / "finished.jsonl", settings)
        asked = (params.mode, params.drafter, params.num_speculative_tokens, params.speculative_options)
        with engines.serve(params, folder, out / "server.log", engines.Speculation(*asked)) as server:
            before = engines.counters(server)
            requests, fresh = _measure_acceptance(server, prompts, params, journal)
            check = cross_check(fresh, before, engines.counters(server))
            timed, waves = _measure_time(server, prompts[: params.timed_prompts], params, journal)
        result = {
            "schema": SCHEMA,
            "engine": server.engine,
            "version": server.version,
            "mode": params.mode,
            "target": params.target,
            "load_s": server.load_s,
            "left_out": list(server.left_out),
            "clean_room": server.room,
            "positions": 0 if params.mode == "plain" else params.num_speculative_tokens,
            "evidence": "told" if server.tells_rounds else "chunks",
            "cross_check": check,
            "requests": requests,
            "timed": timed,
            "waves": waves,
        }
        _check_same_tokens(result)
        result["summary"] = summarise(result)
        write_json(out / "benchmark.json", result)
        journal.delete()
        notes |= {"load_s": server.load_s, **result["summary"]}
    return result


def summarise(result: dict) -> dict:
    """Throughput and latency at one request at a time, throughput by concurrency, and acceptance."""
    tokens, seconds = throughput(result["timed"])
    alone = [row for row in result["timed"] if row["concurrency"] == 1]
    latencies = np.array([row["seconds"] for row in alone])
    after_first = np.array([(row["seconds"] - row["first_token_s"]) / max(row["tokens"] - 1, 1) for row in alone])
    levels = sorted({wave["concurrency"] for wave in result["waves"]})
    rates = {
        level: [w["tokens"] / w["wall_s"] for w in result["waves"] if w["concurrency"] == level] for level in levels
    }
    summary = {
        "tokens_per_s": acceptance.bootstrap(lambda t, s: t.sum(-1) / s.sum(-1), tokens, seconds),
        "by_concurrency": {str(level): [round(rate, 3) for rate in rates[level]] for level in levels},
        "latency_s": {
            "median": round(float(np.median(latencies)), 4),
            "p90": round(float(np.quantile(latencies, 0.9)), 4),
        },
        "first_token_s": round(float(np.median([row["first_token_s"] for row in alone])), 4),
        "time_per_output_token_s": round(float(np.median(after_first)), 5),
    }
    if result["positions"] and any(r["accepted"] for r in result["requests"]):
        summary["acceptance"] = acceptance.summary([r["accepted"] for r in result["requests"]], result["positions"])
    return summary


def cross_check(requests: list[dict], before: dict | None, after: dict | None) -> dict:
    """The rounds of the requests beside what the engine counted otherwise.

    Returns:
        counters: {"rounds", "accepted"} of the engine's counters over the part, where it has them; histograms_equal: of how
        many requests, of all that carry one, the histogram equals the rounds; totals_equal: of how many, of all that carry
        some, the engine's own totals do.
    """
    told = [request for request in requests if request["histogram"]]
    equal = 0
    for request in told:
        steps = [request["accepted"].count(count) for count in range(len(request["histogram"]))]
        equal += steps == request["histogram"]
    summed = [request for request in requests if request.get("totals")]
    totals_equal = sum(r["totals"] == {"rounds": len(r["accepted"]), "accepted": sum(r["accepted"])} for r in summed)
    counted = None
    if after:
        start: dict = before or {"rounds": 0, "accepted": [0] * len(after["accepted"])}
        counted = {
            "rounds": after["rounds"] - start["rounds"],
            "accepted": [a - b for a, b in zip(after["accepted"], start["accepted"], strict=True)],
        }
    return {
        "counters": counted,
        "histograms": len(told),
        "histograms_equal": equal,
        "totals": len(summed),
        "totals_equal": totals_equal,
    }


def _check_drafter(params: BenchmarkParams, folder: Path) -> None:
    config = targets.load_config(folder)
    loaded = checkpoint.load(params.drafter, config.num_hidden_layers)
    checkpoint.check_fits(loaded.drafter.config, config, params.drafter, params.target)


def _measure_acceptance(
    server: engines.Server, prompts: list[Answer], params: BenchmarkParams, journal: Journal
) -> tuple[list[dict], list[dict]]:
    """The requests in the order of ``prompts``, and those of them that this server answered now."""

    def one(prompt: Answer) -> dict:
        answer = engines.complete(server, prompt.prompt_ids, params.max_tokens)
        if params.mode != "plain" and answer.accepted is None:
            answer.accepted = [] if server.tells_rounds else answer.rounds_from_chunks()
            answer.drafted = [params.num_speculative_tokens] * len(answer.accepted)
        return {"id": prompt.id, **asdict(answer)}

    done = {row["request"]["id"]: row["request"] for row in journal.rows if "request" in row}
    todo, fresh = [prompt for prompt in prompts if prompt.id not in done], []
    together = params.concurrency if server.tells_rounds or params.mode == "plain" else 1
    with ThreadPoolExecutor(together) as pool:
        for request in tqdm(pool.map(one, todo), total=len(todo), desc=f"{params.mode}: acceptance", mininterval=2):
            journal.add({"request": request})
            fresh.append(request)
    done |= {request["id"]: request for request in fresh}
    return [done[prompt.id] for prompt in prompts], fresh


def _measure_time(
    server: engines.Server, prompts: list[Answer], params: BenchmarkParams, journal: Journal
) -> tuple[list[dict], list[dict]]:
    waves = {(row["wave"]["concurrency"], row["wave"]["repeat"]): row for row in journal.rows if "wave" in row}
    for concurrency in params.timed_concurrency:

        def one(prompt: Answer, alone: bool = concurrency == 1) -> tuple[str, engines.Completion]:
            return prompt.id, engines.complete(server, prompt.prompt_ids, params.timed_tokens, stream=alone)

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


def _timed_row(prompt_id: str, answer: engines.Completion) -> dict:
    return {
        "id": prompt_id,
        "output_ids": answer.output_ids,
        "tokens": len(answer.output_ids),
        "steps": len(answer.accepted or answer.chunks[1:]),
        "seconds": round(answer.seconds, 5),
        "first_token_s": round(answer.first_token_s, 5),
    }


def _check_same_tokens(result: dict) -> None:
    """Note how many timed answers differ from the start of the acceptance part's (batching may change rounding)."""
    whole = {request["id"]: request["output_ids"] for request in result["requests"]}
    result["timed_differs"] = sum(row["output_ids"] != whole[row["id"]][: row["tokens"]] for row in result["timed"])
    for row in result["timed"]:
        del row["output_ids"]
