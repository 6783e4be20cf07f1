"""Evidence: the rounds of a replay as columns, and what they say together before any verdict.

One row for each round that can be compared with the replay (:func:`eagle3_lib.verdict.rounds.comparable`). A round *departs* where
the engine's accepted count is not that of a correct engine. It *can tell* a hypothesis from another where the engine, a
correct engine or the hypothesis accepted something: where 90 % of the rounds accept nothing, a hypothesis that accepts
nothing anywhere reproduces 90 % of them, and has explained nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..results import ConditionTokens, Interval, Replay, ReplayedRequest, VerdictEvidence, WrongTokens
from . import conditions
from .acceptance import bootstrap, summary
from .changes import HEALTHY as CORRECT
from .rounds import comparable

COUNTS = np.int16  # of accepted drafts; -1 where a request does not have the hypothesis
PLACES = np.int32  # of requests, slots and rounds
# Share of the rounds that can tell in which a healthy engine departs from the replay at most, by the coarser dtype of the
# two: rounding turns near ties. Measured in benchmarks/results/healthy_zoo.json (the real vLLM on a CPU): float32 0 of 10,200
# such rounds, bfloat16 15 of 741 (2.0 %, 4 of 83 at most in one run). On an H200 a bfloat16 SGLang departed in 4 of its 640
# rounds. float16 has 3 bits more than bfloat16.
NOISE = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.03}
EPOCH_S = 1e9  # a start below it is no time since the epoch
LEAST_DEPARTING = 3  # fewer departing rounds are never a finding: one event is no pattern
# Share of wrong tokens from which on a warning is given: a healthy engine had none of 50,000 tokens.
WRONG_TOKENS = 0.001
FALSE_ALARM = 0.01  # of one decision of a verdict, over all the hypotheses it looks at


@dataclass
class Table:
    """Columns [rounds] of the rounds that can be compared, in the order of the requests.

    request: index of its request. slot: of the text; place: of the answer, 0 at its first token, so -1 where a round starts
    at the prompt's last slot. round: its number in the request, counted from 0. beside: other requests that ran at the time,
    nan where the run does not say. engine, correct: accepted counts. drafted: drafts of the round. outside: a correct
    engine stops there at a token outside the draft vocabulary. counts: accepted counts of each hypothesis, the correct engine
    among them; suspects: of each other config.json; since: of faults that begin inside the answers.

    What all rounds of a request share is held once, [requests]: tokens of its prompt, those of them that came from the prefix
    cache (see :func:`eagle3_lib.verdict.conditions.cached_tokens`), as the engine told them, nan without a hit, and when it was
    sent, in seconds after the run's first one. began: when the first was sent, in seconds since the epoch, None where not told.
    """

    request: NDArray[Any]
    slot: NDArray[Any]
    place: NDArray[Any]
    round: NDArray[Any]
    beside: NDArray[Any]
    engine: NDArray[Any]
    drafted: NDArray[Any]
    outside: NDArray[Any]
    counts: dict[str, NDArray[Any]]
    suspects: dict[str, NDArray[Any]]
    since: dict[str, NDArray[Any]]
    prompt_of: NDArray[Any]
    cached_of: NDArray[Any]
    hit_of: NDArray[Any]
    sent_of: NDArray[Any]
    began: float | None = None

    @property
    def requests(self) -> int:
        return len(self.prompt_of)

    @property
    def prompt(self) -> NDArray[Any]:
        """Tokens of the prompt."""
        return np.asarray(self.prompt_of[self.request])

    @property
    def cached(self) -> NDArray[Any]:
        """Prompt tokens that came from the prefix cache; nan where not told."""
        return np.asarray(self.cached_of[self.request])

    @property
    def distance(self) -> NDArray[Any]:
        """Slots from the end of the cached prefix, 0 at the first one after it; nan without a hit or where its length is not told."""
        return np.asarray(self.slot.astype(np.float32) - self.hit_of[self.request])

    @property
    def sent(self) -> NDArray[Any]:
        """When the request was sent, in seconds after the run's first one; nan where not told."""
        return np.asarray(self.sent_of[self.request])

    @property
    def correct(self) -> NDArray[Any]:
        return self.counts[CORRECT]

    @property
    def departing(self) -> NDArray[Any]:
        return np.asarray(self.engine != self.correct)

    def can_tell(self, name: str = CORRECT) -> NDArray[Any]:
        """Rounds [rounds] in which the engine, a correct engine or the hypothesis accepted something."""
        return np.asarray((self.engine > 0) | (self.correct > 0) | (self.counts[name] > 0))

    def by_request(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums [requests] of a column."""
        return np.asarray(np.bincount(self.request, values, self.requests))

    def __len__(self) -> int:
        return len(self.engine)

    @classmethod
    def of(cls, requests: Iterable[ReplayedRequest]) -> "Table":
        """requests: those of replay.json."""
        columns: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("request", "slot", "place", "round", "engine", "drafted")
        }
        columns |= {"outside": [], "beside": []}
        counts, suspects, since = _Named(), _Named(), _Named()
        times: list[tuple[float, float, int] | None] = []
        prompt_of: list[int] = []
        cached_of: list[float] = []
        hit_of: list[float] = []
        sent_of: list[float] = []
        for index, request in enumerate(requests):
            rows = request["rows"]
            kept = [number for number, row in enumerate(rows) if comparable(row)]
            some = [rows[number] for number in kept]
            start = request.get("prompt_length", 1)
            columns["request"].append(np.full(len(some), index, PLACES))
            columns["round"].append(np.array(kept, PLACES))
            for name, kind in (("slot", PLACES), ("engine", COUNTS), ("drafted", COUNTS), ("outside", bool)):
                columns[name].append(np.array([row.get(name, 0) for row in some], kind))
            columns["place"].append(columns["slot"][-1] - PLACES(start))
            prompt_of.append(start)
            cached_of.append(conditions.cached_tokens(request))
            hit_of.append(request.get("cached_tokens") or np.nan)
            sent_of.append(_known(request.get("started_s")))
            of_correct = {CORRECT: [row["replay"] for row in rows]}
            counts.add(of_correct | request.get("hypotheses", {}), kept)
            suspects.add(request.get("suspects", {}), kept)
            since.add(request.get("since", {}), kept)
            times.append(_times(request))
        joined = {name: np.concatenate(columns.pop(name)) for name in list(columns) if columns[name]}
        joined["beside"] = _beside(times, joined["request"], joined["place"])
        sent = np.array(sent_of)
        of_rounds = sent[np.unique(joined["request"])]
        first = of_rounds.min() if len(of_rounds) else np.nan
        return cls(
            **joined,
            counts=counts.joined(),
            suspects=suspects.joined(),
            since=since.joined(),
            prompt_of=np.array(prompt_of, PLACES),
            cached_of=np.array(cached_of, np.float32),
            hit_of=np.array(hit_of, np.float32),
            sent_of=(sent - first).astype(np.float32),
            began=float(first) if first > EPOCH_S else None,
        )


class _Named:
    """Columns by name, of which requests may lack some."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: dict[str, dict[int, NDArray[Any]]] = {}

    def add(self, counts: Mapping[str, Sequence[int]], kept: list[int]) -> None:
        for name, some in counts.items():
            self.parts.setdefault(name, {})[len(self.sizes)] = np.array(some, COUNTS)[kept]
        self.sizes.append(len(kept))

    def joined(self) -> dict[str, NDArray[Any]]:
        """Whole columns; the parts of each are let go as soon as it is whole."""
        found = {}
        for name in list(self.parts):
            parts = self.parts.pop(name)
            whole = [parts.get(index, np.full(size, -1, COUNTS)) for index, size in enumerate(self.sizes)]
            found[name] = np.concatenate(whole)
        return found


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _times(request: ReplayedRequest) -> tuple[float, float, int] | None:
    """When an answer's first and last tokens came, in seconds, and its length; None where the run does not say."""
    started, seconds, first = request.get("started_s"), request.get("seconds"), request.get("first_token_s")
    if started is None or seconds is None or first is None:
        return None
    return started + first, started + seconds, request["output_length"]


def _beside(
    times: Sequence[tuple[float, float, int] | None], request: NDArray[Any], place: NDArray[Any]
) -> NDArray[Any]:
    """Other requests [rounds] that were being decoded when each round ran; nan where that is not known.

    The tokens of an answer are taken as evenly spaced in time.
    """
    if not times or any(some is None for some in times):
        return np.full(len(request), np.nan, np.float32)
    first, last, length = (np.array(column, float) for column in zip(*times, strict=True))
    when = first[request] + (last - first)[request] * (place + 1) / np.maximum(length[request], 1)
    begun = np.searchsorted(np.sort(first), when, side="right")
    ended = np.searchsorted(np.sort(last), when, side="left")
    return np.asarray((begun - ended - 1).clip(0).astype(np.float32))


@dataclass
class Evidence:
    """What the requests of a replay say together, gathered in one pass.

    table: rounds that can be compared. left_out: rounds that cannot be, by reason. unjudged: requests whose rounds are
    contradicted or not told, with the reason. not_greedy: tokens that are not the target's first choice. accepted, own:
    [tokens, not first choices] of accepted drafts, and of tokens that the target chose itself. wrong_requests: requests with
    such tokens. in_vocabulary: [tokens, those in the draft vocabulary]. conditions: what the answers of each condition are.
    """

    replay: Replay
    table: Table
    engine_rounds: list[NDArray[Any]]
    drafted: list[NDArray[Any] | None]
    replay_rounds: list[NDArray[Any]]
    replay_drafted: list[NDArray[Any] | None]
    left_out: dict[str, int]
    unjudged: dict[str, str]
    tokens: int
    not_greedy: int
    accepted: NDArray[Any]
    own: NDArray[Any]
    wrong_requests: int
    in_vocabulary: NDArray[Any]
    conditions: list[ConditionTokens]

    @classmethod
    def of(cls, replay: Replay) -> "Evidence":
        rounds: dict[str, list[Any]] = {
            name: [] for name in ("engine_rounds", "drafted", "replay_rounds", "replay_drafted")
        }
        left_out = dict.fromkeys(("cut", "without a sure place", "without drafts"), 0)
        unjudged: dict[str, str] = {}
        tokens, not_greedy, wrong_requests = 0, 0, 0
        by_condition = conditions.Tally()
        accepted, own, in_vocabulary = (np.zeros(2, int) for _ in range(3))
        for index, request in enumerate(replay["requests"]):
            rows = request["rows"]
            if why := request.get("unjudged"):
                unjudged[str(request.get("id", index))] = why
            left_out["cut"] += sum(row["cut"] for row in rows)
            left_out["without a sure place"] += sum(not row.get("sure", True) and not row["cut"] for row in rows)
            left_out["without drafts"] += request.get("without_drafts", 0)
            left_out["without drafts"] += sum(row.get("drafted") == 0 for row in rows)
            for name, of in rounds.items():
                counts = request.get(name)
                of.append(None if counts is None else np.array(counts, COUNTS))
            if "lossless" in request and "output_length" in request:
                tokens += request["output_length"]
                not_greedy += request["lossless"]
                wrong_requests += request["lossless"] > 0
            by_condition.add(request)
            greedy = request.get("greedy") or {}
            accepted += greedy.get("accepted", (0, 0))
            own += greedy.get("own", (0, 0))
            if "in_vocabulary" in request:
                in_vocabulary += (request["output_length"], request["in_vocabulary"])
        return cls(
            replay=replay,
            table=Table.of(replay["requests"]),
            left_out=left_out,
            unjudged=unjudged,
            tokens=tokens,
            not_greedy=not_greedy,
            accepted=accepted,
            own=own,
            wrong_requests=wrong_requests,
            in_vocabulary=in_vocabulary,
            conditions=by_condition.told(),
            **rounds,
        )

    def as_dict(self) -> VerdictEvidence:
        positions = self.replay["positions"]
        greedy: WrongTokens = {
            "tokens": self.tokens,
            "not_greedy": self.not_greedy,
            "share": self.not_greedy / max(self.tokens, 1),
            "accepted": self.accepted.tolist(),
            "own": self.own.tolist(),
            "requests": self.wrong_requests,
        }
        return {
            "engine": summary(self.engine_rounds, positions, self.drafted),
            "replay": summary(self.replay_rounds, positions, self.replay_drafted),
            "gap": self.gap(),
            "losses": self.losses(),
            "rounds_compared": len(self.table),
            "can_tell": int(self.table.can_tell().sum()),
            "departing": int(self.table.departing.sum()),
            "agreement": agreement(self.table),
            "ranking": [],  # of the hypotheses, where these rounds can rank them
            "left_out": self.left_out,
            "unjudged": self.unjudged,
            "most_drafted": max(
                (int(some.max()) for some in self.drafted if some is not None and len(some)), default=None
            ),
            "tokens_not_greedy": greedy if self.tokens else {},
            "conditions": self.conditions,
        }

    def gap(self) -> Interval:
        """Accepted tokens in a round, engine minus correct engine at the same slots, with a paired interval."""
        table = self.table
        return mean_by_request(table, table.engine - table.correct)

    def losses(self) -> dict[str, float | None]:
        """What becomes of a round: shares of the rounds compared, by how a correct engine's round ends there.

        Returns:
            {"full": every draft accepted, "outside the vocabulary", "wrong at step 0", "lost at later steps": they add up to
            1; "lost by the engine": drafts in a round that a correct engine accepts and the engine does not (negative: it
            accepts more); "vocabulary_ceiling": share of the emitted tokens that the drafter can draft, None where not
            known}; empty without rounds.
        """
        table = self.table
        if not len(table):
            return {}
        drafted = np.where(table.drafted > 0, table.drafted, self.replay["positions"])
        full = table.correct >= drafted
        inside = ~full & ~table.outside
        shares = {
            "full": full,
            "outside the vocabulary": ~full & table.outside,
            "wrong at step 0": inside & (table.correct == 0),
            "lost at later steps": inside & (table.correct > 0),
        }
        tokens, drafts = self.in_vocabulary.tolist()
        found: dict[str, float | None] = {name: round(float(of.mean()), 6) for name, of in shares.items()}
        found["lost by the engine"] = round(float((table.correct - table.engine).mean()), 6)
        return found | {"vocabulary_ceiling": drafts / tokens if tokens else None}


def surely_more(departing: int, rounds: int, share: float, false_alarm: float = FALSE_ALARM) -> bool:
    """Do surely more of the rounds depart than a share explains? One-sided binomial test."""
    if departing < LEAST_DEPARTING:
        return False
    return bool(stats.binom.sf(departing - 1, rounds, share) < false_alarm)


def agreement(table: Table, name: str = CORRECT, among: NDArray[Any] | None = None) -> Interval:
    """Share of the rounds that a hypothesis reproduces, with an interval by request.

    Args:
        among: [rounds] which to count; all by default.
    """
    among = np.ones(len(table), bool) if among is None else among
    pairs = np.column_stack([table.by_request(among), table.by_request(among & (table.counts[name] == table.engine))])
    if not among.any():
        return {"value": None, "low": None, "high": None, "n": table.requests}
    return bootstrap(ratio, pairs)


def mean_by_request(table: Table, values: NDArray[Any]) -> Interval:
    """Mean of a column over rounds, with an interval by request."""
    if not len(table):
        return {"value": 0.0, "low": 0.0, "high": 0.0, "n": table.requests}
    return bootstrap(ratio, np.column_stack([table.by_request(np.ones(len(table))), table.by_request(values)]))


def ratio(counts: NDArray[Any]) -> NDArray[Any]:
    """Sum of the second column over sum of the first, [..., requests, 2] -> [...]; nan without rounds."""
    total = counts.sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total[..., 1] / total[..., 0])
