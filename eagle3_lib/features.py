"""The feature store: safetensors shards of what the target's forward pass gives, and an index.

A shard holds whole samples end to end: ``fused`` [tokens, boundaries x Ht] and ``last_hidden`` [tokens, Ht] in the
storage dtype, ``token_ids`` and ``argmax`` [tokens] int32. ``index.json`` says which samples lie where. Shards are
written whole or not at all, and the index after each, so a killed extraction goes on at the next shard.
"""

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import Eagle3Error
from .provenance import short_path, write_json
from .replay import Features

SCHEMA = 1


@dataclass(frozen=True)
class Sample:
    """One text with its features; ``token_ids``: prompt, then response."""

    id: str
    split: str
    prompt_length: int
    token_ids: list[int]
    features: Features


def bytes_per_token(boundaries: int, hidden: int, dtype: str) -> int:
    """Storage of one token: the boundaries, the last hidden state, and two int32."""
    return (boundaries + 1) * hidden * getattr(torch, dtype).itemsize + 8


class Writer:
    """Writes shards into ``folder``; ``key`` says what they are made from, and other shards are thrown away."""

    def __init__(self, folder: Path, key: dict):
        self.folder, self.path = folder, folder / "index.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.index = json.loads(self.path.read_text()) if self.path.is_file() else {}
        if self.index.get("key") != key:
            for old in folder.glob("shard-*.safetensors"):
                old.unlink()
            self.index = {"schema": SCHEMA, "key": key, "shards": []}

    @property
    def done(self) -> int:
        """Samples in finished shards."""
        return sum(len(shard["samples"]) for shard in self.index["shards"])

    def add_shard(self, samples: list[Sample], dtype: torch.dtype) -> None:
        """Write one shard and note it in the index.

        Raises:
            Eagle3Error: the disk is full; finished shards stay.
        """
        name = f"shard-{len(self.index['shards']):05d}.safetensors"
        tensors = {
            "fused": torch.cat([s.features.fused.to(dtype) for s in samples]).contiguous().cpu(),
            "last_hidden": torch.cat([s.features.last_hidden.to(dtype) for s in samples]).contiguous().cpu(),
            "argmax": torch.cat([s.features.argmax.int() for s in samples]).cpu(),
            "token_ids": torch.tensor([t for s in samples for t in s.token_ids], dtype=torch.int32),
        }
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            save_file(tensors, temporary)
            os.replace(temporary, self.folder / name)
            entries = [
                {"id": s.id, "split": s.split, "prompt_length": s.prompt_length, "tokens": len(s.token_ids)}
                for s in samples
            ]
            index = self.index | {"shards": [*self.index["shards"], {"file": name, "samples": entries}]}
            write_json(self.path, index)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
                raise
            need = sum(t.nbytes for t in tensors.values()) / 2**20
            free = shutil.disk_usage(self.folder).free / 2**20
            raise Eagle3Error(
                f"{short_path(self.folder / name)}: the disk is full: this shard takes {need:.1f} MiB, {free:.1f} MiB are free. "
                f"The {len(self.index['shards'])} shards before it are kept; make room and run the stage again"
            ) from error
        self.index = index


class Store:
    """Read access by memory map.

    Raises:
        Eagle3Error: no index, or a shard that is missing, truncated or of another size than the index says.
    """

    def __init__(self, folder: Path):
        path = folder / "index.json"
        if not path.is_file():
            raise Eagle3Error(f"{short_path(path)}: no such file; expected a feature store (stage extract)")
        self.index = json.loads(path.read_text())
        self.key = self.index["key"]
        self.folder, self.entries, self.files = folder, [], {}
        for shard in self.index["shards"]:
            tokens = sum(sample["tokens"] for sample in shard["samples"])
            self.files[shard["file"]] = self._open(folder / shard["file"], tokens)
            start = 0
            for sample in shard["samples"]:
                self.entries.append(sample | {"file": shard["file"], "start": start})
                start += sample["tokens"]

    @staticmethod
    def _open(path: Path, tokens: int):
        if not path.is_file():
            raise Eagle3Error(
                f"{short_path(path)}: the index names this shard but it is missing; run stage extract again"
            )
        try:
            file = safe_open(path, "pt")
            found = file.get_slice("fused").get_shape()[0]
        except SafetensorError as error:
            raise Eagle3Error(
                f"{short_path(path)}: a truncated or damaged shard ({error}); delete it and index.json, run stage extract again"
            ) from error
        if found != tokens:
            raise Eagle3Error(f"{short_path(path)}: fused: found {found} tokens, expected {tokens} as in index.json")
        return file

    def __len__(self) -> int:
        return len(self.entries)

    def split(self, name: str) -> list[int]:
        """Numbers of the samples of a split ("train" or "held_out")."""
        return [number for number, entry in enumerate(self.entries) if entry["split"] == name]

    def __getitem__(self, number: int) -> Sample:
        entry = self.entries[number]
        file, rows = self.files[entry["file"]], slice(entry["start"], entry["start"] + entry["tokens"])
        features = Features(*(file.get_slice(name)[rows] for name in ("fused", "last_hidden", "argmax")))
        ids = file.get_slice("token_ids")[rows].tolist()
        return Sample(entry["id"], entry["split"], entry["prompt_length"], ids, features)
