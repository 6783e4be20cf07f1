"""Faults that begin inside the answers, replayed from there on.

A slot that was computed before the fault began leaves right keys and values in the drafter's cache, so the fault replayed
over the whole text is not what the engine did. Where the rounds that depart begin at one place of all answers
(:mod:`eagle3_lib.verdict.slices`), the likeliest faults are replayed from that place on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from numpy.typing import NDArray

from ..drafter.model import Drafter
from ..results import MeasuredRequest, Replay, ReplayedRequest
from . import slices
from .changes import HEALTHY as CORRECT
from .evidence import NOISE, Table, surely_more
from .faults import FAULTS
from .hypotheses import counts_from

LIKELIEST = 6  # faults that are replayed again: those that explain most from the place on
EARLIER = (0, 1, 2, 4)  # slots before the first departing round at which the fault may have begun


@dataclass
class Begun:
    """since: the slot of an answer from which on the faults were replayed, 0 at its first token; counts: for each request
    {fault: accepted counts at the engine's rounds}."""

    since: int
    counts: list[dict[str, list[int]]]

    def requests(self, replay: Replay) -> Iterator[ReplayedRequest]:
        """The requests of a replay with these counts as "since"."""
        for request, counts in zip(replay["requests"], self.counts, strict=True):
            yield cast(ReplayedRequest, {**request, "since": counts if request["rows"] else {}})


def find(
    replay: Replay, target: Any, drafter: Drafter, requests: Sequence[MeasuredRequest], ranks: int = 1
) -> Begun | None:
    """The likeliest faults from the place on at which rounds begin to depart; None where they begin at no one place.

    Args:
        replay: as :func:`eagle3_lib.verdict.replayed.read`; requests: those of benchmark.json, in the same order.
    """
    table = Table.of(replay["requests"])
    noise = NOISE[replay["dtype"]]
    if not len(table) or not surely_more(int(table.departing.sum()), int(table.can_tell().sum()), noise):
        return None
    found = slices.find(table, noise)
    if found is None or found.by != slices.PLACE or found.since is None:
        return None
    names = _likeliest(table, table.counts, found.inside)
    best, most = None, -1
    for earlier in EARLIER:
        since = max(found.since - earlier, 0)
        counts = list(counts_from(target, drafter, requests, replay["positions"], names, since, ranks))
        begun = Begun(since, counts)
        explained = max(_explained(Table.of(begun.requests(replay)), found.inside).values(), default=0)
        if explained > most:
            best, most = begun, explained
    return best


def _likeliest(table: Table, counts: dict[str, NDArray[Any]], inside: NDArray[Any]) -> list[str]:
    """Faults by how many more of the rounds inside they reproduce than a correct engine does."""
    gained = {
        name: int((some == table.engine)[inside].sum())
        for name, some in counts.items()
        if name != CORRECT and FAULTS[name].severity == "fault"
    }
    return sorted(gained, key=lambda name: -gained[name])[:LIKELIEST]


def _explained(table: Table, inside: NDArray[Any]) -> dict[str, int]:
    return {name: int((some == table.engine)[inside].sum()) for name, some in table.since.items()}
