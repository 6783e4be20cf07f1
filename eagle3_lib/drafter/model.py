"""The EAGLE-3 drafter: one torch module that training, replay and export all run.

The layer follows EAGLE-3 (Li et al., 2025, https://arxiv.org/abs/2503.01840) as vLLM serves it
(vllm/model_executor/models/llama_eagle3.py, 0.16 to 0.33)::

    h      = fc(concat of the target's residual stream at the boundaries)         once, step 0
    x      = concat(input_layernorm(embed(token)), hidden_norm(h))                embedding first
    h'     = r + attention(x)          r = h, or hidden_norm(h) with norm_before_residual
    h''    = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h''))        over the draft vocabulary
    h      = h'' for the next step     or norm(h'') with norm_output

Slots and steps. For a text x[0..T), slot t holds the features at position t. Step k at slot t embeds x[t+1+k], sits at
rope position t+k and predicts x[t+2+k]. A query at (slot t, step k) attends to step 0 of all slots up to t and to steps
1..k of its own slot: the keys an engine holds when it starts drafting at t, because the drafter's own states of earlier
rounds are replaced by true ones after each verification. So one pass over all slots is both training-time test and an
exact replay of every draft that an engine could have made.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from . import seam
from .attention import Cache, Documents, lattice_attention
from .seam import Rotation


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): ranks and head sizes."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and serving switches of a drafter. ``boundaries``: residual streams after that many target layers.

    ``head_dim``: what rope turns, so the rope part of a head with latent attention.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    boundaries: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    latent: LatentSizes | None = None  # latent attention (MLA) instead of grouped-query attention
    qk_norm: bool = False  # RMSNorm of each query and key head, as in Qwen3
    attention_bias: bool = False  # of q, k, v and o, as transformers and vLLM mean it; none with latent attention
    norm_before_residual: bool = False  # the residual of attention is the normed hidden state (speculators' default)
    norm_output: bool = False  # feed the normed hidden state to the next step ("EAGLE-3.1")
    fc_norm: bool = False  # one RMSNorm for each boundary before fc
    norm_before_fc: bool = False  # one RMSNorm over the concatenated boundaries before fc
    own_embedding: bool = False  # the checkpoint carries embed_tokens; otherwise the target's are shared

    @property
    def feature_size(self) -> int:
        return len(self.boundaries) * self.target_hidden_size

    def llama(self) -> LlamaConfig:
        """The same sizes for transformers' rope and MLP classes."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )

    def with_(self, **changes: Any) -> "DrafterConfig":
        return replace(self, **changes)


class RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """Keeps the type of its input: under autocast the residual stream is bfloat16, as an engine serves it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Rope(LlamaRotaryEmbedding):  # type: ignore[misc]
    """cos and sin of rope; its inverse frequencies stay float32 in every dtype that the drafter is cast to.

    Engines build their cos/sin tables from float32 frequencies, whatever the model's dtype (vLLM 0.32:
    model_executor/layers/rotary_embedding/base.py). In bfloat16 the angle at position 4,000 would be off by radians.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        """Every cast and move of a module passes here: buffers go where ``fn`` puts them, with the values they had."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            self._buffers[name] = buffer.to(self._buffers[name].device)
        return self


def softmax_scale(config: DrafterConfig) -> float:
    """What an attention layer multiplies its scores by before the softmax.

    With latent attention it carries YaRN's mscale twice (once for the query, once for the key), as vLLM's deepseek_v2.py and
    SGLang's deepseek_v2.py have it; a trainer that leaves it out trains another temperature.
    """
    if config.latent is None:
        return float(config.head_dim**-0.5)
    return float(config.latent.qk_head_dim**-0.5) * yarn_mscale(config.rope_parameters) ** 2


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention; ``inputs`` features in, hidden_size out."""

    def __init__(self, config: DrafterConfig, inputs: int):
        super().__init__()
        self.head_dim, self.scale = config.head_dim, softmax_scale(config)
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def query(self, x: Tensor, rope: Rotation) -> Tensor:
        """x [B, S, inputs] -> [B, heads, S, d], turned by ``rope``."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return apply_rotary_pos_emb(query, query[:, :0], *rope)[0]

    def states(self, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """x [B, S, inputs] -> keys, turned by ``rope``, and values [B, kv heads, S, d]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return apply_rotary_pos_emb(keys[:, :0], keys, *rope)[1], values

    def attend(self, query: Tensor, cache: Cache, documents: Documents | None = None) -> Tensor:
        """query [B, heads, S, d] of one step, keys and values of all steps so far -> [B, heads, S, d of values]."""
        return lattice_attention(query, cache, self.scale, documents)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, heads, S, d of values] -> [B, S, hidden_size]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LatentAttention(Attention):
    """Multi-head latent attention: queries and keys of a rope part, interleaved, and of a part without positions."""

    def __init__(self, config: DrafterConfig, inputs: int):
        nn.Module.__init__(self)
        assert config.latent is not None
        sizes, heads, eps = config.latent, config.num_attention_heads, config.rms_norm_eps
        self.sizes, self.scale = sizes, softmax_scale(config)
        self.q_a_proj = nn.Linear(inputs, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, heads * sizes.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, config.hidden_size, bias=False)

    def query(self, x: Tensor, rope: Rotation) -> Tensor:
        """x [B, S, inputs] -> [B, heads, S, nope + rope]."""
        sizes = self.sizes
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (-1, sizes.qk_head_dim))
        query, turned = query.transpose(1, 2).split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], -1)
        return torch.cat([query, apply_rotary_pos_emb_interleave(turned, turned[:, :0], *rope)[0]], -1)

    def states(self, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """x [B, S, inputs] -> keys [B, heads, S, nope + rope] and values [B, heads, S, v]."""
        sizes = self.sizes
        latent, turned = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], -1)
        width = sizes.qk_nope_head_dim + sizes.v_head_dim
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, width)).transpose(1, 2)
        keys, values = heads.split([sizes.qk_nope_head_dim, sizes.v_head_dim], -1)
        turned = turned[:, None]  # one for all heads
        turned = apply_rotary_pos_emb_interleave(turned[:, :0], turned, *rope)[1]
        return torch.cat([keys, turned.expand(-1, keys.shape[1], -1, -1)], -1), values


def yarn_mscale(rope_parameters: dict[str, Any]) -> float:
    """YaRN's factor of the softmax scale (vLLM deepseek_v2.py, yarn_get_mscale): 1 without mscale_all_dim."""
    factor: float = rope_parameters.get("factor", 1.0)
    power: float = rope_parameters.get("mscale_all_dim", 0)
    if rope_parameters.get("rope_type", "default") == "default" or not power or factor <= 1:
        return 1.0
    return 0.1 * power * math.log(factor) + 1.0


class DecoderLayer(nn.Module):  # type: ignore[misc]
    """A :class:`~eagle3_lib.drafter.seam.Layer`. The first layer takes the embedding beside the hidden state; later ones are plain (vLLM llama_eagle3.py)."""

    def __init__(self, config: DrafterConfig, first: bool):
        super().__init__()
        self.first, self.norm_before_residual = first, config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        attention = LatentAttention if config.latent else Attention
        self.self_attn = attention(config, 2 * config.hidden_size if first else config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config.llama())

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.self_attn.scale)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embeds, hidden [B, S, H] -> what attention takes [B, S, 2 H or H], and the residual [B, S, H] it is added to."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embeds), normed], -1)
        return inputs, normed if self.norm_before_residual else hidden

    def query(self, inputs: Tensor, rope: Rotation) -> Tensor:
        """inputs of ``enter`` -> [B, heads, S, d]."""
        return self.self_attn.query(inputs, rope)

    def states(self, inputs: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """inputs of ``enter`` -> keys [B, kv heads, S, d] and values [B, kv heads, S, d of values]."""
        keys, values = self.self_attn.states(inputs, rope)
        return keys, values

    def attend(self, query: Tensor, cache: Cache, documents: Documents | None) -> Tensor:
        """query [B, heads, S, d] of one step, keys and values of all steps so far -> [B, heads, S, d of values]."""
        return self.self_attn.attend(query, cache, documents)

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """residual [B, S, H], mixed [B, heads, S, d of values] -> the residual stream after the layer [B, S, H]."""
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def forward(
        self, embeds: Tensor, hidden: Tensor, rope: Rotation, cache: Cache, documents: Documents | None = None
    ) -> Tensor:
        """embeds, hidden [B, S, H] -> the residual stream after the layer [B, S, H]."""
        return seam.forward(self, embeds, hidden, rope, cache, documents)


class Drafter(nn.Module):  # type: ignore[misc]
    """A :class:`~eagle3_lib.drafter.seam.Head`. A drafter of another kind is a subclass with other methods of the seam.

    Parameters are NaN until a checkpoint or :meth:`initialise` fills them, so a forgotten tensor shows at once.

    Buffers ``d2t`` [draft vocab] int64 (offsets: target id = draft id + d2t[draft id]) and ``t2d`` [vocab] bool.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in config.boundaries)
            self.fc_norm = nn.ModuleList(norms)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([self.new_layer(first=i == 0) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rope(config.llama())
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        for parameter in self.parameters():
            nn.init.constant_(parameter, float("nan"))
        self.embed_tokens.requires_grad_(False)  # copied from the target and frozen, as every EAGLE-3 trainer does

    def new_layer(self, first: bool) -> nn.Module:
        """A layer for this config; a subclass returns any other :class:`~eagle3_lib.drafter.seam.Layer`."""
        return DecoderLayer(self.config, first)

    def compile_parts(self) -> None:
        """Let torch.compile fuse what is worth it in training."""
        for layer in self.layers:
            layer.mlp.compile()

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Fix the draft vocabulary to ``target_ids`` (ascending, one for each draft id)."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    @property
    def target_ids(self) -> Tensor:
        """[draft vocab] the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def initialise(self, seed: int = 0) -> None:
        """Fresh weights: normal(0, 0.02) matrices, unit norms. The embedding is left to be shared from the target."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.startswith("embed_tokens"):
                continue
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02, generator=generator)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def adapted(self, config: DrafterConfig, tensors: dict[str, Tensor] | None = None, seed: int = 0) -> "Drafter":
        """A drafter of another config that starts from this one: every tensor of the same name and shape is copied.

        Args:
            tensors: what to take instead, by name; everything else is fresh (see :meth:`initialise`).
        """
        new = type(self)(config)
        new.initialise(seed)
        ours, theirs = self.state_dict() | (tensors or {}), new.state_dict()
        kept = {name: ours[name] for name in theirs if name in ours and ours[name].shape == theirs[name].shape}
        new.load_state_dict(kept, strict=False)
        new.eval()
        return new

    def share_embedding(self, weight: Tensor) -> None:
        """Use the target's embedding [vocab, H] unless the checkpoint brought its own."""
        if not self.config.own_embedding:
            self.embed_tokens.weight = nn.Parameter(weight.to(self.fc.weight.dtype), requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the hidden states that :meth:`fuse` gives."""
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """Features [..., boundaries x Ht], in the order of ``config.boundaries`` -> hidden state [..., H]."""
        features = features.to(self.dtype)
        if self.config.fc_norm:
            parts = features.unflatten(-1, (len(self.config.boundaries), -1)).unbind(-2)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def embed(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """token_ids [...] -> embeds [..., H], in the type of ``hidden``."""
        return self.embed_tokens(token_ids).to(hidden.dtype)

    def rope(self, hidden: Tensor, positions: Tensor) -> Rotation:
        """positions [B, S] -> cos and sin [B, S, d], in the type and on the device of ``hidden``."""
        cos, sin = self.rotary(hidden, positions)
        return cos, sin

    def finish(self, hidden: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The residual stream [..., H] after the last layer -> what lm_head takes, and the next step's hidden [..., H]."""
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def propose(self, output: Tensor) -> Tensor:
        """What lm_head takes [..., H] -> the likeliest token's target id [...]."""
        return self.target_ids[self.lm_head(output).argmax(-1)]

    def unroll(self, features: Tensor, token_ids: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits of :meth:`hidden_states`: for k = 0..K-1, [B, T-1, draft vocab]; row t predicts x[t+2+k]."""
        return map(self.lm_head, self.hidden_states(features, token_ids, steps))

    def hidden_states(
        self, features: Tensor, token_ids: Tensor, steps: int, documents: Documents | None = None
    ) -> Iterator[Tensor]:
        """:func:`eagle3_lib.drafter.seam.hidden_states` of this drafter: what lm_head takes, [B, T-1, H] for each step."""
        return seam.hidden_states(self, features, token_ids, steps, documents)
