"""Diagnose: drafter or engine? From the engine's rounds and the replay of the same tokens to one verdict with evidence.

What the engine did is compared, round by round, with what a correct engine must have done on the same tokens and with
what an engine with each fault of the catalogue (:mod:`eagle3_lib.faults`) would have done: the hypothesis that
reproduces the rounds is the cause. Acceptance and cost are judged apart: a round that is slow makes speculation lose
even when every draft that should be accepted is accepted.
"""

from dataclasses import asdict, dataclass, field

import numpy as np
from scipy import stats

from .acceptance import bootstrap, curve, request_counts, summary
from .errors import Eagle3Error
from .faults import FAULTS
from .faults import HEALTHY as CORRECT
from .rounds import NOT_TOLD, comparable

HEALTHY = "healthy"
WEAK = "weak drafter"
FAULT = "engine fault"
UNKNOWN = "unknown engine fault"
NOT_ENOUGH = "not enough data"
CANNOT_TELL = "cannot tell"

WEAK_RATE = 0.2  # a correct engine that accepts less than this share of the drafts makes the drafter weak
EXPLAINED = 0.9  # share of rounds that a correct engine must surely reproduce before anything is called healthy
# Share of rounds that a healthy engine reproduces at least, by its dtype: rounding turns near ties. Measured: float32 all of
# 602 and more (vLLM on a CPU, benchmarks/results/healthy_zoo.json), bfloat16 0.98 to 0.998.
AGREEMENT = {"float32": 0.995, "float16": 0.97, "bfloat16": 0.95}
FALSE_ALARM = 0.01  # of one verdict, over all its hypotheses
NOT_GREEDY = 0.05  # share of greedy tokens that may differ from the target's choice by near ties
CLAIM_ROUNDS = 5  # rounds that a correct engine accepts further than any of the engine's, before its K is doubted
LEAST_IN_CHUNKS = 0.95  # agreement that prompts in chunks leave: 0.97 and more with chunks of 32 tokens, prompts of 40
MOST_NEEDED = 20  # "about N rounds would decide" is said up to so many times the rounds there are


@dataclass
class Verdict:
    """``kind`` is one of the constants above; ``fault`` is the catalogue's name and ``ties`` those told from it by nothing."""

    drafter: str
    kind: str
    sentence: str
    evidence: dict = field(default_factory=dict)
    fault: str | None = None
    ties: list[str] = field(default_factory=list)

    def as_dict(self) -> dict:
        return asdict(self)


def judge(replay: dict, weak_rate: float = WEAK_RATE) -> Verdict:
    """The verdict on one drafter in one engine.

    Args:
        replay: {"drafter", "positions": K, "requests": [...]}; each request has "engine_rounds" (accepted counts),
            "replay_rounds" (of a correct engine's own walk), "rows" as :func:`eagle3_lib.rounds.compare`, and where
            the catalogue was replayed "hypotheses": {fault: accepted counts at the engine's rounds}. Further fields are
            those of :func:`eagle3_lib.replay.run`.
        weak_rate: acceptance rate of a correct engine below which the drafter is called weak.
    Raises:
        Eagle3Error: no request, or rounds and rows that do not belong together.
    """
    check(replay)
    found = Evidence.of(replay)
    evidence = found.as_dict()
    drafter, dtype = replay["drafter"], replay.get("dtype", "bfloat16")

    def cannot_tell(reason: str) -> Verdict:
        return Verdict(drafter, CANNOT_TELL, f"{drafter}: cannot tell, because {reason}.", evidence)

    if reason := found.untold():
        return cannot_tell(reason)
    sampled = replay.get("sampled")
    if sampled and not sampled["lossless"]:
        sentence = sampled_sentence(drafter, found, sampled)
        return Verdict(drafter, FAULT, sentence, evidence, fault=sampled["fault"])
    if not sampled and found.not_greedy > NOT_GREEDY * found.tokens:
        share = found.not_greedy / found.tokens
        sentence = _not_lossless(drafter, found, share)
        return Verdict(drafter, FAULT, sentence, evidence, fault="verification is not lossless")
    if reason := found.not_comparable():
        return cannot_tell(reason)
    verdict = conclude(drafter, found.equal, evidence, weak_rate, dtype, found.against_correct)
    unsure = found.left_out["without a sure place"]
    if verdict.kind == NOT_ENOUGH and unsure > len(found.slots):
        return cannot_tell(
            f"{unsure} rounds stand beside steps without drafts and have no sure place, and {len(found.slots)} are left to compare; "
            f"the tokens of each streamed chunk (chunks) would place them"
        )
    share = evidence["agreement"]["value"]
    if verdict.kind == UNKNOWN and (habit := _habit(replay, share)):
        found_share = f"a correct engine reproduces {share:.1%} of {evidence['rounds_compared']} rounds"
        return cannot_tell(f"{habit}; {found_share}")
    return verdict


def _habit(replay: dict, agreement: float) -> str | None:
    """What healthy engines do otherwise than a correct one in a run like this, and how to ask without it; or None.

    Both were found by replaying the real vLLM 0.32.0 (benchmarks/healthy_zoo.py) and then read in its source: see
    docs/faults.md.
    """
    if replay.get("at_limit"):
        return (
            f"{replay['at_limit']} answers came to the end of the context, where vLLM drafts for none of the requests of a batch "
            f"(serve with a longer max_model_len, or ask for shorter answers)"
        )
    if replay.get("prompts_in_chunks") and agreement >= LEAST_IN_CHUNKS:
        return (
            f"{replay['prompts_in_chunks']} prompts were prefilled in chunks, at whose ends vLLM gives the drafter another token "
            f"than the next one (serve with a larger max_num_batched_tokens)"
        )
    return None


@dataclass
class Evidence:
    """What the requests of a replay say together, gathered in one pass.

    slots: [rounds, 3] slot, engine's and correct engine's count of the rounds that can be compared. equal: for each hypothesis
    [requests, 2] such rounds, and how many of them it reproduces. against_correct: for each hypothesis, rounds that only it
    reproduces, and that only a correct engine does. left_out: rounds that cannot be compared, by reason.
    unjudged: requests whose rounds are contradicted or not told, with the reason.
    """

    replay: dict
    engine_rounds: list[list[int]]
    drafted: list[list[int] | None]
    replay_rounds: list[list[int]]
    replay_drafted: list[list[int] | None]
    slots: np.ndarray
    by_request: list[int]
    equal: dict[str, np.ndarray]
    against_correct: dict[str, np.ndarray]
    left_out: dict[str, int]
    unjudged: dict[str, str]
    tokens: int
    not_greedy: int

    @classmethod
    def of(cls, replay: dict) -> "Evidence":
        engine_rounds, drafted, replay_rounds, replay_drafted, rows_of, by_request = [], [], [], [], [], []
        equal: dict[str, list] = {}
        against_correct: dict[str, np.ndarray] = {}
        left_out = dict.fromkeys(("cut", "without a sure place", "without drafts"), 0)
        unjudged, tokens, not_greedy = {}, 0, 0
        for index, request in enumerate(replay["requests"]):
            rows = request["rows"]
            whole = [comparable(row) for row in rows]
            if request.get("unjudged"):
                unjudged[str(request.get("id", index))] = request["unjudged"]
            left_out["cut"] += sum(row["cut"] for row in rows)
            left_out["without a sure place"] += sum(not row.get("sure", True) and not row["cut"] for row in rows)
            left_out["without drafts"] += request.get("without_drafts", 0)
            left_out["without drafts"] += sum(row.get("drafted") == 0 for row in rows)
            engine_rounds.append(request["engine_rounds"])
            drafted.append(request.get("drafted"))
            replay_rounds.append(request["replay_rounds"])
            replay_drafted.append(request.get("replay_drafted"))
            table = [(row["slot"], row["engine"], row["replay"]) for row, kept in zip(rows, whole, strict=True) if kept]
            rows_of.append(np.array(table, int).reshape(-1, 3))
            by_request.append(len(table))
            counts = {CORRECT: [row["replay"] for row in rows]} | request.get("hypotheses", {})
            as_correct = np.array([engine == right for _, engine, right in table], bool)
            for name, some in counts.items():
                pairs = [(row["engine"], count) for row, count, kept in zip(rows, some, whole, strict=True) if kept]
                same = np.array([engine == count for engine, count in pairs], bool)
                of_name = equal.setdefault(name, [])
                of_name += [(n, 0) for n in by_request[len(of_name) : index]]  # requests without this hypothesis
                of_name.append((len(table), int(same.sum())))
                only = np.array([np.sum(same & ~as_correct), np.sum(as_correct & ~same)])
                against_correct[name] = against_correct.get(name, np.zeros(2, int)) + only
            if "lossless" in request and "output_length" in request:
                tokens += request["output_length"]
                not_greedy += request["lossless"]
        padded = {name: some + [(n, 0) for n in by_request[len(some) :]] for name, some in equal.items()}
        return cls(
            replay=replay,
            engine_rounds=engine_rounds,
            drafted=drafted,
            replay_rounds=replay_rounds,
            replay_drafted=replay_drafted,
            slots=np.concatenate(rows_of),
            by_request=by_request,
            equal={name: np.array(some, float) for name, some in padded.items()},
            against_correct=against_correct,
            left_out=left_out,
            unjudged=unjudged,
            tokens=tokens,
            not_greedy=not_greedy,
        )

    def as_dict(self) -> dict:
        positions = self.replay["positions"]
        greedy = {"tokens": self.tokens, "not_greedy": self.not_greedy, "share": self.not_greedy / max(self.tokens, 1)}
        return {
            "engine": summary(self.engine_rounds, positions, self.drafted),
            "replay": summary(self.replay_rounds, positions, self.replay_drafted),
            "gap": self.gap(),
            "by_slot": self.by_slot(),
            "rounds_compared": len(self.slots),
            "ranking": [],  # of the hypotheses, where these rounds can rank them
            "left_out": self.left_out,
            "unjudged": self.unjudged,
            "most_drafted": max((max(some) for some in self.drafted if some), default=None),
            "tokens_not_greedy": greedy if self.tokens else {},
        }

    def gap(self) -> dict:
        """Accepted tokens in a round, engine minus correct engine at the same slots, with a paired interval."""
        more = self.slots[:, 1] - self.slots[:, 2]
        ends = np.cumsum(self.by_request)
        sums = [more[end - n : end].sum() for n, end in zip(self.by_request, ends, strict=True)]
        pairs = np.column_stack([self.by_request, sums]).astype(float)
        return bootstrap(_ratio, pairs) if len(more) else {"value": 0.0, "low": 0.0, "high": 0.0, "n": len(pairs)}

    def by_slot(self, parts: int = 4) -> list[dict]:
        """Accepted tokens in a round, engine and correct engine, in equally full parts of the context length.

        A drafter that decays with the length of the context falls in both; an engine that fails there, in the first alone.
        """
        ordered = self.slots[np.argsort(self.slots[:, 0], kind="stable")]
        return [
            {
                "slots": [int(part[0, 0]), int(part[-1, 0])],
                "rounds": len(part),
                "engine": round(float(part[:, 1].mean()), 4),
                "replay": round(float(part[:, 2].mean()), 4),
            }
            for part in np.array_split(ordered, parts)
            if len(part)
        ]

    def untold(self) -> str | None:
        """Why these rounds and tokens are no evidence at all; None where they are."""
        of_requests = [f"request {name}: {said}" for name, said in self.unjudged.items()]
        told = dict.fromkeys([*self.replay.get("contradictions", []), *of_requests])
        if contradicted := [said for said in told if NOT_TOLD not in said]:
            more = f" (and {len(contradicted) - 1} more)" if len(contradicted) > 1 else ""
            return f"the engine's own counts contradict these rounds: {contradicted[0]}{more}"
        return self._not_speculation()

    def _not_speculation(self) -> str | None:
        """Why tokens that are not the target's own are no fault of speculation; None where they are, or all is well."""
        sampled, plain = self.replay.get("sampled"), self.replay.get("plain")
        if sampled and sampled["lossless"] or not sampled and self.not_greedy <= NOT_GREEDY * self.tokens:
            return None
        wrong = f"{self.not_greedy} of {self.tokens} tokens are not the target's first choice"
        if sampled:
            wrong = f"the tokens are not draws of the target ({sampled['fault']})"
        if defaults := self.replay.get("untold_defaults"):
            settings = ", ".join(f"{name} {value}" for name, value in defaults.items())
            return (
                f"{wrong}, and the target's generation_config.json sets {settings}, which engines apply to requests that leave it "
                f"out; the run does not say (sampling) whether its requests did"
            )
        if plain and _plain_is_wrong(plain):
            return (
                f"{wrong}, and those of plain decoding are not either: the served target, or how it was asked, is not what the "
                f"run says, and speculation is not the cause"
            )
        return None

    def not_comparable(self) -> str | None:
        """Why these rounds tell no engine from another; None where they do."""
        if not sum(map(len, self.engine_rounds)):
            return "there is no round: the engine never drafted, or every answer ended before it could"
        if not len(self.slots):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)
            return f"no round can be compared with the replay ({reasons})"
        return self._claim()

    def _claim(self) -> str | None:
        """The engine never accepts as far as K, a correct one would have, and nothing tells what was drafted."""
        positions, most = self.replay["positions"], int(self.slots[:, 1].max())
        if most == 0 or most == positions or any(some is not None for some in self.drafted):
            return None
        further = int((self.slots[:, 2] > most).sum())
        as_if = np.minimum(self.slots[:, 2], most) == self.slots[:, 1]
        if further < CLAIM_ROUNDS or _surely_less(int(as_if.sum()), len(as_if), AGREEMENT["bfloat16"]):
            return None
        return (
            f"no round accepted more than {most} drafts where K = {positions} is claimed and a correct engine accepts more in "
            f"{further} rounds: the run drafted {most}, or its drafts after step {most} are broken. The field drafted would tell"
        )


def _not_lossless(drafter: str, found: Evidence, share: float) -> str:
    return (
        f"{drafter}: engine fault: verification is not lossless; {share:.1%} of {found.tokens} emitted tokens are not what the "
        f"target would have emitted, so its acceptance says nothing."
    )


def _plain_is_wrong(plain: dict) -> bool:
    if plain["sampled"]:
        return not plain["sampled"]["lossless"]
    return plain["not_greedy"] > NOT_GREEDY * plain["tokens"]


def sampled_sentence(drafter: str, found: Evidence, sampled: dict) -> str:
    """What a sampled run's tests say, with the acceptance that the target's probabilities demand."""
    acceptance = sampled["acceptance"]
    failed = ", ".join(f"{name} p = {test['p']:.2g}" for name, test in sampled["tests"].items() if test["failed"])
    expected = ""
    if acceptance["expected"] is not None:
        expected = (
            f" Drafts accepted: {acceptance['found']:.1%}, by the target's probabilities {acceptance['expected']:.1%}."
        )
    return (
        f"{drafter}: engine fault in verification: {sampled['fault']}. {sampled['tokens']} tokens sampled at temperature "
        f"{found.replay['sampling']['temperature']:g} are not what the target would have emitted ({failed}).{expected}"
    )


def judge_histograms(drafter: str, positions: int, requests: list[dict], weak_rate: float = WEAK_RATE) -> Verdict:
    """The verdict where the engine gives a histogram for each request instead of rounds (SGLang).

    Args:
        requests: [{"histogram": rounds by accepted count, at most K + 1; "own_rounds": {hypothesis: the rounds that it
            would have made on these tokens}}]; hypotheses include the correct engine.
    """
    histograms = [_padded(request["histogram"], positions) for request in requests]
    rounds = [np.repeat(np.arange(positions + 1), histogram).tolist() for histogram in histograms]
    correct = [request["own_rounds"][CORRECT] for request in requests]
    evidence = {"engine": summary(rounds, positions), "replay": summary(correct, positions)}
    equal = {}
    for name in requests[0]["own_rounds"]:
        own = [np.bincount(request["own_rounds"][name], minlength=positions + 1) for request in requests]
        pairs = [(max(e.sum(), o.sum()), np.minimum(e, o).sum()) for e, o in zip(histograms, own, strict=True)]
        equal[name] = np.array(pairs, float)
    return conclude(drafter, equal, evidence, weak_rate)


def conclude(
    drafter: str,
    equal: dict[str, np.ndarray],
    evidence: dict,
    weak_rate: float = WEAK_RATE,
    dtype: str = "bfloat16",
    against_correct: dict[str, np.ndarray] | None = None,
) -> Verdict:
    """Rank hypotheses by the share of rounds they reproduce, and choose the verdict.

    A fault is named when it reproduces more rounds than a correct engine does, by a bootstrap over requests and by a sign
    test over the rounds that only one of the two reproduces, both corrected for the number of hypotheses, and as many of them as rounding in ``dtype`` lets any engine reproduce.

    Args:
        equal: for each hypothesis [requests, 2]: rounds, and how many of them it reproduces.
        dtype: the engine's.
        against_correct: see :class:`Evidence`; None where rounds cannot be told one by one.
    """
    rounds, least = int(equal[CORRECT][:, 0].sum()), AGREEMENT[dtype]
    table = {name: bootstrap(_ratio, counts) for name, counts in equal.items()}
    ranked = sorted(table, key=lambda name: (-table[name]["value"], name != CORRECT))
    evidence |= {"rounds_compared": rounds, "agreement": table[CORRECT], "ranking": _ranking(ranked, table)}
    should, did = (evidence[key]["acceptance_rate"]["value"] for key in ("replay", "engine"))
    say = _Sentences(drafter, did, should, rounds, table)

    def departs(name: str) -> bool:
        """Whether the hypothesis surely reproduces fewer rounds than rounding explains."""
        return _surely_less(int(equal[name][:, 1].sum()), rounds, least)

    faulty = [name for name in ranked if name != CORRECT and _severity(name) == "fault"]
    if faulty and _better(equal, faulty[0], CORRECT, FALSE_ALARM / len(faulty), against_correct):
        best = faulty[0]
        ties = [name for name in faulty[1:] if not _better(equal, best, name, 0.05)]
        runner_up = next((name for name in ranked if name not in (best, *ties)), None)
        evidence |= {"best": best, "runner_up": runner_up}
        if not departs(best):
            return Verdict(drafter, FAULT, say.fault(best, ties, runner_up), evidence, best, ties)
    precise = [name for name in ranked if name == CORRECT or _severity(name) == "precision"]
    as_correct = [name for name in precise if not departs(name)]
    if not as_correct and all(departs(name) for name in ranked):
        return Verdict(drafter, UNKNOWN, say.unknown(ranked[0]), evidence)
    if not any(_explains(equal[name]) for name in as_correct):
        needed = _rounds_needed(table[CORRECT]["value"], rounds)
        evidence["rounds_needed"] = needed
        return Verdict(drafter, NOT_ENOUGH, say.not_enough(needed), evidence)
    if should < weak_rate:
        return Verdict(drafter, WEAK, say.weak(), evidence)
    return Verdict(drafter, HEALTHY, say.healthy(), evidence)


@dataclass
class _Sentences:
    drafter: str
    did: float
    should: float
    rounds: int
    table: dict

    def _share(self, name: str) -> str:
        return f"{self.table[name]['value']:.1%} of {self.rounds} rounds"

    @property
    def _rates(self) -> str:
        return f"{self.drafter}: the engine accepted {self.did:.1%} of the drafts"

    def fault(self, best: str, ties: list[str], runner_up: str | None) -> str:
        also = f" (or {', '.join(ties)}: these tokens cannot tell them apart)" if ties else ""
        next_best = f"; the next best, {runner_up}, {self.table[runner_up]['value']:.1%}" if runner_up else ""
        remedy = FAULTS[best].remedy if best in FAULTS else ""
        return (
            f"{self._rates}, a correct engine would have accepted {self.should:.1%}. Engine fault: {best}{also}. It "
            f"reproduces {self._share(best)}, a correct engine {self.table[CORRECT]['value']:.1%}{next_best}. Remedy: {remedy}."
        )

    def unknown(self, best: str) -> str:
        return (
            f"{self._rates}, a correct engine would have accepted {self.should:.1%}. The engine is at fault, in a way that "
            f"the catalogue does not have: a correct engine reproduces {self._share(CORRECT)}, the best hypothesis "
            f"({best}) {self.table[best]['value']:.1%}."
        )

    def not_enough(self, needed: int | None) -> str:
        told = f"{self._rates}; a correct engine reproduces {self._share(CORRECT)}."
        return f"{told} About {needed} rounds would decide." if needed else f"{told} More such rounds would not decide."

    def weak(self) -> str:
        return (
            f"{self._rates}, and a correct engine would have accepted {self.should:.1%} ({self._share(CORRECT)} equal): the "
            f"drafter is weak on this text, the engine is not at fault."
        )

    def healthy(self) -> str:
        return f"{self._rates}, {self._share(CORRECT)} as a correct engine: the engine does what the drafter allows."


def _severity(name: str) -> str:
    return FAULTS[name].severity if name in FAULTS else "fault"


def _ranking(ranked: list[str], table: dict) -> list[dict]:
    return [{"hypothesis": name} | {k: table[name][k] for k in ("value", "low", "high")} for name in ranked]


def _better(
    equal: dict[str, np.ndarray],
    name: str,
    other: str,
    false_alarm: float,
    against_other: dict[str, np.ndarray] | None = None,
) -> bool:
    """Does ``name`` reproduce more rounds than ``other``? One-sided, by a paired bootstrap over requests.

    With ``against_other`` also by a sign test over the rounds that only one of them reproduces: a bootstrap over very few
    requests takes any lead for sure.
    """
    if against_other is not None:
        won, lost = (int(count) for count in against_other[name])
        if stats.binomtest(won, max(won + lost, 1), alternative="greater").pvalue > false_alarm:
            return False
    pair = np.column_stack([equal[name][:, 0], equal[name][:, 1] - equal[other][:, 1]])
    return bootstrap(_ratio, pair, level=1 - 2 * false_alarm)["low"] > 0


def _explains(counts: np.ndarray) -> bool:
    """Is the share of reproduced rounds surely at least EXPLAINED? (Clopper-Pearson, FALSE_ALARM)"""
    rounds, equal = int(counts[:, 0].sum()), int(counts[:, 1].sum())
    if not rounds:
        return False
    return stats.binomtest(equal, rounds).proportion_ci(1 - 2 * FALSE_ALARM).low >= EXPLAINED


def _surely_less(equal: int, rounds: int, share: float) -> bool:
    """Is the share of reproduced rounds surely less than ``share``? (Clopper-Pearson, FALSE_ALARM)"""
    return rounds > 0 and stats.binomtest(equal, rounds).proportion_ci(1 - 2 * FALSE_ALARM).high < share


def _rounds_needed(share: float, rounds: int) -> int | None:
    """Rounds from which a share like this one would be told from EXPLAINED; None where that is far more than there are."""
    for needed in (int(rounds * factor) + 1 for factor in 1.2 ** np.arange(1, 60)):
        if needed > MOST_NEEDED * max(rounds, 45):
            return None
        equal = round(share * needed)
        if needed >= 45 and (_explains(np.array([[needed, equal]])) or _surely_less(equal, needed, EXPLAINED)):
            return needed
    return None


def _ratio(counts: np.ndarray) -> np.ndarray:
    """Sum of the second column over sum of the first, [..., requests, 2] -> [...]; nan without rounds."""
    total = counts.sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total[..., 1] / total[..., 0]


def _padded(histogram: list[int], positions: int) -> np.ndarray:
    if len(histogram) > positions + 1:
        raise Eagle3Error(
            f"histogram: found {len(histogram)} entries, expected at most positions + 1 = {positions + 1}"
        )
    return np.pad(np.asarray(histogram, int), (0, positions + 1 - len(histogram)))


# ------------------------------------------------------------------------------------------------------ pooled counters


def pooled_curves(own_rounds: dict[str, list[list[int]]], positions: int) -> dict[str, tuple]:
    """For each hypothesis, from its rounds by request: number of rounds, curve [K], and the curve's covariance [K, K]."""
    table = {}
    for name, rounds in own_rounds.items():
        counts = request_counts(rounds, positions)
        draws = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
        table[name] = counts[:, 0].sum(), curve(counts), np.atleast_2d(np.cov(curve(counts[draws]).T))
    return table


def rank_pooled(engine: np.ndarray, curves: dict[str, tuple]) -> list[dict]:
    """Hypotheses against pooled counters alone (Prometheus), as of other tokens than the replayed ones.

    The curves differ by the chance of both samples: the covariance of a hypothesis's curve comes from resampling its
    requests, and is scaled to the engine's number of rounds.

    Args:
        engine: [1 + K] rounds, then accepted counts of each position.
        curves: :func:`pooled_curves` of every hypothesis.
    Returns:
        [{"hypothesis", "chi2", "p"}], best first; p small: the counters are not that hypothesis's.
    """
    engine = np.asarray(engine, float)
    found, table = engine[1:] / engine[0], []
    floor = np.eye(len(found)) / engine[0] ** 2  # one round: a position that is never accepted still has some width
    for name, (rounds, expected, covariance) in curves.items():
        difference = found - expected
        chi2 = float(difference @ np.linalg.solve(covariance * (1 + rounds / engine[0]) + floor, difference))
        table.append({"hypothesis": name, "chi2": chi2, "p": float(stats.chi2.sf(chi2, len(found)))})
    return sorted(table, key=lambda row: row["chi2"])


# ---------------------------------------------------------------------------------------------------- several drafters


def judge_together(verdicts: list[Verdict]) -> dict:
    """What several drafters in one engine say together: a fault that all of them show is the engine's.

    Returns:
        {"kind", "sentence", "faults": names that fit every faulty drafter}
    """
    faulty = [verdict for verdict in verdicts if verdict.kind in (FAULT, UNKNOWN)]
    names = ", ".join(verdict.drafter for verdict in faulty)
    kinds = "; ".join(f"{verdict.drafter}: {verdict.kind}" for verdict in verdicts)
    if all(verdict.kind in (CANNOT_TELL, NOT_ENOUGH) for verdict in verdicts):
        return {"kind": CANNOT_TELL, "sentence": f"No verdict ({kinds}).", "faults": []}
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


# ----------------------------------------------------------------------------------------------------------------- cost


def speed(plain: list[dict], speculative: list[dict], correct_length: float | None = None) -> dict:
    """Cost apart from acceptance, from runs of the same requests with and without speculation.

    Args:
        plain: [{"tokens", "seconds"}], one for each repeat.
        speculative: [{"tokens", "seconds", "rounds"}], one for each repeat.
        correct_length: mean acceptance length of a correct engine, from the replay.
    Returns:
        step_ratio: time of a round over a plain step, which is the mean acceptance length at which speculation breaks
        even. throughput_ratio = mean_length / step_ratio. With correct_length also from_acceptance (engine's length over
        the correct one) and from_cost (correct length over step_ratio): their product is throughput_ratio.
    """
    if not plain or not speculative:
        raise Eagle3Error(
            f"speed: found {len(plain)} plain and {len(speculative)} speculative runs, expected some of each"
        )
    step = np.median([run["seconds"] / run["tokens"] for run in plain])
    round_ = np.median([run["seconds"] / run["rounds"] for run in speculative])
    length = float(np.median([run["tokens"] / run["rounds"] for run in speculative]))
    ratio = float(round_ / step)
    result = {
        "step_ratio": ratio,
        "break_even_length": ratio,
        "mean_length": length,
        "throughput_ratio": length / ratio,
        "repeats": [len(plain), len(speculative)],
    }
    if correct_length:
        result |= {"from_acceptance": length / correct_length, "from_cost": correct_length / ratio}
    return result


# ------------------------------------------------------------------------------------------------------------- refusals


def check(replay: dict) -> None:
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


def _check_rounds(request: dict, where: str) -> None:
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


def check_same(measured: dict, replay: dict) -> None:
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
