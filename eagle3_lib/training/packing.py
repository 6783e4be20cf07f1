"""Packing: the samples of a step divided into passes, and laid end to end in each, without padding.

A step is the same whatever the number of processes and passes: its samples are decided first, then divided. So a run on
one process, on eight, or resumed on another number follows the same curve.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..drafter.attention import Documents
from ..features.store import Sample

Job = TypeVar("Job")
Read = TypeVar("Read")


@dataclass
class Labels:
    """What the positions teach; P positions whose likeliest token is in the draft vocabulary.

    likeliest: [P] its draft id; last_hidden: [P, Ht] from which the target's distribution is computed; slots: [K, P] the
    slot whose step k predicts the position's next token; inside: [K, P] whether that slot lies in the same text.
    counted, taught: [K] positions that count in each step, and those of them that teach; the others (out of the draft
    vocabulary) are misses. These two stay on the CPU.
    """

    likeliest: Tensor
    last_hidden: Tensor
    slots: Tensor
    inside: Tensor
    counted: Tensor
    taught: Tensor


@dataclass
class Pass:
    """Samples laid end to end for one forward and backward pass. fused [1, N, F]; token_ids [1, N + 1]: one of padding."""

    fused: Tensor
    token_ids: Tensor
    documents: Documents
    labels: Labels

    @property
    def tokens(self) -> int:
        return sum(self.documents.lengths)

    def to(self, device: torch.device | str) -> "Pass":
        """The pass on a device, its copies running beside computation where memory is pinned."""
        move = lambda tensor: tensor.to(device, non_blocking=True)  # noqa: E731
        documents = Documents(self.documents.lengths, move(self.documents.bounds))
        names = ("likeliest", "last_hidden", "slots", "inside")
        moved = {name: move(getattr(self.labels, name)) for name in names}
        labels = Labels(**moved, counted=self.labels.counted, taught=self.labels.taught)
        return Pass(move(self.fused), move(self.token_ids), documents, labels)


def pack(samples: list[Sample], target_ids: Tensor, steps: int, teaches: bool = True, pin: bool = False) -> Pass:
    """Lay samples end to end.

    Position t of a sample, from the prompt's last one on, teaches the target's distribution of its next token to step k
    at slot t - 1 - k.

    Args:
        target_ids: [draft vocabulary] the target's id of each draft id, rising.
        steps: K.
        teaches: False for a pass that only keeps a process in step with the others.
        pin: put it into pinned memory, from which a GPU copies in the background.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    documents = Documents.of(lengths)
    own = torch.cat([torch.arange(max(s.prompt_length - 1, 1), n) for s, n in zip(samples, lengths, strict=True)])
    starts = documents.bounds[:-1].long()
    taught = torch.tensor([n - max(s.prompt_length - 1, 1) for s, n in zip(samples, lengths, strict=True)])
    places = own + starts.repeat_interleave(taught.clamp_min(0))
    if not teaches:
        own, places = own[:0], places[:0]
    likeliest = torch.cat([sample.features.argmax for sample in samples]).cpu().long()[places]
    draft_ids = torch.searchsorted(target_ids, likeliest).clamp_max(len(target_ids) - 1)
    known = target_ids[draft_ids] == likeliest
    back = torch.arange(1, steps + 1)[:, None]
    inside = own >= back
    labels = Labels(
        draft_ids[known],
        torch.cat([sample.features.last_hidden for sample in samples]).cpu()[places[known]],
        (places - back)[:, known],
        inside[:, known],
        inside.sum(1),
        inside[:, known].sum(1),
    )
    ids = torch.tensor([[token for sample in samples for token in sample.token_ids] + [0]])
    fused = torch.cat([sample.features.fused for sample in samples]).cpu()[None]
    if pin:
        fused, labels.last_hidden = fused.pin_memory(), labels.last_hidden.pin_memory()
    return Pass(fused, ids, documents, labels)


def divide(lengths: list[int], tokens_per_pass: int, processes: int = 1) -> list[list[int]]:
    """Divide the samples of a step into as few passes as hold them, a whole number for each process.

    Longest first into the emptiest pass (LPT scheduling), so that processes finish together.

    Args:
        lengths: tokens of each sample.
        tokens_per_pass: tokens of a pass; only a single sample may be longer.
    Returns:
        the passes, each the numbers of its samples, rising; process r takes passes r, r + processes, ... A pass is empty
        where samples are fewer than processes.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    count = -(-sum(lengths) // tokens_per_pass)
    while True:
        passes, loads = [[] for _ in range(count)], [0] * count
        for number in order:
            emptiest = loads.index(min(loads))
            passes[emptiest].append(number)
            loads[emptiest] += lengths[number]
        full = any(load > tokens_per_pass and len(some) > 1 for load, some in zip(loads, passes, strict=True))
        if not full and count % processes == 0:
            return [sorted(some) for some in passes]
        count += 1


def read_ahead(jobs: Iterable[Job], read: Callable[[Job], Read], depth: int = 2) -> Iterator[Read]:
    """``read`` of each job in order, up to ``depth`` of them done by a thread while the caller works on another."""
    waiting: deque = deque()
    with ThreadPoolExecutor(1) as pool:
        for job in jobs:
            waiting.append(pool.submit(read, job))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
