"""The draft vocabulary: which of the target's tokens a drafter can propose.

Counted over the tokens that the target wrote in the training split. A drafter's map from its ids to the target's (``d2t``
holds offsets: target id = draft id + d2t[draft id]) belongs to its head: a finetune keeps it, and puts another in its
place only when told to.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import Eagle3Error
from ..targets.answers import Answer

SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)


def count(answers: Iterable[Answer], vocab_size: int) -> Tensor:
    """[vocab] how often the target wrote each token in the training split (the tokens that the loss counts)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for answer in answers:
        if answer.split == "train":
            np.add.at(counts, answer.output_ids, 1)
    return torch.from_numpy(counts)


def most_frequent(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """[size] target ids, ascending: ``always`` (end tokens), then the most frequent; equally frequent by smaller id.

    Raises:
        Eagle3Error: a size beyond the target's vocabulary.
    """
    if not 0 < size <= len(counts):
        raise Eagle3Error(f"draft_vocab_size: found {size}, expected 1 to {len(counts)}, the target's vocabulary")
    weighted = counts.clone()
    weighted[list(always)] = counts.max() + 1
    order = torch.sort(weighted, descending=True, stable=True).indices
    return order[:size].sort().values


def maps(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """{"d2t": [draft vocab] int64 offsets, "t2d": [vocab] bool} of ascending target ids."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": t2d}


def coverage(counts: Tensor, target_ids: Tensor) -> float:
    """Share of the counted tokens that a vocabulary holds."""
    return float(counts[target_ids].sum() / counts.sum().clamp(min=1))


def coverage_by_size(counts: Tensor, sizes: Iterable[int] = SIZES) -> list[dict[str, int | float]]:
    """[{"size", "coverage"}] of the most frequent tokens, up to the target's whole vocabulary."""
    sizes = [size for size in sizes if size < len(counts)] + [len(counts)]
    running = counts.sort(descending=True).values.cumsum(0)
    return [{"size": size, "coverage": float(running[size - 1] / running[-1].clamp(min=1))} for size in sizes]


def settle(
    own: Tensor | None, counts: Tensor, size: int, change: bool, where: str, always: Iterable[int] = ()
) -> Tensor | None:
    """The target ids of the vocabulary to train with.

    Args:
        own: the drafter's target ids; None where it has the target's whole vocabulary.
        size: 0 keeps the drafter's; otherwise a vocabulary of the most frequent tokens.
        change: another map than the drafter's is wanted.
    Returns:
        ascending target ids, or None for the target's whole vocabulary.
    Raises:
        Eagle3Error: another map that nobody asked for.
    """
    if not size:
        return own
    new = most_frequent(counts, size, always)
    before = torch.arange(len(counts)) if own is None else own
    if torch.equal(new, before) or change:
        return new
    kept = torch.isin(new, before).sum().item()
    raise Eagle3Error(
        f"{where}: draft_vocab_size: found {size}, whose map keeps {kept} of the drafter's {len(before)} tokens; its head is "
        "trained for its own map. Expected 0, which keeps it, or change_vocabulary: true, which trains a new head"
    )


def hash_of(target_ids: Tensor) -> str:
    """What tells one map from another."""
    return hashlib.sha256(target_ids.long().numpy().tobytes()).hexdigest()


def save(target_ids: Tensor, vocab_size: int, path: Path) -> None:
    save_file(maps(target_ids, vocab_size), path)
