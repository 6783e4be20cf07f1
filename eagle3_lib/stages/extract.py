"""Stage 04: the target's features of every sample at the drafter's boundaries, into the feature store."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from ..compat.disk_plan import plan
from ..drafter import checkpoint, vocabulary
from ..errors import Eagle3Error
from ..features import parity
from ..features.backends import BACKENDS, offered
from ..features.store import Sample, Store, Writer, write_online_index
from ..features.wanted import Backend, Wanted
from ..files import sha256, write_json
from ..manifest import stage
from ..params import ExtractParams
from ..paths import project_path, short_path
from ..targets import targets
from ..targets.answers import Answer, iter_answers, samples_file
from ..targets.identity import target_identity


def run(params: ExtractParams) -> dict:
    """Run the target over all samples, shard by shard; a killed run goes on with the shards that are missing.

    Returns:
        the manifest's notes: samples, tokens, boundaries, shards, bytes and planned_bytes, tokens_per_s, parity, coverage.
    Raises:
        Eagle3Error: the plan does not fit the disk, backends that differ (parity), another vocabulary than the drafter's, or
            a disk that fills up on the way (finished shards stay).
    """
    folder, out = targets.resolve(params.target), project_path(params.out)
    config = targets.load_config(folder)
    samples = samples_file(params.data)
    sizes = [
        (a.id, a.split, len(a.prompt_ids), len(a.prompt_ids) + len(a.output_ids)) for a in iter_answers(params.data)
    ]
    tokens = sum(size for *_, size in sizes)
    boundaries, draft_ids, coverage = _drafter(params, config)
    space = plan(tokens, len(boundaries), config.hidden_size, params.feature_dtype, out)
    if params.storage == "disk" and not space["fits"]:
        raise Eagle3Error(f"{short_path(out)}: the store {space['advice']}")
    wanted = Wanted(
        folder=folder,
        boundaries=boundaries,
        draft_ids=draft_ids,
        dtype=params.dtype,
        device=params.device,
        engine_python=params.engine_python,
        engine_options=params.engine_options,
        max_model_len=max((size for *_, size in sizes), default=0) + 8,
    )
    key = {
        "samples_sha256": sha256(samples),
        "target": params.target,
        "target_identity": target_identity(params.target),
        "target_dtype": params.dtype,
        "backend": params.backend,
        "boundaries": list(boundaries),
        "vocabulary": None if draft_ids is None else vocabulary.hash_of(draft_ids),
        "feature_dtype": params.feature_dtype,
        "shard_tokens": params.shard_tokens,
    }
    place = params if params.part < 0 else params.model_copy(update={"out": f"{params.out}/part-{params.part}"})
    with stage("extract", place, {"samples": samples, "target": folder / "config.json"}) as notes:
        if params.parity_with:
            notes["parity"] = check_parity(params, wanted, _first(params.data, params.parity_samples))
        notes |= {
            "tokens": tokens,
            "boundaries": list(boundaries),
            "coverage": coverage,
            "planned_bytes": space["bytes"],
        }
        if params.storage == "online":
            entries = [{"id": i, "split": s, "prompt_length": p, "tokens": t} for i, s, p, t in sizes]
            ids = None if draft_ids is None else draft_ids.tolist()
            online = {"data": params.data, "device": params.device, "draft_ids": ids}
            write_online_index(out, key | online, entries)
            return notes | {"samples": len(entries), "shards": 0, "bytes": 0, "tokens_per_s": None}
        writer = Writer(out, key, params.part, params.parts, params.verify)
        notes |= _write(params, wanted, writer, len(sizes))
        store = Store(out) if params.part < 0 else None
        notes |= {
            "samples": len(store) if store else sum(len(shard["samples"]) for shard in writer.shards.values()),
            "shards": len(writer.shards),
            "bytes": sum(shard["bytes"] for shard in writer.shards.values()),
        }
    return notes


def store(params: ExtractParams) -> Store:
    """The store that the stage wrote."""
    return Store(project_path(params.out))


def coverage(params: ExtractParams) -> dict:
    """coverage.json, as :func:`eagle3_lib.drafter.vocabulary.coverage` returns it."""
    return json.loads((project_path(params.out) / "coverage.json").read_text())


def _write(params: ExtractParams, wanted: Wanted, writer: Writer, samples: int) -> dict:
    """Write the shards that are missing; one is written while the target makes the next."""
    dtype, written = getattr(torch, params.feature_dtype), 0
    with contextlib.ExitStack() as stack:
        backend, pending = None, None
        disk = stack.enter_context(ThreadPoolExecutor(1))
        bar = stack.enter_context(tqdm(total=samples, desc="extract", mininterval=2, unit="sample"))
        for number, group in enumerate(_groups(iter_answers(params.data), params.shard_tokens)):
            ours = params.part < 0 or number % params.parts == params.part
            if not ours or writer.has(number, [answer.id for answer in group]):
                bar.update(len(group))
                continue
            if backend is None:
                backend = stack.enter_context(BACKENDS[params.backend](wanted))
            ready = _featurise(backend, group)
            if pending:
                pending.result()
            pending = disk.submit(writer.add_shard, number, ready, dtype)
            written += sum(len(sample.token_ids) for sample in ready)
            bar.update(len(group))
        if pending:
            pending.result()
        writer.write_index()
        return {"tokens_per_s": round(written / bar.format_dict["elapsed"], 1) if written else None}


def _groups(answers: Iterable[Answer], shard_tokens: int) -> Iterator[list[Answer]]:
    """Runs of samples with at least ``shard_tokens`` tokens each (the last may have fewer)."""
    group, size = [], 0
    for answer in answers:
        group.append(answer)
        size += len(answer.prompt_ids) + len(answer.output_ids)
        if size >= shard_tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


def _featurise(backend: Backend, group: list[Answer]) -> list[Sample]:
    """Samples of a shard, in order; run by length, so that little of a pass is padding."""
    texts = [a.prompt_ids + a.output_ids for a in group]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    captured = dict(zip(order, backend([texts[i] for i in order]), strict=True))
    return [
        Sample(a.id, a.split, len(a.prompt_ids), text, captured[i])
        for i, (a, text) in enumerate(zip(group, texts, strict=True))
    ]


def _drafter(params: ExtractParams, config) -> tuple[tuple[int, ...], Tensor | None, float | None]:
    """(boundaries, target ids of the draft vocabulary or None, its coverage of the training text) for the drafter."""
    layers, where = config.num_hidden_layers, f"{params.drafter}/config.json"
    survey = checkpoint.survey(params.drafter)
    drafter, _ = checkpoint.parse_config(survey.raw, where, layers, own_embedding=False)
    checkpoint.check_fits(drafter, config, params.drafter, params.target)
    if wrong := [k for k in params.boundaries if not 0 <= k <= layers]:
        raise Eagle3Error(f"boundaries: found {wrong[0]}, expected 0 to {layers}, the layers of {params.target}")
    own = None
    if survey.d2t is not None and drafter.draft_vocab_size < config.vocab_size:
        own = survey.d2t.long() + torch.arange(len(survey.d2t))
    counts = vocabulary.count(iter_answers(params.data), config.vocab_size)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    always = [token for token in ends if token is not None]
    ids = vocabulary.settle(own, counts, params.draft_vocab_size, params.change_vocabulary, params.drafter, always)
    everything = torch.arange(config.vocab_size) if ids is None else ids
    coverage = vocabulary.coverage(counts, everything)
    if params.part < 0:
        out, table = project_path(params.out), vocabulary.coverage_by_size(counts)
        write_json(out / "coverage.json", {"size": len(everything), "coverage": coverage, "by_size": table})
        vocabulary.save(everything, config.vocab_size, out / "vocabulary.safetensors")
    return tuple(params.boundaries) or drafter.boundaries, ids, coverage


def _first(data: str, most: int) -> list[list[int]]:
    return [a.prompt_ids + a.output_ids for _, a in zip(range(most), iter_answers(data), strict=False)]


def check_parity(params: ExtractParams, wanted: Wanted, texts: list[list[int]]) -> dict:
    """The same samples through this stage's backend and another one, before the long run; also in parity.json.

    Raises:
        Eagle3Error: they differ, naming the boundaries.
    """
    every = offered(params.parity_with, targets.load_config(wanted.folder).num_hidden_layers)
    if lacking := [k for k in wanted.boundaries if k not in every]:
        raise Eagle3Error(f"parity_with: {params.parity_with} gives no boundary {lacking[0]}")
    found, reference = (
        streams_of(backend, wanted, texts, ks)
        for backend, ks in ((params.backend, wanted.boundaries), (params.parity_with, every))
    )
    rows = parity.compare(found, reference, params.dtype, params.parity_relative_error)
    result = parity.demand(rows, params.backend, params.parity_with)
    write_json(project_path(params.out) / "parity.json", result)
    return result


def streams_of(backend: str, wanted: Wanted, texts: list[list[int]], boundaries: tuple[int, ...]) -> dict[int, Tensor]:
    """{boundary: [tokens of all texts, Ht]} by one backend."""
    with BACKENDS[backend](replace(wanted, boundaries=boundaries, last_hidden=False)) as features:
        fused = torch.cat([f.fused.cpu() for f in features(texts)])
    return dict(zip(boundaries, fused.unflatten(-1, (len(boundaries), -1)).unbind(-2), strict=True))


if __name__ == "__main__":  # one part of several hosts: python -m eagle3_lib.stages.extract PARAMS.yaml
    run(ExtractParams.check(yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[1]))
