"""The drafter's layers beside transformers' own, and its lattice beside plain causal decoding."""

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from eagle3_lib.drafter.model import (
    Attention,
    DecoderLayer,
    Drafter,
    DrafterConfig,
    LatentAttention,
    LatentSizes,
    yarn_mscale,
)

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = LatentSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
BASE = DrafterConfig(
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
)
MLA = BASE.with_(latent=LATENT, head_dim=4, num_key_value_heads=4, rope_parameters=YARN, max_position_embeddings=4096)


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5 + (parameter.dim() == 1))
    return module.eval()


def copied(ours: torch.nn.Module, theirs: torch.nn.Module) -> torch.nn.Module:
    theirs.load_state_dict(filled(ours).state_dict())
    return theirs.eval()


def rope_and_mask(config: DrafterConfig, slots: int = 6):
    x = torch.randn(1, slots, config.hidden_size, generator=torch.Generator().manual_seed(1))
    rope = LlamaRotaryEmbedding(config.llama())(x, torch.arange(slots)[None])
    return x, rope, torch.full((slots, slots), float("-inf")).triu(1)[None, None]


def alone(attention: Attention, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """An attention module on one text, at step 0: x [1, S, inputs] -> [1, S, H]."""
    return attention.output(attention.attend(attention.query(x, rope), [attention.states(x, rope)]))


def test_latent_attention_is_that_of_deepseek_v3():
    ours = LatentAttention(MLA, MLA.hidden_size)
    theirs = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters=YARN,
        attn_implementation="eager",
        **vars(LATENT),
    )
    theirs = copied(ours, DeepseekV3Attention(theirs, 0))
    x, rope, mask = rope_and_mask(MLA)
    torch.testing.assert_close(alone(ours, x, rope), theirs(x, rope, mask)[0], rtol=1e-4, atol=1e-5)
    assert yarn_mscale(YARN) ** 2 == pytest.approx(2.005, abs=1e-3)  # what a trainer without it gets wrong


def test_head_norms_are_those_of_qwen3():
    config = BASE.with_(qk_norm=True, rms_norm_eps=1e-6)
    ours = Attention(config, config.hidden_size)
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=PLAIN)
    theirs = copied(ours, Qwen3Attention(Qwen3Config(**sizes, attn_implementation="eager", num_hidden_layers=1), 0))
    x, rope, mask = rope_and_mask(config)
    torch.testing.assert_close(alone(ours, x, rope), theirs(x, rope, mask)[0])


def test_later_layers_and_attention_bias_are_those_of_llama():
    config = BASE.with_(attention_bias=True)
    ours = DecoderLayer(config, first=False)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    theirs = LlamaConfig(**sizes, rms_norm_eps=1e-5, attention_bias=True, attn_implementation="eager")
    theirs = copied(ours, LlamaDecoderLayer(theirs, 0))
    x, rope, mask = rope_and_mask(config)
    theirs = theirs(x, attention_mask=mask, position_embeddings=rope)
    torch.testing.assert_close(ours(None, x, rope, []), theirs[0] if isinstance(theirs, tuple) else theirs)


@pytest.mark.parametrize(
    "config", [BASE, MLA, BASE.with_(num_hidden_layers=2, norm_output=True), BASE.with_(qk_norm=True)]
)
@torch.no_grad()
def test_every_slot_drafts_as_plain_causal_decoding_from_it(config):
    drafter, generator = filled(Drafter(config)), torch.Generator().manual_seed(2)
    ids = torch.randint(50, (1, 9), generator=generator)
    features = torch.randn(1, 9, config.feature_size, generator=generator)
    unrolled = list(drafter.unroll(features, ids, 3))
    for slot in (0, 3, 5):
        hidden, fused = drafter.fuse(features[:, : slot + 1]), None
        for step in range(3):
            embeds = drafter.embed_tokens(ids[:, 1 : hidden.shape[1] + 1])
            rope = drafter.rotary(hidden, torch.arange(hidden.shape[1])[None])
            out = hidden
            for layer in drafter.layers:
                out = layer(embeds, out, rope, [])
            normed = drafter.norm(out)
            logits = drafter.lm_head(normed[:, -1])
            torch.testing.assert_close(unrolled[step][:, slot], logits, rtol=1e-4, atol=1e-4)
            fused = (normed if config.norm_output else out)[:, -1:]
            hidden = torch.cat([hidden, fused], 1)
