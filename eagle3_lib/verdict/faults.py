"""The fault catalogue: what an engine can get wrong with an EAGLE-3 drafter, each as a change of the replay.

A fault is one entry of ``CATALOGUE``; :mod:`eagle3_lib.verdict.changes` has the changes that it can name, and
:mod:`eagle3_lib.verdict.hypotheses` replays them all. ``bugs`` are public reports of the fault, as repository#number.
"""

from dataclasses import dataclass

import torch

from ..drafter.checkpoint import default_boundaries
from ..targets.capture import BEFORE_UPDATE, NORMED, UPDATE
from .changes import (
    Change,
    _plain_rope,
    _seeded,
    before_the_sum,
    boundaries,
    changed,
    dropped,
    flipped,
    last_hidden_only,
    last_normed,
    only_where,
    rope,
    rope_of_target,
    to_bfloat16,
    to_float8,
    with_weights,
)


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
