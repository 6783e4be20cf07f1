"""Reading what stage 07 measured, apart from measuring it, so that the stages after it need no HTTP client."""

import json
from pathlib import Path

import numpy as np

from ..errors import Eagle3Error
from ..params import SamplingSettings
from ..paths import project_path, short_path
from . import meaning
from .options import number_after

DTYPES = ("float32", "bfloat16", "float16")


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
    where = short_path(project_path(folder) / "benchmark.json")
    positions, requests = _field(bench, "positions", int, where), _field(bench, "requests", list, where)
    if not positions or (requests and all(request.get("accepted") is None for request in requests)):
        raise Eagle3Error(f"{where}: mode {bench.get('mode')!r} has no rounds; expected a drafter's run")
    if positions < 0:
        raise Eagle3Error(f"{where}: positions: found {positions}, expected K, the drafts of a round")
    if not requests:
        raise Eagle3Error(f"{where}: requests: found none, expected at least one")
    for name in ("mode", "target"):
        _field(bench, name, str, where)
    if bench.get("dtype", "float32") not in DTYPES:
        raise Eagle3Error(f"{where}: dtype: found {bench['dtype']!r}, expected one of {', '.join(DTYPES)}")
    chunks, seen = bench.get("evidence") == "chunks", set()
    for index, request in enumerate(requests):
        name = _field(request, "id", object, f"{where}: requests: [{index}]")
        if name in seen:
            raise Eagle3Error(f"{where}: requests: id: found {name!r} twice, expected a name for each")
        seen.add(name)
        _check_request(request, f"{where}: requests: {name}", positions, chunks)
    told = {name: bench[name] for name in ("temperature",) if name in bench} | bench.get("sampling", {})
    sampling = SamplingSettings.check(told, f"{where}: sampling")
    options, arguments = bench.get("speculative_options", {}), bench.get("engine_args", [])
    if options or arguments:
        meaning.refuse(bench.get("engine", "vllm"), options, arguments, {}, sampling.temperature)
    return bench | {"sampling": sampling, "sampling_told": sorted(told)}


def _field(values: dict, name: str, kind: type, where: str):
    if not isinstance(values, dict):
        raise Eagle3Error(f"{where}: found {type(values).__name__}, expected fields")
    if name not in values:
        raise Eagle3Error(f"{where}: {name}: found none, expected {kind.__name__}")
    if not isinstance(values[name], kind):
        raise Eagle3Error(f"{where}: {name}: found {type(values[name]).__name__}, expected {kind.__name__}")
    return values[name]


def _check_request(request: dict, where: str, positions: int, chunks: bool) -> None:
    """Refuse a request without tokens, or with counts that cannot be accepted drafts of rounds of K."""
    _field(request, "accepted", object, where)
    told = [name for name in ("accepted", "drafted", "chunks") if request.get(name) is not None]
    for name in ("prompt_ids", "output_ids", *told):
        values = _field(request, name, list, where)
        if wrong := [value for value in values if type(value) is not int or value < 0]:
            raise Eagle3Error(f"{where}: {name}: found {wrong[0]!r}, expected whole numbers from 0 on")
    if not request["prompt_ids"]:
        raise Eagle3Error(f"{where}: prompt_ids: found none, expected at least one")
    for name in () if chunks else {"accepted", "drafted"} & set(told):
        most = max(request[name], default=0)
        if most > positions:
            raise Eagle3Error(f"{where}: {name}: found a round of {most}, expected at most positions = {positions}")


def prompts_in_chunks(bench: dict) -> int:
    """How many prompts the engine may have prefilled in several chunks, by the budget in its command-line words."""
    budget = number_after(bench.get("engine_args", []), "--max-num-batched-tokens", "--chunked-prefill-size")
    lengths = [len(request["prompt_ids"]) for request in bench["requests"]]
    if budget is None:
        return 0
    if bench.get("evidence") == "told" and sum(lengths) > budget:  # asked together, prompts share the budget
        return len(lengths)
    return sum(length > budget for length in lengths)


def throughput(timed: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [prompts] at one request at a time, summed over repeats, in the order of the prompts' ids."""
    timed = [row for row in timed if row["concurrency"] == 1]
    ids = sorted({row["id"] for row in timed})
    total = {i: [0.0, 0.0] for i in ids}
    for row in timed:
        total[row["id"]][0] += row["tokens"]
        total[row["id"]][1] += row["seconds"]
    return np.array([total[i][0] for i in ids]), np.array([total[i][1] for i in ids])
