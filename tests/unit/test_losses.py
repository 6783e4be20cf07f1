"""Losses against a plain reference: full softmax, one loop over steps, autograd."""

import pytest
import torch

from eagle3_lib.training import losses
from eagle3_lib.training.packing import Labels

KINDS = ["ce", "kl", "lk_alpha", "lk_lambda"]


def plain_loss(logits, target_logits, kind, eta=3.0):
    """[..., V] each -> [...], by the definitions."""
    p, q = target_logits.softmax(-1), logits.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    divergence = (p * (p / q).log()).sum(-1)
    if kind == "ce":
        return -(p * q.log()).sum(-1)
    if kind == "kl":
        return divergence
    if kind == "lk_alpha":
        return -alpha.log()
    weight = (-eta * alpha.detach()).exp()
    return weight * divergence + (1 - weight) * (1 - alpha)


def problem(steps, vocabulary=37, positions=23, slots=30):
    generator = torch.Generator().manual_seed(steps)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, head = some(steps, slots, 16).requires_grad_(), (0.3 * some(vocabulary, 16)).requires_grad_()
    places = torch.randperm(slots, generator=generator)[:positions].sort().values
    back = torch.arange(1, steps + 1)[:, None]
    labels = Labels(
        torch.randint(vocabulary, (positions,), generator=generator),
        some(positions, 12),
        places - back,
        places >= back,
        None,
        None,
    )
    weights = 0.8 ** torch.arange(steps) / 10
    return hidden, head, 0.5 * some(vocabulary, 12), labels, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", range(1, 8))
def test_loss_and_gradients_equal_the_plain_reference(kind, steps):
    hidden, head, target_head, labels, weights = problem(steps)
    found = losses.step_losses(hidden, head, target_head, labels, weights, kind, chunk=5 * 37 * steps)
    gradients = torch.autograd.grad(found.total, [hidden, head])
    target_logits, expected, right = labels.last_hidden @ target_head.T, [], []
    for step in range(steps):
        inside = labels.inside[step]
        logits = hidden[step, labels.slots[step, inside]] @ head.T
        expected.append(plain_loss(logits, target_logits[inside], kind).sum())
        right.append((logits.argmax(-1) == labels.likeliest[inside]).sum())
    total = (torch.stack(expected) * weights).sum()
    torch.testing.assert_close(found.total, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.summed, torch.stack(expected).detach(), rtol=1e-5, atol=1e-5)
    assert found.right.tolist() == torch.stack(right).tolist()
    for ours, theirs in zip(gradients, torch.autograd.grad(total, [hidden, head]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing_and_a_frozen_head_costs_nothing(kind):
    hidden, head, target_head, labels, weights = problem(3)
    whole = losses.step_losses(hidden, head, target_head, labels, weights, kind)
    small = losses.step_losses(hidden, head.detach(), target_head, labels, weights, kind, chunk=1)
    torch.testing.assert_close(whole.total, small.total)
    torch.testing.assert_close(*(torch.autograd.grad(found.total, hidden)[0] for found in (whole, small)))


def test_meaning_of_the_losses():
    logits = torch.tensor([[[2.0, 0.0, -1.0]]])
    same = {kind: losses.loss_and_gradient(logits, logits[0], kind, 3.0) for kind in KINDS}
    for kind in ("kl", "lk_alpha", "lk_lambda"):
        assert same[kind][0].item() == pytest.approx(0, abs=1e-6)
    assert all(gradient.abs().max() < 1e-6 for _, gradient in same.values())
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[[0.5, 0.1, 0.4]]])
    value, _ = losses.loss_and_gradient(q.log(), p.log(), "lk_alpha", 3.0)
    assert value.item() == pytest.approx(-torch.tensor(0.7).log().item())  # min: 0.5 + 0.1 + 0.1
    far, _ = losses.loss_and_gradient(q.log(), p.log(), "lk_lambda", 0.0)
    kl, _ = losses.loss_and_gradient(q.log(), p.log(), "kl", 0.0)
    assert far.item() == pytest.approx(kl.item())  # eta = 0: KL alone
    near, _ = losses.loss_and_gradient(q.log(), p.log(), "lk_lambda", 100.0)
    assert near.item() == pytest.approx(0.3)  # eta large: total variation alone


def test_no_label_no_loss():
    hidden, head, target_head, labels, weights = problem(2, positions=0)
    found = losses.step_losses(hidden, head, target_head, labels, weights)
    assert found.total.item() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(found.total, [hidden, head]))


def test_under_autocast_the_products_are_bfloat16():
    hidden, head, target_head, labels, weights = problem(3)
    exact = losses.step_losses(hidden, head, target_head, labels, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = losses.step_losses(hidden, head, target_head, labels, weights)
    assert 0 < abs(rounded.total - exact.total) < 0.02 * exact.total
    found, expected = (torch.autograd.grad(some.total, head)[0] for some in (rounded, exact))
    assert found.dtype == torch.float32 and (found - expected).norm() < 0.02 * expected.norm()


def test_positions_by_vocabulary_are_never_held():
    """The largest tensor of forward and backward is that of a chunk, not of all positions and steps."""
    hidden, head, target_head, labels, weights = problem(4, vocabulary=2000, positions=200, slots=200)
    with torch.profiler.profile(profile_memory=True) as profile:
        losses.step_losses(hidden, head, target_head, labels, weights, chunk=10 * 4 * 2000).total.backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 200 * 4 * 2000 * 4 / 8
