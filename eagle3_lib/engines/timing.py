"""What the timed part of a benchmark says: throughput, latency, time of a step, and cost apart from acceptance."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..results import Benchmark, Cost, Interval, Latency, Replay, TimedRequest
from ..verdict import acceptance, break_even

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
ALONE = 1  # requests at a time


def is_timed(run: Benchmark) -> bool:
    """Whether answers were timed one request at a time, and summed up."""
    alone = any(row["concurrency"] == ALONE for row in run.get("timed", []))
    return alone and "summary" in run and "load_s" in run


def are_paired(plain: Benchmark, other: Benchmark) -> bool:
    """Whether two runs timed the same prompts, as many at a time and as often."""
    return _timed_by(plain) == _timed_by(other)


def _timed_by(run: Benchmark) -> list[tuple[int, int, str]]:
    return sorted((row["concurrency"], row["repeat"], str(row["id"])) for row in run.get("timed", []))


def throughput(timed: Sequence[TimedRequest]) -> tuple[Floats, Floats]:
    """Tokens and seconds [prompts] at one request at a time, summed over repeats, in the order of the prompts' ids."""
    alone = [row for row in timed if row["concurrency"] == ALONE]
    ids = sorted({row["id"] for row in alone}, key=str)
    total = {i: [0.0, 0.0] for i in ids}
    for row in alone:
        total[row["id"]][0] += row["tokens"]
        total[row["id"]][1] += row["seconds"]
    return np.array([total[i][0] for i in ids]), np.array([total[i][1] for i in ids])


def by_concurrency(plain: Benchmark, other: Benchmark) -> dict[str, Interval]:
    """Throughput over plain at each concurrency: median of the repeats' ratios, and the smallest and largest."""
    ratios = {
        level: [ours / theirs for ours, theirs in zip(rates, plain["summary"]["by_concurrency"][level], strict=True)]
        for level, rates in other["summary"]["by_concurrency"].items()
    }
    return {
        level: {"value": float(np.median(values)), "low": min(values), "high": max(values), "n": len(values)}
        for level, values in ratios.items()
    }


def cost(plain: Benchmark, other: Benchmark, replay: Replay) -> Cost:
    """Time of a round over a plain step, and what of the speedup comes from acceptance and what from cost.

    Steps after prefill, at one request at a time; see :func:`eagle3_lib.verdict.break_even.speed`.
    """
    plain_repeats, repeats = _repeats(plain), _repeats(other)
    engine = replay["engine_acceptance"]["mean_length"]["value"]
    correct = replay["replay_acceptance"]["mean_length"]["value"]
    result = break_even.speed(plain_repeats, repeats)
    if not engine or not correct:
        return result
    return break_even.speed(plain_repeats, repeats, result["mean_length"] * correct / engine)


def _repeats(run: Benchmark) -> list[dict[str, float]]:
    """Tokens, seconds and rounds after prefill of each repeat, one request at a time."""
    found: dict[int, dict[str, float]] = {}
    for row in run["timed"]:
        if row["concurrency"] == ALONE:
            total = found.setdefault(row["repeat"], {"tokens": 0, "seconds": 0.0, "rounds": 0})
            total["tokens"] += row["tokens"] - 1
            total["seconds"] += row["seconds"] - row["first_token_s"]
            total["rounds"] += row["steps"]
    return list(found.values())


def round_costs(run: Benchmark, speedups: Mapping[str, Interval], cost: Cost) -> dict[str, float]:
    """Time of a round in plain steps, by concurrency: mean length over speedup.

    At one request at a time it is the ratio of steps after prefill, at more of whole waves, prefill included.
    """
    costs = {}
    for level, speedup in speedups.items():
        timed = [row for row in run["timed"] if row["concurrency"] == int(level)]
        steps = sum(row["steps"] for row in timed)  # 0 where the engine tells no rounds and the answers came whole
        length = sum(row["tokens"] - 1 for row in timed) / steps if steps else cost["mean_length"]
        assert speedup["value"] is not None
        costs[level] = length / speedup["value"]
    return costs | {"1": cost["step_ratio"]}


def latency(run: Benchmark) -> Latency:
    """Time to the first token and time of each later one, one request at a time: medians over prompts, in seconds."""
    first, later, _ = _prompt_times(run)
    return {
        "first_token_s": acceptance.bootstrap(_median, first),
        "later_token_s": acceptance.bootstrap(_median, later),
    }


def step_time(run: Benchmark) -> Interval:
    """Time of a decode step, a round where the engine speculates, after prefill, one request at a time, in seconds."""
    _, _, steps = _prompt_times(run)
    return acceptance.bootstrap(_median, steps)


def _median(values: Floats) -> Floats:
    return np.asarray(np.median(values, axis=-1))


def _prompt_times(run: Benchmark) -> list[Floats]:
    """For each prompt [prompts], medians over repeats at one request at a time: first token, later token, step."""
    prompts: dict[str | int, list[tuple[float, float, float]]] = {}
    for row in run["timed"]:
        if row["concurrency"] == ALONE:
            rest = row["seconds"] - row["first_token_s"]
            times = row["first_token_s"], rest / max(row["tokens"] - 1, 1), rest / max(row["steps"], 1)
            prompts.setdefault(row["id"], []).append(times)
    return list(np.array([np.median(times, axis=0) for times in prompts.values()]).T)


def speedup(plain: Benchmark, other: Benchmark) -> Interval:
    """Throughput of ``other`` over plain, one request at a time, paired by prompt."""
    pairs = [throughput(run["timed"]) for run in (plain, other)]

    def ratio(plain_tokens: Floats, plain_seconds: Floats, tokens: Floats, seconds: Floats) -> Floats:
        return np.asarray((tokens.sum(-1) / seconds.sum(-1)) / (plain_tokens.sum(-1) / plain_seconds.sum(-1)))

    return acceptance.bootstrap(ratio, *pairs[0], *pairs[1])
