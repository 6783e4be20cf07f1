"""Judging an engine that tells no rounds: from the histogram of each request, or from counters over many.

*Histograms* and *counters over the same tokens*: every hypothesis of the catalogue makes its own rounds of the answers
(:func:`eagle3_lib.verdict.replay.own_rounds`), and those are counted as the engine counted its own. A hypothesis is unlike the engine
by the rounds that the two counts do not share. The order of the rounds is lost, so different faults can give the same counts: less is
named than from rounds, and nothing that rounds would not name (docs/faults.md, *What each grade of evidence can say*).

*Pooled counters of other tokens*, as ``/metrics`` of a running server gives them, are counts of text that nobody kept. Acceptance
depends on the text, so they can neither clear an engine nor name a fault; :func:`judge_pooled` says what they can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..errors import Eagle3Error
from ..results import (
    Acceptance,
    Benchmark,
    Counters,
    CurveInterval,
    FittedHypothesis,
    Interval,
    NotExcluded,
    Ranked,
    Replay,
    ReplayedRequest,
    Score,
    ToldSuspect,
    Totals,
    VerdictEvidence,
)
from . import diagnose, suspects, wrong_tokens
from .acceptance import conditional, curve, request_counts, summary
from .changes import HEALTHY as CORRECT
from .diagnose import Verdict
from .emitted import UNTOLD
from .evidence import FALSE_ALARM, NOISE, Evidence, surely_more
from .faults import FAULTS

HISTOGRAMS, COUNTERS = "histograms", "counters"
GRADES = (HISTOGRAMS, COUNTERS)  # of evidence that this module judges
# A round that departs moves the start of the next ones, so that more than one round comes out otherwise before engine and replay begin one
# at the same slot again; and departing rounds can balance in a count. Unlike rounds in the histograms for each departing round, over the
# recordings of benchmarks/grades.py with a deviation: 1.3 in the median, 2.0 in nine of ten, 2.5 at most. So many count as one that departs.
WALK = 2.5
ALARM, NO_ALARM = diagnose.ALARM, diagnose.NO_ALARM
CLIFF = 0.02  # conditional rate below which a position accepts practically nothing
BEFORE_CLIFF = 0.2  # conditional rate that the position before it has at least
NO_CLIFF = 0.1  # conditional rate of a correct engine on the reference at that position, at least, for an alarm


# ---------------------------------------------------------------------------------------------------------- comparing


@dataclass
class Walk:
    """Rounds of one hypothesis by accepted count.

    sure: [K + 1] rounds that a count must hold. open: accepted counts of last rounds, whose drafts reach past the answer's end: an
    engine may count those as more, or as one less (the tokens that it emitted, less one).
    """

    sure: NDArray[Any]
    open: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Sequence[int], positions: int, output_length: int | None) -> "Walk":
        """output_length: tokens of the answer; None where it is not known, which leaves the last round open."""
        past_end = output_length is None or 1 + sum(rounds) + len(rounds) > output_length
        is_open = bool(rounds) and past_end
        inside = rounds[:-1] if is_open else rounds
        return cls(np.bincount(np.asarray(inside, int), minlength=positions + 1), list(rounds[-1:]) if is_open else [])

    @classmethod
    def together(cls, walks: Sequence["Walk"]) -> "Walk":
        total = cls(np.sum([walk.sure for walk in walks], axis=0))
        for walk in walks:
            total.open += walk.open
        return total

    @property
    def counts(self) -> NDArray[Any]:
        """[K + 1] all rounds, the last ones as far as the text reaches."""
        return np.asarray(self.sure + np.bincount(np.asarray(self.open, int), minlength=len(self.sure)))

    def shared(self, counted: NDArray[Any]) -> int:
        """Rounds that an engine's count [K + 1] and this walk both have."""
        both = np.minimum(counted, self.sure)
        free, waiting, taken = counted - both, 0, 0
        for count, left in enumerate(free):
            waiting += sum(max(last - 1, 0) == count for last in self.open)
            fits = min(waiting, int(left))
            waiting, taken = waiting - fits, taken + fits
        return int(both.sum()) + taken


@dataclass(frozen=True)
class Count:
    """One hypothesis beside what the engine counted.

    rounds: that can tell it: neither the engine nor it has them among those that accept nothing. unlike: rounds that only one of the
    two has. lacking: its rounds that the engine's count does not hold. differ: rounds that only it or a correct engine has.
    """

    name: str
    rounds: int
    unlike: int
    lacking: int
    differ: int

    @classmethod
    def of(cls, name: str, counted: Sequence[NDArray[Any]], walks: Sequence[Walk], correct: Sequence[Walk]) -> "Count":
        rounds = unlike = lacking = differ = 0
        for engine, walk, healthy in zip(counted, walks, correct, strict=True):
            own, shared = walk.counts, walk.shared(engine)
            rounds += int(np.maximum(engine, own)[1:].sum())
            unlike += max(int(engine.sum()), int(own.sum())) - shared
            lacking += int(own.sum()) - shared
            other = healthy.counts
            differ += max(int(other.sum()), int(own.sum())) - int(np.minimum(other, own).sum())
        return cls(name, rounds, unlike, lacking, differ)

    def excluded(self, noise: float) -> bool:
        """Whether rounding leaves an engine with this hypothesis surely fewer unlike rounds."""
        return surely_more(int(self.unlike / WALK), self.rounds, noise)

    def beats(self, correct: "Count", false_alarm: float) -> bool:
        """A sign test over the rounds that only one of the two explains, as many as depart."""
        won, lost = int(max(correct.unlike - self.unlike, 0) / WALK), int(self.unlike / WALK)
        return bool(stats.binomtest(won, max(won + lost, 1), alternative="greater").pvalue <= false_alarm)


class HistogramRequest(TypedDict):
    """One answer of an engine that tells no rounds.

    histogram: rounds by accepted count, at most K + 1. own_rounds: {hypothesis: the rounds that it would have made of the answer},
    the correct engine among them. output_length: tokens of the answer. totals: the engine's own, whose drafts say whether each
    round had K.
    """

    histogram: list[int]
    own_rounds: dict[str, list[int]]
    output_length: NotRequired[int]
    totals: NotRequired[Totals | None]


class OwnRounds(TypedDict):
    """One answer of an engine that has counters alone, as :class:`HistogramRequest` without its histogram."""

    own_rounds: dict[str, list[int]]
    output_length: int


@dataclass
class _Case:
    """What one verdict is made from. counted: [K + 1] by group, one a request or one of all; walks: by hypothesis and group."""

    drafter: str
    grade: str
    positions: int
    dtype: str
    break_even: float | None
    counted: list[NDArray[Any]]
    walks: dict[str, list[Walk]]
    correct: list[list[int]]  # rounds of a correct engine by request, those that reach past the end left out
    evidence: VerdictEvidence
    requests: int
    why_not: str | None = None  # a reason why departing counts are no fault's
    scores: list[Score] = field(default_factory=list)

    @property
    def noise(self) -> float:
        return NOISE[self.dtype]

    @property
    def source(self) -> str:
        return "the requests' histograms" if self.grade == HISTOGRAMS else "the engine's counters"

    def verdict(self, kind: str, sentence: str, **more: Any) -> Verdict:
        return Verdict(self.drafter, kind, f"{self.drafter}: {sentence}", self.evidence, **more)

    def cannot_tell(self, reason: str) -> Verdict:
        return self.verdict(diagnose.CANNOT_TELL, f"cannot tell, because {reason}.")


def judge_histograms(
    drafter: str,
    positions: int,
    requests: Sequence[HistogramRequest],
    dtype: str = "bfloat16",
    break_even: float | None = None,
) -> Verdict:
    """The verdict where the engine gives a histogram for each request instead of rounds (SGLang).

    Raises:
        Eagle3Error: a histogram is longer than K + 1.
    """
    walks = _walks(requests, positions)
    counted = [_padded(request["histogram"], positions) for request in requests]
    rounds = [np.repeat(np.arange(positions + 1), histogram).tolist() for histogram in counted]
    evidence: VerdictEvidence = {"engine": summary(rounds, positions)}
    if reason := _other_histograms(requests, counted):
        return Verdict(drafter, diagnose.CANNOT_TELL, f"{drafter}: cannot tell, because {reason}.", evidence)
    return _judge(_case(drafter, HISTOGRAMS, positions, requests, dtype, break_even, counted, walks, evidence))


def judge_counters(
    drafter: str,
    positions: int,
    requests: Sequence[OwnRounds],
    counters: Counters,
    dtype: str = "bfloat16",
    break_even: float | None = None,
) -> Verdict:
    """The verdict where the engine has nothing but counters over all the requests.

    Args:
        counters: what the engine counted over these requests and no others.
    Raises:
        Eagle3Error: the counters have another number of positions than K.
    """
    evidence: VerdictEvidence = {"engine": acceptance_of(counters, positions)}
    if reason := impossible(counters, positions) or _other_counters(requests, counters, positions):
        return Verdict(drafter, diagnose.CANNOT_TELL, f"{drafter}: cannot tell, because {reason}.", evidence)
    walks = {name: [Walk.together(some)] for name, some in _walks(requests, positions).items()}
    counted = [histogram_of(counters)]
    return _judge(_case(drafter, COUNTERS, positions, requests, dtype, break_even, counted, walks, evidence))


def judge(replay: Replay, break_even: float | None = None) -> Verdict:
    """The verdict on the replay of a run whose evidence is histograms or counters; :func:`diagnose.judge` for the other grades.

    Args:
        replay: of :func:`eagle3_lib.stages.replay.run`; its requests hold "own_rounds".
        break_even: as :func:`diagnose.judge`.
    Raises:
        Eagle3Error: no request, or requests without the rounds of the hypotheses.
    """
    found, grade, positions = Evidence.of(replay), replay.get("evidence", COUNTERS), replay["positions"]
    drafter, dtype = replay["drafter"], replay.get("dtype", UNTOLD)
    requests = list(replay["requests"])
    for request in requests:
        if not request.get("own_rounds"):
            raise Eagle3Error(f"replay of {drafter}, request {request['id']}: own_rounds: found none, expected some")
    counters = replay.get("counters")
    histograms = [request.get("histogram") for request in requests]
    counted: list[NDArray[Any]] = []
    reason: str | None
    if grade == HISTOGRAMS:
        if any(not some for some, request in zip(histograms, requests, strict=True) if _has_rounds(request)):
            raise Eagle3Error(f"replay of {drafter}: histogram: found a request without, expected one of each")
        counted = [_padded(some or [], positions) for some in histograms]
        engine = summary([np.repeat(np.arange(positions + 1), some) for some in counted], positions)
        reason = _other_histograms(requests, counted)
    elif counters is not None:
        engine = acceptance_of(counters, positions)
        reason = impossible(counters, positions)
        if other := replay.get("other_rounds"):
            reason = reason or f"{other} of the {counters['rounds']} rounds in the counters are of other requests"
        reason = reason or _other_counters(requests, counters, positions)
        counted = [histogram_of(counters)]
    else:
        raise Eagle3Error(f"replay of {drafter}: counters: found none, expected those of the run")
    evidence = found.as_dict()
    evidence["engine"] = engine
    walks = _walks(requests, positions)
    if grade == COUNTERS:
        walks = {name: [Walk.together(some)] for name, some in walks.items()}
    case = _case(drafter, grade, positions, requests, dtype, break_even, counted, walks, evidence)
    case.why_not = _why_not(replay, case)
    case.scores = _scores(replay.get("suspects") or [], requests)
    verdict = _judge_tokens(case, found) or (case.cannot_tell(reason) if reason else _judge(case))
    verdict.warnings = diagnose.warnings(found)
    return verdict


def _has_rounds(request: ReplayedRequest) -> bool:
    return request["output_length"] > 1


def _walks(requests: Sequence[Any], positions: int) -> dict[str, list[Walk]]:
    if not requests:
        raise Eagle3Error("requests: found none, expected at least one")
    return {
        name: [Walk.of(r["own_rounds"][name], positions, r.get("output_length")) for r in requests]
        for name in requests[0]["own_rounds"]
    }


def _case(
    drafter: str,
    grade: str,
    positions: int,
    requests: Sequence[Any],
    dtype: str,
    break_even: float | None,
    counted: list[NDArray[Any]],
    walks: dict[str, list[Walk]],
    evidence: VerdictEvidence,
) -> _Case:
    own = [request["own_rounds"][CORRECT] for request in requests]
    inside = [_inside(r["own_rounds"][CORRECT], positions, r.get("output_length")) for r in requests]
    evidence["replay"] = summary(own, positions)
    evidence["rounds_compared"] = sum(map(len, own))
    return _Case(drafter, grade, positions, dtype, break_even, counted, walks, inside, evidence, len(requests))


def _inside(rounds: Sequence[int], positions: int, length: int | None) -> list[int]:
    """The rounds whose drafts all lie inside the answer."""
    if length is None:
        return list(rounds)
    firsts = np.cumsum([1, *[count + 1 for count in rounds]])[:-1]
    return [count for count, first in zip(rounds, firsts.tolist(), strict=True) if first + positions <= length]


def _padded(histogram: Sequence[int], positions: int) -> NDArray[Any]:
    if len(histogram) > positions + 1:
        raise Eagle3Error(
            f"histogram: found {len(histogram)} entries, expected at most positions + 1 = {positions + 1}"
        )
    return np.pad(np.asarray(histogram, int), (0, positions + 1 - len(histogram)))


# ------------------------------------------------------------------------------------------------- is this evidence?


def _judge_tokens(case: _Case, found: Evidence) -> Verdict | None:
    """No verdict where the tokens are not the target's: without rounds nothing says which tokens were drafts."""
    replay = found.replay
    if contradictions := replay.get("contradictions"):
        return case.cannot_tell(f"the engine's own counts contradict each other: {contradictions[0]}")
    sampled = replay.get("sampled")
    if sampled and not sampled["lossless"]:
        said = f"the tokens are not draws of the target ({sampled['fault']})"
    elif not sampled and found.not_greedy > diagnose.NOT_GREEDY * found.tokens:
        said = f"{found.not_greedy} of {found.tokens} tokens are not the target's first choice"
    elif not sampled and (of_condition := wrong_tokens.find(found.conditions)):
        said = f"{of_condition.counts} ({of_condition.fault})"
    else:
        return None
    return case.cannot_tell(
        f"{said}, and without rounds nothing says which of them were drafts: the served target is not the folder that the replay "
        f"loads, or verification is at fault, or the requests were sampled otherwise than the run says. Ask the same "
        f"without speculation"
    )


def _why_not(replay: Replay, case: _Case) -> str | None:
    """Why counts that depart from a correct engine's are no proof of a fault in this run; None where they are."""
    sampling = replay.get("sampling") or {}
    if replay.get("sampled") or sampling.get("temperature"):
        return (
            f"the tokens were sampled, and {case.source} cannot tell whether drafting or verification is at fault (ask the same "
            f"at temperature 0, or have the rounds told)"
        )
    if replay.get("drafts_vary"):
        return "the engine was set to draft fewer than K at times, and only the rounds of each request tell when"
    if case.grade == HISTOGRAMS and (claim := _claim(replay, case)):
        return claim
    correct = Count.of(CORRECT, case.counted, case.walks[CORRECT], case.walks[CORRECT])
    agreeing = 1 - correct.unlike / max(case.evidence["rounds_compared"], 1)
    return diagnose.habit(replay, agreeing)


def _claim(replay: Replay, case: _Case) -> str | None:
    """The engine never accepts as far as K, a correct one does, and nothing tells how many were drafted."""
    totals = [request.get("totals") for request in replay["requests"]]
    told = [some.get("drafted") for some in totals if some]
    engine = np.sum(case.counted, axis=0)
    most = int(np.flatnonzero(engine).max(initial=0))
    further = int(np.sum([walk.counts for walk in case.walks[CORRECT]], axis=0)[most + 1 :].sum())
    if any(drafts is not None for drafts in told) or not 0 < most < case.positions or further < diagnose.CLAIM_ROUNDS:
        return None
    return (
        f"no round accepted more than {most} drafts where K = {case.positions} is claimed and a correct engine accepts more in {further} "
        f"rounds: the run drafted {most}, or its drafts after step {most} are broken. The engine's total of drafts would tell"
    )


def _other_histograms(requests: Sequence[Any], counted: Sequence[NDArray[Any]]) -> str | None:
    """Why histograms are not those of rounds with K drafts each on these answers; None where they may be."""
    idle = 0
    for request, histogram in zip(requests, counted, strict=True):
        if "output_length" not in request:
            continue
        length, positions = request["output_length"], len(histogram) - 1
        emitted = 1 + int((histogram * np.arange(1, positions + 2)).sum())
        if emitted > length + positions:
            name = request.get("id", "")
            return f"the histogram of request {name} emits {emitted} tokens, and its answer has {length}"
        idle += emitted < length
        drafted = (request.get("totals") or {}).get("drafted")
        if drafted is not None and drafted != positions * int(histogram.sum()):
            return _shorter(drafted, int(histogram.sum()), positions)
    if idle:
        return (
            f"{idle} of {len(requests)} answers have more tokens than the rounds of their histograms emit: steps without "
            f"drafts stand at places that histograms do not tell"
        )
    return None


def _other_counters(requests: Sequence[Any], counters: Counters, positions: int) -> str | None:
    """Why counters are not those of rounds with K drafts each on these answers alone; None where they may be."""
    answered = [request["output_length"] for request in requests if request["output_length"]]
    tokens, rounds = sum(answered), counters["rounds"]
    emitted = len(answered) + rounds + sum(counters["accepted"])
    if "drafted" in counters and counters["drafted"] != positions * rounds:
        return _shorter(counters["drafted"], rounds, positions)
    if emitted < tokens:
        return (
            f"the counted rounds emit {emitted} tokens and the answers have {tokens}: steps without drafts, or answers that "
            f"the counters do not hold"
        )
    if emitted > tokens + positions * len(answered):
        return (
            f"the counted rounds emit {emitted} tokens and the answers have {tokens}: the counters hold other requests too. Ask "
            f"while the server has no other traffic"
        )
    return None


def _shorter(drafted: int, rounds: int, positions: int) -> str:
    return (
        f"the engine counted {drafted} drafts in {rounds} rounds, which is not {positions} in each: the rounds of each request "
        f"would tell which were shorter"
    )


def impossible(counters: Counters, positions: int) -> str | None:
    """What no engine with K drafts a round can have counted; None where it can.

    Raises:
        Eagle3Error: another number of positions than K.
    """
    rounds, accepted, drafted = counters["rounds"], counters["accepted"], counters.get("drafted")
    if len(accepted) != positions:
        raise Eagle3Error(f"counters: accepted: found {len(accepted)} positions, expected K = {positions}")
    if min([rounds, *accepted, drafted or 0]) < 0:
        return "a counter fell: the server was started again in between"
    if not rounds:
        return "no round was counted: the engine did not draft"
    rising = [k for k, (a, b) in enumerate(zip([rounds, *accepted], accepted, strict=False), 1) if b > a]
    if rising:
        before = f"at position {rising[0] - 1}" if rising[0] > 1 else "as rounds"
        return (
            f"the counters are no chain draft's: {accepted[rising[0] - 1]} accepted at position {rising[0]}, fewer {before}. A draft "
            f"tree, or counters of several engines"
        )
    if drafted is not None and drafted < sum(accepted):
        return f"the counters are impossible: {sum(accepted)} drafts accepted of {drafted}"
    if drafted is not None and drafted > positions * rounds:
        return f"the counters are of another K: {drafted} drafts in {rounds} rounds, where K = {positions}"
    return None


def histogram_of(counters: Counters) -> NDArray[Any]:
    """[K + 1] rounds by accepted count, which follow from the rounds that accepted each position."""
    reached = np.array([counters["rounds"], *counters["accepted"], 0])
    return np.asarray(reached[:-1] - reached[1:])


def acceptance_of(counters: Counters, positions: int) -> Acceptance:
    """As :func:`eagle3_lib.verdict.acceptance.summary`, without intervals: counters do not tell one request from another."""
    rounds, accepted = counters["rounds"], list(counters["accepted"])
    drafted = counters.get("drafted", positions * rounds)
    rates = [count / rounds for count in accepted] if rounds else None
    return {
        "requests": 0,
        "rounds": rounds,
        "positions": positions,
        "drafted": drafted,
        "accepted": accepted,
        "curve": cast(CurveInterval, {"value": rates, "low": None, "high": None, "n": 0}),
        "conditional": conditional(rates) if rates else [None] * positions,
        "acceptance_rate": _alone(sum(accepted) / drafted if drafted else None),
        "mean_length": _alone(1 + sum(accepted) / rounds if rounds else None),
    }


def engine_acceptance(bench: Benchmark, grade: str) -> Acceptance:
    """What an engine that tells no rounds accepted: by its histograms, or its counters over all requests."""
    positions = bench["positions"]
    histograms = [_padded(request.get("histogram") or [], positions) for request in bench["requests"]]
    counters = (bench.get("cross_check") or {}).get("counters")
    if grade == HISTOGRAMS:
        return summary([np.repeat(np.arange(positions + 1), some) for some in histograms], positions)
    found = acceptance_of(counters or {"rounds": 0, "accepted": [0] * positions}, positions)
    return {**found, "requests": len(bench["requests"])}


def _alone(value: float | None) -> Interval:
    return {"value": value, "low": None, "high": None, "n": 0}


# ---------------------------------------------------------------------------------------------------------- judging


def _judge(case: _Case) -> Verdict:
    of_correct = case.walks[CORRECT]
    counts = [Count.of(name, case.counted, walks, of_correct) for name, walks in case.walks.items()]
    counts.sort(key=lambda count: (count.unlike, count.name != CORRECT))
    (correct,) = (count for count in counts if count.name == CORRECT)
    case.evidence["ranking"] = [_ranked(count) for count in counts]
    case.evidence["can_tell"], case.evidence["departing"] = correct.rounds, correct.unlike
    case.evidence["config"] = case.scores
    compared = max(case.evidence["rounds_compared"], 1)
    case.evidence["agreement"] = {**_alone(max(0.0, 1 - correct.unlike / compared)), "n": case.requests}
    left = [count for count in counts if not count.excluded(case.noise) and count.name != CORRECT]
    faulty = [count for count in left if diagnose.severity(count.name) != "precision"]
    precise = [count for count in left if count not in faulty]
    departs = correct.excluded(case.noise)
    if departs and precise and (not faulty or precise[0].unlike <= faulty[0].unlike):
        departs = False
    if not departs:
        return _as_correct(case, correct, faulty)
    if case.why_not:
        return case.cannot_tell(f"{case.why_not}; {_unlike(correct)}")
    if case.grade == COUNTERS and not surely_more(int(correct.lacking / WALK), correct.rounds, case.noise):
        return case.cannot_tell(
            f"the counters hold all rounds that a correct engine makes of these answers, and "
            f"{correct.unlike - correct.lacking} or more besides: of other requests"
        )
    return _departs(case, correct, faulty, len(counts) - 1)


def _ranked(count: Count) -> Ranked:
    share = 1 - count.unlike / max(count.rounds, count.unlike, 1)
    return {
        "hypothesis": count.name,
        "value": share,
        "low": None,
        "high": None,
        "rounds": count.rounds,
        "unlike": count.unlike,
    }


def _unlike(count: Count) -> str:
    whose = "a correct engine's" if count.name == CORRECT else f"as {count.name} predicts"
    return f"{count.unlike} rounds are not {whose}, of {count.rounds} that can tell"


def _as_correct(case: _Case, correct: Count, faulty: Sequence[Count]) -> Verdict:
    left = _not_excluded(faulty)
    rounds = np.concatenate([*case.correct, []])
    engine = case.evidence["engine"]
    accepted, counted = sum(engine["accepted"]), engine["rounds"]
    most = max(accepted / max(counted, 1), float(rounds.mean()) if len(rounds) else 0.0)
    if counted >= diagnose.LEAST_ROUNDS and most < diagnose.HARDLY_ANY:
        return case.verdict(
            diagnose.NOTHING,
            f"nothing accepted: {accepted} of {engine['drafted']} drafts, and a correct engine would have accepted as little. "
            f"What splits engine and drafter: {diagnose.SPLITS_NOTHING}.",
            not_excluded=left,
        )
    needed = diagnose.rounds_needed(
        int(correct.unlike / WALK), correct.rounds, case.evidence["rounds_compared"], case.noise
    )
    if needed:
        case.evidence["rounds_needed"] = needed
        decide = diagnose.would_decide(needed, case.evidence["rounds_compared"])
        return case.verdict(
            diagnose.NOT_ENOUGH,
            f"{diagnose.rates(case.evidence)} ({case.source}: {_unlike(correct)}). {decide}",
            not_excluded=left,
        )
    if suspect := suspects.clearly_better(case.scores):
        return _config(case, suspect)
    return _strength(case, correct, rounds, left)


def _strength(case: _Case, correct: Count, rounds: NDArray[Any], left: list[NotExcluded]) -> Verdict:
    """Weak or healthy, by the same limits as :func:`diagnose.judge`."""
    first, length = float((rounds > 0).mean()), 1 + float(rounds.mean())
    case.evidence["first_drafts"], case.evidence["break_even_length"] = first, case.break_even
    reach = f"a correct engine makes {length:.2f} tokens a round and accepts {first:.1%} of the first drafts"
    weak, against = diagnose.weakness(first, length, case.break_even)
    said = f"{diagnose.rates(case.evidence)} ({case.source}: {_unlike(correct)})."
    limits = f" From {case.source}, a fault that holds in a part of the run, or leaves the counts as they are, is not excluded."
    open_ = diagnose.said_open(left) + limits
    doubt = suspects.unsettled(case.scores, len(rounds)) if weak else None
    if doubt:
        case.evidence["rounds_needed"] = doubt[1]
        return case.verdict(diagnose.NOT_ENOUGH, f"{said} {diagnose.weak_or_config(*doubt)}", not_excluded=left)
    if weak:
        sentence = f"{said} The drafter is weak on this text: {reach}{against}.{open_}"
        return case.verdict(diagnose.WEAK, sentence, not_excluded=left)
    sentence = f"{said} The engine accepts what the drafter allows: {reach}.{open_}"
    return case.verdict(diagnose.HEALTHY if case.grade == HISTOGRAMS else NO_ALARM, sentence, not_excluded=left)


def _departs(case: _Case, correct: Count, faulty: Sequence[Count], hypotheses: int) -> Verdict:
    engine, healthy = case.evidence["engine"], case.evidence["replay"]
    lost = (sum(healthy["accepted"]) - sum(engine["accepted"])) / max(sum(healthy["accepted"]), 1)
    case.evidence["cost"] = lost
    explains = (1 - diagnose.NAMED[case.dtype]) * correct.unlike
    sure = [c for c in faulty if c.unlike <= explains and c.beats(correct, FALSE_ALARM / hypotheses)]
    if sure and case.grade == HISTOGRAMS:
        best = next((count for count in sure if count.name == diagnose.NOTHING_AT_ALL), sure[0])
        return _fault(case, correct, best, [count.name for count in faulty if count is not best])
    said = f"{diagnose.rates(case.evidence)}. {_sentence(case.source)}: {_unlike(correct)}."
    like = faulty[0] if faulty else None
    case.evidence["most_like"] = _fitted(like, correct) if like else None
    few = correct.unlike <= WALK * diagnose.SMALL_SHARE * case.evidence["rounds_compared"]
    if few and abs(lost) <= diagnose.SMALL_COST:
        change = "costs" if lost >= 0 else "brings"
        return case.cannot_tell(
            f"the engine departs from a correct one by more than rounding in {case.dtype} explains ({case.source}: {_unlike(correct)}), "
            f"which {change} {abs(lost):.1%} of the accepted drafts: a small deviation, or a fault in a part of the run. The rounds "
            f"of each request would tell"
        )
    if sure:
        names = diagnose.listed([count.name for count in faulty], 6)
        way = f" Counters do not name it; of the catalogue these give the same: {names}. The rounds of each request would tell."
    else:
        way = " Nothing in the catalogue gives these counts; the rounds of each request tell more."
    return case.verdict(diagnose.UNKNOWN, f"{said} The engine is at fault.{way}")


def _fitted(count: Count, correct: Count) -> FittedHypothesis:
    return {
        "name": count.name,
        "departing": correct.unlike,
        "explained": max(correct.unlike - count.unlike, 0),
        "spoiled": 0,
        "rounds": count.rounds,
        "unlike": count.unlike,
    }


def _fault(case: _Case, correct: Count, best: Count, ties: list[str]) -> Verdict:
    suspect = suspects.clearly_better(case.scores)
    if suspect and suspect.get("fault") == best.name:
        return _config(case, suspect)
    also = f" {_sentence(case.source)} cannot tell it from: {diagnose.listed(ties, 6)}." if ties else ""
    return case.verdict(
        diagnose.FAULT,
        f"{diagnose.rates(case.evidence)}. Engine fault: {best.name}. {_sentence(case.source)}: {_unlike(correct)}, and {_unlike(best)}."
        f"{also}{diagnose.remedy(best.name, ties)}",
        fault=best.name,
        ties=ties,
    )


def _config(case: _Case, suspect: Score) -> Verdict:
    gain = f"{suspect['accepted']:.2f} drafts a round against {suspect['of_config']:.2f}"
    return case.verdict(
        diagnose.CONFIG,
        f"{diagnose.rates(case.evidence)}. config.json does not describe this drafter: with {suspect['field']} = {suspect['value']} a correct engine "
        f"would accept {gain} at the rounds that it makes of these answers. To try: {suspect['shim']}",
        suspect=suspect,
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _not_excluded(faulty: Sequence[Count]) -> list[NotExcluded]:
    left: list[NotExcluded] = []
    for count in faulty:
        experiment = FAULTS[count.name].experiment if count.name in FAULTS else ""
        left.append({"hypothesis": count.name, "rounds_that_differ": count.differ, "experiment": experiment})
    return sorted(left, key=lambda row: row["rounds_that_differ"])


def _scores(told: Sequence[ToldSuspect], requests: Sequence[ReplayedRequest]) -> list[Score]:
    """What every other config.json would accept at the rounds that a correct engine makes of the answers."""
    by_name = {suspect["name"]: suspect for suspect in told}
    accepted: dict[str, list[list[int]]] = {name: [] for name in by_name if name in (requests[0].get("suspects") or {})}
    if not accepted:
        return []
    correct = []
    for request in requests:
        own = request["own_rounds"][CORRECT]
        firsts = np.cumsum([1, *[count + 1 for count in own]])[:-1] + request["prompt_length"] - 2
        short = int((firsts < suspects.SHORT).sum())
        correct.append(own[:short])
        for name, some in accepted.items():
            some.append(request["suspects"][name][:short])
    scores = suspects.score(accepted, correct)
    return [cast(Score, {**by_name[score["name"]], **score}) for score in scores]


# ------------------------------------------------------------------------------------------- counters of other tokens


class PooledCurve(NamedTuple):
    """Rounds, rate at each position [K], and the covariance of the rates [K, K]."""

    rounds: float
    rates: NDArray[Any]
    covariance: NDArray[Any]


class PooledFit(TypedDict):
    """One hypothesis against pooled counters; p small: the counters are not that hypothesis's."""

    hypothesis: str
    chi2: float
    p: float


def pooled_curves(own_rounds: dict[str, list[list[int]]], positions: int) -> dict[str, PooledCurve]:
    """For each hypothesis, from its rounds by request: number of rounds, curve [K], and the curve's covariance [K, K]."""
    table: dict[str, PooledCurve] = {}
    for name, rounds in own_rounds.items():
        counts = request_counts(rounds, positions)
        draws = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
        covariance = np.atleast_2d(np.cov(curve(counts[draws]).T))
        table[name] = PooledCurve(float(counts[:, 0].sum()), curve(counts), covariance)
    return table


def rank_pooled(engine: NDArray[Any], curves: Mapping[str, PooledCurve]) -> list[PooledFit]:
    """Hypotheses against pooled counters alone (Prometheus), as of other tokens of the same kind of text as the replayed ones.

    The curves differ by the chance of both samples: the covariance of a hypothesis's curve comes from resampling its
    requests, and is scaled to the engine's number of rounds.

    Args:
        engine: [1 + K] rounds, then accepted counts of each position.
        curves: :func:`pooled_curves` of every hypothesis.
    Returns:
        [{"hypothesis", "chi2", "p"}], best first; p small: the counters are not that hypothesis's.
    """
    engine = np.asarray(engine, float)
    found = engine[1:] / engine[0]
    table: list[PooledFit] = []
    floor = np.eye(len(found)) / engine[0] ** 2  # one round: a position that is never accepted still has some width
    for name, (rounds, expected, covariance) in curves.items():
        difference = found - expected
        chi2 = float(difference @ np.linalg.solve(covariance * (1 + rounds / engine[0]) + floor, difference))
        table.append({"hypothesis": name, "chi2": chi2, "p": float(stats.chi2.sf(chi2, len(found)))})
    return sorted(table, key=lambda row: row["chi2"])


def judge_pooled(
    counters: Counters, positions: int, curves: Mapping[str, PooledCurve] | None = None, drafter: str = "drafter"
) -> Verdict:
    """What counters over traffic say whose tokens nobody kept.

    An alarm is raised for a cliff alone that a correct engine does not have on the reference: a position from which on practically
    nothing is accepted although the one before it is. Other text lowers every rate of a healthy engine (the base drafter of this
    project makes 2.0 tokens a round on its own text and 1.1 on Python), so a low rate is never an alarm, and no fault is named.

    Args:
        counters: rounds and accepted drafts by position, as ``/metrics`` rose by.
        curves: :func:`pooled_curves` of reference texts, the correct engine's among them; None without a reference.
    Returns:
        a verdict of the kinds "alarm", "no alarm", "nothing accepted" or "cannot tell".
    Raises:
        Eagle3Error: the counters have another number of positions than K, or the reference has no correct engine.
    """
    if curves is not None and CORRECT not in curves:
        raise Eagle3Error(f"curves: found {', '.join(curves) or 'none'}, expected {CORRECT!r} among them")
    engine = acceptance_of(counters, positions)
    evidence: VerdictEvidence = {"engine": engine}

    def verdict(kind: str, sentence: str) -> Verdict:
        return Verdict(drafter, kind, f"{drafter}: {sentence}", evidence)

    if reason := impossible(counters, positions):
        return verdict(diagnose.CANNOT_TELL, f"cannot tell, because {reason}.")
    rounds, accepted = counters["rounds"], counters["accepted"]
    said = (
        f"{engine['mean_length']['value']:.2f} tokens a round, {diagnose.percent(engine['acceptance_rate']['value'])} of the drafts "
        f"accepted in {rounds} rounds with K = {positions}"
    )
    unknown = "replay answers of this traffic whose tokens are kept"
    if rounds < diagnose.LEAST_ROUNDS:
        return verdict(diagnose.CANNOT_TELL, f"cannot tell, because there are {rounds} rounds ({said}).")
    if sum(accepted) < diagnose.HARDLY_ANY * rounds:
        sentence = f"nothing accepted: {said}. Engine, drafter or their match: counters do not split them; {unknown}."
        return verdict(diagnose.NOTHING, sentence)
    cliff = _cliff(counters)
    if curves is None:
        sign = f" A sign to look at: {_cliff_words(counters, cliff)}." if cliff is not None else ""
        return verdict(
            diagnose.CANNOT_TELL,
            f"cannot tell, because these counters have no reference: {said}.{sign} Acceptance depends on the text, so whether a "
            f"correct engine would have accepted more is not known; {unknown}.",
        )
    return _beside_reference(counters, positions, curves, verdict, said, cliff)


def _beside_reference(
    counters: Counters, positions: int, curves: Mapping[str, PooledCurve], verdict: Any, said: str, cliff: int | None
) -> Verdict:
    reference = curves[CORRECT]
    rates = conditional(reference.rates.tolist())
    expected = 1 + float(reference.rates.sum())
    beside = f"{said}; a correct engine makes {expected:.2f} on the reference texts"
    if cliff is not None and (rates[cliff] or 0.0) >= NO_CLIFF:
        alike = [name for name, other in curves.items() if name != CORRECT and _has_cliff(other, cliff)]
        names = f" Of the catalogue these have it there: {', '.join(alike)}." if alike else ""
        found: Verdict = verdict(
            ALARM,
            f"alarm: {_cliff_words(counters, cliff)}, where a correct engine accepts {rates[cliff]:.0%} on the reference texts. Other text "
            f"lowers rates and does not end them at one position.{names} Replay answers of this engine to name the cause.",
        )
        return found
    spread = (
        float(reference.covariance.sum()) * (1 + reference.rounds / counters["rounds"]) + 1 / counters["rounds"] ** 2
    )
    lower = (1 + sum(counters["accepted"]) / counters["rounds"] - expected) / np.sqrt(spread) < stats.norm.ppf(
        FALSE_ALARM
    )
    if lower:
        told: Verdict = verdict(
            diagnose.CANNOT_TELL,
            f"cannot tell, because {beside}, and other text lowers acceptance as a fault does. Replay answers of this traffic.",
        )
        return told
    engine = np.array([counters["rounds"], *counters["accepted"]])
    fits = [
        row["hypothesis"]
        for row in rank_pooled(engine, curves)
        if row["p"] >= FALSE_ALARM and row["hypothesis"] != CORRECT
    ]
    open_ = f" Not excluded by counters: {diagnose.listed(fits, 4)}." if fits else ""
    clear: Verdict = verdict(NO_ALARM, f"no alarm: {beside}. That is no proof of a healthy engine.{open_}")
    return clear


def _cliff(counters: Counters) -> int | None:
    """The first position (counted from 0) that surely accepts practically nothing after one that surely does not; or None."""
    reached = [counters["rounds"], *counters["accepted"]]
    for k in range(1, len(counters["accepted"])):
        if reached[k] < diagnose.LEAST_ROUNDS:
            return None
        after = stats.binomtest(reached[k + 1], reached[k]).proportion_ci(1 - 2 * FALSE_ALARM).high
        before = stats.binomtest(reached[k], reached[k - 1]).proportion_ci(1 - 2 * FALSE_ALARM).low
        if after < CLIFF and before >= BEFORE_CLIFF:
            return k
    return None


def _has_cliff(curve_: PooledCurve, position: int) -> bool:
    rate = conditional(curve_.rates.tolist())[position]
    return rate is not None and rate < NO_CLIFF


def _cliff_words(counters: Counters, cliff: int) -> str:
    reached = [counters["rounds"], *counters["accepted"]]
    return (
        f"{reached[cliff]} of {reached[cliff - 1]} rounds accept position {cliff}, and {reached[cliff + 1]} of those {reached[cliff]} "
        f"position {cliff + 1}"
    )
