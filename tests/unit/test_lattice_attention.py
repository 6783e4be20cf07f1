"""The lattice attention against a plain T x T reference with one softmax: forward, gradients, packing, memory."""

import itertools

import pytest
import torch
from test_drafter_attention import BASE

from eagle3_lib.drafter import attention
from eagle3_lib.drafter.attention import Documents, lattice_attention
from eagle3_lib.drafter.model import Drafter, LatentSizes


def assert_equal_to_1e5(found, expected, what=""):
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max()), what


def reference(query, cache, scale, documents=None):
    """The whole T x (k+1) T matrix of scores, a mask, one softmax."""
    slots, groups = query.shape[2], query.shape[1] // cache[0][0].shape[1]
    keys, values = (torch.cat(part, 2).repeat_interleave(groups, 1) for part in zip(*cache, strict=True))
    text = torch.repeat_interleave(torch.tensor(documents.lengths)) if documents else torch.zeros(slots)
    seen = torch.ones(slots, slots).tril().bool() & (text[:, None] == text)
    seen = torch.cat([seen, *[torch.eye(slots).bool()] * (len(cache) - 1)], 1)
    scores = (query @ keys.mT * scale).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ values


def states(heads, kv_heads, slots, width, value_width, steps, batch=1, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(slots)

    def some(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    cache = [(some(batch, kv_heads, slots, width), some(batch, kv_heads, slots, value_width)) for _ in range(1 + steps)]
    return some(batch, heads, slots, width), cache


def outputs_and_gradients(function, query, cache, scale, documents=None):
    out = function(query, cache, scale, documents)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad((out * weights).sum(), [query, *itertools.chain(*cache)])


@pytest.mark.parametrize("later_steps", [0, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(4, 4, 8, 8), (6, 2, 8, 8), (2, 2, 12, 8)])
@pytest.mark.parametrize("lengths", [None, (5, 1, 23, 11)])
@pytest.mark.parametrize("kernel", ["flash", "blockwise"])
def test_equals_the_plain_matrix(later_steps, heads, kv_heads, width, value_width, lengths, kernel, monkeypatch):
    if kernel == "blockwise":
        monkeypatch.setattr(attention, "ROWS", 16)
        monkeypatch.setattr(attention, "_cpu_flash_forward", attention._blockwise_forward)
        monkeypatch.setattr(attention, "_cpu_flash_backward", attention._blockwise_backward)
    query, cache = states(heads, kv_heads, 40, width, value_width, later_steps, batch=1 if lengths else 2)
    documents = Documents.of(lengths) if lengths else None
    found = outputs_and_gradients(lattice_attention, query, cache, 0.3, documents)
    expected = outputs_and_gradients(reference, query, cache, 0.3, documents)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_to_1e5(ours, theirs)


LLAMA = BASE.with_(target_hidden_size=24)
MLA = LLAMA.with_(
    latent=LatentSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
    head_dim=4,
    num_key_value_heads=4,
)
SWITCHES = ["norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "attention_bias"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize(
    "base", [LLAMA, MLA, LLAMA.with_(qk_norm=True, num_hidden_layers=2)], ids=["llama", "mla", "2"]
)
def test_a_drafter_with_it_equals_one_with_the_plain_matrix(base, steps, monkeypatch):
    """Every switch alone and all together, for 1 to 7 steps: hidden states, and the gradient of every weight."""
    for switches in [[], *([name] for name in SWITCHES), SWITCHES]:
        config = base.with_(**{name: True for name in switches if not (base.latent and name == "attention_bias")})
        drafter, generator = Drafter(config), torch.Generator().manual_seed(steps)
        drafter.initialise(1)
        for weight in drafter.parameters():
            weight.data = 0.5 * (torch.rand(weight.shape, generator=generator) - 0.5) + (weight.dim() == 1)
        ids, features = (
            torch.randint(50, (2, 12), generator=generator),
            torch.randn(2, 12, config.feature_size, generator=generator),
        )

        def run(drafter=drafter, features=features, ids=ids):
            drafter.zero_grad()
            hidden = torch.stack(list(drafter.hidden_states(features, ids, steps)))
            hidden.square().mean().backward()
            return {"hidden": hidden} | {name: w.grad for name, w in drafter.named_parameters() if w.requires_grad}

        found = run()
        with monkeypatch.context() as patch:
            patch.setattr("eagle3_lib.drafter.model.lattice_attention", reference)
            expected = run()
        for name in expected:
            if expected[name] is not None:  # lm_head takes no part
                assert_equal_to_1e5(found[name], expected[name], f"{switches} {name}")


def test_a_packed_row_equals_its_texts_apart():
    drafter, generator = Drafter(LLAMA), torch.Generator().manual_seed(3)
    drafter.initialise()
    torch.nn.init.normal_(drafter.embed_tokens.weight)
    lengths = (7, 2, 11)
    ids = [torch.randint(50, (n,), generator=generator) for n in lengths]
    features = [torch.randn(n, LLAMA.feature_size, generator=generator) for n in lengths]
    row = torch.cat([*ids, torch.tensor([0])])[None]
    packed = torch.stack(list(drafter.hidden_states(torch.cat(features)[None], row, 5, Documents.of(lengths))))
    for some, some_features, part in zip(ids, features, packed.split(lengths, 2), strict=True):
        apart = torch.stack(list(drafter.hidden_states(some_features[None], some[None], 5)))
        for step in range(min(5, len(some) - 1)):  # a later slot embeds tokens past the text's end
            assert_equal_to_1e5(part[step, :, : len(some) - 1 - step], apart[step, :, : len(some) - 1 - step])


def test_memory_grows_with_the_slots_not_their_square():
    """What autograd keeps for backward, and the largest tensor made on the way: 4 times the slots, 4 times as much."""

    def kept(slots):
        query, cache = states(2, 1, slots, 8, 8, 2)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            with torch.profiler.profile(profile_memory=True) as profile:
                lattice_attention(query, cache, 0.3).sum().backward()
        return sum(sizes), max(event.cpu_memory_usage for event in profile.events())

    (few, few_peak), (many, many_peak) = kept(512), kept(2048)
    assert many == 4 * few
    assert many_peak < 5 * few_peak


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernel in half precision runs on a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(8, 2, 64, 64), (4, 4, 192, 128)])
@pytest.mark.parametrize("lengths", [None, (50, 1, 230, 110)])
def test_flash_on_a_gpu_is_as_close_to_float32_as_the_plain_matrix(heads, kv_heads, width, value_width, lengths):
    query, cache = states(heads, kv_heads, 391, width, value_width, 6, 1, "cuda", torch.bfloat16)
    documents = Documents.of(lengths, "cuda") if lengths else None
    found = outputs_and_gradients(lattice_attention, query, cache, 0.1, documents)
    exact = [query.detach().cpu().float().requires_grad_()]
    exact_cache = [tuple(t.detach().cpu().float().requires_grad_() for t in pair) for pair in cache]
    expected = outputs_and_gradients(reference, *exact, exact_cache, 0.1, Documents.of(lengths) if lengths else None)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.cpu().float() - theirs).norm() / theirs.norm()
        assert error < 0.02
