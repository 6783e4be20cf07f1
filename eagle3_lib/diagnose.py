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

HEALTHY = "healthy"
WEAK = "weak drafter"
FAULT = "engine fault"
UNKNOWN = "unknown engine fault"
NOT_ENOUGH = "not enough data"

WEAK_RATE = 0.2  # a correct engine that accepts less than this share of the drafts makes the drafter weak
EXPLAINED = 0.9  # share of rounds that a hypothesis must reproduce to explain them; float32 gives 0.99, bfloat16 less
FALSE_ALARM = 0.01  # of one verdict, over all its hypotheses
NOT_GREEDY = 0.05  # share of greedy tokens that may differ from the target's choice by near ties


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
            "replay_rounds" (of a correct engine's own walk), "rows" as :func:`eagle3_lib.replay.compare`, and where
            the catalogue was replayed "hypotheses": {fault: accepted counts at the engine's rounds}.
        weak_rate: acceptance rate of a correct engine below which the drafter is called weak.
    Raises:
        Eagle3Error: no request, or rounds and rows that do not belong together.
    """
    check(replay)
    positions, requests = replay["positions"], replay["requests"]
    evidence = {
        "engine": summary([request["engine_rounds"] for request in requests], positions),
        "replay": summary([request["replay_rounds"] for request in requests], positions),
        "gap": _gap(requests),
        "by_slot": by_slot(requests),
        "tokens_not_greedy": _not_greedy(replay),
    }
    equal = {CORRECT: _equal(requests, lambda request: [row["replay"] for row in request["rows"]])}
    for name in requests[0].get("hypotheses", {}):
        equal[name] = _equal(requests, lambda request, name=name: request["hypotheses"][name])
    return conclude(replay["drafter"], equal, evidence, weak_rate)


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


def conclude(drafter: str, equal: dict[str, np.ndarray], evidence: dict, weak_rate: float = WEAK_RATE) -> Verdict:
    """Rank hypotheses by the share of rounds they reproduce, and choose the verdict.

    A fault is named when it reproduces more rounds than a correct engine does, by a bootstrap over requests whose level
    is corrected for the number of hypotheses, and reproduces enough of them.

    Args:
        equal: for each hypothesis [requests, 2]: rounds, and how many of them it reproduces.
    """
    rounds = int(equal[CORRECT][:, 0].sum())
    table = {name: bootstrap(_ratio, counts) for name, counts in equal.items()}
    ranked = sorted(table, key=lambda name: (-table[name]["value"], name != CORRECT))
    evidence |= {"rounds_compared": rounds, "agreement": table[CORRECT], "ranking": _ranking(ranked, table)}
    should, did = (evidence[key]["acceptance_rate"]["value"] for key in ("replay", "engine"))
    say = _Sentences(drafter, did, should, rounds, table)

    if evidence.get("tokens_not_greedy", {}).get("share", 0) > NOT_GREEDY:
        share = evidence["tokens_not_greedy"]["share"]
        return Verdict(drafter, FAULT, say.not_lossless(share), evidence, fault="verification is not lossless")
    faulty = [name for name in ranked if name != CORRECT and _severity(name) == "fault"]
    if faulty and _better(equal, faulty[0], CORRECT, FALSE_ALARM / len(faulty)):
        best = faulty[0]
        ties = [name for name in faulty[1:] if not _better(equal, best, name, 0.05)]
        runner_up = next((name for name in ranked if name not in (best, *ties)), None)
        evidence |= {"best": best, "runner_up": runner_up}
        if table[best]["value"] >= EXPLAINED:
            return Verdict(drafter, FAULT, say.fault(best, ties, runner_up), evidence, best, ties)
    precise = [name for name in ranked if name == CORRECT or _severity(name) == "precision"]
    correct_enough = any(_explains(equal[name])[0] for name in precise)
    surely_not = _explains(equal[CORRECT])[1]
    if surely_not and not any(_explains(equal[name])[0] for name in ranked):
        return Verdict(drafter, UNKNOWN, say.unknown(ranked[0]), evidence)
    if not correct_enough:
        evidence["rounds_needed"] = _rounds_needed(table[CORRECT]["value"], rounds)
        return Verdict(drafter, NOT_ENOUGH, say.not_enough(evidence["rounds_needed"]), evidence)
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

    def not_lossless(self, share: float) -> str:
        return (
            f"{self._rates}. Engine fault: verification is not lossless; {share:.1%} of the emitted tokens are not what the "
            f"target would have emitted, so its acceptance says nothing."
        )

    def not_enough(self, needed: int) -> str:
        return f"{self._rates}; a correct engine reproduces {self._share(CORRECT)}. About {needed} rounds would decide."

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


def _better(equal: dict[str, np.ndarray], name: str, other: str, false_alarm: float) -> bool:
    """Does ``name`` reproduce more rounds than ``other``? One-sided, by a paired bootstrap over requests."""
    pair = np.column_stack([equal[name][:, 0], equal[name][:, 1] - equal[other][:, 1]])
    return bootstrap(_ratio, pair, level=1 - 2 * false_alarm)["low"] > 0


def _explains(counts: np.ndarray) -> tuple[bool, bool]:
    """Is the share of reproduced rounds surely at least EXPLAINED; is it surely less? (Clopper-Pearson, FALSE_ALARM)"""
    rounds, equal = int(counts[:, 0].sum()), int(counts[:, 1].sum())
    if not rounds:
        return False, False
    interval = stats.binomtest(equal, rounds).proportion_ci(1 - 2 * FALSE_ALARM)
    return interval.low >= EXPLAINED, interval.high < EXPLAINED


def _rounds_needed(share: float, rounds: int) -> int:
    """Rounds from which a share like this one would be told from EXPLAINED."""
    for needed in (int(rounds * factor) + 1 for factor in 1.2 ** np.arange(1, 60)):
        above, below = _explains(np.array([[needed, round(share * needed)]]))
        if needed >= 45 and (above or below):
            return needed
    return needed


def _equal(requests: list[dict], counts) -> np.ndarray:
    """[requests, 2] uncut rounds, and how many of them have the same accepted count under the hypothesis."""
    table = []
    for request in requests:
        pairs = [
            (row["engine"], count)
            for row, count in zip(request["rows"], counts(request), strict=True)
            if not row["cut"]
        ]
        table.append((len(pairs), sum(engine == count for engine, count in pairs)))
    return np.array(table, float)


def _gap(requests: list[dict]) -> dict:
    """Accepted tokens in a round, engine minus correct engine at the same slots, with a paired interval."""
    rows = [[row for row in request["rows"] if not row["cut"]] for request in requests]
    pairs = np.array([(len(some), sum(row["engine"] - row["replay"] for row in some)) for some in rows], float)
    return bootstrap(_ratio, pairs) if pairs[:, 0].sum() else {"value": 0.0, "low": 0.0, "high": 0.0, "n": len(rows)}


def by_slot(requests: list[dict], parts: int = 4) -> list[dict]:
    """Accepted tokens in a round, engine and correct engine, in equally full parts of the context length.

    A drafter that decays with the length of the context falls in both; an engine that fails there, in the first alone.
    """
    rows = sorted((row for request in requests for row in request["rows"] if not row["cut"]), key=lambda r: r["slot"])
    table = []
    for some in np.array_split(np.arange(len(rows)), parts):
        part = [rows[index] for index in some]
        if part:
            means = {who: round(float(np.mean([row[who] for row in part])), 4) for who in ("engine", "replay")}
            table.append({"slots": [part[0]["slot"], part[-1]["slot"]], "rounds": len(part), **means})
    return table


def _not_greedy(replay: dict) -> dict:
    known = [request for request in replay["requests"] if "lossless" in request and "output_length" in request]
    tokens = sum(request["output_length"] for request in known)
    if not tokens or replay.get("temperature", 0):
        return {}
    wrong = sum(request["lossless"] for request in known)
    return {"tokens": tokens, "not_greedy": wrong, "share": wrong / tokens}


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
    if not faulty:
        kinds = "; ".join(f"{verdict.drafter}: {verdict.kind}" for verdict in verdicts)
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
            _check_rounds(rounds, request["output_length"], at)


def _check_rounds(rounds: list[int], output_length: int, where: str) -> None:
    """Prefill emits one token, each round its accepted ones and one more; only the last may overshoot the end."""
    emitted = 1 + sum(rounds) + len(rounds)
    before_last = emitted - (rounds[-1] + 1 if rounds else 0)
    if emitted < output_length or (rounds and before_last >= output_length):
        raise Eagle3Error(
            f"{where}: engine_rounds: found rounds that emit {emitted} tokens, expected the {output_length} of the output; "
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
        if lengths != of_run or request["engine_rounds"] != run["accepted"]:
            raise Eagle3Error(
                f"replay of {replay['drafter']}: request {request['id']}: found {lengths} prompt and output tokens, expected "
                f"{of_run} and the same rounds: the replay is of other tokens than the run"
            )
