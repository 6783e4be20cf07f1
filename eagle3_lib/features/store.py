"""The feature store: safetensors shards of what the target's forward pass gives, and an index.

A shard holds whole samples end to end: ``fused`` [tokens, boundaries x Ht] and ``last_hidden`` [tokens, Ht] in the
storage type, ``token_ids`` and ``argmax`` [tokens] int32, ``draft_mass`` [tokens] float32. In float8 each row is stored
in blocks of 64 values, divided by a float32 scale that makes the largest of a block 448: ``fused_scale`` and
``last_hidden_scale`` [tokens, values / 64]. ``index.json`` says which samples lie where, and each shard's size and sha256.

Shards are written whole or not at all, and the index after each, so a killed extraction goes on at the next shard. Hosts
that share a folder write shards of one numbering, each its own index (``index-PART-of-PARTS.json``); joining them is one
index over the same files. An index without shards is "online": its samples' features are computed where they are read.
"""

import errno
import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..compat.disk_plan import scale_block
from ..errors import Eagle3Error
from ..files import sha256, write_json
from ..paths import project_path, short_path
from ..targets import targets
from ..targets.answers import iter_answers
from ..targets.capture import Features, capture

SCHEMA = 2
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
ALIGNMENT = 8  # of the header's length, so that tensors begin at a multiple of it (safetensors format)
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", FLOAT8: "F8_E4M3", torch.int32: "I32"}


@dataclass(frozen=True)
class Sample:
    """One text with its features; ``token_ids``: prompt, then response."""

    id: str
    split: str
    prompt_length: int
    token_ids: list[int]
    features: Features


# --- storage types ----------------------------------------------------------------------------------------------------


def to_float8(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[T, W] values as float8 and [T, W / block] float32 scales; value = float8 x scale."""
    blocks = values.float().unflatten(-1, (-1, block))
    scale = (blocks.abs().amax(-1) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (blocks / scale.unsqueeze(-1)).to(FLOAT8).flatten(-2), scale


def from_float8(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of :func:`to_float8`."""
    blocks = stored.float().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale.unsqueeze(-1)).flatten(-2)


def stored(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """A sample's tensors as a shard holds them, on the CPU."""
    features, hidden = sample.features, sample.features.last_hidden.shape[-1]
    mass = torch.ones(len(features.argmax)) if features.draft_mass is None else features.draft_mass.float()
    tensors = {
        "argmax": features.argmax.int(),
        "draft_mass": mass,
        "token_ids": torch.tensor(sample.token_ids, dtype=torch.int32),
    }
    for name, values in (("fused", features.fused), ("last_hidden", features.last_hidden)):
        if dtype == FLOAT8:
            tensors[name], tensors[f"{name}_scale"] = to_float8(values, scale_block(hidden))
        else:
            tensors[name] = values.to(dtype)
    return {name: tensors[name].contiguous().cpu() for name in sorted(tensors)}


# --- writing ----------------------------------------------------------------------------------------------------------


def write_shard(path: Path, samples: list[dict[str, Tensor]]) -> tuple[int, str]:
    """Write samples' tensors end to end as one safetensors file, hashing what is written on the way.

    Written piece by piece: the whole shard is never in memory a second time, and hashing (in its own thread) costs no
    second pass over the file.

    Returns:
        (bytes, sha256) of the file, which is on the disk when this returns.
    """
    header, offset = {}, 0
    for name, first in samples[0].items():
        size = sum(sample[name].nbytes for sample in samples)
        shape = [sum(len(sample[name]) for sample in samples), *first.shape[1:]]
        header[name] = {"dtype": KINDS[first.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        head: bytes | memoryview = len(text).to_bytes(8, "little") + text
        for piece in (head, *(_raw(s[name]) for name in header for s in samples)):
            hashed = hashing.submit(digest.update, piece)  # one thread: in order
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        hashed.result()
        return file.tell(), digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class Writer:
    """Writes shards into ``folder``; ``key`` says what they are made from, and other shards are thrown away.

    Args:
        part, parts: which of the hosts that share the folder; its index is its own. The default is the whole, which takes
            over what parts have finished.
        verify: check the sha256 of finished shards; damaged ones are named and written anew.
    """

    def __init__(self, folder: Path, key: dict, part: int = -1, parts: int = 1, verify: bool = False):
        self.folder = folder
        self.path = folder / ("index.json" if part < 0 else f"index-{part:03d}-of-{parts:03d}.json")
        folder.mkdir(parents=True, exist_ok=True)
        known = [self.path] if part >= 0 else [self.path, *sorted(folder.glob("index-*-of-*.json"))]
        indexes = [json.loads(path.read_text()) for path in known if path.is_file()]
        ours = [index for index in indexes if index["key"] == key and index["schema"] == SCHEMA]
        self.shards = {shard["file"]: shard for index in ours for shard in index["shards"]}
        if part < 0:
            for old in folder.glob("shard-*.safetensors"):
                if old.name not in self.shards:
                    old.unlink()
        for name in damaged(folder, list(self.shards.values()), verify):
            print(f"{short_path(folder / name)}: damaged, written anew")
            del self.shards[name]
        self.key = key

    def has(self, number: int, ids: list[str]) -> bool:
        """The shard is finished and holds these samples."""
        shard = self.shards.get(shard_name(number))
        return shard is not None and [sample["id"] for sample in shard["samples"]] == ids

    def add_shard(self, number: int, samples: list[Sample], dtype: torch.dtype) -> None:
        """Write one shard and note it in the index.

        Raises:
            Eagle3Error: the disk is full; finished shards stay.
        """
        path = self.folder / shard_name(number)
        tensors = [stored(sample, dtype) for sample in samples]
        temporary = self.folder / f".{path.name}.{os.getpid()}"
        try:
            size, digest = write_shard(temporary, tensors)
            os.replace(temporary, path)
            self.shards[path.name] = {"file": path.name, "bytes": size, "sha256": digest, "samples": _entries(samples)}
            self.write_index()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self.shards.pop(path.name, None)
            if error.errno != errno.ENOSPC:
                raise
            need = sum(t.nbytes for sample in tensors for t in sample.values()) / 2**20
            free = shutil.disk_usage(self.folder).free / 2**20
            raise Eagle3Error(
                f"{short_path(path)}: the disk is full: this shard takes {need:.1f} MiB, {free:.1f} MiB are free. "
                f"The {len(self.shards)} shards before it are kept; make room and run the stage again"
            ) from error

    def write_index(self) -> None:
        shards = [self.shards[name] for name in sorted(self.shards)]
        write_json(self.path, {"schema": SCHEMA, "key": self.key, "shards": shards})


def _entries(samples: list[Sample]) -> list[dict]:
    return [
        {"id": s.id, "split": s.split, "prompt_length": s.prompt_length, "tokens": len(s.token_ids)} for s in samples
    ]


def write_online_index(folder: Path, key: dict, entries: list[dict]) -> None:
    """An index whose features are computed where they are read; ``key`` names the samples and the target."""
    write_json(folder / "index.json", {"schema": SCHEMA, "key": key, "shards": [], "online": entries})


# --- reading ----------------------------------------------------------------------------------------------------------


def damaged(folder: Path, shards: list[dict], verify: bool = True) -> list[str]:
    """Names of the shards that are missing, of another size than the index says or, with ``verify``, of another sha256."""

    def bad(shard: dict) -> bool:
        path = folder / shard["file"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            return True
        return verify and sha256(path) != shard["sha256"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [shard["file"] for shard, wrong in zip(shards, pool.map(bad, shards), strict=True) if wrong]


class Store:
    """Read access by memory map, in any order.

    Args:
        verify: check every shard's sha256 (reads the whole store once).
        skip_damaged: name damaged shards and leave their samples out, instead of an error.
    Raises:
        Eagle3Error: no index, or a shard that is missing, truncated or not as the index says.
    """

    def __init__(self, folder: Path, verify: bool = False, skip_damaged: bool = False):
        path = folder / "index.json"
        if not path.is_file():
            raise Eagle3Error(f"{short_path(path)}: no such file; expected a feature store (stage extract)")
        self.index = json.loads(path.read_text())
        if self.index["schema"] != SCHEMA:
            raise Eagle3Error(
                f"{short_path(path)}: schema: found {self.index['schema']}, expected {SCHEMA}; run stage extract again"
            )
        self.key, self.folder, self.entries, self.files = self.index["key"], folder, [], {}
        self.online = Online(self.key) if "online" in self.index else None
        if self.online:
            self.entries = self.index["online"]
        wrong = damaged(folder, self.index["shards"], verify)
        for shard in self.index["shards"]:
            if shard["file"] in wrong:
                self._tell(folder / shard["file"], shard, skip_damaged)
                continue
            tokens = sum(sample["tokens"] for sample in shard["samples"])
            self.files[shard["file"]] = self._open(folder / shard["file"], tokens)
            start = 0
            for sample in shard["samples"]:
                self.entries.append(sample | {"file": shard["file"], "start": start})
                start += sample["tokens"]

    @staticmethod
    def _tell(path: Path, shard: dict, skip: bool) -> None:
        if not path.is_file():
            wrong = "the index names this shard but it is missing"
        elif (size := path.stat().st_size) != shard["bytes"]:
            wrong = f"a truncated or damaged shard (found {size} bytes, expected {shard['bytes']})"
        else:
            wrong = "a damaged shard (its sha256 is not the index's)"
        said = f"{short_path(path)}: {wrong}"
        if not skip:
            raise Eagle3Error(f"{said}; run stage extract again: it writes this shard anew and keeps the others")
        print(f"{said}: its {len(shard['samples'])} samples are left out")

    @staticmethod
    def _open(path: Path, tokens: int) -> dict[str, Tensor]:
        """The shard's tensors, as views of the mapped file."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise Eagle3Error(
                f"{short_path(path)}: a truncated or damaged shard ({error}); delete it and run stage extract again"
            ) from error
        if missing := {"argmax", "draft_mass", "fused", "last_hidden", "token_ids"} - tensors.keys():
            raise Eagle3Error(f"{short_path(path)}: a damaged shard: found no tensor {', '.join(sorted(missing))}")
        if (found := len(tensors["fused"])) != tokens:
            raise Eagle3Error(f"{short_path(path)}: fused: found {found} tokens, expected {tokens} as in index.json")
        return tensors

    def __len__(self) -> int:
        return len(self.entries)

    def split(self, name: str) -> list[int]:
        """Numbers of the samples of a split ("train" or "held_out")."""
        return [number for number, entry in enumerate(self.entries) if entry["split"] == name]

    def __getitem__(self, number: int) -> Sample:
        return self.window(number, 0, self.entries[number]["tokens"])

    def window(self, number: int, start: int, stop: int) -> Sample:
        """Positions [start, stop) of a sample. Features are views of the mapped file, in the storage type; float8's are float32."""
        entry = self.entries[number]
        if self.online:
            return self.online.sample(entry, slice(start, stop))
        tensors, rows = self.files[entry["file"]], slice(entry["start"] + start, entry["start"] + stop)
        values = {
            name: from_float8(tensors[name][rows], tensors[f"{name}_scale"][rows])
            if tensors[name].dtype == FLOAT8
            else tensors[name][rows]
            for name in ("fused", "last_hidden")
        }
        features = Features(**values, argmax=tensors["argmax"][rows], draft_mass=tensors["draft_mass"][rows])
        ids = tensors["token_ids"][rows].tolist()
        return Sample(entry["id"], entry["split"], max(entry["prompt_length"] - start, 0), ids, features)


class Online:
    """Features computed where they are read: the target is loaded at the first sample."""

    def __init__(self, key: dict):
        self.key, self.texts = key, {}
        self.target: Any = None

    def sample(self, entry: dict, rows: slice) -> Sample:
        key = self.key
        if self.target is None:
            dtype = getattr(torch, key["target_dtype"])
            self.target = targets.load(targets.resolve(key["target"]), dtype, key["device"])
            self.texts = {a.id: a.prompt_ids + a.output_ids for a in iter_answers(project_path(key["data"]))}
        ids = self.texts[entry["id"]]
        draft_ids = torch.tensor(key["draft_ids"], device=self.target.device) if key.get("draft_ids") else None
        (whole,) = capture(self.target, [ids], key["boundaries"], draft_ids=draft_ids)
        features = Features(whole.fused[rows], whole.last_hidden[rows], whole.argmax[rows])
        features.draft_mass = None if draft_ids is None else whole.draft_mass[rows]
        return Sample(
            entry["id"], entry["split"], max(entry["prompt_length"] - (rows.start or 0), 0), ids[rows], features
        )
