"""Reading what stage 07 measured, apart from measuring it, so that the stages after it need no HTTP client."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from . import meaning
from .errors import Eagle3Error
from .params import SamplingSettings
from .provenance import project_path, short_path


def read(folder: str | Path) -> dict:
    """A benchmark.json that :func:`run` wrote."""
    path = project_path(folder) / "benchmark.json"
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run stage benchmark first")
    return json.loads(path.read_text())


def read_rounds(folder: str | Path) -> dict:
    """A benchmark.json whose rounds can be replayed: stage 07's, or one written from another run.

    Needed are "mode", "target", "positions" (K) and "requests", each with "id", "prompt_ids", "output_ids" and "accepted".
    "sampling" (fields of SamplingSettings), or "temperature" alone, says how the tokens were chosen; a field that is missing
    is taken as that of greedy decoding, and is not among those of "sampling_told".

    Raises:
        Eagle3Error: a field is missing or of a wrong kind, no request has rounds, or counts pass K.
    """
    bench = read(folder)
    where = f"{short_path(project_path(folder) / 'benchmark.json')}"
    positions, requests = _field(bench, "positions", int, where), _field(bench, "requests", list, where)
    for name in ("mode", "target"):
        if positions and requests:
            _field(bench, name, str, where)
    if not positions or (requests and all(request.get("accepted") is None for request in requests)):
        raise Eagle3Error(f"{where}: mode {bench.get('mode')!r} has no rounds; expected a drafter's run")
    chunks = bench.get("evidence") == "chunks"
    for index, request in enumerate(requests):
        _check_request(request, f"{where}: requests: {request.get('id', index)}", positions, chunks)
    if "speculative_options" in bench or "engine_args" in bench:
        options, arguments = bench.get("speculative_options", {}), bench.get("engine_args", [])
        temperature = bench.get("sampling", {}).get("temperature", 0.0)
        meaning.refuse(bench.get("engine", "vllm"), options, arguments, {}, temperature)
    told = bench.get("sampling", {name: bench[name] for name in ("temperature",) if name in bench})
    return bench | {"sampling": SamplingSettings.check(told, f"{where}: sampling"), "sampling_told": sorted(told)}


def _field(values: dict, name: str, kind: type, where: str):
    if name not in values:
        raise Eagle3Error(f"{where}: {name}: found none, expected {kind.__name__}")
    if not isinstance(values[name], kind):
        raise Eagle3Error(f"{where}: {name}: found {type(values[name]).__name__}, expected {kind.__name__}")
    return values[name]


def _check_request(request: dict, where: str, positions: int, chunks: bool) -> None:
    """Refuse a request without tokens, or with counts that cannot be accepted drafts of rounds of K."""
    lists = {name: _field(request, name, list, where) for name in ("prompt_ids", "output_ids")}
    for name in ("accepted", "drafted"):
        counts = request.get(name)
        if counts is None:
            continue
        lists[name] = _field(request, name, list, where)
        if counts and not chunks and max(counts) > positions:
            raise Eagle3Error(
                f"{where}: {name}: found a round of {max(counts)}, expected at most positions = {positions}"
            )
    for name, values in lists.items():
        if wrong := [value for value in values if type(value) is not int or value < 0]:
            raise Eagle3Error(f"{where}: {name}: found {wrong[0]!r}, expected whole numbers from 0 on")


def tensor_parallel(engine_args: list[str]) -> int:
    """The tensor parallel size that an engine was started with, from its command-line words; 1 where they say none."""
    return _number_after(engine_args, "--tensor-parallel-size", "-tp", "--tp-size", "--tp") or 1


def prompts_in_chunks(bench: dict) -> int:
    """How many prompts the engine may have prefilled in several chunks, by the budget in its command-line words."""
    budget = _number_after(bench.get("engine_args", []), "--max-num-batched-tokens", "--chunked-prefill-size")
    lengths = [len(request["prompt_ids"]) for request in bench["requests"]]
    if budget is None:
        return 0
    if bench.get("evidence") == "told" and sum(lengths) > budget:  # asked together, prompts share the budget
        return len(lengths)
    return sum(length > budget for length in lengths)


def _number_after(words: list[str], *flags: str) -> int | None:
    parted = [part for word in words for part in word.split("=", 1)]
    return next((int(value) for flag, value in pairwise(parted) if flag in flags), None)


def throughput(timed: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [prompts] at one request at a time, summed over repeats, in the order of the prompts' ids."""
    timed = [row for row in timed if row["concurrency"] == 1]
    ids = sorted({row["id"] for row in timed})
    total = {i: [0.0, 0.0] for i in ids}
    for row in timed:
        total[row["id"]][0] += row["tokens"]
        total[row["id"]][1] += row["seconds"]
    return np.array([total[i][0] for i in ids]), np.array([total[i][1] for i in ids])
