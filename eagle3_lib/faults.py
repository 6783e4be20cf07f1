"""The fault catalogue: what an engine can get wrong with an EAGLE-3 drafter, each as a change of the replay.

A fault is one entry of ``CATALOGUE``. Its ``change`` takes a correct engine's :class:`~eagle3_lib.replay.Setup` and the
target's parts and returns the setup of an engine with the fault, or None where the fault cannot show with this drafter
(a flag that the drafter does not have, default boundaries that are the configured ones). :func:`replay_all` then tells
what each such engine would have accepted on the same tokens; all share one forward pass of the target.

``bugs`` are public reports of the fault, as repository#number.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .checkpoint import default_boundaries
from .drafter import Drafter, Rope, softmax_scale
from .emitted import Told
from .emitted import compare as compare_tokens
from .replay import (
    BEFORE_UPDATE,
    NORMED,
    RESIDUAL,
    UPDATE,
    Features,
    From,
    Kind,
    OtherRanks,
    Setup,
    Texts,
    Without,
    all_slots,
    capture,
    captured_for,
    correct,
    counts_at,
    own_rounds,
)
from .rounds import (
    NOT_TOLD,
    Laid,
    capped,
    compare,
    contradiction,
    drafts_by_slot,
    lay,
    round_slots,
    walk,
    walk_as_drafted,
)

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
    rope_parameters: dict | None = None
    ranks: int = 1
    divided_mlps: frozenset[int] = frozenset()

    @classmethod
    def of(cls, target, ranks: int = 1) -> "TargetParts":
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


def _rope_parameters(config) -> dict | None:
    """Of a transformers config."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if "rope_theta" not in rope or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    return {**rope, "rope_type": kind} if kind == "default" or kind in ROPE_INIT_FUNCTIONS else None


def _adds_a_dense_mlp(layer: nn.Module, config) -> bool:
    """Whether what ``layer`` adds last is its MLP's down_proj: no experts, and nothing done to it on the way."""
    changed = hasattr(layer, "post_feedforward_layernorm") or getattr(config, "residual_multiplier", 1.0) != 1.0
    return isinstance(getattr(getattr(layer, "mlp", None), "down_proj", None), nn.Linear) and not changed


Change = Callable[[Setup, TargetParts], Setup | None]


@dataclass(frozen=True)
class Fault:
    """One entry. ``severity``: "precision" marks what a correct engine may do when it computes in fewer bits."""

    name: str
    stands_for: str
    looks: str
    experiment: str
    remedy: str
    change: Change
    bugs: tuple[str, ...] = ()
    severity: str = "fault"


# ---------------------------------------------------------------------------------------------- changes of the drafter


def variant(drafter: Drafter, weights: dict[str, Tensor] | None = None, /, **config) -> Drafter:
    """A drafter that shares all tensors with ``drafter`` but the ones given, under a changed config."""
    new = _shallow(drafter)
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
    return new.eval()


def _shallow(module: nn.Module) -> nn.Module:
    new = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(module.__dict__[name])
    return new


def _unit_norm(drafter: Drafter, size: int) -> nn.RMSNorm:
    weight = drafter.fc.weight
    return nn.RMSNorm(size, eps=drafter.config.rms_norm_eps, device=weight.device, dtype=weight.dtype)


def with_drafter(**config) -> Change:
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

    def change(setup: Setup, _) -> Setup | None:
        if getattr(setup.drafter.config, flag) != value:
            return None
        return replace(setup, drafter=variant(setup.drafter, **{flag: changed}))

    return change


def rope(make: Callable[[dict, TargetParts], dict | None]) -> Change:
    def change(setup: Setup, parts: TargetParts) -> Setup | None:
        now = setup.drafter.config.rope_parameters
        new = make(dict(now), parts)
        return (
            None if new is None or new == now else replace(setup, drafter=variant(setup.drafter, rope_parameters=new))
        )

    return change


def _plain_rope(now: dict, _) -> dict | None:
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
    def change(setup: Setup, _) -> Setup | None:
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


def changed(**fields) -> Change:
    return lambda setup, _: replace(setup, **fields)


def to_float8(values: Tensor) -> Tensor:
    """Rounded to float8 (e4m3) with one scale for each token."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


def _seeded(shape, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like) * 0.02


IDS = "eagle_aux_hidden_state_layer_ids"
SHIM = f"a copy of the drafter whose config.json has the boundaries in top-level {IDS}"

CATALOGUE: tuple[Fault, ...] = (
    Fault(
        "boundaries -1",
        "The engine takes ids of layers whose output is meant as boundaries.",
        "every conditional rate somewhat lower; the first position most",
        f"serve {SHIM}, each + 1",
        "write boundaries into the top level (vLLM), layer ids = boundary - 1 into eagle_config (SGLang)",
        boundaries(lambda b, _: (k - 1 for k in b)),
        ("vllm#43671", "TorchSpec#87", "BaldEagle#18"),
    ),
    Fault(
        "boundaries +1",
        "The engine adds 1 to ids that are boundaries already.",
        "every conditional rate somewhat lower; the first position most",
        f"serve {SHIM}, each - 1",
        "as for boundaries -1",
        boundaries(lambda b, _: (k + 1 for k in b)),
        ("sglang#25454", "sglang#32334", "sglang#32226"),
    ),
    Fault(
        "default boundaries",
        "The configured ids are not read (nested where top level is wanted, or the other way round): the engine's default.",
        "near nothing at every position, unless the default lies near the configured ones",
        f"serve {SHIM}",
        "put the ids where this version reads them; stage 06 tells where",
        boundaries(lambda b, layers: default_boundaries(layers)),
        ("vllm#50170", "vllm#42764", "tokenspeed#526", "vllm#25961"),
    ),
    Fault(
        "last three boundaries",
        "The engine captures the last layers instead of the configured ones.",
        "near nothing at every position",
        f"serve {SHIM}",
        "fix the capture in the target's model file",
        boundaries(lambda b, layers: range(layers - len(b) + 1, layers + 1)),
        ("sglang#25408",),
    ),
    Fault(
        "last hidden only",
        "The drafter gets the target's last hidden state, after the final norm, in the place of the fused features.",
        "the first position much lower, the later ones lower still",
        "switch the model runner (VLLM_USE_V2_MODEL_RUNNER=0 or 1)",
        "SGLang: --speculative-algorithm EAGLE3 (EAGLE captures no boundaries); vLLM: method eagle3; in config.json set "
        "use_aux_hidden_state to true in eagle_config",
        last_hidden_only,
        ("vllm#40551", "vllm#40656", "sglang#14920", "sglang#21272"),
    ),
    Fault(
        "boundaries reversed",
        "Features are concatenated in falling order.",
        "every conditional rate lower",
        "serve a copy whose fc columns are in the reverse order of boundaries",
        "train and export with rising boundaries; engines capture in rising order, whatever the config says",
        boundaries(lambda b, _: reversed(b)),
        (),
    ),
    Fault(
        "first two boundaries swapped",
        "Features are concatenated in another order than the drafter was trained with.",
        "every conditional rate somewhat lower",
        "serve a copy whose fc columns are permuted in the same way",
        "as for boundaries reversed",
        boundaries(lambda b, _: (b[1], b[0], *b[2:]) if len(b) > 1 else b),
        (),
    ),
    Fault(
        "last two boundaries swapped",
        "Features are concatenated in another order than the drafter was trained with.",
        "every conditional rate lower",
        "serve a copy whose fc columns are permuted in the same way",
        "as for boundaries reversed",
        boundaries(lambda b, _: (*b[:-2], b[-1], b[-2]) if len(b) > 2 else b),
        (),
    ),
    Fault(
        "low boundary dropped",
        "The first of the features never arrives (zeros).",
        "the first position lower",
        "compare one GPU with several, pipeline and expert parallelism off",
        "fix the capture or the gather in the target's model file",
        dropped(0),
        ("sglang#14280", "sglang#10801", "vllm-ascend#5825"),
    ),
    Fault(
        "middle boundary dropped",
        "The second of the features never arrives (zeros).",
        "the first position lower",
        "as for the low one",
        "as for the low one",
        dropped(1),
        ("sglang#14280", "sglang#10801"),
    ),
    Fault(
        "high boundary dropped",
        "The last of the features never arrives (zeros).",
        "the first position much lower",
        "as for the low one",
        "lower the last boundary below the number of layers, or fix the capture",
        dropped(-1),
        ("vllm#46788", "sglang#10801"),
    ),
    Fault(
        "features after the final norm",
        "The target's final norm is applied to what is captured.",
        "near nothing at every position",
        "dump the features the engine hands over (stage 04) and compare their size",
        "capture before the norm",
        boundaries(lambda b, _: b, NORMED),
        (),
    ),
    Fault(
        "last feature after the final norm",
        "The last boundary is the end of the target, and the engine takes it after the final norm.",
        "the first position lower",
        "dump the features the engine hands over (stage 04) and compare their size",
        "capture before the norm",
        last_normed,
        (),
    ),
    Fault(
        "residual missing",
        "Captured is what a layer adds, without the residual stream it is added to.",
        "near nothing at every position",
        "dump the features the engine hands over (stage 04) and compare their size",
        "capture hidden_states + residual",
        boundaries(lambda b, _: b, UPDATE),
        ("vllm#14464", "vllm#11672"),
    ),
    Fault(
        "last update missing",
        "Captured is the residual stream before the layer's MLP is added to it (or before it is reduced over GPUs).",
        "every conditional rate lower",
        "one GPU instead of several; all-reduce fusion off",
        "capture hidden_states + residual, after the reduction",
        boundaries(lambda b, _: b, BEFORE_UPDATE),
        ("sglang#28343",),
    ),
    Fault(
        "captured before the sum over ranks",
        "Under tensor parallelism each GPU captures its own part of the layer's last update, before the parts are summed.",
        "every conditional rate somewhat lower",
        "tensor parallel size 1; all-reduce fusion off",
        "capture hidden_states + residual, after the reduction",
        before_the_sum,
        ("sglang#28343",),
    ),
    Fault(
        "features one slot late",
        "A slot gets the features of the slot before it.",
        "near nothing at every position",
        "batch of one; padded drafter batch off (disable_padded_drafter_batch)",
        "fix the index by which the engine gathers features",
        changed(lag=1),
        ("vllm-ascend#2793", "vllm-ascend#2794"),
    ),
    Fault(
        "token shift",
        "A slot embeds its own token instead of the next one.",
        "the first position low, the later ones less so, given the first",
        "K = 1 against K > 1; another version of the engine",
        "shift the drafter's token ids by one in the first pass",
        changed(first_token=0),
        ("vllm#14464", "vllm#9565", "vllm-ascend#2793"),
    ),
    Fault(
        "d2t dropped",
        "Draft ids are taken for target ids.",
        "about a tenth at the first position, nothing after it",
        "the audit (stage 06): is d2t in the checkpoint?",
        "put d2t, as offsets, into the checkpoint",
        with_weights(lambda d, _: {"d2t": torch.zeros_like(d.d2t)} if bool(d.d2t.any()) else None),
        ("vllm#18909", "Automodel#2447"),
    ),
    Fault(
        "d2t of target ids",
        "d2t holds target ids and the engine adds the draft id to them, as to offsets.",
        "about nothing at every position",
        "the audit (stage 06): d2t must be offsets",
        "store d2t as offsets",
        with_weights(lambda d, _: {"d2t": d.target_ids.clone()} if bool(d.d2t.any()) else None),
        ("verl-SpeCo#67",),
    ),
    Fault(
        "head missing",
        "The drafter's head is not in the checkpoint and stays as it was made at random.",
        "nothing at every position",
        "the audit (stage 06): is lm_head in the checkpoint?",
        "export lm_head",
        with_weights(lambda d, _: {"lm_head.weight": _seeded(d.lm_head.weight.shape, d.lm_head.weight)}),
        ("sglang#27829", "sglang#27908"),
    ),
    Fault(
        "head of the target's first rows",
        "The target's head stands in for the drafter's, cut to its size.",
        "little at the first position, nothing after it",
        "the engine's log: does it say that the head is shared?",
        "export lm_head",
        with_weights(
            lambda d, t: (
                {"lm_head.weight": t.head[: len(d.d2t)].to(d.fc.weight.dtype)}
                if t.head.shape[1] == d.config.hidden_size
                else None
            )
        ),
        ("vllm#28549",),
    ),
    Fault(
        "head of the target",
        "The target's head, at the rows of the draft vocabulary, stands in for the drafter's.",
        "the first position lower, the later ones too",
        "the engine's log: does it say that the head is shared?",
        "export lm_head",
        with_weights(
            lambda d, t: (
                {"lm_head.weight": t.head[d.target_ids].to(d.fc.weight.dtype)}
                if t.head.shape[1] == d.config.hidden_size
                else None
            )
        ),
        ("vllm#28549",),
    ),
    Fault(
        "embedding missing",
        "The embedding is neither in the checkpoint nor shared from the target (zeros).",
        "the first position much lower; the drafter does not know the last token",
        "the engine's log: does it say that the embedding is shared?",
        "export embed_tokens, or use an engine that shares the target's",
        with_weights(lambda d, _: {"embed_tokens.weight": torch.zeros_like(d.embed_tokens.weight)}),
        ("TensorRT-LLM#3176",),
    ),
    Fault(
        "embedding off by one row",
        "Rows of the embedding are shifted, as by a token added at the front.",
        "the first position low, the later ones too",
        "the audit (stage 06): is embed_tokens the target's?",
        "leave embed_tokens out, so that the target's is shared",
        with_weights(lambda d, _: {"embed_tokens.weight": d.embed_tokens.weight.roll(1, 0)}),
        (),
    ),
    Fault(
        "norm_before_residual flipped",
        "The engine never reads norm_before_residual (SGLang), or its loader sets it (speculators' default is true).",
        "the first position lower, later ones lower still",
        "serve a copy whose config.json has the flag the other way round",
        "use an engine that reads the flag, or retrain without it",
        flipped("norm_before_residual"),
        ("vllm#11672",),
    ),
    Fault(
        "norm_output flipped",
        "The hidden state goes to the next step before the norm instead of after it, or the other way round.",
        "the first position right, later ones lower",
        "serve a copy whose config.json has norm_output the other way round; K = 1 is right",
        "use an engine that reads the flag, or retrain without it",
        flipped("norm_output"),
        ("vllm#42764", "sglang#24663", "SpecForge norm_output"),
    ),
    Fault(
        "fc_norm ignored",
        "The norms of the single features are skipped.",
        "the first position much lower",
        "another version of the engine",
        "use an engine that reads fc_norm",
        only_where("fc_norm", True, False),
        ("vllm#42764", "sglang#24663"),
    ),
    Fault(
        "fc_norm wrongly on",
        "Features are normed one by one though the drafter was trained without.",
        "near nothing at every position",
        "serve a copy whose config.json says fc_norm false",
        "set fc_norm to false",
        only_where("fc_norm", False, True),
        (),
    ),
    Fault(
        "norm_before_fc ignored",
        "The norm over all features is skipped.",
        "the first position much lower",
        "another version of the engine",
        "use an engine that reads norm_before_fc",
        only_where("norm_before_fc", True, False),
        ("vllm#38111", "sglang#32334"),
    ),
    Fault(
        "norm_before_fc wrongly on",
        "Features are normed together though the drafter was trained without.",
        "near nothing at every position",
        "serve a copy whose config.json says norm_before_fc false",
        "set norm_before_fc to false",
        only_where("norm_before_fc", False, True),
        (),
    ),
    Fault(
        "rope theta 10000",
        "rope_theta is lost on the way and the default of 10000 taken.",
        "every conditional rate lower, more so in long texts",
        "serve a copy whose config.json has rope_theta in both places (top level and rope_parameters)",
        "write rope_theta where this version reads it",
        rope(lambda now, _: now | {"rope_theta": 10000.0}),
        ("Automodel#2920", "SpecForge#270"),
    ),
    Fault(
        "rope scaling ignored",
        "rope_scaling is not read.",
        "right in short texts, lower in long ones",
        "compare texts by length",
        "write rope_scaling where this version reads it",
        rope(_plain_rope),
        ("SpecForge#219", "Automodel#2399", "vllm#51092"),
    ),
    Fault(
        "rope of the target",
        "One cos/sin cache serves both models, so that the drafter is turned by the target's rope parameters.",
        "every conditional rate lower, more so in long texts",
        "serve a copy whose rope parameters are the target's: it accepts the same",
        "train the drafter with the target's rope parameters, or use an engine with a cache for each model",
        rope_of_target,
        ("vllm-ascend#6612",),
    ),
    Fault(
        "positions not advanced",
        "Every drafting step rotates by the position of the first.",
        "the first position right, later ones lower",
        "K = 1 is right",
        "advance the position with each step",
        changed(advance=0),
        (),
    ),
    Fault(
        "positions advanced twice",
        "Drafting steps skip a position.",
        "the first position right, later ones lower",
        "K = 1 is right",
        "advance the position by one with each step",
        changed(advance=2),
        (),
    ),
    Fault(
        "stale drafter cache",
        "Slots inside an accepted run keep the states that the drafter made of its own outputs.",
        "every rate a little lower",
        "another version of the engine; K = 1 is right",
        "run the drafter over all verified tokens with the target's features",
        changed(stale=True),
        ("vllm#14649",),
    ),
    Fault(
        "prompt missing in drafter cache",
        "The drafter did not run over the prompt, or its cache was not kept with the target's (zeros).",
        "the first rounds of a request low, later ones better",
        "prefix caching off (--no-enable-prefix-caching, --disable-radix-cache); chunked prefill off",
        "as the experiment, until the engine is fixed",
        changed(prompt_cached=False),
        ("sglang#10846", "sglang#11215", "sglang#17338"),
    ),
    Fault(
        "cliff after step 0",
        "Steps after the first draft nonsense (a compiled graph that reads stale or misinterpreted inputs).",
        "the first position right, nothing after it",
        "eager mode (--enforce-eager) for target and drafter",
        "as the experiment, until the engine is fixed",
        changed(right_steps=1),
        ("vllm#17211", "vllm#42004", "sglang#8163"),
    ),
    Fault(
        "nothing accepted",
        "Drafts are nonsense altogether, or verification never accepts.",
        "nothing at every position",
        "eager mode; another attention backend; a drafter that is known to work",
        "look for NaN in the drafter: its quantisation, its attention backend, missing tensors",
        changed(right_steps=0),
        ("vllm#25883", "vllm#9534", "sglang#19796", "vllm-ascend#7290"),
    ),
    Fault(
        "float8 features",
        "Features are rounded to float8 on their way to the drafter.",
        "every rate a little lower",
        "keep the drafter and what it gets out of the quantisation",
        "as the experiment",
        changed(rounding=to_float8),
        ("vllm#26590", "vllm#28435"),
    ),
    Fault(
        "bfloat16 features",
        "Features are rounded to bfloat16: what every engine does that runs in bfloat16.",
        "as a correct engine, but for near ties",
        "serve in float32",
        "none needed",
        changed(rounding=to_bfloat16),
        (),
        severity="precision",
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in CATALOGUE}


# ------------------------------------------------------------------------------------------------- all of them at once


def hypotheses(drafter: Drafter, parts: TargetParts, names: Iterable[str] | None = None) -> dict[str, Setup]:
    """A correct engine and every fault that can show with this drafter, by name."""
    healthy = correct(drafter)
    setups = {HEALTHY: healthy}
    for name in FAULTS if names is None else names:
        if (setup := FAULTS[name].change(healthy, parts)) is not None:
            setups[name] = setup
    return setups


def extra_streams(setups: dict[str, Setup]) -> set:
    """What one pass of the target must capture for all of them: ``capture(..., also=...)``."""
    return captured_for(setups.values())


def texts_of(requests: list[tuple[list[int], list[int]]], features: Iterable[Features]) -> Texts:
    """Requests (prompt ids, output ids) with the features of their texts."""
    texts = [prompt + output for prompt, output in requests]
    return Texts(texts, [len(prompt) for prompt, _ in requests], [f.streams for f in features])


def replay_all(
    setups: dict[str, Setup], texts: Texts, rounds: list[list[int]] | None, steps: int
) -> dict[str, list[list[int]]]:
    """For each hypothesis and request: the accepted counts at the engine's rounds, or its own rounds without them.

    Args:
        rounds: the engine's accepted counts by request; None where the engine tells only histograms or counters.
        steps: K.
    """
    if rounds is None:
        slots = all_slots(texts)
        return {name: own_rounds(counts_at(setup, texts, slots, steps), texts) for name, setup in setups.items()}
    slots = [round_slots(counts, length) for counts, length in zip(rounds, texts.prompt_lengths, strict=True)]
    return {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in setups.items()}


TOKENS_AT_ONCE = 8192  # of the texts whose streams are held together: about 40 tensors [tokens, Ht]


def examine(
    target,
    drafter: Drafter,
    requests: list[dict],
    steps: int,
    names: Iterable[str] | None = None,
    told: Told | None = None,
    ranks: int = 1,
    suspects: dict[str, Setup] | None = None,
) -> list[dict]:
    """Replay a correct engine and the catalogue on an engine's tokens: the ``requests`` of replay.json.

    Args:
        requests: [{"id", "prompt_ids", "output_ids", "accepted": the engine's accepted counts, and where they are known
            "drafted", "chunks", "totals", "histogram"}].
        steps: K.
        names: faults to try; all of them by default.
        told: how the tokens were chosen; greedily in float32 by default.
        ranks: tensor parallel size of the engine.
        suspects: engines that obey another config.json, by name (:mod:`eagle3_lib.suspects`).
    Returns:
        for each request {"id", "prompt_length", "output_length", "engine_rounds", "drafted", "unjudged": why its rounds are
        not compared, or None, "without_drafts": steps that drafted nothing, "in_vocabulary": tokens of the answer that are in
        the draft vocabulary, "replay_rounds", "replay_drafted", "rows", "hypotheses" and "suspects": {name: accepted counts
        at the engine's rounds}, and how its tokens compare with the target's: "greedy" and "lossless" (tokens that are not
        the target's first choice), or "emission" where they were sampled}.
    """
    return list(examining(target, drafter, requests, steps, names, told or Told(), ranks, suspects or {}))


def examining(
    target,
    drafter: Drafter,
    requests: list[dict],
    steps: int,
    names: Iterable[str] | None,
    told: Told,
    ranks: int = 1,
    suspects: dict[str, Setup] | None = None,
) -> Iterator[dict]:
    """The requests of :func:`examine`, one after the other, a few texts at a time in memory."""
    setups = hypotheses(drafter, TargetParts.of(target, ranks), names)
    laid = lay_all(requests, steps)
    for group in _groups(requests):
        some, their_laid = [requests[i] for i in group], [laid[i] for i in group]
        yield from _examine(target, setups, suspects or {}, some, their_laid, steps, told)


def counts_from(
    target, drafter: Drafter, requests: list[dict], steps: int, names: Iterable[str], since: int, ranks: int = 1
) -> Iterator[dict[str, list[int]]]:
    """For each request, each fault's accepted counts at the engine's rounds where the fault begins inside the answers.

    Args:
        since: the slot of an answer from which on the engine has the fault; see :class:`eagle3_lib.replay.From`.
    """
    setups = hypotheses(drafter, TargetParts.of(target, ranks), names)
    laid = lay_all(requests, steps)
    for group in _groups(requests):
        some, placed = [requests[i] for i in group], [_placed(laid[i]) for i in group]
        _, texts = forward(target, setups, some)
        slots = [laid.slots(length) for laid, length in zip(placed, texts.prompt_lengths, strict=True)]
        counts = {
            name: counts_at(From(setup, setups[HEALTHY], since), texts, slots, steps)
            for name, setup in setups.items()
            if name != HEALTHY and not setup.stale
        }
        for index, request in enumerate(some):
            yield {name: capped(of[index], request.get("drafted")) for name, of in counts.items()}


def _groups(requests: list[dict]) -> Iterator[list[int]]:
    """Indices of requests whose texts are held together."""
    group: list[int] = []
    for index, request in enumerate(requests):
        tokens = sum(_tokens(requests[other]) for other in group)
        if group and tokens + _tokens(request) > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(index)
    yield group


def _placed(laid: Laid | str) -> Laid:
    return laid if isinstance(laid, Laid) else Laid()


def _tokens(request: dict) -> int:
    return len(request["prompt_ids"]) + len(request["output_ids"])


def lay_all(requests: list[dict], steps: int) -> list[Laid | str]:
    """Each request's rounds on its text, or why they are not compared."""
    found = [_lay(request, steps) for request in requests]
    idle = any(isinstance(laid, Laid) and laid.idle for laid in found)
    if idle or any(0 in (request.get("drafted") or ()) for request in requests):
        found = [_lay(request, steps, may_idle=True) for request in requests]
    return found


def _lay(request: dict, steps: int, may_idle: bool = False) -> Laid | str:
    if request["accepted"] is None:
        return NOT_TOLD
    if said := contradiction(request, steps):
        return said
    return lay(len(request["output_ids"]), request["accepted"], request.get("chunks") or (), may_idle)


@torch.no_grad()
def _examine(
    target,
    setups: dict[str, Setup],
    suspects: dict[str, Setup],
    requests: list[dict],
    laid: list[Laid | str],
    steps: int,
    told: Told,
) -> Iterator[dict]:
    features, texts = forward(target, {**suspects, **setups}, requests)
    everywhere = counts_at(setups[HEALTHY], texts, all_slots(texts), steps)
    faulty = {name: setup for name, setup in setups.items() if name != HEALTHY}
    placed = [_placed(some) for some in laid]
    slots = [some.slots(length) for some, length in zip(placed, texts.prompt_lengths, strict=True)]
    rounds = [request["accepted"] if some.firsts else [] for request, some in zip(requests, placed, strict=True)]
    counts = {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in faulty.items()}
    of_suspects = {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in suspects.items()}
    vocabulary = frozenset(setups[HEALTHY].drafter.target_ids.tolist())
    for index, request in enumerate(requests):
        of_request = {name: by_request[index] for name, by_request in counts.items()}
        examined = tell(request, laid[index], everywhere[index], of_request, steps, vocabulary)
        if suspects and examined["rows"]:
            drafted = request.get("drafted")
            examined["suspects"] = {name: capped(of[index], drafted) for name, of in of_suspects.items()}
        known = placed[index] if isinstance(laid[index], Laid) else None
        yield examined | compare_tokens(target, setups[HEALTHY].drafter, request, features[index], known, steps, told)


def forward(target, setups: dict[str, Setup], requests: list[dict]) -> tuple[list[Features], Texts]:
    """One forward pass of the target over the requests' texts, for all setups."""
    texts = [request["prompt_ids"] + request["output_ids"] for request in requests]
    boundaries = setups[HEALTHY].drafter.config.boundaries
    features = list(capture(target, texts, boundaries, also=extra_streams(setups)))
    return features, texts_of([(request["prompt_ids"], request["output_ids"]) for request in requests], features)


def tell(
    request: dict,
    laid: Laid | str,
    everywhere: list[int],
    counts: dict[str, list[int]],
    steps: int,
    vocabulary: frozenset[int] | None = None,
) -> dict:
    """A request of replay.json, from a correct engine's counts at all slots and each fault's at the engine's rounds.

    Args:
        vocabulary: the target ids that the drafter can draft; None: all of them.
    """
    start, drafted = len(request["prompt_ids"]), request.get("drafted")
    accepted = [0] * (start - 1) + everywhere
    told = {
        "id": request["id"],
        "prompt_length": start,
        "output_length": len(request["output_ids"]),
        "in_vocabulary": sum(_drafts_it(token, vocabulary) for token in request["output_ids"]),
        "engine_rounds": request["accepted"] or [],
        "drafted": drafted,
    }
    told |= {name: request[name] for name in ("started_s", "seconds", "first_token_s") if name in request}
    if isinstance(laid, str):
        nothing = {"unjudged": laid, "without_drafts": 0, "rows": [], "hypotheses": {}, "drafted": None}
        return told | nothing | {"replay_rounds": walk(accepted, start), "replay_drafted": None}
    drafts_at = drafts_by_slot(laid, request["accepted"], drafted, start)
    replay_rounds, replay_drafted = walk_as_drafted(accepted, start, drafts_at, steps)
    rows = compare(request["accepted"], accepted, start, steps, drafted, laid)
    for row in rows:
        stops_at = row["slot"] + 2 + row["replay"] - start
        ends_there = row["replay"] < row["drafted"] and stops_at < len(request["output_ids"])
        row["outside"] = ends_there and not _drafts_it(request["output_ids"][stops_at], vocabulary)
    return told | {
        "unjudged": None,
        "without_drafts": len(laid.idle),
        "replay_rounds": replay_rounds,
        "replay_drafted": replay_drafted,
        "rows": rows,
        "hypotheses": {name: capped(some, drafted) for name, some in counts.items()},
    }


def _drafts_it(token: int, vocabulary: frozenset[int] | None) -> bool:
    return vocabulary is None or token in vocabulary


def markdown() -> str:
    """The catalogue as the section of docs/faults.md (a test keeps the two the same)."""
    parts = []
    for fault in CATALOGUE:
        bugs = ", ".join(fault.bugs) or "none known"
        parts.append(
            f"### {fault.name}\n\n{fault.stands_for}\n\n"
            f"- Looks like: {fault.looks}.\n"
            f"- Confirm with: {fault.experiment}.\n"
            f"- Remedy: {fault.remedy}.\n"
            f"- Public bugs: {bugs}.\n"
        )
    return "\n".join(parts)
