"""Rope's frequencies and the softmax scale: what casting leaves alone, and what another rope changes."""

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes, Rope, softmax_scale
from eagle3_lib.verdict import changes

PLAIN = {"rope_type": "default", "rope_theta": 100000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GQA = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    target_hidden_size=32,
    boundaries=(2, 5, 7),
    rope_parameters=PLAIN,
    max_position_embeddings=4096,
)
LATENT = LatentSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
MLA = GQA.with_(latent=LATENT, head_dim=4, num_key_value_heads=4, rope_parameters=YARN)
CASTS = {
    "to bfloat16": lambda drafter: drafter.to(torch.bfloat16),
    "bfloat16": lambda drafter: drafter.bfloat16(),
    "half": lambda drafter: drafter.half(),
    "to device and dtype": lambda drafter: drafter.to("cpu", torch.float16),
    "there and back": lambda drafter: drafter.bfloat16().float(),
    "double": lambda drafter: drafter.double(),
    "copied": lambda drafter: copy.deepcopy(drafter).bfloat16(),
    "another rope": lambda drafter: changes.variant(drafter, rope_parameters=drafter.config.rope_parameters).half(),
}


@pytest.mark.parametrize("config", [GQA, MLA], ids=["plain", "yarn"])
@pytest.mark.parametrize("cast", CASTS)
def test_frequencies_stay_float32(config, cast):
    expected = LlamaRotaryEmbedding(config.llama()).inv_freq
    cast_one = CASTS[cast](Drafter(config))
    for name in ("inv_freq", "original_inv_freq"):
        found = getattr(cast_one.rotary, name)
        assert found.dtype == torch.float32 and torch.equal(found, expected), name
    assert "rotary.inv_freq" not in cast_one.state_dict()


def test_frequencies_move_with_the_drafter():
    with torch.device("meta"):
        assert Drafter(GQA).rotary.inv_freq.is_meta
    assert Drafter(GQA).to("meta").rotary.inv_freq.is_meta


@pytest.mark.parametrize("config", [GQA, MLA], ids=["plain", "yarn"])
def test_a_bfloat16_drafter_turns_by_the_float32_angles_at_8000(config):
    """What vLLM does: its table is made in float32 and then cast."""
    positions = torch.arange(7990, 8000)[None]
    exact = Rope(config.llama())(torch.zeros(1), positions)
    cast = Drafter(config).bfloat16().rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
    for found, expected in zip(cast, exact, strict=True):
        assert torch.equal(found, expected.bfloat16())


def test_the_loaded_drafter_keeps_them():
    found = checkpoint.load("drafters/tiny-mla-public", dtype=torch.bfloat16).drafter
    assert found.fc.weight.dtype == torch.bfloat16 and found.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(found.rotary.inv_freq, LlamaRotaryEmbedding(found.config.llama()).inv_freq)
    rounded = LlamaRotaryEmbedding(found.config.llama()).bfloat16().inv_freq.float()
    radians = (rounded - found.rotary.inv_freq).abs().max() * 8000
    assert radians > 1, "what a plain cast does at position 8,000"


@pytest.mark.parametrize(("config", "other"), [(GQA, YARN), (MLA, PLAIN), (MLA, YARN | {"factor": 8.0})])
def test_another_rope_is_that_of_a_drafter_made_with_it(config, other):
    drafter = Drafter(config.with_(num_hidden_layers=2, norm_before_residual=True))
    before = [layer.self_attn.scale for layer in drafter.layers]
    found = changes.variant(drafter, rope_parameters=other)
    fresh = Drafter(found.config)
    for layer, expected, own in zip(found.layers, fresh.layers, drafter.layers, strict=True):
        assert layer.self_attn.scale == expected.self_attn.scale == softmax_scale(found.config)
        assert layer.norm_before_residual and layer.mlp is own.mlp
        assert layer.self_attn.o_proj is own.self_attn.o_proj
    assert torch.equal(found.rotary.inv_freq, fresh.rotary.inv_freq)
    assert found.rotary.attention_scaling == fresh.rotary.attention_scaling
    assert [layer.self_attn.scale for layer in drafter.layers] == before


def test_scales_in_numbers():
    """0.1 ln(factor) + 1, twice, over the root of the head; YaRN on grouped-query attention is in cos and sin alone."""
    assert softmax_scale(GQA) == softmax_scale(GQA.with_(rope_parameters=YARN)) == pytest.approx(8**-0.5)
    assert softmax_scale(MLA) == pytest.approx(2.0048 * 12**-0.5, rel=1e-4)
    assert softmax_scale(MLA.with_(rope_parameters=PLAIN)) == pytest.approx(12**-0.5)
    public = checkpoint.load("drafters/tiny-mla-public").drafter
    ignored = changes.variant(public, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    ratio = ignored.layers[0].self_attn.scale / public.layers[0].self_attn.scale
    assert ratio == pytest.approx(1 / 1.2965, rel=1e-4)  # 0.1 ln(4) + 1 = 1.1386, twice
