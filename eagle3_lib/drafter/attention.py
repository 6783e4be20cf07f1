"""The lattice attention of training-time test: causal over step 0, the own slot only in each later step.

With 4 slots, a query of step 2 (rows: slots) sees::

    step 0      step 1      step 2
    x . . .     x . . .     x . . .
    x x . .     . x . .     . x . .
    x x x .     . . x .     . . x .
    x x x x     . . . x     . . . x

No slots x slots matrix is ever held. The causal part is a flash kernel, which also gives the log-sum-exp of its scores;
each later step adds one score a slot; both are merged by their log-sum-exp. Backward, the flash kernel is given the
*merged* output and log-sum-exp: it then recomputes the merged softmax's weights of step 0, and its gradients are those
of the whole (as ring attention joins its blocks, Liu et al. 2023, https://arxiv.org/abs/2310.01889).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Cache = list[tuple[Tensor, Tensor]]
aten = torch.ops.aten
ROWS = 512  # query rows whose scores are held at once where no flash kernel runs


@dataclass(frozen=True)
class Documents:
    """Texts laid end to end in one row of slots; none sees another.

    lengths: slots of each text; bounds: [texts + 1] int32, the first slot of each and the end, where attention runs.
    """

    lengths: tuple[int, ...]
    bounds: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "Documents":
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), bounds.to(device, non_blocking=True))

    def positions(self) -> Tensor:
        """[1, S] the position of each slot in its own text."""
        lengths = self.bounds.diff().long()
        starts = torch.repeat_interleave(self.bounds[:-1].long(), lengths, output_size=sum(self.lengths))
        return (torch.arange(len(starts), device=starts.device) - starts)[None]


def lattice_attention(query: Tensor, cache: Cache, scale: float, documents: Documents | None = None) -> Tensor:
    """Attention of one step.

    Args:
        query: [B, heads, S, d].
        cache: keys [B, kv heads, S, d] and values [B, kv heads, S, dv] of steps 0..k; each kv head serves
            heads / kv heads query heads, in order.
        scale: of the scores before softmax.
        documents: with B = 1, the texts that share the row; without, each row is one text.
    Returns:
        [B, heads, S, dv]
    """
    return _Lattice.apply(query, scale, documents, *(tensor for pair in cache for tensor in pair))


class _Lattice(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Tensor, scale: float, documents: Documents | None, *cache: Tensor) -> Tensor:
        keys, values, own = cache[0], cache[1], list(zip(cache[2::2], cache[3::2], strict=True))
        mixed, lse, rng = _causal(query, keys, values, scale, documents)
        shares = None
        if own:
            grouped = _grouped(query, keys)
            scores = torch.stack([_dot(grouped, key[:, :, None]) for key, _ in own], -1).flatten(1, 2) * scale
            causal_lse, lse = lse, torch.logaddexp(lse, scores.logsumexp(-1))
            shares = (scores - lse[..., None]).exp().to(lse.dtype)  # [B, heads, S, later steps]
            total = _grouped(mixed * (causal_lse - lse).exp()[..., None], keys)
            for share, (_, value) in zip(_grouped(shares, keys).unbind(-1), own, strict=True):
                total += share[..., None] * value[:, :, None]
            mixed = total.flatten(1, 2).to(query.dtype)
        ctx.scale, ctx.documents = scale, documents
        ctx.save_for_backward(query, mixed, lse, shares, rng, *cache)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, mixed, lse, shares, rng, keys, values, *own = ctx.saved_tensors
        causal = _causal_backward(grad, query, keys, values, mixed, lse, rng, ctx.scale, ctx.documents)
        if not own:
            return causal[0], None, None, *causal[1:]
        grad_query, grads = _grouped(causal[0], keys).to(lse.dtype), list(causal[1:])
        rows, grouped = _grouped(grad, keys), _grouped(query, keys)
        mean = _grouped(_dot(grad, mixed), keys)  # what softmax subtracts from each weight's gradient
        for share, key, value in zip(_grouped(shares, keys).unbind(-1), own[::2], own[1::2], strict=True):
            grad_score = (share * (_dot(rows, value[:, :, None]) - mean) * ctx.scale)[..., None]
            grad_query += grad_score * key[:, :, None]
            grads += [(grad_score * grouped).sum(2).to(key.dtype), (share[..., None] * rows).sum(2).to(value.dtype)]
        return grad_query.flatten(1, 2).to(query.dtype), None, None, *grads


def _grouped(states: Tensor, keys: Tensor) -> Tensor:
    """[B, heads, ...] -> [B, kv heads, heads / kv heads, ...]"""
    return states.unflatten(1, (keys.shape[1], -1))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Products over the last axis, summed in float32 at least."""
    return (left * right).sum(-1, dtype=torch.promote_types(left.dtype, torch.float32))


# --- the causal part: each kernel gives the output and the log-sum-exp, and takes them back for the gradients ----------


def _flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _causal(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, documents: Documents | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output [B, heads, S, dv], log-sum-exp [B, heads, S], and the kernel's random state (None where it has none)."""
    if _flash(query):
        return _flash_forward(query, keys, values, scale, documents)
    kernel = _cpu_flash_forward if query.device.type == "cpu" else _blockwise_forward
    parts = [kernel(q, k, v, scale) for q, k, v in _texts(documents, query, keys, values)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2), None


def _causal_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, ...]:
    """Gradients by query, keys and values."""
    if _flash(query):
        return _flash_backward(grad, query, keys, values, out, lse, rng, scale, documents)
    kernel = _cpu_flash_backward if query.device.type == "cpu" else _blockwise_backward
    texts = _texts(documents, grad, query, keys, values, out, lse)
    gradients = zip(*(kernel(*text, scale) for text in texts), strict=True)  # type: ignore[call-arg]
    return tuple(torch.cat(parts, 2) for parts in gradients)


def _texts(documents: Documents | None, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors, [B, heads, S, ...] each, cut into texts."""
    if documents is None:
        return [tensors]
    return list(zip(*(tensor.split(documents.lengths, 2) for tensor in tensors), strict=True))


def _widened(states: Tensor, width: int) -> Tensor:
    """Zeros appended to the last axis: flash kernels want keys and values of one width."""
    return pad(states, (0, width - states.shape[-1])) if states.shape[-1] < width else states


def _cpu_flash_forward(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    width = max(query.shape[-1], values.shape[-1])
    states = (_widened(tensor, width) for tensor in (query, keys, values))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, True, scale=scale)
    return out[..., : values.shape[-1]], lse


def _cpu_flash_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    width = max(query.shape[-1], values.shape[-1])
    states = (_widened(tensor, width) for tensor in (grad, query, keys, values, out))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*states, lse, 0.0, True, scale=scale)
    return tuple(g[..., : t.shape[-1]] for g, t in zip(grads, (query, keys, values), strict=True))


def _flash_forward(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, documents: Documents | None
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2 over packed rows [B x S, heads, d], in half precision (torch.nn.attention.varlen calls the same)."""
    batch, slots = query.shape[0], query.shape[2]
    bounds, longest = _bounds(documents, batch, slots, query.device)
    width = -(-max(query.shape[-1], values.shape[-1]) // 8) * 8
    rows = (_rows(_widened(tensor, width)) for tensor in (query, keys, values))
    out, lse, rng, *_ = aten._flash_attention_forward(
        *rows, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    out = out.unflatten(0, (batch, slots)).transpose(1, 2)[..., : values.shape[-1]]
    return out, lse.unflatten(1, (batch, slots)).transpose(0, 1), rng


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, ...]:
    batch, slots = query.shape[0], query.shape[2]
    bounds, longest = _bounds(documents, batch, slots, query.device)
    width = -(-max(query.shape[-1], values.shape[-1]) // 8) * 8
    rows = (_rows(_widened(tensor, width)).contiguous() for tensor in (grad, query, keys, values, out))
    lse = lse.transpose(0, 1).flatten(1).contiguous()
    unused = torch.empty(0, device=query.device)
    grads = aten._flash_attention_backward(
        *rows, lse, bounds, bounds, longest, longest, 0.0, True, rng, unused, scale=scale
    )
    grads = (g.unflatten(0, (batch, slots)).transpose(1, 2) for g in grads)
    return tuple(g[..., : t.shape[-1]] for g, t in zip(grads, (query, keys, values), strict=True))


def _rows(states: Tensor) -> Tensor:
    """[B, heads, S, d] -> [B x S, heads, d]"""
    return states.transpose(1, 2).flatten(0, 1)


def _bounds(documents: Documents | None, batch: int, slots: int, device: torch.device) -> tuple[Tensor, int]:
    if documents is None:
        return torch.arange(0, (batch + 1) * slots, slots, dtype=torch.int32, device=device), slots
    return documents.bounds, max(documents.lengths)


def _blockwise_forward(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In plain torch, ``ROWS`` queries at a time: float32 on a GPU, for which there is no flash kernel."""
    out, lse = [], []
    for end, _, scores in _blocks(query, keys, scale):
        lse.append(scores.logsumexp(-1))
        out.append((scores - lse[-1][..., None]).exp() @ values[:, :, None, :end])
    return torch.cat(out, 3).flatten(1, 2), torch.cat(lse, 3).flatten(1, 2)


def _blockwise_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    mean = _grouped((grad * out).sum(-1, keepdim=True), keys)
    grad, lse = _grouped(grad, keys), _grouped(lse, keys)[..., None]
    grad_query, grad_keys, grad_values = [], torch.zeros_like(keys), torch.zeros_like(values)
    for end, rows, scores in _blocks(query, keys, scale):
        weights, taken = (scores - lse[..., rows, :]).exp(), grad[..., rows, :]
        grad_values[:, :, :end] += (weights.mT @ taken).sum(2)
        weights *= (taken @ values[:, :, None, :end].mT - mean[..., rows, :]) * scale
        grad_query.append(weights @ keys[:, :, None, :end])
        grad_keys[:, :, :end] += (weights.mT @ _grouped(query, keys)[..., rows, :]).sum(2)
    return torch.cat(grad_query, 3).flatten(1, 2), grad_keys, grad_values


def _blocks(query: Tensor, keys: Tensor, scale: float) -> Iterator[tuple[int, slice, Tensor]]:
    """Masked scores [B, kv heads, group, rows, end] of some query rows over all keys that they see."""
    for start in range(0, query.shape[2], ROWS):
        rows = slice(start, min(start + ROWS, query.shape[2]))
        scores = _grouped(query, keys)[..., rows, :] @ keys[:, :, None, : rows.stop].mT * scale
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1 + start)
        yield rows.stop, rows, scores.masked_fill(ahead, float("-inf"))
