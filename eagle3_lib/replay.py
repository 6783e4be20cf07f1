"""Replay: what a correct engine must have accepted, round by round, from its own tokens.

A greedy chain draft is accepted iff it equals the token that the engine emitted (at any temperature: the draft is
one-hot in rejection sampling, Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). So the target's features of the
emitted tokens and the drafter's weights decide every round: a round that starts at slot t accepts the longest run of
steps k = 0, 1, ... with draft_k(t) = x[t+2+k]; the next round starts at t + accepted + 1. The first starts at the last
prompt token, since prefill itself emits x[prompt_len].
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafter import Drafter


@dataclass
class Features:
    """What one forward pass of the target gives for one text.

    fused: [T, boundaries x Ht] residual streams, in the order of the boundaries; last_hidden: [T, Ht] after the final
    norm; argmax: [T] the target's greedy next token at each position.
    """

    fused: Tensor
    last_hidden: Tensor
    argmax: Tensor


@torch.no_grad()
def capture(target, texts: list[list[int]], boundaries: Iterable[int], tokens_per_pass: int = 4096) -> Iterable[Features]:
    """Run the target over token sequences and keep its residual stream at the boundaries.

    Boundary k is the input of decoder layer k; the last one, the output of the last layer before the final norm. Texts
    are padded on the right to the longest of a pass; with causal attention padding never reaches a real position.

    Yields:
        :class:`Features` for each text, in order.
    """
    layers, boundaries = target.base_model.layers, list(boundaries)
    seen: dict[int, Tensor] = {}

    def keep(index, hidden):
        if index in boundaries:
            seen[index] = hidden

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs, k=k: keep(k, args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
        for k, layer in enumerate(layers)
    ]
    last = lambda _, __, output: keep(len(layers), output[0] if isinstance(output, tuple) else output)  # noqa: E731
    hooks.append(layers[-1].register_forward_hook(last))
    try:
        for group in _passes(texts, tokens_per_pass):
            length = max(len(text) for text in group)
            ids = torch.tensor([text + [0] * (length - len(text)) for text in group], device=target.device)
            mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in group], device=target.device)
            hidden = target.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            fused = torch.cat([seen[k] for k in boundaries], -1)
            for row, text in enumerate(group):
                last_hidden = hidden[row, : len(text)]
                yield Features(fused[row, : len(text)], last_hidden, target.lm_head(last_hidden).argmax(-1))
    finally:
        for hook in hooks:
            hook.remove()


def _passes(texts: list[list[int]], tokens_per_pass: int) -> Iterable[list[list[int]]]:
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) + 1) * max(len(text), *map(len, group)) > tokens_per_pass:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


@torch.no_grad()
def drafts(drafter: Drafter, fused: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """[B, T-1, steps] target ids that the drafter proposes at each slot and step, the earlier steps being right."""
    target_ids = drafter.target_ids
    return torch.stack([target_ids[logits.argmax(-1)] for logits in drafter.unroll(fused, token_ids, steps)], -1)


def accepted_at(proposed: Tensor, token_ids: list[int]) -> list[int]:
    """The accepted count of a round that started at each slot.

    Args:
        proposed: [T-1, steps] target ids of :func:`drafts` for one text.
        token_ids: the T tokens of the text.
    Returns:
        T-1 counts; near the end only as far as the text reaches.
    """
    slots, steps = proposed.shape
    text = torch.tensor(token_ids[2:] + [-1] * steps, device=proposed.device)
    emitted = text.unfold(0, steps, 1)[:slots]
    return (proposed == emitted).int().cumprod(-1).sum(-1).tolist()


def walk(accepted: list[int], prompt_length: int) -> list[int]:
    """The rounds of a correct engine: accepted counts from the prompt's last slot on, until the text is all emitted."""
    rounds, slot = [], prompt_length - 1
    while slot < len(accepted) - 1:  # the last slot has nothing left to emit
        rounds.append(accepted[slot])
        slot += accepted[slot] + 1
    return rounds


def compare(engine_rounds: list[int], accepted: list[int], prompt_length: int, steps: int) -> list[dict]:
    """Each of the engine's rounds beside what the replay says of a round at the same slot.

    Returns:
        for each round {"slot", "engine", "replay", "cut"}; ``cut``: the text ends inside the round's drafts, so that the
        engine may have accepted tokens that it never emitted.
    """
    rows, slot = [], prompt_length - 1
    for count in engine_rounds:
        replayed = accepted[slot] if slot < len(accepted) else 0
        rows.append({"slot": slot, "engine": count, "replay": replayed, "cut": slot + 1 + steps > len(accepted)})
        slot += count + 1
    return rows
