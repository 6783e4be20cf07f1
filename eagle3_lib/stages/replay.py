"""Stage 08: replay one drafter on the tokens that an engine emitted, and judge the engine's rounds."""

import torch
from tqdm import tqdm

from ..drafter import checkpoint
from ..drafter.model import Drafter
from ..engines import measured, options
from ..errors import Eagle3Error
from ..manifest import stage
from ..params import ReplayParams, SamplingSettings
from ..paths import project_path
from ..targets import targets
from ..verdict import begun, changes, emitted, hypotheses, lossless, replayed, suspects
from ..verdict.replayed import Tally
from ..verdict.rounds import at_context_limit


def run(params: ReplayParams) -> dict:
    """Stage 08: replay one drafter on the tokens that the engine emitted, and lay its rounds beside the engine's.

    Returns:
        {"drafter", "engine", "target", "positions", "dtype": the coarser of engine's and replay's, "sampling",
        "untold_defaults": settings of the target's generation_config.json that the run says nothing of, "evidence", "contradictions",
        "requests": as :func:`eagle3_lib.verdict.hypotheses.examine`, "agreement": {"rounds", "equal", "cut", "unsure",
        "without_drafts", "tokens_not_greedy"}, "engine_acceptance", "replay_acceptance", "sampled": as
        :func:`eagle3_lib.verdict.lossless.judge` at a temperature above 0, else None, "plain": as
        :func:`eagle3_lib.verdict.emitted.plain`, None where there is no plain run}. Also in replay.json.
    Raises:
        Eagle3Error: the benchmark is missing, was of plain or n-gram decoding, or of another target; its rounds cannot be
            those of its K; or its engine was set to accept otherwise than by the target.
    """
    bench = measured.read_rounds(params.benchmark)
    positions = bench["positions"]
    if bench["target"] != params.target:
        raise Eagle3Error(
            f"{params.benchmark}/benchmark.json: target: found {bench['target']!r}, expected {params.target!r}"
        )
    inputs = {"benchmark": project_path(params.benchmark) / "benchmark.json", "drafter": project_path(params.drafter)}
    with stage("replay", params, inputs) as notes:
        dtype = getattr(torch, params.dtype)
        folder = targets.resolve(params.target)
        target = targets.load(folder, dtype, params.device)
        drafter = checkpoint.load_for(params.drafter, params.target, target, dtype)
        rounded = emitted.coarser(bench.get("dtype", params.dtype), params.dtype)
        told = emitted.Told(bench["sampling"], rounded, targets.end_ids(folder))
        ranks = options.tensor_parallel(bench.get("engine_args", []))
        tried = suspects.suspects(drafter, changes.TargetParts.of(target, ranks))
        header = {
            "drafter": params.name,
            "engine": params.engine,
            "target": params.target,
            "positions": positions,
            "dtype": told.dtype,
            "sampling": told.sampling.model_dump(),
            "untold_defaults": {
                name: value
                for name, value in targets.sampling_defaults(folder).items()
                if name not in bench["sampling_told"]
            },
            "evidence": bench.get("evidence", "told"),
            "prompts_in_chunks": measured.prompts_in_chunks(bench),
            "at_limit": sum(at_context_limit(request, bench) for request in bench["requests"]),
            "contradictions": (bench.get("cross_check") or {}).get("contradictions", []),
            "suspects": [suspects.told(suspect, params.drafter) for suspect in tried.values()],
        }
        path, emissions = project_path(params.out) / "replay.json", []
        tally = Tally(positions)
        setups = {name: suspect.setup for name, suspect in tried.items() if suspect.fault is None}
        examined = hypotheses.examining(target, drafter, bench["requests"], positions, None, told, ranks, setups)
        with replayed.Writer(path, header) as writer:
            for request in tqdm(examined, total=len(bench["requests"]), desc="replay", mininterval=2):
                if "emission" in request:
                    emissions.append(request.pop("emission"))
                tally.add(request)
                writer.add(request)
            sampled = None
            if emissions:
                sampled = lossless.judge(lossless.Emission.join(emissions), told.sampling.temperature)
            plain = _plain(params, bench, target, drafter, told)
            summary = tally.summary() | {"sampled": sampled, "plain": plain}
            writer.finish(summary)
        found = begun.find(replayed.read(path), target, drafter, bench["requests"], ranks)
        if found:
            with replayed.Writer(path, header | {"since": found.since}) as writer:
                for request in found.requests(replayed.read(path)):
                    writer.add(request)
                writer.finish(summary)
        notes |= tally.agreement
    return replayed.read(path)


def _plain(params: ReplayParams, bench: dict, target, drafter: Drafter, told) -> dict | None:
    """The same engine's plain decoding of the same requests, where it was measured and asked in the same way."""
    if not params.plain or not (project_path(params.plain) / "benchmark.json").is_file():
        return None
    found = measured.read(params.plain)
    where = f"{params.plain}/benchmark.json: sampling"
    if found["target"] != bench["target"] or SamplingSettings.check(found.get("sampling", {}), where) != told.sampling:
        return None
    return emitted.plain(target, drafter.config.boundaries[0], found["requests"], told)


def emitted_words(params: ReplayParams, request_id: str) -> list[str]:
    """The tokens of one measured answer as text."""
    requests = measured.read(params.benchmark)["requests"]
    (output_ids,) = (request["output_ids"] for request in requests if request["id"] == request_id)
    tokenizer = targets.load_tokenizer(targets.resolve(params.target))
    return [tokenizer.decode([token]) for token in output_ids]
