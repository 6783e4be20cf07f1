"""The result of ``vllm bench serve``: one JSON, or JSON lines where results are appended.

Read in vLLM 0.32.0 (benchmarks/serve.py): every spec_decode_* field is the difference of two /metrics scrapes around the
run, summed over engines and models. spec_decode_acceptance_rate is percent, the rates by position are fractions of the
rounds. Without speculation the fields are absent.
"""

from collections.abc import Mapping
from typing import Any

from ...errors import Eagle3Error
from ...results import Counters
from .document import Document
from .recorded import Recorded, add_up, amount, choose, count, counters, get, mean_length, refuse_impossible, shown
from .vllm_metrics import OTHERS, PAST_END, short_drafts

TOOL = "vllm bench serve"
ROUNDS, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"
RATES = "spec_decode_per_position_acceptance_rates"
OF_EVERY_RESULT = {"backend", "model_id", "total_output_tokens", "request_throughput"}
WHOLE = 1e-3  # how far rate * rounds may be from a whole number


def recognise(document: Document) -> bool:
    return any(values.keys() >= OF_EVERY_RESULT or ROUNDS in values for values in document.objects)


def read(document: Document, of: str = "") -> Recorded:
    """The sum over the results of one model.

    Raises:
        Eagle3Error: no result has spec_decode_* fields, several models have them and none is named, or the values
            contradict each other.
    """
    pairs = zip(document.values, document.places, strict=True)
    results = [(values, where) for values, where in pairs if isinstance(values, dict) and ROUNDS in values]
    if not results:
        raise Eagle3Error(
            f"{document.where}: {ROUNDS}: found none, expected this field; the server did not speculate, or its /metrics could "
            f"not be read"
        )
    models = sorted({str(values.get("model_id", "")) for values, _ in results})
    model = choose(models, of, document.where, "model_id")
    chosen = [_counters(values, where) for values, where in results if str(values.get("model_id", "")) == model]
    positions = {len(part["accepted"]) for part in chosen}
    if len(positions) > 1:
        raise Eagle3Error(f"{document.where}: {RATES}: found {sorted(positions)} positions, expected one K")
    told = counters(
        sum(part["rounds"] for part in chosen),
        add_up(part["accepted"] for part in chosen),
        sum(part["drafted"] for part in chosen),
    )
    notes = [
        "The difference of two scrapes of /metrics; by request nothing is told, so that there is no interval.",
        OTHERS,
        PAST_END,
    ]
    if len(chosen) > 1:
        notes.append(f"{len(chosen)} appended results, summed.")
    if len(results) < len(document.values):
        notes.append(f"{len(document.values) - len(results)} results without speculation are left out.")
    return Recorded(
        TOOL,
        "vllm",
        positions=positions.pop(),
        counters=told,
        mean_length=mean_length(told),
        notes=[*notes, *short_drafts(told)],
    )


def _counters(values: Mapping[str, Any], where: str) -> Counters:
    rounds, drafted, total = (
        count(get(values, name, where), f"{where}: {name}") for name in (ROUNDS, DRAFTED, ACCEPTED)
    )
    rates = get(values, RATES, where)
    if not isinstance(rates, list) or not rates:
        raise Eagle3Error(f"{where}: {RATES}: found {shown(rates)}, expected a rate for each position")
    accepted = [times(amount(rate, f"{where}: {RATES}"), rounds, f"{where}: {RATES}") for rate in rates]
    if sum(accepted) != total:
        raise Eagle3Error(
            f"{where}: {RATES}: found rates that make {sum(accepted)} accepted, expected {ACCEPTED} = {total}"
        )
    told = counters(rounds, accepted, drafted)
    refuse_impossible(told, where)
    return told


def times(rate: float, rounds: int, where: str) -> int:
    """The count behind a rate by round.

    Raises:
        Eagle3Error: it is no whole number.
    """
    found = rate * rounds
    if abs(found - round(found)) > WHOLE:
        raise Eagle3Error(f"{where}: found {rate}, {found:.4f} of {rounds} rounds, expected a whole number of them")
    return round(found)
