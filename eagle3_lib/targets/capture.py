"""The target's residual stream at decoder layers, from one forward pass of transformers.

Boundary k is the input of decoder layer k; the last one, the output of the last layer before the final norm.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

RESIDUAL, UPDATE = (
    "residual",
    "update",
)  # the residual stream at a boundary; what the layer before it added last (its MLP)
NORMED = "normed"  # made of it: after the target's final norm


@dataclass(frozen=True)
class OtherRanks:
    """Of UPDATE, what ranks 1 and up add under tensor parallelism of ``ranks``: the MLP's other intermediate columns."""

    ranks: int


@dataclass(frozen=True)
class Without:
    """Made of two: the residual stream without ``part`` of it, UPDATE or OtherRanks."""

    part: str | OtherRanks


BEFORE_UPDATE = Without(UPDATE)
Kind = str | OtherRanks | Without
Stream = tuple[Kind, int]  # of a boundary


@dataclass
class Features:
    """What one forward pass of the target gives for one text.

    fused: [T, boundaries x Ht] residual streams, in the order of the boundaries; last_hidden: [T, Ht] after the final
    norm; argmax: [T] the target's greedy next token at each position; streams: [T, Ht] for each captured stream;
    draft_mass: [T] the probability that the target gives to the draft vocabulary, where that was asked for.
    """

    fused: Tensor
    last_hidden: Tensor
    argmax: Tensor
    streams: dict[Stream, Tensor] = field(default_factory=dict)
    draft_mass: Tensor | None = None


@torch.no_grad()
def capture(
    target,
    texts: list[list[int]],
    boundaries: Iterable[int],
    tokens_per_pass: int = 4096,
    also: Iterable[Stream] = (),
    draft_ids: Tensor | None = None,
) -> Iterable[Features]:
    """Run the target over token sequences and keep its residual stream at the boundaries.

    Boundary k is the input of decoder layer k; the last one, the output of the last layer before the final norm. Texts
    are padded on the right to the longest of a pass; with causal attention padding never reaches a real position.

    Args:
        also: further streams (RESIDUAL, UPDATE or OtherRanks at a boundary) that hypotheses need; see :func:`captured_for`.
        draft_ids: target ids of the draft vocabulary, for ``draft_mass``.
    Yields:
        :class:`Features` for each text, in order.
    """
    boundaries = list(boundaries)
    wanted = list(dict.fromkeys([*((RESIDUAL, k) for k in boundaries), *also]))
    seen: dict[Stream, Tensor] = {}
    hooks = [_hook(target.base_model.layers, stream, seen) for stream in wanted]
    try:
        for group in _passes(texts, tokens_per_pass):
            length = max(len(text) for text in group)
            ids = torch.tensor([text + [0] * (length - len(text)) for text in group], device=target.device)
            mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in group], device=target.device)
            hidden = target.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            lengths = [len(text) for text in group]
            argmax, mass = choices(target.lm_head, hidden[mask.bool()], draft_ids)
            masses = [None] * len(group) if mass is None else mass.split(lengths)
            for row, (n, ids_of, mass_of) in enumerate(zip(lengths, argmax.split(lengths), masses, strict=True)):
                streams = {stream: values[row, :n] for stream, values in seen.items()}
                fused = torch.cat([streams[RESIDUAL, k] for k in boundaries], -1)
                yield Features(fused, hidden[row, :n], ids_of, streams, mass_of)
    finally:
        for hook in hooks:
            hook.remove()


def choices(
    head: Callable, last_hidden: Tensor, draft_ids: Tensor | None = None, rows: int = 1024, slice_rows: int = 64
):
    """([T] greedy ids, [T] float32 probability of the draft vocabulary or None).

    ``rows`` positions' logits are held at a time, and exponentials of ``slice_rows``, few enough for a processor's cache.
    """
    argmax, mass, among = [], [], None
    for hidden in last_hidden.split(rows):
        logits = head(hidden)
        if draft_ids is None:
            argmax.append(logits.argmax(-1))
            continue
        if among is None:  # [V, 2] of 0 and 1: the draft vocabulary, and all
            among = torch.ones(logits.shape[-1], 2, device=logits.device)
            among[:, 0] = torch.zeros_like(among[:, 1]).index_fill(0, draft_ids, 1)
        for part in logits.split(slice_rows):
            top, ids = part.max(-1, keepdim=True)
            drafted, total = ((part.float() - top).exp_() @ among).unbind(-1)
            argmax.append(ids.squeeze(-1))
            mass.append(drafted / total)
    return torch.cat(argmax), torch.cat(mass) if mass else None


def _hook(layers, stream: Stream, seen: dict[Stream, Tensor]):
    """Put ``stream`` into ``seen`` whenever the target runs."""
    kind, boundary = stream
    layer_before = layers[boundary - 1]

    def keep(_, __, output):
        seen[stream] = output[0] if isinstance(output, tuple) else output

    def keep_input(_, args, kwargs):
        seen[stream] = args[0] if args else kwargs["hidden_states"]

    def keep_part(down_proj, args, _, ranks):
        first = args[0].shape[-1] // ranks
        seen[stream] = args[0][..., first:] @ down_proj.weight[:, first:].T

    if isinstance(kind, OtherRanks):
        return layer_before.mlp.down_proj.register_forward_hook(partial(keep_part, ranks=kind.ranks))
    if kind == UPDATE:
        return layer_before.mlp.register_forward_hook(keep)
    if boundary == len(layers):
        return layers[-1].register_forward_hook(keep)
    return layers[boundary].register_forward_pre_hook(keep_input, with_kwargs=True)


def _passes(texts: list[list[int]], tokens_per_pass: int) -> Iterable[list[list[int]]]:
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) + 1) * max(len(text), *map(len, group)) > tokens_per_pass:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
