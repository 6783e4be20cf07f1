"""The seam of a drafter: the steps that training and the replay both run, so that a head of another kind is one module.

Training runs every step at every slot at once (:func:`hidden_states`); the replay runs only the slots where rounds start
and only as far as their drafts are right (:mod:`eagle3_lib.verdict.replay`). Both call the methods below and hold nothing
of a head's arithmetic themselves. They differ in one thing: training calls a layer's ``attend``, and the replay attends
over its own cache of keys and values. So a layer's attention must be softmax(scale x query . key) over values, at slots up
to its own in step 0 and at its own slot in later steps; everything else of a layer is free.

Shapes: B rows of S slots each, H the hidden size, heads of width d (values: dv). Nothing but attention may carry anything
from one slot to another, because the replay calls these methods with any subset of slots.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from .attention import Cache, Documents

Rotation = tuple[Tensor, Tensor]  # cos and sin [B, S, d] of rope


class Layer(Protocol):
    """One decoder layer of a drafter; its module's ``forward`` is :func:`forward`."""

    @property
    def scale(self) -> float:
        """What scores of queries and keys are multiplied by before the softmax."""

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention takes, and what waits for its result.

        Args:
            embeds: [B, S, H] of the tokens that this step embeds.
            hidden: [B, S, H] the residual stream before the layer.
        Returns:
            inputs [B, S, any width], for ``query`` and ``states``; residual [B, S, any width], for ``leave``.
        """

    def query(self, inputs: Tensor, rope: Rotation) -> Tensor:
        """inputs of ``enter`` -> [B, heads, S, d], turned by ``rope`` and not yet scaled.

        A layer without attention has one head of width 0 here and in ``states``: then nothing is attended.
        """

    def states(self, inputs: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """inputs of ``enter`` -> keys [B, kv heads, S, d], turned by ``rope``, and values [B, kv heads, S, dv].

        Each kv head serves heads / kv heads query heads, in order.
        """

    def attend(self, query: Tensor, cache: Cache, documents: Documents | None) -> Tensor:
        """Training's attention of one step over all steps so far.

        Args:
            query: [B, heads, S, d] of ``query``.
            cache: what ``states`` gave in each step so far, this one's last.
            documents: with B = 1, the texts that share the row; None where each row is one text.
        Returns:
            [B, heads, S, dv]
        """

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """residual of ``enter`` and the result of attention [B, heads, S, dv] -> hidden [B, S, H] after the layer."""

    def __call__(
        self, embeds: Tensor, hidden: Tensor, rope: Rotation, cache: Cache, documents: Documents | None = None
    ) -> Tensor:
        """:func:`forward`, by way of the module, so that its hooks run."""


class Head(Protocol):
    """What training and the replay run of a drafter.

    Its ``lm_head``, one matrix for all steps, is applied by training's loss, which never holds whole logits.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """In order; there may be none."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states that ``fuse`` gives."""

    def fuse(self, features: Tensor) -> Tensor:
        """Features [..., boundaries x Ht] of any type -> the hidden state [..., H] that step 0 starts from."""

    def embed(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """token_ids [...] -> embeds [..., H], in the type of ``hidden``."""

    def rope(self, hidden: Tensor, positions: Tensor) -> Rotation:
        """positions [B, S] -> cos and sin [B, S, d], in the type and on the device of ``hidden``."""

    def finish(self, hidden: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The residual stream [..., H] after the last layer -> what lm_head takes, and the next step's hidden [..., H]."""

    def propose(self, output: Tensor) -> Tensor:
        """What lm_head takes [..., H] -> the likeliest token's target id [...]."""


def forward(
    layer: Layer, embeds: Tensor, hidden: Tensor, rope: Rotation, cache: Cache, documents: Documents | None = None
) -> Tensor:
    """One step through a layer: hidden [B, S, H] before it -> after it. ``cache`` grows by this step's keys and values."""
    inputs, residual = layer.enter(embeds, hidden)
    query = layer.query(inputs, rope)
    cache.append(layer.states(inputs, rope))
    return layer.leave(residual, layer.attend(query, cache, documents))


def hidden_states(
    head: Head, features: Tensor, token_ids: Tensor, steps: int, documents: Documents | None = None
) -> Iterator[Tensor]:
    """Run ``steps`` drafting steps at every slot at once; the tokens embedded are the text's own.

    Args:
        features: [B, T, boundaries x Ht] of the target for ``token_ids``; padded on the right.
        token_ids: [B, T]; tokens past the text's end may be anything, and so are the logits that embed them.
        steps: K.
        documents: with B = 1, the texts that lie end to end in the row's T-1 slots (the last token is padding).
    Yields:
        for k = 0..K-1: what lm_head takes, [B, T-1, H]; row t predicts x[t+2+k].
    """
    slots = token_ids.shape[1] - 1
    hidden = head.fuse(features[:, :slots])
    padded = nn.functional.pad(token_ids, (0, steps))
    positions = torch.arange(slots, device=token_ids.device)[None] if documents is None else documents.positions()
    caches: list[Cache] = [[] for _ in head.layers]
    for step in range(steps):
        embeds = head.embed(padded[:, 1 + step : 1 + step + slots], hidden)
        rope = head.rope(hidden, positions + step)
        for layer, cache in zip(head.layers, caches, strict=True):
            hidden = layer(embeds, hidden, rope, cache, documents)
        output, hidden = head.finish(hidden, step)
        yield output
