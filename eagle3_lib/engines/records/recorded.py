"""What an import gives, and the checks that every format needs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ...errors import Eagle3Error
from ...results import Counters, RequestId
from ...results import shown as shown


class RecordedRequest(TypedDict):
    """One answer. accepted, drafted: of each round, in order, without the bonus token. output_tokens: after the cut at its
    end."""

    id: RequestId
    accepted: list[int]
    drafted: list[int] | None
    output_tokens: int | None


@dataclass(frozen=True)
class Recorded:
    """Acceptance that another tool wrote down, in the definitions of :mod:`eagle3_lib.verdict.acceptance`.

    tool: which file this is. engine: "vllm", "sglang", or "" where the file does not tell.
    positions: K, None where the file does not tell it.
    requests: the rounds of each answer in order; None where the file does not tell them. A round with 0 drafts, which vLLM
        counts under asynchronous scheduling, stays in the list and is left out of the counters.
    histograms: of each answer, its rounds by accepted count from 0 on; None where the file tells none by answer.
    counters: over everything in the file; without "drafted" where it does not tell it. None where no count by position can
        be had. Their "accepted" ends at the largest position seen where K is not told.
    mean_length: mean acceptance length: 1 + accepted / rounds, or the length told where there are no counters; None where
        there was no round.
    exact: every value is the engine's own count. notes: what differs from these definitions in this file, in sentences.
    warnings: values that cannot be used.
    """

    tool: str
    engine: str
    positions: int | None = None
    requests: list[RecordedRequest] | None = None
    histograms: list[list[int]] | None = None
    counters: Counters | None = None
    mean_length: float | None = None
    exact: bool = True
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def count(value: Any, where: str) -> int:
    """A whole number from 0 on; a float such as 12.0 is one.

    Raises:
        Eagle3Error: it is another value. where: file and field.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or value != int(value):
        raise Eagle3Error(f"{where}: found {shown(value)}, expected a whole number from 0 on")
    return int(value)


def counts(values: Any, where: str) -> list[int]:
    """A list of whole numbers from 0 on."""
    if not isinstance(values, list):
        raise Eagle3Error(f"{where}: found {shown(values)}, expected a list of whole numbers")
    return [count(value, where) for value in values]


def amount(value: Any, where: str, least: float = 0) -> float:
    """A finite number from ``least`` on."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        raise Eagle3Error(f"{where}: found {shown(value)}, expected a number from {least:g} on")
    return float(value)


def get(values: Mapping[str, Any], name: str, where: str) -> Any:
    """A field that has to be there."""
    if name not in values:
        raise Eagle3Error(f"{where}: {name}: found none, expected this field")
    return values[name]


def fields(values: Any, where: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(values, dict):
        raise Eagle3Error(f"{where}: found {shown(values)}, expected an object")
    return values


def parse_count(text: str | None, where: str) -> int:
    """As :func:`count`, of text."""
    return count(_parse(text, where), where)


def parse_amount(text: str | None, where: str, least: float = 0) -> float:
    """As :func:`amount`, of text."""
    return amount(_parse(text, where), where, least)


def _parse(text: str | None, where: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise Eagle3Error(f"{where}: found {shown(text)}, expected a number") from None


def dense(histogram: Mapping[int, int]) -> list[int]:
    """Rounds by accepted count, from a histogram that leaves empty counts out."""
    return [histogram.get(accepted, 0) for accepted in range(max(histogram, default=-1) + 1)]


def add_up(lists: Iterable[Sequence[int]]) -> list[int]:
    """Element by element; a shorter list ends in zeros."""
    total: list[int] = []
    for values in lists:
        total += [0] * (len(values) - len(total))
        for place, value in enumerate(values):
            total[place] += value
    return total


def histogram_of(accepted: Sequence[int], positions: int | None) -> list[int]:
    """Rounds by accepted count."""
    longest = max(accepted, default=0) if positions is None else positions
    return [sum(value == reached for value in accepted) for reached in range(longest + 1)]


def counters_of_histogram(histogram: Sequence[int], drafted: int | None, positions: int | None) -> Counters:
    """Counters from rounds by accepted count; accepted[i] = rounds that accepted more than i drafts."""
    most = max(len(histogram) - 1, 0) if positions is None else positions
    return counters(sum(histogram), [sum(histogram[place + 1 :]) for place in range(most)], drafted)


def counters(rounds: int, accepted: list[int], drafted: int | None) -> Counters:
    """Counters, without "drafted" where it is None."""
    told: Counters = {"rounds": rounds, "accepted": accepted}
    if drafted is not None:
        told["drafted"] = drafted
    return told


def mean_length(told: Counters) -> float | None:
    """1 + accepted / rounds; None without a round."""
    return 1 + sum(told["accepted"]) / told["rounds"] if told["rounds"] else None


def refuse_impossible(told: Counters, where: str) -> None:
    """Refuse counters of no engine: a later position accepted more often than an earlier one, or than there are rounds.

    Raises:
        Eagle3Error: naming the position.
    """
    before = told["rounds"]
    for position, accepted in enumerate(told["accepted"]):
        if accepted > before:
            earlier = "rounds" if position == 0 else f"accepted at position {position - 1}"
            raise Eagle3Error(
                f"{where}: accepted at position {position}: found {accepted}, expected at most {earlier}, {before}"
            )
        before = accepted
    drafted, total = told.get("drafted"), sum(told["accepted"])
    if drafted is not None and drafted < total:
        raise Eagle3Error(f"{where}: drafted: found {drafted}, expected at least the accepted drafts, {total}")


def choose(names: Sequence[str], of: str, where: str, what: str) -> str:
    """The one that was asked for, or the only one.

    Args:
        names: those that the file has. of: the name that the caller asked for, "" for none. what: model, configuration.
    Raises:
        Eagle3Error: there are several and none was asked for, or the one asked for is not among them.
    """
    listed = ", ".join(repr(name) for name in names)
    if of:
        if of not in names:
            raise Eagle3Error(f"{where}: {what}: found {listed or 'none'}, expected {of!r}")
        return of
    if len(names) != 1:
        raise Eagle3Error(f"{where}: {what}: found {listed or 'none'}, expected one; name it (of=...)")
    return names[0]
