"""Break-even: from the time of a step and the acceptance curve to the speedup at each number of drafted tokens, K.

Model: a round drafts one token after another and checks them in one step, so its time is t(K) = a + b K, and its tokens
are L(K) = 1 + r_1 + ... + r_K. With a plain step's time p, speedup(K) = L(K) p / t(K). (Leviathan et al. 2023,
arXiv:2211.17192, Theorem 3.8, with measured rates for one constant rate, and with a and b measured.)

What is assumed:
- The rate of a position does not depend on K: the drafter's first drafts are the same whatever comes after them.
- Checking one token more costs the same each time. On a GPU that holds until the step is bound by arithmetic, which many
  requests at a time reach sooner; so a and b belong to one concurrency.
- With rounds measured at one K only, a round without drafts takes a plain step (a = p); what the engine spends on
  speculation at any K is then counted into b, which favours small K.
- Beyond the measured positions a draft is accepted, given the one before it, as at the last measured position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import Eagle3Error
from ..results import BreakEven, Predicted
from . import acceptance

MOST = 8
PLAIN_IS_BEST = 0


@dataclass(frozen=True)
class RoundCost:
    """Time of a plain step and of a round, t(K) = base + per_draft * K, all in one unit (seconds, or plain steps).

    measured: the K whose rounds were measured.
    """

    plain: float
    base: float
    per_draft: float
    measured: tuple[int, ...]

    def round(self, drafts: int) -> float:
        """Time of a round with so many drafted tokens."""
        return self.base + self.per_draft * drafts


def fit(plain: float, rounds: Mapping[int, float]) -> RoundCost:
    """The cost of a round from measured times, by least squares; with one K, through the plain step at K = 0.

    Args:
        plain: time of a plain step.
        rounds: K -> time of a round, in the same unit.
    Raises:
        Eagle3Error: no round, or a time or K that is not positive.
    """
    if not rounds or min(rounds) < 1 or not min(plain, *rounds.values()) > 0:
        raise Eagle3Error(
            f"break-even: found a plain step of {plain} and rounds {dict(rounds)}, expected times above 0 at K of 1 or more"
        )
    if len(rounds) == 1:
        ((drafts, time),) = rounds.items()
        return RoundCost(plain, plain, (time - plain) / drafts, (drafts,))
    slope, base = np.polyfit(list(rounds), list(rounds.values()), 1)
    return RoundCost(plain, float(base), float(slope), tuple(sorted(rounds)))


def mean_length(curve: Sequence[float], drafts: int) -> float:
    """Tokens of a round with so many drafts, from the rates by position, continued at the last conditional rate."""
    rates = list(curve[:drafts])
    last = next((rate for rate in reversed(acceptance.conditional(curve)) if rate is not None), 0.0)
    while len(rates) < drafts:
        rates.append(rates[-1] * last)
    return 1 + sum(rates)


def predict(cost: RoundCost, curve: Sequence[float], most: int = MOST) -> list[Predicted]:
    """Predicted speedup for each K from 1 to ``most``.

    Args:
        curve: rate at each position, of a run with as many drafts or more.
    Returns:
        [{"K", "mean_length", "round" (in plain steps: the break-even length), "speedup", "beyond_curve"}].
    """
    rows: list[Predicted] = []
    for drafts in range(1, most + 1):
        length, ratio = mean_length(curve, drafts), cost.round(drafts) / cost.plain
        rows.append(
            {
                "K": drafts,
                "mean_length": round(length, 4),
                "round": round(ratio, 4),
                "speedup": round(length / ratio, 4),
                "beyond_curve": drafts > len(curve),
            }
        )
    return rows


def recommend(rows: Sequence[Predicted]) -> int:
    """The K of the largest predicted speedup; 0, plain decoding, where none is above 1."""
    best = max(rows, key=lambda row: row["speedup"])
    return best["K"] if best["speedup"] > 1 else PLAIN_IS_BEST


def of_run(positions: int, curve: Sequence[float], rounds: Mapping[str, float]) -> dict[str, BreakEven]:
    """Predictions of one measured run.

    Args:
        positions: K of the run.
        curve: its rate at each position.
        rounds: concurrency -> time of a round in plain steps of that concurrency.
    Returns:
        concurrency -> {"measured_K", "recommended", "rows"}; rows as :func:`predict` has them.
    """
    found: dict[str, BreakEven] = {}
    for level, ratio in rounds.items():
        rows = predict(fit(1.0, {positions: ratio}), curve)
        found[level] = {"measured_K": positions, "recommended": recommend(rows), "rows": rows}
    return found
