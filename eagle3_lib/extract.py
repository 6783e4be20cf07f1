"""Stage 04: the target's features of every sample at the drafter's boundaries, into the feature store."""

import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from . import checkpoint, targets
from .answers import Answer, read_answers
from .errors import Eagle3Error
from .features import Sample, Store, Writer, bytes_per_token
from .params import ExtractParams
from .provenance import folder_hash, project_path, sha256, short_path, stage
from .replay import capture


def plan(tokens: int, boundaries: int, hidden: int, dtype: str, folder: Path) -> dict:
    """Bytes that a feature store of so many tokens takes, and what is free where it goes."""
    while not folder.exists():
        folder = folder.parent
    need = tokens * bytes_per_token(boundaries, hidden, dtype)
    free = shutil.disk_usage(folder).free
    return {
        "tokens": tokens,
        "bytes_per_token": bytes_per_token(boundaries, hidden, dtype),
        "bytes": need,
        "free_bytes": free,
        "fits": need < free,
    }


def run(params: ExtractParams) -> dict:
    """Run the target over all samples, shard by shard; a killed run goes on with the next shard.

    Raises:
        Eagle3Error: the plan does not fit the disk, or the disk fills up on the way (finished shards stay).
    """
    folder, out = targets.resolve(params.target), project_path(params.out)
    config = targets.load_config(folder)
    raw = checkpoint.read_config(project_path(params.drafter))
    where = f"{params.drafter}/config.json"
    drafter_config, _ = checkpoint.parse_config(raw, where, config.num_hidden_layers, own_embedding=False)
    checkpoint.check_fits(drafter_config, config, params.drafter, params.target)
    samples_path = project_path(params.data) / "samples.jsonl"
    answers = read_answers(params.data)
    tokens = sum(len(a.prompt_ids) + len(a.output_ids) for a in answers)
    space = plan(tokens, len(drafter_config.boundaries), config.hidden_size, params.feature_dtype, out)
    if not space["fits"]:
        raise Eagle3Error(
            f"{short_path(out)}: {space['bytes'] / 1e9:.2f} GB of features do not fit: {space['free_bytes'] / 1e9:.2f} GB are free"
        )
    key = {
        "samples_sha256": sha256(samples_path),
        "target_sha256": folder_hash(folder / "config.json"),
        "target": params.target,
        "boundaries": list(drafter_config.boundaries),
        "feature_dtype": params.feature_dtype,
        "shard_tokens": params.shard_tokens,
    }
    with stage("extract", params, {"samples": samples_path, "target": folder / "config.json"}) as notes:
        writer = Writer(out, key)
        model, done = None, writer.done
        with tqdm(total=len(answers), initial=done, desc="extract", mininterval=2, unit="sample") as bar:
            for group in _shards(answers[done:], params.shard_tokens):
                model = model or targets.load(folder, torch.float32, params.device)
                writer.add_shard(
                    _featurise(model, group, drafter_config.boundaries), getattr(torch, params.feature_dtype)
                )
                bar.update(len(group))
        store = Store(out)
        notes |= {
            "samples": len(store),
            "tokens": tokens,
            "boundaries": list(drafter_config.boundaries),
            "shards": len(store.files),
            "bytes": sum((out / name).stat().st_size for name in store.files),
            "planned_bytes": space["bytes"],
            "tokens_per_s": None if done else round(tokens / bar.format_dict["elapsed"], 1),
        }
    return notes


def _shards(answers: list[Answer], shard_tokens: int):
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


def _featurise(model, group: list[Answer], boundaries: tuple[int, ...]) -> list[Sample]:
    texts = [a.prompt_ids + a.output_ids for a in group]
    captured = capture(model, texts, boundaries)
    return [Sample(a.id, a.split, len(a.prompt_ids), t, f) for a, t, f in zip(group, texts, captured, strict=True)]
