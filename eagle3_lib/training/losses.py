"""Losses of the training-time test: soft labels over the draft vocabulary, and losses on the acceptance rate.

p: the target's distribution at a position, restricted to the draft vocabulary; q: the drafter's. With
alpha = sum_v min(p_v, q_v), the chance that a draft sampled from q is accepted:

- ``ce``: cross-entropy -sum p log q;
- ``kl``: KL(p || q), which is ce less the entropy of p: the same gradient, and 0 when q = p;
- ``lk_alpha``: -log alpha;
- ``lk_lambda``: w KL + (1 - w) (1 - alpha), with w = exp(-eta alpha) held fixed: KL far from the target, total
  variation near it.

The last two are the LK losses of Samarin et al. 2026 (https://arxiv.org/abs/2602.23881; eta = 3 there), with alpha and w
of each position, as in speculators 0.9.0.

Positions x vocabulary is never held: a chunk of positions is taken through all steps at once, so that the target's
logits of a position are computed once, and its gradients are computed with its loss, so that no logits are kept or
computed again.
"""

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .packing import Labels

Kind = Literal["ce", "kl", "lk_alpha", "lk_lambda"]
CHUNK = {"cpu": 2**22, "cuda": 2**27}  # logits held at once


class StepLosses(NamedTuple):
    """total: what backward starts from; summed [K]: each step's loss over its positions; right [K]: likeliest equal."""

    total: Tensor
    summed: Tensor
    right: Tensor


def step_losses(
    hidden: Tensor,
    head: Tensor,
    target_head: Tensor,
    labels: Labels,
    weights: Tensor,
    kind: Kind = "ce",
    eta: float = 3.0,
    chunk: int | None = None,
    compiled: bool = False,
) -> StepLosses:
    """Losses of K steps over the positions that teach.

    Args:
        hidden: [K, S, H] what the drafter's lm_head takes, of each step at each slot.
        head: [draft vocabulary, H] the drafter's lm_head.
        target_head: [draft vocabulary, Ht] the target's rows for the draft vocabulary; no gradient.
        weights: [K] weight of a position in each step; total = sum over steps of weight x summed.
        chunk: logits held at once; by default what suits the device.
        compiled: fuse the passes over each chunk's logits (torch.compile).
    """
    return StepLosses(*_StepLosses.apply(hidden, head, target_head, labels, weights, kind, eta, chunk, compiled))


def loss_and_gradient(logits: Tensor, target_logits: Tensor, kind: Kind, eta: float) -> tuple[Tensor, Tensor]:
    """logits [K, P, V] and target_logits [P, V] -> the loss [K, P] and its gradient by the logits [K, P, V], float32."""
    log_p = target_logits.float().log_softmax(-1)
    log_q = logits.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    cross_entropy = -(p * log_q).sum(-1)
    if kind == "ce":
        return cross_entropy, q - p
    divergence = cross_entropy + (p * log_p).sum(-1)
    if kind == "kl":
        return divergence, q - p
    below = q * (q < p)  # where more of q is more accepted
    rise = below - q * below.sum(-1, keepdim=True)  # gradient of alpha
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "lk_alpha":
        alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)
        return -alpha.log(), -rise / alpha[..., None]
    weight = (-eta * alpha).exp()
    loss = weight * divergence + (1 - weight) * (1 - alpha)
    return loss, weight[..., None] * (q - p) - (1 - weight[..., None]) * rise


@functools.cache
def _compiled():
    return torch.compile(loss_and_gradient, dynamic=True)


class _StepLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, target_head, labels, weights, kind, eta, chunk, compiled):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        steps, slots = hidden.shape[:2]
        states, head_rows, target_rows = hidden.flatten(0, 1), head.to(dtype), target_head.to(dtype)
        grad_states = torch.zeros_like(states)
        wide = torch.promote_types(head.dtype, torch.float32)  # sums over chunks
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        summed = torch.zeros(steps, device=hidden.device)
        right = torch.zeros(steps, dtype=torch.int64, device=hidden.device)
        first = torch.arange(0, steps * slots, slots, device=hidden.device)[:, None]
        size = max(1, (chunk or CHUNK.get(device, CHUNK["cpu"])) // (steps * len(head)))
        compute = _compiled() if compiled else loss_and_gradient
        with torch.autocast(device, enabled=False):
            for start in range(0, len(labels.likeliest), size):
                part = slice(start, start + size)
                inside = labels.inside[:, part]
                rows = (first + labels.slots[:, part].clamp_min(0)).flatten()
                taken = states[rows].to(dtype)
                logits = (taken @ head_rows.T).unflatten(0, (steps, -1))
                target_logits = labels.last_hidden[part].to(dtype) @ target_rows.T
                loss, grad = compute(logits, target_logits, kind, eta)
                summed += (loss * inside).sum(1)
                right += ((logits.argmax(-1) == labels.likeliest[part]) & inside).sum(1)
                grad = (grad * (weights[:, None] * inside)[..., None]).to(dtype).flatten(0, 1)
                grad_states.index_add_(0, rows, (grad @ head_rows).to(states.dtype))
                if grad_head is not None:
                    grad_head += grad.T @ taken
        ctx.head_dtype = head.dtype
        ctx.save_for_backward(grad_states.view_as(hidden), grad_head)
        ctx.mark_non_differentiable(summed, right)
        return (summed * weights).sum(), summed, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, None if grad_head is None else (grad_head * grad).to(ctx.head_dtype), *[None] * 7
