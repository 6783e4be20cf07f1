"""How a fault changes the replay.

A change takes a correct engine's :class:`~eagle3_lib.verdict.replay.Setup` and the target's parts and returns the setup of
an engine with the fault, or None where the fault cannot show with this drafter (a flag that the drafter does not have,
default boundaries that are the configured ones).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..drafter.model import Drafter, Rope, softmax_scale
from ..targets.capture import BEFORE_UPDATE, NORMED, RESIDUAL, UPDATE, Kind, OtherRanks, Without
from .replay import Setup

HEALTHY = "correct engine"


@dataclass(frozen=True)
class TargetParts:
    """What faults need of the target: its number of layers, embedding and head [vocab, H], and final norm.

    rope_parameters: as in transformers' configs, with rope_type and rope_theta; None where layers differ in it, only a part
    of each head turns, or its kind is unknown here. ranks: the engine's tensor parallel size. divided_mlps: boundaries whose
    layer before adds one dense MLP, which such an engine divides by intermediate columns, as it is; experts are not among
    them.
    """

    layers: int
    embedding: Tensor
    head: Tensor
    final_norm: nn.Module
    rope_parameters: dict[str, Any] | None = None
    ranks: int = 1
    divided_mlps: frozenset[int] = frozenset()

    @classmethod
    def of(cls, target: PreTrainedModel, ranks: int = 1) -> "TargetParts":
        config, layers = target.config.get_text_config(), target.base_model.layers
        return cls(
            config.num_hidden_layers,
            target.get_input_embeddings().weight,
            target.get_output_embeddings().weight,
            target.base_model.norm,
            _rope_parameters(config),
            ranks,
            frozenset(k for k, layer in enumerate(layers, 1) if _adds_a_dense_mlp(layer, config)),
        )


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Of a transformers config."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if "rope_theta" not in rope or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    return {**rope, "rope_type": kind} if kind == "default" or kind in ROPE_INIT_FUNCTIONS else None


def _adds_a_dense_mlp(layer: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether what ``layer`` adds last is its MLP's down_proj: no experts, and nothing done to it on the way."""
    changed = hasattr(layer, "post_feedforward_layernorm") or getattr(config, "residual_multiplier", 1.0) != 1.0
    return isinstance(getattr(getattr(layer, "mlp", None), "down_proj", None), nn.Linear) and not changed


Change = Callable[[Setup, TargetParts], Setup | None]


# ---------------------------------------------------------------------------------------------- changes of the drafter


def variant(drafter: Drafter, weights: dict[str, Tensor] | None = None, /, **config: Any) -> Drafter:
    """A drafter that shares all tensors with ``drafter`` but the ones given, under a changed config."""
    new: Drafter = _shallow(drafter)
    new.config = drafter.config.with_(**config)
    if "rope_parameters" in config:
        new.rotary = Rope(new.config.llama()).to(drafter.fc.weight.device)
    if {"rope_parameters", "norm_before_residual"} & config.keys():
        new.layers = nn.ModuleList(_shallow(layer) for layer in drafter.layers)
        for layer in new.layers:
            layer.norm_before_residual = new.config.norm_before_residual
            layer.self_attn = _shallow(layer.self_attn)
            layer.self_attn.scale = softmax_scale(new.config)
    if config.get("fc_norm") and not drafter.config.fc_norm:
        sizes = [new.config.target_hidden_size] * len(new.config.boundaries)
        new.fc_norm = nn.ModuleList(_unit_norm(drafter, size) for size in sizes)
    if config.get("norm_before_fc") and not drafter.config.norm_before_fc:
        new.input_norm = _unit_norm(drafter, new.config.feature_size)
    for name, tensor in (weights or {}).items():
        path, _, last = name.rpartition(".")
        owner = new
        if path:
            owner = _shallow(new.get_submodule(path))
            setattr(new, path, owner)
        setattr(owner, last, nn.Parameter(tensor, requires_grad=False) if last == "weight" else tensor)
    new.eval()
    return new


def _shallow(module: nn.Module) -> nn.Module:
    new = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(module.__dict__[name])
    return new


def _unit_norm(drafter: Drafter, size: int) -> nn.RMSNorm:
    weight = drafter.fc.weight
    return nn.RMSNorm(size, eps=drafter.config.rms_norm_eps, device=weight.device, dtype=weight.dtype)


def with_drafter(**config: Any) -> Change:
    return lambda setup, _: replace(setup, drafter=variant(setup.drafter, **config))


def with_weights(make: Callable[[Drafter, TargetParts], dict[str, Tensor] | None]) -> Change:
    def change(setup: Setup, parts: TargetParts) -> Setup | None:
        weights = make(setup.drafter, parts)
        return replace(setup, drafter=variant(setup.drafter, weights)) if weights else None

    return change


def flipped(flag: str) -> Change:
    """A flag without a tensor: read where it should be ignored, or the other way round."""
    return lambda setup, _: replace(
        setup, drafter=variant(setup.drafter, **{flag: not getattr(setup.drafter.config, flag)})
    )


def only_where(flag: str, value: bool, changed: bool) -> Change:
    """A flag with a tensor: ignored where the drafter has it (``value`` True), or on with unit weights where not."""

    def change(setup: Setup, _: TargetParts) -> Setup | None:
        if getattr(setup.drafter.config, flag) != value:
            return None
        return replace(setup, drafter=variant(setup.drafter, **{flag: changed}))

    return change


def rope(make: Callable[[dict[str, Any], TargetParts], dict[str, Any] | None]) -> Change:
    def change(setup: Setup, parts: TargetParts) -> Setup | None:
        now = setup.drafter.config.rope_parameters
        new = make(dict(now), parts)
        return (
            None if new is None or new == now else replace(setup, drafter=variant(setup.drafter, rope_parameters=new))
        )

    return change


def _plain_rope(now: dict[str, Any], _: TargetParts) -> dict[str, Any] | None:
    return (
        None
        if now.get("rope_type", "default") == "default"
        else {"rope_type": "default", "rope_theta": now["rope_theta"]}
    )


def rope_of_target(setup: Setup, parts: TargetParts) -> Setup | None:
    """cos and sin as the target turns by, over the drafter's own head; the softmax scale stays the drafter's.

    None where the two turn alike, however their parameters are written.
    """
    if parts.rope_parameters is None:
        return None
    drafter = setup.drafter
    turned = variant(drafter, rope_parameters=parts.rope_parameters).rotary
    now = drafter.rotary
    if turned.attention_scaling == now.attention_scaling and torch.equal(turned.inv_freq, now.inv_freq):
        return None
    new = variant(drafter)
    new.rotary = turned
    return replace(setup, drafter=new)


# --------------------------------------------------------------------------------------------- changes of the features


def boundaries(make: Callable[[tuple[int, ...], int], Iterable[int]], kind: Kind = RESIDUAL) -> Change:
    """Other boundaries, or another stream at the same ones; None where they are the configured ones or do not exist."""

    def change(setup: Setup, parts: TargetParts) -> Setup | None:
        configured = setup.drafter.config.boundaries
        made = tuple(make(configured, parts.layers))
        lowest = 1 if kind in (UPDATE, BEFORE_UPDATE) else 0
        sources = tuple((kind, k) for k in made)
        if (
            sources == setup.sources
            or len(made) != len(configured)
            or not all(lowest <= k <= parts.layers for k in made)
        ):
            return None
        return replace(setup, sources=sources, final_norm=parts.final_norm)

    return change


def before_the_sum(setup: Setup, parts: TargetParts) -> Setup | None:
    """Rank 0's part of the last update only; None with one rank, or where a boundary has no MLP that ranks divide.

    Where every rank drafts from its own part, their drafters disagree and this is the nearest single one: it reproduces 120
    of 125 rounds of such an engine, a correct engine 114 (benchmarks/tp_agreement.py, tp2_wrong).
    """
    configured = setup.drafter.config.boundaries
    if parts.ranks == 1 or not parts.divided_mlps.issuperset(configured):
        return None
    return replace(setup, sources=tuple((Without(OtherRanks(parts.ranks)), k) for k in configured))


def dropped(place: int) -> Change:
    def change(setup: Setup, _: TargetParts) -> Setup | None:
        if not -len(setup.sources) <= place < len(setup.sources):
            return None
        sources = list(setup.sources)
        sources[place] = None
        return replace(setup, sources=tuple(sources))

    return change


def last_normed(setup: Setup, parts: TargetParts) -> Setup | None:
    *others, last = setup.sources
    if last is None or last[1] != parts.layers:
        return None
    return replace(setup, sources=(*others, (NORMED, last[1])), final_norm=parts.final_norm)


def last_hidden_only(setup: Setup, parts: TargetParts) -> Setup | None:
    config = setup.drafter.config
    if config.target_hidden_size != config.hidden_size:
        return None
    return replace(setup, sources=((NORMED, parts.layers),), final_norm=parts.final_norm, through_fc=False)


def changed(**fields: Any) -> Change:
    return lambda setup, _: replace(setup, **fields)


def to_float8(values: Tensor) -> Tensor:
    """Rounded to float8 (e4m3) with one scale for each token."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


def _seeded(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like) * 0.02
