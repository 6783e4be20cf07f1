"""NVIDIA AIPerf: profile_export.jsonl, profile_export_aiperf.json and server_metrics_export.json.

Read and run in AIPerf 0.13.0 (common/models/spec_decode_models.py, metrics/types/spec_decode_metrics.py, and its exporters).
Its records are vLLM's, by answer. metrics.spec_decode_draft_acceptance_rate is percent, the record's own rate a fraction;
spec_decode_accepted_per_verified is the mean length over K + 1; spec_decode_acceptance_length.avg is a mean over requests,
spec_decode_token_weighted_acceptance_length the mean length of this project. In server_metrics_export.json the names of
counters have no _total, and stats.total is the increase.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import Eagle3Error
from .document import Document
from .recorded import (
    Recorded,
    amount,
    count,
    counters_of_histogram,
    dense,
    fields,
    get,
    mean_length,
    refuse_impossible,
    shown,
)
from .vllm_metrics import (
    ACCEPTED,
    BY_POSITION,
    DRAFTED,
    FAMILIES,
    PAST_END,
    ROUNDS,
    Counts,
    Scrape,
    recorded,
    short_drafts,
)
from .vllm_record import read_record, together

TOOL = "aiperf"
RECORD, POOLED = "spec_decode_acceptance", "pooled_spec_decode_acceptance_histogram"
STEPS, TAKEN, PROPOSED = "total_spec_decode_steps", "total_accepted_draft_tokens", "total_draft_tokens"
LENGTH, PER_VERIFIED = "spec_decode_acceptance_length", "spec_decode_accepted_per_verified"
ENGINES = ("vllm", "sglang")
ABSENT = (
    "start vLLM with --per-request-spec-decode-metrics detailed; answers without metrics (stop string, n > 1) have none"
)


def recognise(document: Document) -> bool:
    return any("aiperf_version" in values for values in document.objects) or _is_records(document)


def _is_records(document: Document) -> bool:
    first = document.objects[0] if document.objects else {}
    return RECORD in first or (
        isinstance(first.get("metadata"), dict) and "benchmark_phase" in first["metadata"] and "metrics" in first
    )


def read(document: Document, of: str = "") -> Recorded:
    """One of AIPerf's three files.

    Raises:
        Eagle3Error: it tells nothing of speculation, or its values contradict each other.
    """
    if _is_records(document):
        return _records(document)
    values = document.objects[0]
    if isinstance(values.get("metrics"), dict):
        return _server_metrics(values, document.where, of)
    return _profile(values, document.where)


def _records(document: Document) -> Recorded:
    records, engines, without, warm_up = [], set(), 0, 0
    for values, where in zip(document.values, document.places, strict=True):
        values = fields(values, where)
        metadata = fields(values.get("metadata", {}), f"{where}: metadata")
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            warm_up += 1
            continue
        if values.get(RECORD) is None:
            without += 1
            continue
        record = fields(values[RECORD], f"{where}: {RECORD}")
        name = metadata.get("x_request_id") or where
        records.append(read_record(record, name, record.get("completion_tokens"), f"{where}: {RECORD}"))
        engines.add(str(record.get("engine", "")))
    if not records:
        raise Eagle3Error(f"{document.where}: {RECORD}: found none, expected this field; {ABSENT}")
    notes = []
    if without:
        notes.append(f"{without} of {without + len(records)} answers hold no record and are left out.")
    if warm_up:
        notes.append(f"{warm_up} answers of the warm-up are left out.")
    engine = engines.pop() if len(engines) == 1 else ""
    found = together(TOOL, engine if engine in ENGINES else "", records, document.where, notes)
    if engine == "vllm":
        return found
    unread = f"The records are of engine {engine!r}; what its fields mean was read for vLLM alone."
    return replace(found, exact=False, notes=[*found.notes, unread])


def _profile(values: Mapping[str, Any], where: str) -> Recorded:
    if POOLED not in values:
        raise Eagle3Error(f"{where}: {POOLED}: found none, expected this field; {ABSENT}")
    named = fields(values[POOLED], f"{where}: {POOLED}")
    wrong = [key for key in named if not key.isdecimal()]
    if wrong:
        raise Eagle3Error(f"{where}: {POOLED}: found {shown(wrong[0])}, expected accepted counts from 0 on")
    histogram = dense({int(key): count(value, f"{where}: {POOLED}: {key}") for key, value in named.items()})
    drafted = _total(values, PROPOSED, where)
    positions = _positions(values, where)
    told = counters_of_histogram(histogram, drafted, positions)
    if positions is not None and len(histogram) > positions + 1:
        raise Eagle3Error(f"{where}: {POOLED}: found {len(histogram) - 1} accepted, expected at most K = {positions}")
    refuse_impossible(told, where)
    for name, found in ((STEPS, told["rounds"]), (TAKEN, sum(told["accepted"]))):
        expected = _total(values, name, where)
        if expected is not None and expected != found:
            raise Eagle3Error(f"{where}: {POOLED}: found {found}, expected {name} = {expected}")
    return Recorded(
        TOOL,
        "vllm",
        positions=positions,
        counters=told,
        mean_length=mean_length(told),
        notes=[
            f"From the histogram over all answers; {LENGTH}.avg is a mean over requests and is not this mean length.",
            "Rounds by request lie in profile_export.jsonl.",
            PAST_END,
            *short_drafts(told),
        ],
        warnings=[] if told["rounds"] else ["There was no round, so there is no acceptance."],
    )


def _total(values: Mapping[str, Any], name: str, where: str) -> int | None:
    if name not in values:
        return None
    return count(get(fields(values[name], f"{where}: {name}"), "avg", f"{where}: {name}"), f"{where}: {name}.avg")


def _positions(values: Mapping[str, Any], where: str) -> int | None:
    """K, from the mean length over K + 1, where it is the same in every answer."""
    if LENGTH not in values or PER_VERIFIED not in values:
        return None
    length, share = (
        amount(get(fields(values[name], f"{where}: {name}"), "avg", f"{where}: {name}"), f"{where}: {name}.avg")
        for name in (LENGTH, PER_VERIFIED)
    )
    steps = length / share if share else 0.0
    return round(steps) - 1 if steps > 1 and abs(steps - round(steps)) < 1e-6 else None


def _server_metrics(values: Mapping[str, Any], where: str, of: str) -> Recorded:
    metrics = fields(values["metrics"], f"{where}: metrics")
    if ROUNDS not in metrics:
        raise Eagle3Error(f"{where}: {ROUNDS}: found none, expected vLLM's counters of speculation")
    scrape: Scrape = {}
    for name in FAMILIES:
        for labels, url, total in _series(get(metrics, name, where), f"{where}: {name}"):
            others = ", ".join(
                f"{key}={labels[key]}" for key in sorted(labels) if key not in ("model_name", "position")
            )
            counts = scrape.setdefault((labels.get("model_name", ""), f"{url} {others}".strip()), Counts())
            counts.set_total(name, labels.get("position"), total, f"{where}: {name}")
    for series, counts in scrape.items():
        missing = [name for name in (ROUNDS, DRAFTED, ACCEPTED) if name not in counts.totals]
        if missing or sorted(counts.accepted) != list(range(len(counts.accepted))):
            found = missing[0] if missing else BY_POSITION
            raise Eagle3Error(f"{where}: {found}: found not every series of {series[1]}, expected one for each engine")
    notes = ["The increase of /metrics over AIPerf's profiling phase, as AIPerf computed it."]
    return recorded(TOOL, scrape, where, of, notes)


def _series(metric: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str, int]]:
    series = get(fields(metric, where), "series", where)
    for part in series if isinstance(series, list) else []:
        part = fields(part, where)
        labels = fields(part.get("labels") or {}, f"{where}: labels")
        stats = fields(get(part, "stats", where), f"{where}: stats")
        yield labels, str(part.get("endpoint_url", "")), count(get(stats, "total", where), f"{where}: stats.total")
