"""Diagnose: drafter or engine? From the engine's rounds and the replay of the same tokens to one verdict with evidence.

What the engine did is compared, round by round, with what a correct engine must have done on the same tokens and with
what an engine with each fault of the catalogue would have done. Acceptance and cost are judged apart: a round that is
slow makes speculation lose even when every draft that should be accepted is accepted.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from .acceptance import bootstrap, summary
from .errors import Eagle3Error

HEALTHY = "healthy"
WEAK = "weak drafter"
FAULT = "engine fault"
UNKNOWN = "unknown engine fault"
NOT_ENOUGH = "not enough data"

WEAK_RATE = 0.2  # a correct engine that accepts less than this share of the drafts makes the drafter weak
CORRECT_AGREEMENT = (
    0.9  # least share of rounds that an engine without a fault reproduces; float32 gives 1.00, bfloat16 less
)
FALSE_ALARM = 0.01  # for one verdict over all hypotheses
PRECISION = 0.1  # tokens per round: the gap that must be told from none before an engine is called healthy


@dataclass
class Verdict:
    """``kind`` is one of the constants above; ``fault`` names the catalogue's entry (or several in a tie)."""

    drafter: str
    kind: str
    sentence: str
    evidence: dict = field(default_factory=dict)
    fault: str | None = None

    def as_dict(self) -> dict:
        return asdict(self)


def judge(replay: dict, weak_rate: float = WEAK_RATE) -> Verdict:
    """The verdict on one drafter in one engine.

    Args:
        replay: {"drafter", "positions": K, "requests": [{"engine_rounds": accepted counts, "replay_rounds": those of a
            correct engine's own walk, "rows": as :func:`eagle3_lib.replay.compare`}, ...]}.
        weak_rate: acceptance rate of a correct engine below which the drafter is called weak.
    Raises:
        Eagle3Error: no request, or rounds and rows that do not belong together.
    """
    check(replay)
    positions, requests = replay["positions"], replay["requests"]
    engine = summary([request["engine_rounds"] for request in requests], positions)
    correct = summary([request["replay_rounds"] for request in requests], positions)
    pairs = [_pairs(request["rows"]) for request in requests]
    rounds = sum(len(pair) for pair in pairs)
    evidence = {"engine": engine, "replay": correct, "rounds_compared": rounds}
    name = replay["drafter"]
    if rounds == 0:
        return Verdict(name, NOT_ENOUGH, f"{name}: no round ends inside the text; nothing can be compared.", evidence)
    agreement = bootstrap(_ratio, np.array([[len(p), (p[:, 0] == p[:, 1]).sum()] for p in pairs], float))
    gap = bootstrap(
        _ratio, np.array([[len(p), (p[:, 0] - p[:, 1]).sum()] for p in pairs], float), level=1 - FALSE_ALARM
    )
    evidence |= {"agreement": agreement, "gap": gap}
    rates = f"the engine accepted {engine['acceptance_rate']['value']:.1%} of the drafts"
    share = f"{agreement['value']:.1%} of {rounds} rounds equal to a correct engine's"
    half_width = (gap["high"] - gap["low"]) / 2
    if agreement["high"] < CORRECT_AGREEMENT and (gap["high"] < 0 or gap["low"] > 0):
        should = correct["acceptance_rate"]["value"]
        sentence = f"{name}: {rates}, a correct engine would have accepted {should:.1%} of its own; only {share}: the engine is at fault."
        return Verdict(name, UNKNOWN, sentence, evidence)
    if agreement["value"] < CORRECT_AGREEMENT or half_width > PRECISION:
        needed = int(np.ceil(rounds * max(half_width / PRECISION, 1.5) ** 2))
        evidence["rounds_needed"] = needed
        return Verdict(name, NOT_ENOUGH, f"{name}: {share}; about {needed} rounds would decide.", evidence)
    if correct["acceptance_rate"]["value"] < weak_rate:
        sentence = f"{name}: {rates}, and so would a correct engine ({share}): the drafter is weak on this text, the engine is not at fault."
        return Verdict(name, WEAK, sentence, evidence)
    return Verdict(name, HEALTHY, f"{name}: {rates}, {share}: the engine does what the drafter allows.", evidence)


def check(replay: dict) -> None:
    """Refuse a replay whose parts do not belong together."""
    requests = replay.get("requests")
    if not requests:
        raise Eagle3Error(
            f"replay of {replay.get('drafter')}: field requests: found none, expected at least one request"
        )
    for index, request in enumerate(requests):
        where = f"replay of {replay.get('drafter')}, request {request.get('id', index)}"
        rounds, rows = request["engine_rounds"], request["rows"]
        if rounds != [row["engine"] for row in rows]:
            raise Eagle3Error(
                f"{where}: rows: found {len(rows)} that are not the engine's {len(rounds)} rounds; expected one for each"
            )
        if any(not 0 <= count <= replay["positions"] for count in rounds):
            raise Eagle3Error(
                f"{where}: engine_rounds: found counts up to {max(rounds)}, expected 0 to positions = {replay['positions']}"
            )


def _pairs(rows: list[dict]) -> np.ndarray:
    """[rounds, 2] accepted counts of engine and replay where the text covers the whole round."""
    return np.array([(row["engine"], row["replay"]) for row in rows if not row["cut"]], dtype=int).reshape(-1, 2)


def _ratio(counts: np.ndarray) -> np.ndarray:
    """Sum of the second column over sum of the first, [..., requests, 2] -> [...]."""
    total = counts.sum(-2)
    return total[..., 1] / total[..., 0]


def speed(plain: list[dict], speculative: list[dict]) -> dict:
    """Cost apart from acceptance, from runs of the same requests with and without speculation.

    Args:
        plain: [{"tokens", "seconds"}], one for each repeat.
        speculative: [{"tokens", "seconds", "rounds"}], one for each repeat.
    Returns:
        step_ratio: time of a speculative round over a plain step, both for all requests together; it is the mean
        acceptance length at which speculation breaks even. mean_length: tokens in a round. throughput_ratio:
        mean_length / step_ratio, measured.
    """
    step = np.median([run["seconds"] / run["tokens"] for run in plain])
    round_ = np.median([run["seconds"] / run["rounds"] for run in speculative])
    length = np.median([run["tokens"] / run["rounds"] for run in speculative])
    ratio = float(round_ / step)
    return {
        "step_ratio": ratio,
        "break_even_length": ratio,
        "mean_length": float(length),
        "throughput_ratio": float(length / ratio),
        "repeats": [len(plain), len(speculative)],
    }
