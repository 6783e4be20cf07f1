"""Slices: a fault that is not everywhere. Where in a run do the departing rounds lie, and where are there none?

Eight orders are looked at: the place in the answer, the number of the round in its request, the requests, how many other
requests ran beside, how many prompt tokens came from the prefix cache, how far behind them the round stands, the length of the
prompt, and when the request was sent. In each the rounds that can tell are split in two so that their shares of departing rounds
are as unlike as they can be (the likelihood ratio of two shares over one). How large that ratio becomes by chance is found by
dealing the departing rounds out anew at random, with the same search in each deal: a permutation test that accounts for
the search (Good, Permutation, Parametric and Bootstrap Tests of Hypotheses, 2005). A slice is a split that chance does not
explain and whose other side is as a healthy engine's.

Two orders can be mistaken for others, and a slice by them needs rounds on its other side that are like its own in the rest:
the distance from the cached prefix (the same places of answers without a hit, and later places of those with one), and the time
(earlier or later requests with prompts as long, as much from the cache, and as much company).
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from ..results import Where
from .evidence import FALSE_ALARM, Table, surely_more

PLACE, ROUND, REQUEST, BESIDE, CACHED, PROMPT = "place", "round", "request", "beside", "cached", "prompt"
DISTANCE, SENT = "distance", "sent"
ORDERS = (CACHED, DISTANCE, PROMPT, PLACE, ROUND, REQUEST, BESIDE, SENT)
OF_CACHE = (CACHED, DISTANCE)  # orders whose slices go away without a prefix cache
OF_STATE = (CACHED, DISTANCE, PROMPT, SENT)  # not shown where all rounds have the same value
# Random deals: with eight orders a slice is found where at most one of them is as unlike as the rounds are.
DEALS = 1999
LEVELS_AT_ONCE = 2**20  # of all deals that are held together
LEAST_CLEAN = 30  # rounds that can tell on the side without departing rounds
LEAST_SENT = 3  # requests on each side of a time: fewer are told as requests


@dataclass(frozen=True)
class Slice:
    """The part of a run in which rounds depart.

    by: one of ORDERS. since, until: the first value inside, and the first one past it; None where the
    slice is open. at: since or until in seconds since the epoch, where they are times and the run tells the day.
    requests: indices of its requests, where it is made of requests. inside: [rounds] of the table. p: of the
    permutation test, for all orders together; None where none was made. counts: departing rounds and rounds that can tell, inside and outside.
    """

    by: str
    inside: NDArray[Any]
    p: float | None
    counts: dict[str, tuple[int, int]]
    since: int | None = None
    until: int | None = None
    requests: tuple[int, ...] | None = None
    at: float | None = None

    def words(self, requests: int) -> str:
        """Where the slice is, as in "from token 60 of the answers on"; ``requests``: of the run."""
        if self.by == REQUEST:
            return f"in {len(self.requests or ())} of {requests} requests"
        if self.by == CACHED:
            return "only after a prefix-cache hit" if self.since is not None else "only without a prefix-cache hit"
        if self.by == DISTANCE:
            return f"only in the first {self.until} tokens after a cached prefix"
        if self.by == SENT:
            return self._time_words()
        if self.by == PROMPT:
            length = f"{self.since} tokens or more" if self.since is not None else f"less than {self.until} tokens"
            return f"only on prompts of {length}"
        if self.until is not None and self.until <= (0 if self.by == PLACE else 1) and self.by != BESIDE:
            return "in the first round of the requests"
        where = {PLACE: "token {} of the answers", ROUND: "round {} of the requests", BESIDE: "{} requests beside"}[
            self.by
        ]
        if self.since is not None:
            return f"from {where.format(max(self.since, 0))} on"
        return f"before {where.format(self.until)}"

    def _time_words(self) -> str:
        clock = ""
        if self.at is not None:
            clock = datetime.datetime.fromtimestamp(self.at, datetime.UTC).strftime(" %H:%M:%S UTC")
        if self.since is not None:
            after = f"{self.since} seconds after the first"
            return (
                f"only in requests sent from{clock} on, {after}" if clock else f"only in requests sent from {after} on"
            )
        within = f"in the first {self.until} seconds"
        return f"only in requests sent before{clock}, {within}" if clock else f"only in requests sent {within}"

    @classmethod
    def told(cls, where: Where) -> "Slice":
        """The slice that a verdict holds, without its rounds."""
        inside, outside = where["inside"], where["outside"]
        counts = {"inside": (inside[0], inside[1]), "outside": (outside[0], outside[1])}
        requests = where["requests"]
        return cls(
            where["by"],
            np.zeros(0, bool),
            where["p"],
            counts,
            where["since"],
            where["until"],
            None if requests is None else tuple(requests),
            where.get("at"),
        )

    def as_dict(self) -> Where:
        return {
            "by": self.by,
            "since": self.since,
            "until": self.until,
            "p": self.p,
            "inside": self.counts["inside"],
            "outside": self.counts["outside"],
            "requests": list(self.requests) if self.requests else None,
            "at": self.at,
        }


def find(table: Table, noise: float) -> Slice | None:
    """The slice that explains best where rounds depart; None where they depart everywhere, or too few do.

    Args:
        noise: share of the rounds that can tell in which a healthy engine departs at most.
    """
    telling = np.flatnonzero(table.can_tell())
    departing = table.departing[telling]
    if not departing.any() or departing.all():
        return None
    splits = [_split(table, by, telling, departing) for by in ORDERS]
    found = [split for split in splits if split and split.p <= FALSE_ALARM]
    for split in sorted(found, key=lambda split: -split.score):
        slice_ = split.slice(table, noise)
        if slice_:
            return slice_
    return None


def departing_requests(table: Table) -> Slice | None:
    """The requests in which any round departs, for a fault that is to explain them all; None where too little lies outside."""
    some = table.by_request(table.departing) > 0
    inside = some[table.request]
    counts = _counts(table, inside)
    if not some.any() or counts["outside"][1] < LEAST_CLEAN:
        return None
    return Slice(REQUEST, inside, None, counts, requests=tuple(np.flatnonzero(some).tolist()))


def _counts(table: Table, inside: NDArray[Any]) -> dict[str, tuple[int, int]]:
    tells, departs = table.can_tell(), table.departing
    return {
        name: (int((departs & side).sum()), int((tells & side).sum()))
        for name, side in (("inside", inside), ("outside", ~inside))
    }


@dataclass
class _Split:
    """One order's best split."""

    by: str
    inside: NDArray[Any]  # [rounds] of the table
    score: float  # likelihood ratio beyond what chance gives on average
    p: float

    def slice(self, table: Table, noise: float) -> Slice | None:
        counts = _counts(table, self.inside)
        departing, rounds = counts["outside"]
        if rounds < LEAST_CLEAN or surely_more(departing, rounds, noise):
            return None
        if not surely_more(*counts["inside"], noise):
            return None
        if not _controlled(table, self.by, self.inside, noise):
            return None
        found = Slice(self.by, self.inside, self.p, counts)
        if self.by == REQUEST:
            return replace(found, requests=tuple(np.unique(table.request[self.inside]).tolist()))
        values = _values(table, self.by)
        inside = values[self.inside]
        if inside.min() > values[~self.inside].max():
            found = replace(found, since=int(inside.min()))
        else:
            found = replace(found, until=int(inside.max()) + 1)
        if self.by != SENT or table.began is None:
            return found
        seconds = found.until if found.since is None else found.since
        return replace(found, at=table.began + (seconds or 0))


def _controlled(table: Table, by: str, inside: NDArray[Any], noise: float) -> bool:
    """Whether rounds outside a slice that are like those inside in the other orders are there, and are a healthy engine's."""
    if by == DISTANCE:
        without_hit = (table.cached == 0) & (table.place <= table.place[inside].max())
        farther = ~inside & ~np.isnan(table.distance)
        return _clean(table, without_hit, noise) and _clean(table, farther, noise)
    if by == SENT:
        like = ~inside
        for values in (table.cached, table.prompt, _most_beside(table)):
            departing = values[inside & table.departing]
            if not np.isnan(values).any():
                like &= (values >= departing.min()) & (values <= departing.max())
        sides = (inside & table.departing, like)
        enough = all(len(np.unique(table.request[side])) >= LEAST_SENT for side in sides)
        return enough and _clean(table, like, noise)
    return True


def _most_beside(table: Table) -> NDArray[Any]:
    """Other requests [rounds] that ran beside a round's request at most; what company spoils may stay when the others have ended."""
    most = np.zeros(table.requests, table.beside.dtype)
    np.maximum.at(most, table.request, table.beside)
    return np.asarray(most[table.request])


def _clean(table: Table, among: NDArray[Any], noise: float) -> bool:
    """Enough rounds that can tell, and no more of them depart than of a healthy engine's."""
    rounds = int((among & table.can_tell()).sum())
    return rounds >= LEAST_CLEAN and not surely_more(int((among & table.departing).sum()), rounds, noise)


def _values(table: Table, by: str) -> NDArray[Any]:
    values: NDArray[Any] = getattr(table, by)
    return values


def _split(table: Table, by: str, telling: NDArray[Any], departing: NDArray[Any]) -> _Split | None:
    """None where the order is not known, where all rounds have one value in it, or its split is none of its own.

    The distance from the cached prefix is looked at among the rounds that have one.
    """
    values = _values(table, by)
    known = ~np.isnan(values[telling])
    if by != DISTANCE and np.isnan(values).any():
        return None
    everywhere, telling, departing = (telling, departing), telling[known], departing[known]
    levels, level = np.unique(values[telling], return_inverse=True)
    if len(levels) < 2 or not departing.any() or departing.all():
        return None
    sizes, found = np.bincount(level), np.bincount(level, departing, len(levels)).astype(int)
    best_of = _best_of_requests if by == REQUEST else _best_of_order
    ratios, chosen = best_of(found[None], sizes)
    by_chance = _by_chance(best_of, sizes, int(departing.sum()))
    p = len(ORDERS) * (1 + int((by_chance >= ratios[0]).sum())) / (1 + DEALS)
    if by == DISTANCE and chosen[0][-1]:
        return None  # far from the prefix: a place of the answers
    inside = _inside(table, by, values, levels, chosen[0])
    ratio = ratios[0] if by != DISTANCE else _ratio(values <= levels[chosen[0]].max(), *everywhere)
    return _Split(by, inside, float(ratio - by_chance.mean()), min(p, 1.0))


def _ratio(inside: NDArray[Any], telling: NDArray[Any], departing: NDArray[Any]) -> float:
    """The ratio of one split [rounds] of the table."""
    sides = np.array([inside[telling].sum(), len(telling)])
    return float(_ratios(np.array([departing[inside[telling]].sum(), departing.sum()]), sides)[0])


def _inside(table: Table, by: str, values: NDArray[Any], levels: NDArray[Any], chosen: NDArray[Any]) -> NDArray[Any]:
    """The rounds [rounds] of the chosen levels; an order's slice begins and ends with a departing round."""
    if by == REQUEST:
        return np.isin(values, levels[chosen])
    inside = (values >= levels[chosen].min()) & (values <= levels[chosen].max())
    departing = values[inside & table.departing]
    if chosen[-1]:
        return np.asarray(values >= departing.min())
    return np.asarray(values <= departing.max())


# For deals [deals, levels] of departing rounds over levels of these sizes: the largest ratio of each [deals], and the levels
# [deals, levels] on the side that departs more.
Best = Callable[[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]


def _by_chance(best_of: Best, sizes: NDArray[Any], departing: int) -> NDArray[Any]:
    """The largest ratio of each random deal [DEALS], a few deals at a time."""
    random, at_once = np.random.default_rng(0), max(1, LEVELS_AT_ONCE // len(sizes))
    ratios = []
    for start in range(0, DEALS, at_once):
        deals = min(at_once, DEALS - start)
        dealt = random.multivariate_hypergeometric(sizes, departing, deals, method="marginals")
        ratios.append(best_of(dealt, sizes)[0])
    return np.concatenate(ratios)


def _best_of_order(dealt: NDArray[Any], sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Levels in their order, split at one place."""
    passed, rounds = dealt.cumsum(-1), sizes.cumsum()
    ratios = _ratios(passed, rounds)[:, :-1]
    place = ratios.argmax(-1)[:, None]
    low = np.arange(len(sizes)) <= place
    low_departing = np.take_along_axis(passed, place, -1)
    low_share = low_departing / rounds[place]
    high_share = (passed[:, -1:] - low_departing) / (rounds[-1] - rounds[place])
    return ratios.max(-1), np.where(low_share > high_share, low, ~low)


def _best_of_requests(dealt: NDArray[Any], sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Requests, split into those that depart more and the others."""
    order = np.argsort(-dealt / sizes, -1, kind="stable")
    passed = np.take_along_axis(dealt, order, -1).cumsum(-1)
    ratios = _ratios(passed, sizes[order].cumsum(-1))[:, :-1]
    rank = np.argsort(order, -1)
    return ratios.max(-1), rank <= ratios.argmax(-1)[:, None]


def _ratios(departing: NDArray[Any], rounds: NDArray[Any]) -> NDArray[Any]:
    """Log likelihood of two shares over that of one, for each split of levels [..., levels], from sums up to each level."""
    others, rest = departing[..., -1:] - departing, rounds[..., -1:] - rounds
    whole = _likelihood(departing[..., -1:], rounds[..., -1:])
    return np.asarray(_likelihood(departing, rounds) + _likelihood(others, rest) - whole)


def _likelihood(departing: NDArray[Any], rounds: NDArray[Any]) -> NDArray[Any]:
    """Of a share of departing rounds, at its best value."""
    others = rounds - departing
    return np.asarray(xlogy(departing, departing) + xlogy(others, others) - xlogy(rounds, rounds))


def parts(table: Table, most: int = 12) -> dict[str, list[dict[str, int]]]:
    """How often rounds depart by each order, for the figures of stage 09.

    Args:
        most: parts of an order, each with about as many rounds that can tell; requests are given one by one.
    Returns:
        {by: [{"from", "to", "rounds": that can tell, "departing"}]}; an order that the run does not tell is left out.
    """
    telling = np.flatnonzero(table.can_tell())
    found = {}
    for by in ORDERS:
        values, departing = _values(table, by)[telling], table.departing[telling]
        if by == DISTANCE:
            known = ~np.isnan(values)
            values, departing = values[known], departing[known]
        if not len(values) or np.isnan(values).any():
            continue
        levels = np.unique(values)
        if by in OF_STATE and len(levels) < 2:
            continue
        pieces = len(levels) if by == REQUEST else min(most, len(levels))
        edges = (
            np.unique(np.quantile(values, np.linspace(0, 1, pieces + 1), method="lower")) if by != REQUEST else levels
        )
        part = np.searchsorted(edges, values, side="right") - 1
        part = part.clip(0, len(edges) - (1 if by == REQUEST else 2) if len(edges) > 1 else 0)
        found[by] = [_part(values[part == n], departing[part == n]) for n in np.unique(part)]
    return found


def _part(values: NDArray[Any], departing: NDArray[Any]) -> dict[str, int]:
    return {
        "from": int(values.min()),
        "to": int(values.max()),
        "rounds": len(values),
        "departing": int(departing.sum()),
    }
