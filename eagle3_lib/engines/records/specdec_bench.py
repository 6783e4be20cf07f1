"""Model-Optimizer's specdec_bench: acceptance_rate.json, with configuration.json beside it for K.

Read and run in NVIDIA/Model-Optimizer at a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73 (examples/specdec_bench, version 0.0.0).
The file is a list to which each run into a folder appends. Acceptance_Length_Histogram counts streamed steps by the tokens
they emit: accepted + 1 in a round, 1 in prefill, and less where the answer ends. A length that never occurs has no key.
Request_AL, Category_AL and Average_AL are means by request over the same steps.
"""

import json
from collections.abc import Mapping
from typing import Any

from ...errors import Eagle3Error
from .document import Document
from .recorded import Recorded, count, counters_of_histogram, dense, fields, get, mean_length, refuse_impossible, shown

TOOL = "specdec_bench"
HISTOGRAM, BY_REQUEST = "Acceptance_Length_Histogram", "Request_AL"
CONFIGURATION = "configuration.json"
CHAINS = ("EAGLE3", "EAGLE", "MTP", "DRAFT_TARGET")  # draft_length is K


def recognise(document: Document) -> bool:
    return bool(_runs(document))


def _runs(document: Document) -> list[dict[str, Any]]:
    value = document.values[0] if document.values else None
    parts = value if isinstance(value, list) else [value]
    return [part for part in parts if isinstance(part, dict) and HISTOGRAM in part]


def read(document: Document, of: str = "") -> Recorded:
    """The last run of the file.

    Raises:
        Eagle3Error: a field is missing or no count, or there are more requests than steps that emit one token.
    """
    runs = _runs(document)
    where = document.where
    named = fields(runs[-1][HISTOGRAM], f"{where}: {HISTOGRAM}")
    wrong = [key for key in named if not key.isdecimal() or int(key) < 1]
    if wrong:
        raise Eagle3Error(f"{where}: {HISTOGRAM}: found {shown(wrong[0])}, expected lengths from 1 on")
    steps = {int(key): count(value, f"{where}: {HISTOGRAM}: {key}") for key, value in named.items()}
    requests = len(fields(get(runs[-1], BY_REQUEST, where), f"{where}: {BY_REQUEST}"))
    if steps.get(1, 0) < requests:
        raise Eagle3Error(
            f"{where}: {HISTOGRAM}: 1: found {steps.get(1, 0)}, expected at least one step of prefill for each of the "
            f"{requests} requests"
        )
    configuration = _configuration(document)
    positions = _positions(configuration, document)
    rounds = {length - 1: number for length, number in steps.items()}
    rounds[0] -= requests
    histogram = dense(rounds)
    notes = [
        f"{requests} steps of prefill, one a request, are taken off the {sum(steps.values())} steps.",
        "The last round of an answer is cut at its end: a few accepted drafts are missing.",
        "Average_AL is a mean over requests, prefill among its steps, and is not this mean length.",
        "The drafted tokens are not told.",
    ]
    if len(runs) > 1:
        notes.append(f"The file holds {len(runs)} runs; the last one is read.")
    if positions is None:
        notes.append(f"K is not told: no {CONFIGURATION} of a chain of drafts lies beside the file.")
    engine = str(configuration.get("engine", "")).lower()
    engine = engine if engine in ("vllm", "sglang") else ""
    if positions is not None and len(histogram) > positions + 1:
        longest = len(histogram)
        return Recorded(
            TOOL,
            engine,
            positions,
            exact=False,
            notes=notes,
            warnings=[
                f"Steps emit up to {longest} tokens, more than K + 1 = {positions + 1}: steps were merged into one chunk, or "
                f"{CONFIGURATION} is another run's. No count is given."
            ],
        )
    told = counters_of_histogram(histogram, None, positions)
    refuse_impossible(told, where)
    warnings = [] if told["rounds"] else ["There was no round, so there is no acceptance."]
    return Recorded(
        TOOL,
        engine,
        positions,
        counters=told,
        mean_length=mean_length(told),
        exact=False,
        notes=notes,
        warnings=warnings,
    )


def _configuration(document: Document) -> Mapping[str, Any]:
    path = document.path.parent / CONFIGURATION
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise Eagle3Error(f"{CONFIGURATION} beside {document.where}: not JSON: {error}") from error
    values = values[-1] if isinstance(values, list) and values else values
    return fields(values, f"{CONFIGURATION} beside {document.where}")


def _positions(configuration: Mapping[str, Any], document: Document) -> int | None:
    length = configuration.get("draft_length")
    if length is None or configuration.get("speculative_algorithm") not in CHAINS:
        return None
    return count(length, f"{CONFIGURATION} beside {document.where}: draft_length")
