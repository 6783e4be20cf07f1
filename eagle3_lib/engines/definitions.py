"""What engines call accepted, drafted and a rate, by version, turned into this project's definitions.

Ours: a round accepts a of its K drafts; the bonus token, which the target itself adds, is neither drafted nor accepted;
acceptance rate = accepted / drafted; mean acceptance length = 1 + accepted / rounds.

Read in vLLM 0.16.0 to 0.33.0 (v1/spec_decode/metrics.py). Counts of one answer are there from 0.29.0 on, with
--per-request-spec-decode-metrics; from 0.29.0 to 0.33.0 the option, its levels and default ("none"), and all fields are
the same (config/observability.py, v1/metrics/stats.py RequestSpecDecodeMetrics, entrypoints/generate/base/protocol.py
SpeculativeDecodingMetrics). So are the answers that go without them (serving.py in entrypoints/openai/completion/ and
chat_completion/, v1/engine/output_processor.py):

- streamed without stream_options.include_usage (or the server's --enable-force-include-usage): they ride on the chunk
  of usage, which has no choices;
- n > 1, and a completion of several prompts: the counts would be of one sequence of several;
- a stop string ended it: the front end found it, the engine's own end of the request is an abort.

Drafts that a grammar refuses are not counted as drafted. Synchronous scheduling leaves them out of the step, and a step
whose drafts are all refused is no round. Asynchronous scheduling, the default where the executor allows it, has already
scheduled as many places, so that such a step is a round with 0 drafted and 0 accepted (v1/core/sched/scheduler.py:
update_draft_token_ids, update_draft_token_ids_in_output, update_from_output).

Read in SGLang 0.5.8 to 0.5.12, 0.5.14 to 0.5.16, 0.5.23 (srt/managers/tokenizer_manager.py; the running rate in
srt/managers/scheduler_metrics_mixin.py, later srt/observability/ and scheduler_components/metrics_reporter.py). It
computes the drafted tokens of an answer as rounds * (draft tokens - 1) of the configuration, and does not count them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .options import version_tuple


@dataclass(frozen=True)
class Definitions:
    """How an engine, from one version on, tells of speculation.

    since: the first version. rounds, accepted, drafted, histogram: fields of one answer's metrics, "" where there is
    none (histogram: rounds by their accepted count). root_is_drafted: the engine's number of draft tokens counts the
    root of the draft tree, so it is K + 1. bonus_in_rate: its running rate (log line, gauge) is (accepted + rounds) /
    (rounds * (K + 1)). prefill_in_length: its length is all completion tokens over rounds, prefill's among them.
    """

    since: tuple[int, ...]
    rounds: str = ""
    accepted: str = ""
    drafted: str = ""
    histogram: str = ""
    root_is_drafted: bool = False
    bonus_in_rate: bool = False
    prefill_in_length: bool = False


def _sglang(since: tuple[int, ...], accepted: str, drafted: str, histogram: str, bonus_in_rate: bool) -> Definitions:
    return Definitions(
        since,
        "spec_verify_ct",
        accepted,
        drafted,
        histogram,
        root_is_drafted=True,
        bonus_in_rate=bonus_in_rate,
        prefill_in_length=True,
    )


TABLE = {
    "vllm": (
        Definitions((0, 0)),
        Definitions((0, 29), "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "acceptance_histogram"),
    ),
    "sglang": (
        _sglang((0, 0, 0), "spec_accept_token_num", "spec_draft_token_num", "", True),
        _sglang((0, 5, 9), "spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram", True),
        _sglang((0, 5, 11), "spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram", False),
        _sglang(
            (0, 5, 12), "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram", False
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
    """One answer's own totals, {"rounds", "accepted", "drafted"}; None where it tells none.

    "drafted" is left out where the answer does not tell it.

    Args:
        metrics: vLLM's metrics.speculative_decoding, SGLang's meta_info.
    """
    names = of(engine, version)
    if not names.rounds or names.rounds not in metrics:
        return None
    counts = {"rounds": metrics[names.rounds], "accepted": metrics[names.accepted]}
    if names.drafted in metrics:
        counts["drafted"] = metrics[names.drafted]
    return counts


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
