"""vLLM's record of one answer's speculation, ``speculative_decoding``, as answers of the server and AIPerf hold it.

Read in vLLM 0.29.0 to 0.33.0 (v1/metrics/stats.py RequestSpecDecodeMetrics, entrypoints/generate/base/protocol.py) and
AIPerf 0.13.0 (common/models/spec_decode_models.py), which turns the histogram into an object without empty counts. Level
"summary" has no counts by round; without a round the lists are null, or missing in a stream, and the length is 1.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Eagle3Error
from ...results import RequestId
from .recorded import (
    Recorded,
    RecordedRequest,
    add_up,
    count,
    counters_of_histogram,
    counts,
    dense,
    fields,
    get,
    histogram_of,
    mean_length,
    refuse_impossible,
    shown,
)
from .vllm_metrics import PAST_END, short_drafts

ROUNDS, ACCEPTED, DRAFTED, POSITIONS = (
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
)
HISTOGRAM, BY_ROUND, DRAFTED_BY_ROUND = "acceptance_histogram", "per_step_accepted", "per_step_drafted"


@dataclass(frozen=True)
class Record:
    """One answer. rounds: accepted and drafted of each round, None at level summary. histogram: rounds that drafted
    anything, by accepted count."""

    name: RequestId
    positions: int | None
    accepted: list[int] | None
    by_round_drafted: list[int] | None
    histogram: list[int]
    drafted: int | None
    without_drafts: int
    output_tokens: int | None


def read_record(values: Any, name: RequestId, output_tokens: Any, where: str) -> Record:
    """One record, held against itself.

    Args:
        name: the answer's id. output_tokens: completion_tokens of its usage, None where that is not told.
    Raises:
        Eagle3Error: a field is missing or no count, or two fields contradict each other.
    """
    values = fields(values, where)
    rounds = count(get(values, ROUNDS, where), f"{where}: {ROUNDS}")
    total = count(get(values, ACCEPTED, where), f"{where}: {ACCEPTED}")
    drafted = _optional(values, DRAFTED, where)
    positions = _optional(values, POSITIONS, where)
    histogram = _histogram(values.get(HISTOGRAM), f"{where}: {HISTOGRAM}")
    accepted = None if values.get(BY_ROUND) is None else counts(values[BY_ROUND], f"{where}: {BY_ROUND}")
    by_round = (
        None
        if values.get(DRAFTED_BY_ROUND) is None
        else counts(values[DRAFTED_BY_ROUND], f"{where}: {DRAFTED_BY_ROUND}")
    )
    if rounds == 0 and accepted is None:
        accepted, by_round = [], []
    if accepted is None and histogram is None:
        raise Eagle3Error(f"{where}: found neither {BY_ROUND} nor {HISTOGRAM}, expected one of them")
    empty = 0
    if accepted is not None:
        _refuse_other(accepted, by_round, rounds, total, drafted, positions, where)
        empty = by_round.count(0) if by_round is not None else 0
        if histogram is not None and _trimmed(histogram) != _trimmed(histogram_of(accepted, positions)):
            raise Eagle3Error(f"{where}: {HISTOGRAM}: found {histogram}, expected the counts of {BY_ROUND}")
        kept = accepted if by_round is None else [a for a, d in zip(accepted, by_round, strict=True) if d]
        histogram = histogram_of(kept, positions)
    assert histogram is not None
    if positions is not None:
        histogram = [*histogram, *[0] * (positions + 1 - len(histogram))]
    _refuse_histogram(histogram, rounds - empty, total, positions, where)
    tokens = None if output_tokens is None else count(output_tokens, f"{where}: completion_tokens")
    return Record(name, positions, accepted, by_round, histogram, drafted, empty, tokens)


def _optional(values: Mapping[str, Any], name: str, where: str) -> int | None:
    return None if values.get(name) is None else count(values[name], f"{where}: {name}")


def _histogram(values: Any, where: str) -> list[int] | None:
    if values is None or isinstance(values, list):
        return None if values is None else counts(values, where)
    named = fields(values, where)
    wrong = [key for key in named if not key.isdecimal()]
    if wrong:
        raise Eagle3Error(f"{where}: found {shown(wrong[0])}, expected accepted counts from 0 on")
    return dense({int(key): count(value, f"{where}: {key}") for key, value in named.items()})


def _trimmed(histogram: Sequence[int]) -> list[int]:
    kept = list(histogram)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _refuse_other(
    accepted: list[int],
    by_round: list[int] | None,
    rounds: int,
    total: int,
    drafted: int | None,
    positions: int | None,
    where: str,
) -> None:
    """Refuse rounds that are not those of the totals."""
    if len(accepted) != rounds:
        raise Eagle3Error(f"{where}: {BY_ROUND}: found {len(accepted)} rounds, expected {ROUNDS} = {rounds}")
    if sum(accepted) != total:
        raise Eagle3Error(f"{where}: {BY_ROUND}: found {sum(accepted)} accepted, expected {ACCEPTED} = {total}")
    if by_round is None:
        return
    if len(by_round) != rounds:
        raise Eagle3Error(f"{where}: {DRAFTED_BY_ROUND}: found {len(by_round)} rounds, expected {ROUNDS} = {rounds}")
    if drafted is not None and sum(by_round) != drafted:
        raise Eagle3Error(f"{where}: {DRAFTED_BY_ROUND}: found {sum(by_round)} drafted, expected {DRAFTED} = {drafted}")
    if positions is not None and max(by_round, default=0) > positions:
        found = max(by_round)
        raise Eagle3Error(f"{where}: {DRAFTED_BY_ROUND}: found a round of {found}, expected at most K = {positions}")
    for place, (taken, proposed) in enumerate(zip(accepted, by_round, strict=True)):
        if taken > proposed:
            raise Eagle3Error(
                f"{where}: {BY_ROUND}: found {taken} in round {place}, expected at most its drafts, {proposed}"
            )


def _refuse_histogram(histogram: list[int], rounds: int, total: int, positions: int | None, where: str) -> None:
    longest = len(_trimmed(histogram)) - 1
    if positions is not None and longest > positions:
        raise Eagle3Error(
            f"{where}: {HISTOGRAM}: found a round that accepted {longest}, expected at most K = {positions}"
        )
    if sum(histogram) != rounds:
        raise Eagle3Error(f"{where}: {HISTOGRAM}: found {sum(histogram)} rounds, expected {ROUNDS} = {rounds}")
    found = sum(taken * number for taken, number in enumerate(histogram))
    if found != total:
        raise Eagle3Error(f"{where}: {HISTOGRAM}: found {found} accepted, expected {ACCEPTED} = {total}")


def together(tool: str, engine: str, records: Sequence[Record], where: str, notes: list[str]) -> Recorded:
    """All answers of a file.

    Raises:
        Eagle3Error: they differ in K.
    """
    lengths = sorted({record.positions for record in records if record.positions is not None})
    if len(lengths) > 1:
        raise Eagle3Error(f"{where}: {POSITIONS}: found {lengths}, expected one K; read the runs apart")
    positions = lengths[0] if lengths else None
    histogram = add_up(record.histogram for record in records)
    parts = [record.drafted for record in records]
    drafted = sum(part for part in parts if part is not None) if None not in parts else None
    told = counters_of_histogram(histogram, drafted, positions)
    refuse_impossible(told, where)
    in_order = all(record.accepted is not None for record in records)
    warnings = []
    if not told["rounds"]:
        warnings.append("There was no round, so there is no acceptance; the length 1.0 that the file tells is none.")
    elif any(not sum(record.histogram) for record in records):
        silent = sum(not sum(record.histogram) for record in records)
        warnings.append(f"{silent} answers had no round: the length 1.0 that the file tells of them is left out.")
    empty = sum(record.without_drafts for record in records)
    if empty:
        notes = [*notes, f"{empty} steps drafted nothing: they are in the lists and are no rounds in the counters."]
    if not in_order:
        notes = [*notes, "Level summary: rounds by accepted count, without their order."]
    requests: list[RecordedRequest] | None = None
    if in_order:
        requests = [
            {
                "id": record.name,
                "accepted": record.accepted or [],
                "drafted": record.by_round_drafted,
                "output_tokens": record.output_tokens,
            }
            for record in records
        ]
    return Recorded(
        tool,
        engine,
        positions=positions,
        requests=requests,
        histograms=[record.histogram for record in records],
        counters=told,
        mean_length=mean_length(told),
        notes=[*notes, PAST_END, *short_drafts(told)],
        warnings=warnings,
    )
