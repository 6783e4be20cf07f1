"""Diagnose: drafter, config, target or engine? From the engine's rounds and the replay of the same tokens to one verdict.

What the engine did is compared, round by round, with what a correct engine must have done on the same tokens and with
what an engine with each fault of the catalogue (:mod:`eagle3_lib.verdict.faults`) would have done. A fault is named when it explains
the rounds that a correct engine does not, nearly all of them; a fault that holds in a part of the run is looked for in that
part (:mod:`eagle3_lib.verdict.slices`). Every other config.json (:mod:`eagle3_lib.verdict.suspects`) is scored by what it would accept. A
verdict says which hypotheses these rounds cannot exclude. Acceptance and cost are judged apart: a round that is slow makes
speculation lose even when every draft that should be accepted is accepted.

The rules and the source of each threshold are in docs/faults.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..errors import Eagle3Error
from ..results import (
    Benchmark,
    FittedHypothesis,
    NotExcluded,
    PlainTokens,
    Ranked,
    Replay,
    ReplayedRequest,
    SampledTokens,
    Score,
    StoredVerdict,
    Together,
    VerdictEvidence,
    Where,
)
from . import conditions, slices, suspects, wrong_tokens
from .changes import HEALTHY as CORRECT
from .emitted import UNTOLD
from .evidence import FALSE_ALARM, LEAST_DEPARTING, NOISE, WRONG_TOKENS, Evidence, Table, agreement, surely_more
from .faults import FAULTS
from .rounds import NOT_TOLD

HEALTHY = "healthy"
WEAK = "weak drafter"
NOTHING = "nothing accepted"
CONFIG = "config does not describe the drafter"
TARGET = "target in doubt"
SMALL = "small deviation"
FAULT = "engine fault"
UNKNOWN = "unknown engine fault"
NOT_ENOUGH = "not enough data"
CANNOT_TELL = "cannot tell"
ALARM, NO_ALARM = "alarm", "no alarm"  # of counters over other texts (eagle3_lib.verdict.pooled.judge_pooled)
OF_ENGINE = (FAULT, UNKNOWN)  # verdicts that put the engine at fault
NO_VERDICT = (CANNOT_TELL, NOT_ENOUGH, NOTHING, TARGET)

# Share of the departing rounds that a hypothesis must explain to be named. In float32 a right hypothesis explains all of
# them (benchmarks/results/fault_matrix.json); rounding in fewer bits adds departing rounds that no hypothesis explains, a
# tenth of them where a fault changes 15 % of the rounds.
NAMED = {"float32": 0.99, "float16": 0.9, "bfloat16": 0.8}
DETECTABLE = (
    0.1  # of the rounds that can tell: a deviation this much larger than rounding would be seen, or more are needed
)
SMALL_SHARE, SMALL_COST = 0.05, 0.1  # of the rounds compared depart, of the accepted tokens are lost: at most, if small
WEAK_FIRST = (
    0.4  # first drafts that a correct engine accepts: fewer make a drafter weak where no break-even is measured
)
HARDLY_ANY = 0.01  # accepted drafts in a round: below it, nothing is accepted
LEAST_ROUNDS = 45  # 0.9 ** 45 < 1 %
NOT_GREEDY = 0.05  # share of tokens that are not the target's first choice, near ties left out, that stops the verdict
MOST_CONTRADICTED = 0.2  # of the answers may have joined chunks; with more, rounds read off chunks are no evidence
CLAIM_ROUNDS = 5  # rounds that a correct engine accepts further than any of the engine's, before its K is doubted
LEAST_IN_CHUNKS = 0.95  # agreement that prompts in chunks leave: 0.97 and more with chunks of 32 tokens, prompts of 40
MOST_NEEDED = 20  # "about N rounds would decide" is said up to so many times the rounds there are
NOTHING_AT_ALL = "nothing accepted"  # the catalogue's entry for drafts that are nonsense altogether
SPLITS_NOTHING = (
    "stage 06 (map, head, and config against held-out answers), the accuracy that stage 05 measured for these weights, and a "
    "drafter that is known to work in the same engine"
)


@dataclass
class Verdict:
    """``kind`` is one of the constants above.

    fault: the catalogue's name; ties: faults that these rounds cannot tell from it. where: the part of the run that has the
    fault (:meth:`eagle3_lib.verdict.slices.Slice.as_dict`), None: everywhere. suspect: the other config.json that fits, {"name",
    "field", "value", "gain", ...}. not_excluded: [{"hypothesis", "rounds_that_differ", "experiment"}] that a verdict without
    a fault leaves open. warnings: sentences.
    """

    drafter: str
    kind: str
    sentence: str
    evidence: VerdictEvidence = field(default_factory=lambda: VerdictEvidence())
    fault: str | None = None
    ties: list[str] = field(default_factory=list)
    where: Where | None = None
    suspect: Score | None = None
    not_excluded: list[NotExcluded] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> StoredVerdict:
        """As verdict.json holds it."""
        return cast(StoredVerdict, asdict(self))

    @classmethod
    def of(cls, stored: StoredVerdict) -> "Verdict":
        """The verdict that verdict.json holds."""
        return cls(**stored)


def judge(replay: Replay, break_even: float | None = None) -> Verdict:
    """The verdict on one drafter in one engine.

    Args:
        replay: {"drafter", "positions": K, "requests": [...]}; each request has "engine_rounds" (accepted counts),
            "replay_rounds" (of a correct engine's own walk), "rows" as :func:`eagle3_lib.verdict.rounds.compare`, and where
            the catalogue was replayed "hypotheses": {fault: accepted counts at the engine's rounds}. Further fields are
            those of :func:`eagle3_lib.stages.replay.run`.
        break_even: mean acceptance length at which speculation is as fast as plain decoding in this engine
            (:func:`speed`); a correct engine that stays below makes the drafter weak. None where it was not measured.
    Raises:
        Eagle3Error: no request, or rounds and rows that do not belong together.
    """
    check(replay)
    found = Evidence.of(replay)
    case = _Case(replay["drafter"], found, found.as_dict(), replay.get("dtype", UNTOLD), break_even)
    verdict = _judge_tokens(case) or _judge_comparable(case) or _judge_rounds(case)
    verdict.warnings = warnings(found)
    return verdict


@dataclass
class _Case:
    """What one verdict is made from."""

    drafter: str
    found: Evidence
    evidence: VerdictEvidence
    dtype: str
    break_even: float | None = None

    @property
    def table(self) -> Table:
        return self.found.table

    @property
    def noise(self) -> float:
        return NOISE[self.dtype]

    def verdict(self, kind: str, sentence: str, **more: Any) -> Verdict:
        return Verdict(self.drafter, kind, f"{self.drafter}: {sentence}", self.evidence, **more)

    def cannot_tell(self, reason: str) -> Verdict:
        return self.verdict(CANNOT_TELL, f"cannot tell, because {reason}.")


# ------------------------------------------------------------------------------------------- tokens: target, verification


def _judge_tokens(case: _Case) -> Verdict | None:
    """The verdict where rounds or tokens are no evidence, or the tokens are not the target's; None where they are."""
    found = case.found
    if reason := _untold(found):
        return case.cannot_tell(reason)
    sampled = found.replay.get("sampled")
    if sampled:
        return None if sampled["lossless"] else _judge_sampled(case, sampled)
    if of_condition := _judge_condition(case):
        return of_condition
    if found.not_greedy <= NOT_GREEDY * found.tokens or found.not_greedy < LEAST_DEPARTING:
        return None
    wrong = f"{found.not_greedy} of {found.tokens} tokens are not the target's first choice"
    if defaults := found.replay.get("untold_defaults"):
        return case.cannot_tell(f"{wrong}, and {_asked_by(defaults)}")
    plain = found.replay.get("plain")
    if plain and not plain["sampled"]:
        return _beside_plain(case, wrong, plain)
    return _without_plain(case, wrong)


def _judge_condition(case: _Case) -> Verdict | None:
    """The verdict where tokens are wrong in one condition alone, whatever their share of the run; None where they are not."""
    found = wrong_tokens.find(case.found.conditions)
    plain = case.found.replay.get("plain")
    if found is None or (plain and plain["not_greedy"]):
        return None
    if not found.certain:
        return case.cannot_tell(
            f"{found.counts}: too few answers are wrong to tell whether the condition is the cause ({found.fault}?). Ask more "
            f"prompts in that condition"
        )
    return case.verdict(
        FAULT, f"engine fault: {found.fault}; {found.counts}. Its acceptance says nothing.", fault=found.fault
    )


def _beside_plain(case: _Case, wrong: str, plain: PlainTokens) -> Verdict:
    if surely_more(plain["not_greedy"] or 0, plain["tokens"], WRONG_TOKENS):
        return case.verdict(
            TARGET,
            f"{wrong}, and {plain['not_greedy']} of {plain['tokens']} tokens of plain decoding are not either: speculation is "
            f"not the cause. The served target is not the folder that the replay loads (another checkpoint, or quantised), "
            f"or its own caches are at fault; {_of_requests(case.found)}. Compare the two folders' weights, and serve "
            f"with --no-enable-prefix-caching.",
        )
    return _not_lossless(case, f"{wrong}; of plain decoding {plain['not_greedy']} of {plain['tokens']}")


def _without_plain(case: _Case, wrong: str) -> Verdict:
    """Accepted drafts alone wrong: verification. Tokens that the target chose itself wrong too: the target."""
    own_tokens, own_wrong = (int(count) for count in case.found.own)
    if not surely_more(own_wrong, own_tokens, WRONG_TOKENS):
        accepted, accepted_wrong = (int(count) for count in case.found.accepted)
        more = (
            f", {accepted_wrong} of {accepted} accepted drafts and {own_wrong} of {own_tokens} others"
            if accepted
            else ""
        )
        return _not_lossless(case, f"{wrong}{more}")
    return case.verdict(
        TARGET,
        f"{wrong}, among them {own_wrong} of {own_tokens} that no draft stood for: the served target computes otherwise than "
        f"the folder that the replay loads; {_of_requests(case.found)}. Ask the same without speculation. Wrong there too: "
        f"another checkpoint, quantisation, or the target's own caches (--no-enable-prefix-caching, vllm#41838); right "
        f"there: speculation changes what the target computes.",
    )


def _of_requests(found: Evidence) -> str:
    requests = len(found.engine_rounds)
    if found.wrong_requests == requests:
        return f"such tokens stand in all {requests} requests, as another checkpoint would make them"
    by_condition = f" ({conditions.counts(found.conditions)} tokens)" if found.conditions else ""
    return (
        f"such tokens stand in {found.wrong_requests} of {requests} requests{by_condition}, where another checkpoint would show "
        f"in all"
    )


def _not_lossless(case: _Case, wrong: str) -> Verdict:
    return case.verdict(
        FAULT,
        f"engine fault: verification is not lossless; {wrong}, so its acceptance says nothing.",
        fault="verification is not lossless",
    )


def _judge_sampled(case: _Case, sampled: SampledTokens) -> Verdict:
    """What a sampled run's tests say, with the acceptance that the target's probabilities demand."""
    replay = case.found.replay
    wrong = f"the tokens are not draws of the target ({sampled['fault']})"
    if defaults := replay.get("untold_defaults"):
        return case.cannot_tell(f"{wrong}, and {_asked_by(defaults)}")
    plain = replay.get("plain")
    if plain and plain["sampled"] and not plain["sampled"]["lossless"]:
        return case.cannot_tell(
            f"{wrong}, and those of plain decoding are not either: the served target, or how it was asked, is not what the "
            f"run says, and speculation is not the cause"
        )
    acceptance, expected = sampled["acceptance"], ""
    failed = ", ".join(f"{name} p = {test['p']:.2g}" for name, test in sampled["tests"].items() if test["failed"])
    if acceptance["expected"] is not None:
        expected = (
            f" Drafts accepted: {acceptance['found']:.1%}, by the target's probabilities {acceptance['expected']:.1%}."
        )
    return case.verdict(
        FAULT,
        f"engine fault in verification: {sampled['fault']}. {sampled['tokens']} tokens sampled at temperature "
        f"{replay['sampling']['temperature']:g} are not what the target would have emitted ({failed}).{expected}",
        fault=sampled["fault"],
    )


def _asked_by(defaults: Mapping[str, float]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"the target's generation_config.json sets {settings}, which engines apply to requests that leave it out; the run does "
        f"not say (sampling) whether its requests did"
    )


def _untold(found: Evidence) -> str | None:
    """Why these rounds are no evidence at all; None where they are.

    Chunks that an engine joined spoil their own answer alone: a few such answers are left out, and the rest is judged.
    """
    of_requests = _contradicted(found)
    told = [
        said for said in dict.fromkeys([*found.replay.get("contradictions", []), *of_requests]) if NOT_TOLD not in said
    ]
    of_few = len(of_requests) <= MOST_CONTRADICTED * len(found.engine_rounds)
    if not told or (found.replay.get("evidence") == "chunks" and of_few and set(told) <= set(of_requests)):
        return None
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return f"the engine's own counts contradict these rounds: {told[0]}{more}"


def _contradicted(found: Evidence) -> list[str]:
    """Answers whose rounds are contradicted, a sentence each."""
    return [f"request {name}: {said}" for name, said in found.unjudged.items() if NOT_TOLD not in said]


def warnings(found: Evidence) -> list[str]:
    """What does not decide the verdict and should be looked at."""
    said: list[str] = []
    if left_out := _contradicted(found):
        said.append(
            f"{len(left_out)} of {len(found.engine_rounds)} answers are left out: the engine's own counts contradict the rounds "
            f"that their chunks show."
        )
    if not found.replay.get("sampled") and surely_more(found.not_greedy, found.tokens, WRONG_TOKENS):
        said.append(
            f"{found.not_greedy} of {found.tokens} tokens are not the target's first choice, near ties left out; a healthy engine "
            f"has none. {_of_requests(found).capitalize()}. Is the served target the folder that the replay loads?"
        )
    return said


# --------------------------------------------------------------------------------------------------- comparable rounds


def _judge_comparable(case: _Case) -> Verdict | None:
    """The verdict where the rounds tell no engine from another; None where they may."""
    found, table = case.found, case.table
    if not sum(map(len, found.engine_rounds)):
        return case.cannot_tell("there is no round: the engine never drafted, or every answer ended before it could")
    if not len(table):
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items() if count)
        return case.cannot_tell(f"no round can be compared with the replay ({reasons})")
    if claim := _claim(found, case.noise):
        return case.cannot_tell(claim)
    unsure = found.left_out["without a sure place"]
    if unsure > len(table) and len(table) < LEAST_ROUNDS:
        return case.cannot_tell(
            f"{unsure} rounds stand beside steps without drafts and have no sure place, and {len(table)} are left to "
            f"compare; the tokens of each streamed chunk (chunks) would place them"
        )
    return None


def _claim(found: Evidence, noise: float) -> str | None:
    """The engine never accepts as far as K, a correct one would have, and nothing tells what was drafted."""
    table, positions = found.table, found.replay["positions"]
    most = int(table.engine.max())
    if most == 0 or most == positions or any(some is not None for some in found.drafted):
        return None
    further = int((table.correct > most).sum())
    other = int((np.minimum(table.correct, most) != table.engine).sum())
    if further < CLAIM_ROUNDS or surely_more(other, int(table.can_tell().sum()), max(noise, NOISE["bfloat16"])):
        return None
    return (
        f"no round accepted more than {most} drafts where K = {positions} is claimed and a correct engine accepts more in "
        f"{further} rounds: the run drafted {most}, or its drafts after step {most} are broken. The field drafted would tell"
    )


def habit(replay: Replay, agreeing: float | None) -> str | None:
    """What healthy engines do otherwise than a correct one in a run like this, and how to ask without it; or None.

    Both were found by replaying the real vLLM 0.32.0 (benchmarks/healthy_zoo.py) and then read in its source: see
    docs/faults.md.
    """
    if replay.get("at_limit"):
        return (
            f"{replay['at_limit']} answers came to the end of the context, where vLLM drafts for none of the requests of a batch "
            f"(serve with a longer max_model_len, or ask for shorter answers)"
        )
    if replay.get("prompts_in_chunks") and (agreeing or 0.0) >= LEAST_IN_CHUNKS:
        return (
            f"{replay['prompts_in_chunks']} prompts were prefilled in chunks, at whose ends vLLM gives the drafter another token "
            f"than the next one (serve with a larger max_num_batched_tokens)"
        )
    return None


# --------------------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Fit:
    """One hypothesis on some rounds. explained: departing rounds that it reproduces; spoiled: rounds that a correct engine
    reproduces and it does not; rounds: that can tell it; unlike: those of them that it does not reproduce."""

    name: str
    departing: int
    explained: int
    spoiled: int
    rounds: int
    unlike: int

    @classmethod
    def of(cls, table: Table, name: str, counts: NDArray[Any], inside: NDArray[Any]) -> "Fit":
        same, departing = counts == table.engine, table.departing & inside
        can_tell = ((table.engine > 0) | (table.correct > 0) | (counts > 0)) & inside
        return cls(
            name,
            departing=int(departing.sum()),
            explained=int((departing & same).sum()),
            spoiled=int((inside & ~table.departing & ~same).sum()),
            rounds=int(can_tell.sum()),
            unlike=int((can_tell & ~same).sum()),
        )

    def excluded(self, noise: float) -> bool:
        """Whether rounding leaves an engine with this hypothesis surely fewer unlike rounds."""
        return surely_more(self.unlike, self.rounds, noise)

    def beats_correct(self, false_alarm: float) -> bool:
        """A sign test over the rounds that only one of the two reproduces."""
        decided = self.explained + self.spoiled
        return bool(stats.binomtest(self.explained, max(decided, 1), alternative="greater").pvalue <= false_alarm)


def _fits(table: Table, counts: dict[str, NDArray[Any]], inside: NDArray[Any]) -> list[Fit]:
    """Every hypothesis but the correct engine, best first."""
    fits = [Fit.of(table, name, some, inside) for name, some in counts.items() if name != CORRECT]
    return sorted(fits, key=lambda fit: (fit.unlike, -fit.explained))


def _named(
    table: Table, counts: dict[str, NDArray[Any]], inside: NDArray[Any], dtype: str
) -> tuple[Fit, list[str]] | None:
    """The hypothesis that explains the departing rounds, and those that cannot be told from it; None where none does."""
    fits = _fits(table, counts, inside)
    left = [fit for fit in fits if not fit.excluded(NOISE[dtype])]
    sure = [
        fit
        for fit in left
        if fit.explained >= NAMED[dtype] * fit.departing and fit.beats_correct(FALSE_ALARM / len(fits))
    ]
    if not sure:
        return None
    best = next((fit for fit in sure if fit.name == NOTHING_AT_ALL), sure[0])
    ties = [
        fit.name
        for fit in left
        if fit.name != best.name and not _told_apart(table, counts, best.name, fit.name, inside)
    ]
    return best, ties


def _told_apart(table: Table, counts: dict[str, NDArray[Any]], best: str, other: str, inside: NDArray[Any]) -> bool:
    """Does ``best`` surely reproduce more rounds? A sign test over the rounds that only one of the two reproduces."""
    ours, theirs = (counts[name][inside] == table.engine[inside] for name in (best, other))
    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return bool(stats.binomtest(won, max(won + lost, 1), alternative="greater").pvalue <= FALSE_ALARM)


def _judge_rounds(case: _Case) -> Verdict:
    table, evidence = case.table, case.evidence
    everywhere = np.ones(len(table), bool)
    evidence["ranking"] = _ranking(table)
    evidence["slices"] = slices.parts(table) if table.departing.any() else {}
    scores = _scores(case)
    evidence["config"] = scores
    departs = surely_more(evidence["departing"], evidence["can_tell"], case.noise)
    named = _named(table, table.counts, everywhere, case.dtype) if departs else None
    if named and severity(named[0].name) == "precision":
        departs, named = False, None
    suspect = suspects.clearly_better(scores)
    if suspect and (not departs or (named and suspect.get("fault") == named[0].name)):
        return _config(case, suspect, departs)
    if not departs:
        return _as_correct(case)
    if named:
        return _fault(case, *named)
    if reason := habit(case.found.replay, evidence["agreement"]["value"]):
        compared = f"a correct engine reproduces {percent(evidence['agreement']['value'])} of {len(table)} rounds"
        return case.cannot_tell(f"{reason}; {compared}")
    return _partial(case) or _outside(case, everywhere)


def severity(name: str) -> str:
    return FAULTS[name].severity if name in FAULTS else "fault"


def _ranking(table: Table) -> list[Ranked]:
    """Every hypothesis, best first: share of the rounds that can tell it that it reproduces, with an interval by request."""
    everywhere = np.ones(len(table), bool)
    fits = [Fit.of(table, name, counts, everywhere) for name, counts in table.counts.items()]
    fits.sort(key=lambda fit: (fit.unlike / max(fit.rounds, 1), fit.name != CORRECT))
    rows: list[Ranked] = []
    for fit in fits:
        share = agreement(table, fit.name, table.can_tell(fit.name))
        rows.append(
            {
                "hypothesis": fit.name,
                "value": share["value"],
                "low": share["low"],
                "high": share["high"],
                "rounds": fit.rounds,
                "unlike": fit.unlike,
                "explained": fit.explained,
                "departing": fit.departing,
            }
        )
    return rows


def _scores(case: _Case) -> list[Score]:
    """What every other config.json would accept at the same rounds; [] where none was replayed."""
    table, told = case.table, case.found.replay.get("suspects") or []
    if not told:
        return []
    short = table.slot < suspects.SHORT
    accepted, by_name = {}, {}
    for suspect in told:
        counts = table.suspects.get(suspect["name"], table.counts.get(suspect["fault"] or ""))
        if counts is not None:
            accepted[suspect["name"]] = _by_request(table, counts, short)
            by_name[suspect["name"]] = suspect
    scores = suspects.score(accepted, _by_request(table, table.correct, short))
    return [cast(Score, {**by_name[score["name"]], **score}) for score in scores]


def _by_request(table: Table, counts: NDArray[Any], among: NDArray[Any]) -> list[list[int]]:
    ends = np.searchsorted(table.request[among], np.arange(1, table.requests))
    return [part.tolist() for part in np.split(counts[among], ends)]


def _as_correct(case: _Case) -> Verdict:
    """No more rounds depart than rounding explains: weak, healthy, nothing accepted, or too few rounds."""
    table, evidence = case.table, case.evidence
    left = _not_excluded(case)
    if len(table) >= LEAST_ROUNDS and max(table.engine.mean(), table.correct.mean()) < HARDLY_ANY:
        return _nothing(case, left)
    needed = rounds_needed(evidence["departing"], evidence["can_tell"], len(table), case.noise)
    if needed:
        evidence["rounds_needed"] = needed
        return case.verdict(NOT_ENOUGH, f"{_so_far(case)} {would_decide(needed, len(table))}", not_excluded=left)
    kind, sentence = _strength(case)
    doubt = suspects.unsettled(evidence["config"], len(table)) if kind == WEAK else None
    if doubt:
        evidence["rounds_needed"] = doubt[1]
        return case.verdict(NOT_ENOUGH, f"{_so_far(case)} {weak_or_config(*doubt)}", not_excluded=left)
    return case.verdict(kind, f"{sentence}{said_open(left)}", not_excluded=left)


def weak_or_config(suspect: Score, needed: int) -> str:
    """Why a weak drafter is not called weak yet."""
    return (
        f"The drafter is weak on this text, or config.json does not describe it: with {suspect['field']} = {suspect['value']} a "
        f"correct engine would accept {suspect['accepted']:.2f} drafts a round against {suspect['of_config']:.2f}, which may be "
        f"chance in {suspect['requests']} requests. About {needed} rounds would decide."
    )


def rounds_needed(departing: int, can_tell: int, compared: int, noise: float) -> int | None:
    """Rounds like these from which a deviation of DETECTABLE would be seen; None where there are enough.

    That many rounds decide: a larger share of departing rounds surely passes the noise by then.
    """
    most = noise + DETECTABLE

    def enough(rounds: int) -> bool:
        share = departing / can_tell if can_tell else 0.0
        return stats.binomtest(round(share * rounds), rounds).proportion_ci(
            1 - 2 * FALSE_ALARM
        ).high < most or surely_more(round(share * rounds), rounds, noise)

    if can_tell and enough(can_tell):
        return None
    needed = next(rounds for rounds in range(can_tell + 1, 100_000) if enough(rounds))
    return int(np.ceil(needed * compared / can_tell)) if can_tell else max(needed, compared + 1)


def would_decide(needed: int, compared: int) -> str:
    if needed > MOST_NEEDED * max(compared, LEAST_ROUNDS):
        return (
            "So few drafts are accepted that texts on which the drafter accepts more would decide, not more of these."
        )
    return f"About {needed} rounds would decide."


def _so_far(case: _Case) -> str:
    equal, rounds = len(case.table) - case.evidence["departing"], len(case.table)
    tell = case.evidence["can_tell"]
    return f"{rates(case.evidence)}; {equal} of {rounds} rounds are a correct engine's, of which {tell} can tell."


def rates(evidence: VerdictEvidence) -> str:
    """What the engine accepted, and what a correct engine would have accepted."""
    did, should = (evidence[who]["acceptance_rate"]["value"] for who in ("engine", "replay"))
    return f"the engine accepted {percent(did)} of the drafts, a correct engine would have accepted {percent(should)}"


def percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _strength(case: _Case) -> tuple[str, str]:
    """Weak or healthy, from what a correct engine accepts, without K."""
    table = case.table
    first = float((table.correct > 0).mean())
    length = 1 + float(table.correct.mean())
    same = f"{len(table) - case.evidence['departing']} of {len(table)} rounds are a correct engine's"
    ceiling = case.evidence["losses"].get("vocabulary_ceiling")
    limit = f" (the draft vocabulary allows {percent(ceiling)})" if ceiling is not None and ceiling < 0.995 else ""
    reach = f"a correct engine makes {length:.2f} tokens a round and accepts {first:.1%} of the first drafts{limit}"
    case.evidence["first_drafts"], case.evidence["break_even_length"] = first, case.break_even
    weak, against = weakness(first, length, case.break_even)
    if weak:
        return WEAK, f"{rates(case.evidence)} ({same}). The drafter is weak on this text: {reach}{against}."
    return HEALTHY, f"{rates(case.evidence)} ({same}). The engine does what the drafter allows: {reach}."


def weakness(first: float, length: float, break_even: float | None) -> tuple[bool, str]:
    """Whether a drafter is weak, and against what it was held.

    Args:
        first: share of its first drafts that a correct engine accepts. length: tokens that such an engine makes a round.
        break_even: the length at which speculation is as fast as plain decoding; None where it was not measured.
    """
    if break_even is None:
        return first < WEAK_FIRST, f", where fewer than {WEAK_FIRST:.0%} count as weak"
    return length < break_even, f", and speculation breaks even at {break_even:.2f} tokens a round in this engine"


def _not_excluded(case: _Case) -> list[NotExcluded]:
    """Faults that these rounds cannot tell from a correct engine, those that differ least first, with what would tell."""
    table, everywhere = case.table, np.ones(len(case.table), bool)
    left: list[NotExcluded] = []
    for fit in _fits(table, table.counts, everywhere):
        if fit.excluded(case.noise) or severity(fit.name) == "precision":
            continue
        differ = int((table.counts[fit.name] != table.correct).sum())
        experiment = FAULTS[fit.name].experiment if fit.name in FAULTS else ""
        left.append({"hypothesis": fit.name, "rounds_that_differ": differ, "experiment": experiment})
    return sorted(left, key=lambda row: row["rounds_that_differ"])


def said_open(left: Sequence[NotExcluded]) -> str:
    """What a verdict without a fault leaves open, as a sentence."""
    if not left:
        return ""
    names = listed([row["hypothesis"] for row in left], 3)
    most = max(row["rounds_that_differ"] for row in left)
    where = f"in all but {most} of these rounds" if most else "in every one of these rounds"
    return f" Not excluded: {names}, which accept the same {where}."


def _nothing(case: _Case, left: list[NotExcluded]) -> Verdict:
    accepted, drafts = int(case.table.engine.sum()), case.evidence["engine"]["drafted"]
    others = len(case.table.counts) - 1
    same = f"{len(left)} of {others} faults of the catalogue predict the same" if others else "no fault was replayed"
    return case.verdict(
        NOTHING,
        f"nothing accepted: {accepted} of {drafts} drafts, and a correct engine would have accepted {int(case.table.correct.sum())} "
        f"at the same rounds; {same}, so these rounds do not say whether the engine is at fault. Causes: the drafter is not "
        f"trained; its vocabulary map (d2t) or head is not the one it was trained with; its target is another one (rotated, "
        f"quantised, finetuned); config.json names other boundaries. What splits them: {SPLITS_NOTHING}.",
        not_excluded=left,
    )


def _config(case: _Case, suspect: Score, departs: bool) -> Verdict:
    gain = f"{suspect['accepted']:.2f} drafts a round against {suspect['of_config']:.2f}"
    obeys = "The engine does not obey config.json there, and gains by it" if departs else "The engine obeys config.json"
    return case.verdict(
        CONFIG,
        f"{rates(case.evidence)}. {obeys}, but config.json does not describe this drafter: with {suspect['field']} = "
        f"{suspect['value']} a correct engine would accept {gain} at the same rounds. To try: {suspect['shim']}",
        suspect=suspect,
    )


def _fault(case: _Case, best: Fit, ties: list[str], where: slices.Slice | None = None) -> Verdict:
    explains = f"explains {best.explained} of the {best.departing} rounds that depart from a correct engine"
    also = ""
    if ties:
        also = f" These rounds cannot tell it from: {listed(ties, 6)}."
    place = "" if where is None else f" {_place_words(case, where, 'It holds')}"
    return case.verdict(
        FAULT,
        f"{rates(case.evidence)}. Engine fault: {best.name}.{place} It {explains}, and of all {best.rounds} rounds that can tell it "
        f"{best.rounds - best.unlike} are as it predicts.{also}{remedy(best.name, ties)}",
        fault=best.name,
        ties=ties,
        where=where and where.as_dict(),
    )


def listed(names: Sequence[str], most: int) -> str:
    """Some names as a text, with how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def remedy(fault: str, ties: Sequence[str]) -> str:
    """What the catalogue says to do about a fault that is named, as a sentence; "" for one that it does not have."""
    if fault not in FAULTS:
        return ""
    return f" Confirm with: {FAULTS[fault].experiment}." if ties else f" Remedy: {FAULTS[fault].remedy}."


def _place_words(case: _Case, where: slices.Slice, said: str) -> str:
    inside, outside = where.counts["inside"], where.counts["outside"]
    counts = f"{inside[0]} of {inside[1]} rounds that can tell depart, and {outside[0]} of {outside[1]} elsewhere"
    return f"{said} {where.words(case.table.requests)}: {counts}."


def _partial(case: _Case) -> Verdict | None:
    """The verdict on a fault that holds in a part of the run; None where no part without departing rounds is found."""
    table = case.table
    where = slices.find(table, case.noise)
    if where is not None:
        begins = where.by == slices.PLACE and where.since is not None
        named = _named(table, table.counts | table.since if begins else table.counts, where.inside, case.dtype)
        if named and severity(named[0].name) != "precision":
            return _fault(case, *named, where)
    by_request = _in_requests(case)
    if by_request is not None:
        return by_request
    return _outside(case, where.inside, where) if where is not None else None


def _in_requests(case: _Case) -> Verdict | None:
    """A fault that explains the requests in which rounds depart, and would have shown in the others; None without one."""
    table = case.table
    where = slices.departing_requests(table)
    if where is None:
        return None
    named = _named(table, table.counts, where.inside, case.dtype)
    if named is None or severity(named[0].name) == "precision":
        return None
    elsewhere = Fit.of(table, named[0].name, table.counts[named[0].name], ~where.inside)
    if not elsewhere.excluded(case.noise):
        return None
    return _fault(case, *named, where)


def _outside(case: _Case, inside: NDArray[Any], where: slices.Slice | None = None) -> Verdict:
    """Rounds depart and no hypothesis of the catalogue explains them: a small deviation, or an unknown fault."""
    table = case.table
    counts = table.counts | (table.since if where is not None else {})
    fits = [fit for fit in _fits(table, counts, inside) if severity(fit.name) != "precision"]
    like = max(fits, key=lambda fit: fit.explained - fit.spoiled, default=None)
    departing, compared = int((table.departing & inside).sum()), int(inside.sum())
    lost = float((table.correct - table.engine)[inside].sum())
    cost = lost / max(float(table.correct[inside].sum()), 1.0)
    most_like = ""
    if like and like.explained > like.spoiled:
        most_like = f" Most like {like.name}, which explains {like.explained} of the {like.departing} departing rounds"
        most_like += f" and contradicts {like.spoiled} others." if like.spoiled else "."
    place = "" if where is None else f" {_place_words(case, where, 'Rounds depart')}"
    size = (
        f"{departing} of {compared} rounds depart from a correct engine, where rounding in {case.dtype} explains "
        f"{case.noise:.1%} of those that can tell"
    )
    where_of = where and where.as_dict()
    case.evidence["most_like"] = cast(FittedHypothesis, asdict(like)) if like else None
    case.evidence["cost"] = cost
    if departing <= SMALL_SHARE * compared and abs(cost) <= SMALL_COST:
        change = "costs" if cost >= 0 else "brings"
        told = f"{rates(case.evidence)}. Small deviation: {size}. It {change} {abs(cost):.1%} of the accepted drafts.{place}{most_like}"
        return case.verdict(SMALL, told, where=where_of)
    way = "in a way that the catalogue does not have"
    if like and like.explained >= NAMED[case.dtype] * like.departing and not like.excluded(case.noise):
        way = "and too few rounds depart to name the fault"
    told = f"{rates(case.evidence)}. The engine is at fault, {way}: {size}.{place}{most_like}"
    return case.verdict(UNKNOWN, told, where=where_of)


# ---------------------------------------------------------------------------------------------------- several drafters


def judge_together(verdicts: Sequence[Verdict]) -> Together:
    """What several drafters in one engine say together: a fault that all of them show is the engine's.

    Returns:
        {"kind", "sentence", "faults": names that fit every faulty drafter}
    """
    faulty = [verdict for verdict in verdicts if verdict.kind in OF_ENGINE]
    names = ", ".join(verdict.drafter for verdict in faulty)
    kinds = "; ".join(f"{verdict.drafter}: {verdict.kind}" for verdict in verdicts)
    if all(verdict.kind in NO_VERDICT for verdict in verdicts):
        return {"kind": CANNOT_TELL, "sentence": f"No verdict ({kinds}).", "faults": []}
    if not faulty and any(verdict.kind in (SMALL, CONFIG) for verdict in verdicts):
        first = next(verdict for verdict in verdicts if verdict.kind in (SMALL, CONFIG))
        return {"kind": first.kind, "sentence": f"No named fault of the engine ({kinds}).", "faults": []}
    if not faulty:
        return {"kind": HEALTHY, "sentence": f"No sign of an engine fault ({kinds}).", "faults": []}
    shared = set.intersection(*({v.fault, *v.ties} - {None} for v in faulty)) if faulty else set()
    order = [name for name in (faulty[0].fault, *faulty[0].ties) if name is not None and name in shared]
    if len(faulty) == 1:
        return {"kind": faulty[0].kind, "sentence": faulty[0].sentence, "faults": order}
    if order:
        sentence = f"{names} fail in the same way ({' or '.join(order)}): the engine, not the drafters."
        return {"kind": FAULT, "sentence": sentence, "faults": order}
    sentence = (
        f"{names} all fail and no one fault of the catalogue explains them together: the engine, in an unknown way."
    )
    return {"kind": UNKNOWN, "sentence": sentence, "faults": []}


# ------------------------------------------------------------------------------------------------------------- refusals


def check(replay: Replay) -> None:
    """Refuse a replay whose parts do not belong together, or rounds that do not make up the emitted text."""
    requests, positions = replay.get("requests"), replay.get("positions")
    where = f"replay of {replay.get('drafter')}"
    if not requests:
        raise Eagle3Error(f"{where}: requests: found none, expected at least one")
    for index, request in enumerate(requests):
        at = f"{where}, request {request.get('id', index)}"
        rounds = request["engine_rounds"]
        if request.get("unjudged"):
            continue
        if rounds != [row["engine"] for row in request["rows"]]:
            raise Eagle3Error(
                f"{at}: rows: found {len(request['rows'])}, expected one for each of the engine's {len(rounds)} rounds"
            )
        if any(not 0 <= count <= positions for count in rounds):
            raise Eagle3Error(
                f"{at}: engine_rounds: found counts up to {max(rounds)}, expected at most positions = {positions}"
            )
        for name, counts in request.get("hypotheses", {}).items():
            if len(counts) != len(rounds):
                raise Eagle3Error(f"{at}: hypotheses, {name}: found {len(counts)} counts, expected {len(rounds)}")
        if "output_length" in request:
            _check_rounds(request, at)


def _check_rounds(request: ReplayedRequest, where: str) -> None:
    """Prefill emits one token, each round its accepted ones and one more, each step without drafts one; the last may
    overshoot the end."""
    rounds, length = request["engine_rounds"], request["output_length"]
    emitted = 1 + sum(rounds) + len(rounds) + request.get("without_drafts", 0)
    before_last = emitted - (rounds[-1] + 1 if rounds else 0)
    if emitted < length or (rounds and before_last >= length):
        raise Eagle3Error(
            f"{where}: engine_rounds: found rounds that emit {emitted} tokens, expected the {length} of the output; "
            f"the run was cut off, or rounds and tokens are of different runs"
        )


def check_same(measured: Benchmark, replay: Replay) -> None:
    """Refuse an engine run (benchmark.json) and a replay that are not of the same target, K and tokens."""
    for name in ("positions", "target"):
        found, expected = replay.get(name), measured.get(name)
        if name in replay and name in measured and found != expected:
            raise Eagle3Error(
                f"replay of {replay['drafter']}: {name}: found {found}, expected {expected} as in the run"
            )
    runs = {request["id"]: request for request in measured["requests"]}
    for request in replay["requests"]:
        run = runs.get(request["id"])
        if run is None:
            raise Eagle3Error(
                f"replay of {replay['drafter']}: request {request['id']}: found no such request in the run"
            )
        lengths = request["prompt_length"], request["output_length"]
        of_run = len(run["prompt_ids"]), len(run["output_ids"])
        if lengths != of_run or request["engine_rounds"] != (run["accepted"] or []):
            raise Eagle3Error(
                f"replay of {replay['drafter']}: request {request['id']}: found {lengths} prompt and output tokens, expected "
                f"{of_run} and the same rounds: the replay is of other tokens than the run"
            )
