"""Acceptance: rounds, counts, curves and their intervals, in one set of definitions.

A round is one draft-and-verify step; ``accepted`` is the list of accepted draft tokens in each round of one request.
accepted[i] = rounds in which position i was accepted; rate at position i = accepted[i] / rounds (never increasing);
conditional rate c_i = accepted[i] / accepted[i-1]; acceptance rate = accepted / drafted, without the bonus token;
mean acceptance length = 1 + accepted / rounds. A round that the engine gave fewer than K drafts counts with those.

Intervals resample requests, not tokens: tokens of one request correlate, and an interval by token is several times too
narrow.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from ..results import Acceptance, CurveInterval, Interval

RESAMPLES = 2000
Counts = Sequence[int] | NDArray[Any]  # of the rounds of one request


def position_counts(rounds: Counts, positions: int) -> NDArray[Any]:
    """[positions] rounds in which each position was accepted."""
    reached = np.asarray(rounds, dtype=int)[:, None] > np.arange(positions)
    return np.asarray(reached.sum(0))


def request_counts(requests: Sequence[Counts], positions: int) -> NDArray[Any]:
    """[requests, 1 + positions] the number of rounds, then the accepted count of each position."""
    return np.array([[len(rounds), *position_counts(rounds, positions)] for rounds in requests], dtype=float)


def curve(counts: NDArray[Any]) -> NDArray[Any]:
    """Rate at each position from counts [..., requests, 1 + positions]."""
    total = counts.sum(-2)
    with np.errstate(invalid="ignore"):  # a resample of requests without a round
        return np.asarray(total[..., 1:] / total[..., :1])


def mean_length(counts: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(1 + curve(counts).sum(-1))


def acceptance_rate(counts: NDArray[Any], drafted: NDArray[Any]) -> NDArray[Any]:
    """Accepted over drafted tokens, from counts [..., requests, 1 + positions] and drafted tokens [..., requests]."""
    with np.errstate(invalid="ignore"):
        return np.asarray(counts[..., 1:].sum((-1, -2)) / drafted.sum(-1))


def conditional(rates: Sequence[float]) -> list[float | None]:
    """c_i = rate_i / rate_(i-1); None where position i-1 was never accepted."""
    before = [1.0, *rates[:-1]]
    return [float(rate / base) if base else None for rate, base in zip(rates, before, strict=True)]


def bootstrap(
    statistic: Callable[..., NDArray[Any]], *samples: NDArray[Any], seed: int = 0, level: float = 0.95
) -> Interval:
    """Value and interval of a statistic, resampling requests.

    Percentiles alone are too narrow with few requests; the tails are widened as a t interval is over a normal one
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", expanded percentile interval).

    Args:
        statistic: takes each sample resampled, [resamples, requests, ...], and reduces the requests axis (-2, or -1 for
            one-dimensional samples).
        samples: arrays whose first axis is requests; all of one length, resampled together (paired).
    Returns:
        {"value", "low", "high", "n"}: floats, or lists for a statistic with several values.
    """
    requests = len(samples[0])
    draws = _draws(seed, requests)
    resampled = statistic(*(np.asarray(sample)[draws] for sample in samples))
    tail = (1 - level) / 2
    if requests > 1:
        tail = special.ndtr(np.sqrt(requests / (requests - 1)) * special.stdtrit(requests - 1, tail))
    low, high = np.nanquantile(resampled, [tail, 1 - tail], axis=0)
    value = statistic(*(np.asarray(sample)[None] for sample in samples))[0]
    return cast(Interval, {"value": _plain(value), "low": _plain(low), "high": _plain(high), "n": requests})


@functools.lru_cache(maxsize=64)
def _draws(seed: int, requests: int) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(0, requests, (RESAMPLES, requests))


def _plain(value: ArrayLike) -> float | list[float]:
    found: float | list[float] = np.asarray(value, dtype=float).round(6).tolist()
    return found


def summary(requests: Sequence[Counts], positions: int, drafted: Sequence[Counts | None] | None = None) -> Acceptance:
    """Everything a report says about one run's acceptance.

    Args:
        requests: the accepted counts of the rounds of each request.
        drafted: the drafts of the same rounds, where they are known; a round drafts K otherwise. One that drafted nothing
            is no round.
    Returns:
        counts, and intervals as :func:`bootstrap`, whose values are None where there was no round.
    """
    drafted = [None] * len(requests) if drafted is None else drafted
    parts = [_drafting(*pair, positions) for pair in zip(requests, drafted, strict=True)]
    counts = (
        np.concatenate([request_counts([accepted], positions) for accepted, _ in parts]) if parts else np.zeros((0, 0))
    )
    drafts = np.array([total for _, total in parts], float)
    rounds = int(counts[:, 0].sum()) if len(counts) else 0
    nothing: Interval = {"value": None, "low": None, "high": None, "n": len(requests)}
    result: Acceptance = {
        "requests": len(requests),
        "rounds": rounds,
        "positions": positions,
        "drafted": int(drafts.sum()),
        "accepted": [0] * positions,
        "curve": cast(CurveInterval, nothing),
        "conditional": [None] * positions,
        "acceptance_rate": nothing,
        "mean_length": nothing,
    }
    if rounds:
        result["accepted"] = counts[:, 1:].sum(0).astype(int).tolist()
        result["curve"] = cast(CurveInterval, bootstrap(curve, counts))
        result["conditional"] = conditional(curve(counts).tolist())
        result["acceptance_rate"] = bootstrap(acceptance_rate, counts, drafts)
        result["mean_length"] = bootstrap(mean_length, counts)
    return result


def _drafting(accepted: Counts, drafted: Counts | None, positions: int) -> tuple[NDArray[Any], int]:
    """Accepted counts of the rounds of a request that drafted anything, and all its drafts."""
    counts = np.asarray(accepted, np.int16)
    if drafted is None:
        return counts, positions * len(counts)
    drafts = np.asarray(drafted, np.int16)
    return counts[drafts > 0], int(drafts.sum())


def paired_length_difference(
    ours: Sequence[Sequence[int]], others: Sequence[Sequence[int]], positions: int
) -> Interval:
    """Mean acceptance length of ``ours`` minus ``others`` over the same requests, with a paired interval."""
    pair = request_counts(ours, positions), request_counts(others, positions)
    return bootstrap(lambda a, b: mean_length(a) - mean_length(b), *pair)
