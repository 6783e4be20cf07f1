"""What engines call accepted, drafted and a rate, by version, turned into this project's definitions.

Ours: a round accepts a of its K drafts; the bonus token, which the target itself adds, is neither drafted nor accepted;
acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / rounds. Read in vLLM 0.16.0 to 0.33.0
(v1/spec_decode/metrics.py) and SGLang 0.5.8, 0.5.16, 0.5.23 (srt/managers/tokenizer_manager.py,
scheduler_metrics_mixin.py, observability/metrics_collector.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .options import version_tuple


@dataclass(frozen=True)
class Definitions:
    """How an engine, from one version on, tells of speculation.

    since: the first version. rounds, accepted, histogram: fields of one answer's metrics, "" where there is none
    (histogram: rounds by their accepted count). root_is_drafted: the engine's number of draft tokens counts the root of the
    draft tree, so it is K + 1. bonus_in_rate: its running rate (log line, gauge) is (accepted + rounds) / (rounds * (K +
    1)). prefill_in_length: its length is all completion tokens over rounds, prefill's among them.
    """

    since: tuple[int, ...]
    rounds: str
    accepted: str
    histogram: str
    root_is_drafted: bool
    bonus_in_rate: bool
    prefill_in_length: bool


TABLE = {
    "vllm": (
        Definitions((0, 0), "", "", "", False, False, False),
        Definitions(
            (0, 32), "num_spec_steps", "num_accepted_draft_tokens", "acceptance_histogram", False, False, False
        ),
    ),
    "sglang": (
        Definitions((0, 0, 0), "spec_verify_ct", "spec_accept_token_num", "", True, True, True),
        Definitions(
            (0, 5, 16),
            "spec_verify_ct",
            "spec_num_correct_drafts",
            "spec_correct_drafts_histogram",
            True,
            False,
            True,
        ),
    ),
}


def of(engine: str, version: str) -> Definitions:
    """The definitions of one version of an engine."""
    release = version_tuple(version)
    return [row for row in TABLE[engine] if row.since <= release][-1]


def draft_tokens(engine: str, drafts: int) -> int:
    """K as the engine, in every version, counts its draft tokens."""
    return drafts + TABLE[engine][-1].root_is_drafted


def request_counts(engine: str, version: str, metrics: Mapping) -> dict | None:
    """One answer's own totals, {"rounds", "accepted"}; None where it tells none.

    Args:
        metrics: vLLM's metrics.speculative_decoding, SGLang's meta_info.
    """
    names = of(engine, version)
    if not names.rounds or names.rounds not in metrics:
        return None
    return {"rounds": metrics[names.rounds], "accepted": metrics[names.accepted]}


def histogram(engine: str, version: str, metrics: Mapping) -> list[int] | None:
    """Rounds by their accepted count, from 0 on; None where the answer tells none."""
    name = of(engine, version).histogram
    return metrics.get(name) or None if name else None


def acceptance_rate(engine: str, version: str, rate: float, drafts: int) -> float:
    """Accepted over drafted tokens, from the running rate in an engine's log or gauges.

    Args:
        rate: as the engine tells it.
        drafts: K.
    """
    return (rate * (drafts + 1) - 1) / drafts if of(engine, version).bonus_in_rate else rate


def mean_length(engine: str, version: str, length: float, rounds: int) -> float:
    """Mean acceptance length, from the length that an engine tells of one request with so many rounds."""
    return length - 1 / rounds if of(engine, version).prefill_in_length else length
