"""Model-Optimizer's specdec_bench: acceptance_rate.json, with configuration.json beside it for K.

Read and run in NVIDIA/Model-Optimizer at a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73 (examples/specdec_bench, version 0.0.0:
specdec_bench/metrics/acceptance_rate.py, specbench.py, mtbench.py, specdec_bench/models/). The file is a list to which each run
into a folder appends. Acceptance_Length_Histogram counts streamed chunks by the tokens they hold: accepted + 1 in a round, 1
in prefill, and less where the answer ends; SGLang and TensorRT-LLM add chunks without a token. A length that never occurs has no
key. Request_AL, Category_AL and Average_AL are means by request over the same chunks.

Every turn of a request has its own prefill. Request_AL names the turns of the plain metric; MT-Bench has two; those of SpecBench
stand in specbench_responses.jsonl.
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
RESPONSES = "specbench_responses.jsonl"
MTBENCH_TURNS = 2


def recognise(document: Document) -> bool:
    return bool(_runs(document))


def _runs(document: Document) -> list[dict[str, Any]]:
    value = document.values[0] if document.values else None
    parts = value if isinstance(value, list) else [value]
    return [part for part in parts if isinstance(part, dict) and HISTOGRAM in part]


def read(document: Document, of: str = "") -> Recorded:
    """The last run of the file.

    Raises:
        Eagle3Error: a field is missing or no count, or there are more turns than chunks of one token.
    """
    runs = _runs(document)
    where = document.where
    chunks = _chunks(runs[-1][HISTOGRAM], f"{where}: {HISTOGRAM}")
    configuration = _configuration(document)
    requests = fields(get(runs[-1], BY_REQUEST, where), f"{where}: {BY_REQUEST}")
    turns, told_by = _turns(requests, configuration, document)
    if chunks.get(1, 0) < turns:
        raise Eagle3Error(
            f"{where}: {HISTOGRAM}: 1: found {chunks.get(1, 0)}, expected at least one step of prefill for each of {turns} turns"
        )
    notes = [
        f"{turns} steps of prefill, one a turn ({told_by}), are taken off the {sum(chunks.values())} steps.",
        "The last round of an answer is cut at its end: a few accepted drafts are missing.",
        "Average_AL is a mean over requests, prefill among its steps, and is not this mean length.",
        "The drafted tokens are not told.",
    ]
    if len(runs) > 1:
        notes.append(f"The file holds {len(runs)} runs; the last one is read.")
    together = configuration.get("concurrency")
    if together != 1:
        notes.append(f"Concurrency {together or 'not told'}: steps that were joined in one chunk count as one.")
    engine = str(configuration.get("engine", "")).lower()
    engine = engine if engine in ("vllm", "sglang") else ""
    topk = _topk(configuration)
    positions = None if topk > 1 else _positions(configuration, document)
    if positions is None and topk == 1:
        notes.append(f"K is not told: no {CONFIGURATION} of a chain of drafts lies beside the file.")
    rounds = {length - 1: number for length, number in chunks.items()}
    rounds[0] -= turns
    warning = _unusable(rounds, positions, topk)
    if warning:
        return Recorded(TOOL, engine, positions, exact=False, notes=notes, warnings=[warning])
    told = counters_of_histogram(dense(rounds), None, positions)
    refuse_impossible(told, where)
    return Recorded(
        TOOL,
        engine,
        positions,
        counters=told,
        mean_length=mean_length(told),
        exact=False,
        notes=notes,
        warnings=[] if told["rounds"] else ["There was no round, so there is no acceptance."],
    )


def _chunks(histogram: Any, where: str) -> dict[int, int]:
    """Chunks by their tokens, those without any left out."""
    named = fields(histogram, where)
    wrong = [key for key in named if not key.isdecimal()]
    if wrong:
        raise Eagle3Error(f"{where}: found {shown(wrong[0])}, expected lengths")
    return {int(key): count(value, f"{where}: {key}") for key, value in named.items() if key != "0"}


def _turns(requests: Mapping[str, Any], configuration: Mapping[str, Any], document: Document) -> tuple[int, str]:
    """How many answers there were, and what tells it."""
    if all(isinstance(turns, dict) for turns in requests.values()):
        return sum(len(turns) for turns in requests.values()), BY_REQUEST
    if configuration.get("mtbench"):
        return MTBENCH_TURNS * len(requests), "MT-Bench has two turns"
    path = document.path.parent / RESPONSES
    lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()] if path.is_file() else []
    if len(lines) != len(requests):
        return len(requests), f"one turn a request is assumed, as no {RESPONSES} of this run lies beside the file"
    where = f"{RESPONSES} beside {document.where}"
    try:
        values = [fields(json.loads(line), where) for line in lines]
    except ValueError as error:
        raise Eagle3Error(f"{where}: not JSON: {error}") from error
    return sum(len(get(value, "turns", where)) for value in values), RESPONSES


def _topk(configuration: Mapping[str, Any]) -> int:
    """SGLang's topk; specdec_bench asks for 1 where its runtime parameters have none."""
    runtime = configuration.get("runtime_params")
    arguments = runtime.get("engine_args") if isinstance(runtime, dict) else None
    topk = arguments.get("speculative_eagle_topk") if isinstance(arguments, dict) else None
    return topk if isinstance(topk, int) else 1


def _unusable(rounds: Mapping[int, int], positions: int | None, topk: int) -> str:
    """Why no count can be given; "" where one can."""
    if topk > 1:
        return f"The drafts are a tree (speculative_eagle_topk {topk}), whose counts are not a chain's. None is given."
    if positions is not None and max(rounds) > positions:
        return (
            f"Steps hold up to {max(rounds) + 1} tokens, more than K + 1 = {positions + 1}: steps were joined in one chunk, or "
            f"{CONFIGURATION} is another run's. No count is given."
        )
    return ""


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
