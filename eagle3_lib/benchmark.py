"""Stage 07: one engine in one mode over HTTP: the tokens it emits, its rounds, its throughput and latency.

Two parts under one server. Acceptance: every held-out prompt once, several at a time. Time: some of them, one request
at a time, in several repeats after a warm-up; their tokens are checked against the first part's.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import acceptance, targets
from .engines import base, vllm
from .errors import Eagle3Error
from .generate import Answer, read_answers
from .params import BenchmarkParams
from .provenance import project_path, stage, write_json

SCHEMA = 1


def run(params: BenchmarkParams) -> dict:
    """Measure one mode and write benchmark.json.

    Returns:
        {"schema", "engine", "version", "mode", "load_s", "positions", "requests": [{"id", "prompt_ids", "output_ids",
        "accepted", "drafted", ...}], "timed": [{"repeat", "id", "tokens", "seconds", "first_token_s"}], "summary"}.
    Raises:
        Eagle3Error: a drafter that does not fit the target, no held-out prompts, a server that fails, or one that
            speculates without telling its rounds.
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    if params.drafter:
        _check_drafter(params, folder)
    prompts = [answer for answer in read_answers(params.data) if answer.split == "held_out"]
    if len(prompts) < params.timed_prompts:
        raise Eagle3Error(
            f"{params.data}: found {len(prompts)} held-out samples, expected at least timed_prompts = {params.timed_prompts}"
        )
    inputs = {"prompts": project_path(params.data) / "samples.jsonl"} | (
        {"drafter": project_path(params.drafter)} if params.drafter else {}
    )
    with stage("benchmark", params, inputs) as notes:
        speculative = (params.mode, params.drafter, params.num_speculative_tokens)
        with vllm.serve(params, folder, out / "server.log", *speculative) as server:
            started = time.monotonic()
            requests = _measure_acceptance(server, prompts, params)
            batched_s = time.monotonic() - started
            timed = _measure_time(server, prompts[: params.timed_prompts], params)
        result = {
            "schema": SCHEMA,
            "engine": server.engine,
            "version": server.version,
            "mode": params.mode,
            "load_s": server.load_s,
            "positions": 0 if params.mode == "plain" else params.num_speculative_tokens,
            "requests": requests,
            "timed": timed,
            "batched_tokens_per_s": round(sum(len(r["output_ids"]) for r in requests) / batched_s, 2),
        }
        _check_same_tokens(result)
        result["summary"] = summarise(result)
        write_json(out / "benchmark.json", result)
        notes |= {"load_s": server.load_s, **result["summary"]}
    return result


def read(folder: str | Path) -> dict:
    """A benchmark.json that :func:`run` wrote."""
    path = project_path(folder) / "benchmark.json"
    if not path.is_file():
        raise Eagle3Error(f"{path}: no such file; run stage benchmark first")
    return json.loads(path.read_text())


def throughput(timed: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [prompts], summed over repeats, in the order of the prompts' ids."""
    ids = sorted({row["id"] for row in timed})
    total = {i: [0.0, 0.0] for i in ids}
    for row in timed:
        total[row["id"]][0] += row["tokens"]
        total[row["id"]][1] += row["seconds"]
    return np.array([total[i][0] for i in ids]), np.array([total[i][1] for i in ids])


def summarise(result: dict) -> dict:
    """Throughput at one request at a time, latency, and acceptance where the engine speculates."""
    tokens, seconds = throughput(result["timed"])
    latencies = np.array([row["seconds"] for row in result["timed"]])
    after_first = np.array([(row["seconds"] - row["first_token_s"]) / (row["tokens"] - 1) for row in result["timed"]])
    repeats = sorted({row["repeat"] for row in result["timed"]})
    by_repeat = [[row for row in result["timed"] if row["repeat"] == repeat] for repeat in repeats]
    summary = {
        "tokens_per_s": acceptance.bootstrap(lambda t, s: t.sum(-1) / s.sum(-1), tokens, seconds),
        "tokens_per_s_by_repeat": [
            round(sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows), 3) for rows in by_repeat
        ],
        "latency_s": {
            "median": round(float(np.median(latencies)), 4),
            "p90": round(float(np.quantile(latencies, 0.9)), 4),
        },
        "first_token_s": round(float(np.median([row["first_token_s"] for row in result["timed"]])), 4),
        "time_per_output_token_s": round(float(np.median(after_first)), 5),
    }
    if result["positions"]:
        summary["acceptance"] = acceptance.summary([r["accepted"] for r in result["requests"]], result["positions"])
    return summary


def _check_drafter(params: BenchmarkParams, folder: Path) -> None:
    from . import checkpoint

    config = targets.load_config(folder)
    loaded = checkpoint.load(params.drafter, config.num_hidden_layers)
    checkpoint.check_fits(loaded.drafter.config, config, params.drafter, params.target)


def _measure_acceptance(server: base.Server, prompts: list[Answer], params: BenchmarkParams) -> list[dict]:
    def one(prompt: Answer) -> dict:
        answer = base.complete(server, prompt.prompt_ids, params.max_tokens)
        if params.mode != "plain" and answer.accepted is None:
            raise Eagle3Error(
                f"{server.engine} {server.version}: no rounds in its answer; expected per-request speculation metrics"
            )
        return {"id": prompt.id, **asdict(answer)}

    with ThreadPoolExecutor(params.concurrency) as pool:
        return list(tqdm(pool.map(one, prompts), total=len(prompts), desc=f"{params.mode}: acceptance", mininterval=2))


def _measure_time(server: base.Server, prompts: list[Answer], params: BenchmarkParams) -> list[dict]:
    base.complete(server, prompts[0].prompt_ids, params.timed_tokens)  # warm-up, not counted
    rows = []
    for repeat in tqdm(range(params.repeats), desc=f"{params.mode}: one request at a time", mininterval=2):
        for prompt in prompts:
            answer = base.complete(server, prompt.prompt_ids, params.timed_tokens)
            rows.append(
                {
                    "repeat": repeat,
                    "id": prompt.id,
                    "output_ids": answer.output_ids,
                    "tokens": len(answer.output_ids),
                    "seconds": round(answer.seconds, 5),
                    "first_token_s": round(answer.first_token_s, 5),
                }
            )
    return rows


def _check_same_tokens(result: dict) -> None:
    """Note how many timed answers differ from the start of the acceptance part's (batching may change rounding)."""
    batched = {request["id"]: request["output_ids"] for request in result["requests"]}
    rows = result["timed"]
    result["timed_differs"] = sum(row["output_ids"] != batched[row["id"]][: row["tokens"]] for row in rows)
    for row in rows:
        del row["output_ids"]
