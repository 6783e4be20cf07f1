"""Engines beside each other on the same prompts: what they accept, what a step costs them, and which is fastest."""

import statistics
from collections.abc import Mapping
from typing import Any

from .plots import span

NGRAM, PLAIN = "ngram", "plain"


def engine_rows(engines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each engine and mode of a report, at one request at a time.

    *tokens a step*: 1 plain, else the mean acceptance length; with n-gram only where steps without drafts are known.
    *drafted in*: share of n-gram's steps that had drafts, where the engine counts them. *a step*: milliseconds, the time of a
    later token times the tokens a step.

    Args:
        engines: ``engines`` of report.json.
    """
    rows = []
    for name, found in engines.items():
        for mode, speed in found["throughput"].items():
            length = _length(found, mode)
            token_s = found["latency"][mode]["later_token_s"]["value"]
            rows.append(
                {
                    "engine": f"{name} {found['version']}",
                    "mode": mode,
                    "answers after, s": speed["load_s"],
                    "rounds equal": _equal(found, mode),
                    "drafted in": _drafted_in(found, mode),
                    "tokens a step": length,
                    "a step, ms": None if length is None else 1000 * token_s * length,
                    "tokens/s": speed["tokens_per_s"]["value"],
                    "over plain": span(found["speedup"][mode]) if mode in found["speedup"] else None,
                }
            )
    return rows


def fastest_rows(engines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each number of requests at a time: the fastest engine and mode, and whether its repeats leave the next behind.

    Args:
        engines: ``engines`` of report.json.
    """
    rates: dict[int, list[tuple[str, list[float]]]] = {}
    for name, found in engines.items():
        for mode, speed in found["throughput"].items():
            for level, repeats in speed["by_concurrency"].items():
                rates.setdefault(int(level), []).append((f"{name} {mode}", repeats))
    rows = []
    for level, of in sorted(rates.items()):
        ranked = sorted(of, key=lambda one: statistics.median(one[1]), reverse=True)
        (best, first), (next_best, second) = (*ranked, ("–", [0.0]))[:2]
        rows.append(
            {
                "requests at a time": level,
                "fastest": best,
                "tokens/s": statistics.median(first),
                "next": next_best,
                "its tokens/s": statistics.median(second),
                "every repeat faster": "yes" if min(first) > max(second) else "no",
            }
        )
    return rows


def _length(found: Mapping[str, Any], mode: str) -> float | None:
    """Tokens that a step emits on average."""
    if mode == PLAIN:
        return 1.0
    if mode == NGRAM:
        told = found["ngram_acceptance"] if _has_all_steps(found) else None
    else:
        told = found["drafters"].get(mode, {}).get("engine_acceptance")
    value: float | None = told["mean_length"]["value"] if told else None
    return value


def _equal(found: Mapping[str, Any], mode: str) -> str | None:
    if mode not in found["drafters"]:
        return None
    agreement = found["drafters"][mode]["agreement"]
    return f"{agreement['equal']} of {agreement['rounds']}, {agreement['cut']} others cut"


def _drafted_in(found: Mapping[str, Any], mode: str) -> float | None:
    """Share of an n-gram run's steps that drafted: the engine counts those only, chunks count every step."""
    if mode != NGRAM or not found["ngram_acceptance"] or not _has_all_steps(found):
        return None
    counted = (found["evidence"][mode]["cross_check"] or {}).get("counters")
    return counted["rounds"] / found["ngram_acceptance"]["rounds"] if counted else None


def _has_all_steps(found: Mapping[str, Any]) -> bool:
    """Whether the rounds of an n-gram run are its chunks, and so all its steps; rounds that the engine tells have drafts."""
    return bool(found["evidence"][NGRAM]["evidence"] == "chunks")
