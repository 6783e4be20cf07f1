"""Conditions: the state of the server in which a request was asked, and what its answers are in each.

Speculative decoding is lossless, and so is a cache: the greedy answer to a prompt is the same with a cold and with a warm prefix
cache, alone and in company, now and later. Where two answers to one prompt differ, rounding may have turned a tie of the target's
logits, and that is no fault. So answers are compared, and beside that the tokens are counted that the target's own logits exclude
(:func:`eagle3_lib.verdict.lossless.wrong`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..results import ConditionTokens, MeasuredRequest, Reference, ReplayedRequest

COLD, WARM = "cold", "warm"  # prefix cache empty, filled
TOGETHER, LATE = "together", "late"  # in company of other requests; asked once more after some time
# Logits below the first choice from which on no rounding makes a token: four times the most that was measured in bfloat16, twice
# lossless.NEAR_TIE of it. The dtype of a run may be unknown: a server in bfloat16 that does not tell it is held against a float32
# replay, and its ties count as tokens that are not the target's.
SURELY_WRONG = 1.0
ONLY = {
    WARM: "only after a prefix-cache hit",
    TOGETHER: "only in company of other requests",
    LATE: "only in requests asked again later",
}


def of(request: Mapping[str, Any]) -> str:
    """The condition of a request of benchmark.json or replay.json; "" where it has none.

    What the server tells of the prefix cache decides between cold and warm, where it tells it.
    """
    condition: str = request.get("condition") or ""
    cached = request.get("cached_tokens")
    if condition in (COLD, WARM) and cached is not None:
        return WARM if cached else COLD
    return condition


def cached_tokens(request: Mapping[str, Any]) -> float:
    """Prompt tokens from the prefix cache; 1 where an answer does not tell them and was asked a second time; nan: not known."""
    cached = request.get("cached_tokens")
    if cached is not None:
        return float(cached)
    return float(request["condition"] == WARM) if request.get("condition") else float("nan")


def references(requests: Sequence[MeasuredRequest]) -> list[Reference | None]:
    """For each answer the first cold one to the same prompt, and where the two differ; None where there is no other one."""
    first: dict[tuple[int, ...], MeasuredRequest] = {}
    for request in requests:
        if of(request) == COLD:
            first.setdefault(tuple(request["prompt_ids"]), request)
    found: list[Reference | None] = []
    for request in requests:
        cold = first.get(tuple(request["prompt_ids"]))
        if cold is None or cold is request or not of(request):
            found.append(None)
            continue
        found.append({"id": cold["id"], "differs_at": _differs_at(request["output_ids"], cold["output_ids"])})
    return found


def _differs_at(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first token at which two answers differ; None where they are the same."""
    for place, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return place
    return None if len(ids) == len(others) else min(len(ids), len(others))


class Tally:
    """What the answers of each condition are, added one by one."""

    def __init__(self) -> None:
        self.rows: dict[str, ConditionTokens] = {}
        self.wrong: dict[str, bool] = {}  # whether an answer has a token that no rounding makes, by id
        self.beside: list[tuple[str, str, str]] = []  # condition, id, id of the cold answer to the same prompt

    def add(self, request: ReplayedRequest) -> None:
        """request: of a greedy run; one without a condition, or whose tokens were not held against the target's, is left out."""
        condition = of(request)
        if not condition or "lossless" not in request or "output_length" not in request:
            return
        row = self.rows.setdefault(condition, _empty(condition))
        row["answers"] += 1
        row["tokens"] += request["output_length"]
        row["not_greedy"] += request["lossless"]
        greedy = request.get("greedy") or {}
        wrong = request["lossless"] > 0 and greedy.get("largest_margin", 0.0) > SURELY_WRONG
        row["wrong_answers"] += wrong
        own = greedy.get("own", [0, 0])
        row["own"] = [row["own"][0] + own[0], row["own"][1] + own[1]]
        self.wrong[str(request["id"])] = wrong
        reference = request.get("reference")
        if reference is None:
            return
        row["compared"] += 1
        self.beside.append((condition, str(request["id"]), str(reference["id"])))
        place = reference["differs_at"]
        if place is not None:
            row["differ"] += 1
            row["first"] = place if row["first"] is None else min(row["first"], place)

    def told(self) -> list[ConditionTokens]:
        """One row for each condition; [] where the run has fewer than two."""
        for condition, name, cold in self.beside:
            self.rows[condition]["pairs"] += self.wrong[name] and not self.wrong.get(cold, False)
        self.beside = []
        return list(self.rows.values()) if len(self.rows) > 1 else []


def _empty(condition: str) -> ConditionTokens:
    return {
        "condition": condition,
        "answers": 0,
        "compared": 0,
        "differ": 0,
        "first": None,
        "tokens": 0,
        "not_greedy": 0,
        "wrong_answers": 0,
        "own": [0, 0],
        "pairs": 0,
    }


def counts(rows: Iterable[ConditionTokens]) -> str:
    """Tokens that are not the target's in each condition, as in "cold 0 of 2880, warm 31 of 480"."""
    return ", ".join(f"{row['condition']} {row['not_greedy']} of {row['tokens']}" for row in rows)
