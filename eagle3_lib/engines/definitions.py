"""What engines call accepted, drafted and a rate, by version, turned into this project's definitions.

Ours: a round accepts a of its K drafts; the bonus token, which the target itself adds, is neither drafted nor accepted;
acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / rounds. What an engine tells in each of its
versions, and where that was read, stands in its ``spec.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..results import Totals


@dataclass(frozen=True)
class Definitions:
    """How an engine, from one version on, tells of speculation.

    since: the first version. rounds, accepted, drafted, histogram: fields of one answer's metrics, "" where there is
    none (histogram: rounds by their accepted count). root_is_drafted: the engine's number of draft tokens counts the
    root of the draft tree, so it is K + 1. bonus_in_rate: its running rate (log line, gauge) is (accepted + rounds) /
    (rounds * (K + 1)). prefill_in_length: its length is all completion tokens over rounds, prefill's among them.
    """

    since: tuple[int, ...] = (0,)
    rounds: str = ""
    accepted: str = ""
    drafted: str = ""
    histogram: str = ""
    root_is_drafted: bool = False
    bonus_in_rate: bool = False
    prefill_in_length: bool = False

    def totals_in(self, metrics: Mapping[str, Any]) -> "Totals | None":
        """One answer's own totals, without "drafted" where it does not tell it; None where it tells none by these names.

        Args:
            metrics: of one answer: vLLM's metrics.speculative_decoding, SGLang's meta_info.
        """
        if not self.rounds or not {self.rounds, self.accepted} <= metrics.keys():
            return None
        totals: Totals = {"rounds": metrics[self.rounds], "accepted": metrics[self.accepted]}
        if self.drafted in metrics:
            totals["drafted"] = metrics[self.drafted]
        return totals

    def histogram_in(self, metrics: Mapping[str, Any]) -> list[int] | None:
        """Rounds by their accepted count, from 0 on; None where the answer tells none."""
        return metrics.get(self.histogram) or None if self.histogram else None

    def draft_tokens(self, drafts: int) -> int:
        """K as the engine counts its draft tokens."""
        return drafts + self.root_is_drafted

    def acceptance_rate(self, rate: float, drafts: int) -> float:
        """Accepted over drafted tokens, from the running rate in an engine's log or gauges.

        Args:
            rate: as the engine tells it.
            drafts: K.
        """
        return (rate * (drafts + 1) - 1) / drafts if self.bonus_in_rate else rate

    def mean_length(self, length: float, rounds: int) -> float:
        """Mean acceptance length, from the length that an engine tells of one request with so many rounds."""
        return length - 1 / rounds if self.prefill_in_length else length


NOTHING_TOLD = Definitions()
