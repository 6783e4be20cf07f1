"""Deliberately broken engines: the real vLLM, made to misbehave in one known way.

Two ways in, none of which touches an installed file. A *shim* is a copy of a drafter folder whose config.json or tensors
are edited, so that the engine itself does the wrong thing; any engine can serve it. A *patch* replaces a method of
vLLM's V1 runner (0.32: v1/spec_decode/llm_base_proposer.py) in the engine's own worker process, where vLLM resolves
``--worker-extension-cls eagle3_lib.broken.cliff_after_step_0``; see :func:`extension`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import IDS, default_boundaries, read_config, read_tensors
from .errors import Eagle3Error
from .faults import to_float8
from .provenance import project_path, whole_folder, write_json

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Injection:
    """How one fault is brought into the engine; the key of ``INJECTIONS`` is the fault's name in the catalogue.

    config: takes config.json and the number of target layers, returns the fields to set. tensors: takes the drafter's
    tensors and the target's embedding [vocab, H], returns the tensors to set; None removes one. patch: runs in the
    worker process before the engine loads a model.
    """

    config: Callable[[dict, int], dict] | None = None
    tensors: Callable[[Tensors, Tensor], dict[str, Tensor | None]] | None = None
    patch: Callable[[], None] | None = None


def shim(drafter: str | Path, fault: str, out: str | Path, target: str | Path) -> Path:
    """Write a copy of ``drafter`` that makes an engine show ``fault``; a plain copy where the fault is a patch."""
    return write_shim(drafter, named(fault), out, target)


def write_shim(drafter: str | Path, injection: Injection, out: str | Path, target: str | Path) -> Path:
    """The same for a fault that is not in ``INJECTIONS``."""
    drafter, out, target = project_path(drafter), project_path(out), project_path(target)
    config, tensors = read_config(drafter), read_tensors(drafter)
    target_config = read_config(target)
    if injection.config:
        config |= injection.config(config, target_config["num_hidden_layers"])
    if injection.tensors:
        embedding = read_tensors(target)["model.embed_tokens.weight"].to(tensors["fc.weight"].dtype)
        tensors |= injection.tensors(tensors, embedding)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    with whole_folder(out) as work:
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
        write_json(work / "config.json", config)
    return out


def named(fault: str) -> Injection:
    if fault not in INJECTIONS:
        raise Eagle3Error(f"broken engine: fault: found {fault!r}, expected one of {sorted(INJECTIONS)}")
    return INJECTIONS[fault]


# ---------------------------------------------------------------------------------------------- config and tensors


def shifted_boundaries(by: int):
    return lambda config, layers: {IDS: [b + by for b in config.get(IDS) or default_boundaries(layers)]}


def blocks(order: tuple[int | None, ...]):
    """The columns of fc as if the engine handed over the features in ``order``; None: one that is never handed over."""

    def edit(tensors: Tensors, _) -> Tensors:
        columns = tensors["fc.weight"].chunk(len(order), 1)
        edited = [torch.zeros_like(columns[0]) for _ in order]
        for place, source in enumerate(order):
            if source is not None:
                edited[source] = columns[place]
        return {"fc.weight": torch.cat(edited, 1)}

    return edit


def first_head_rows(tensors: Tensors, embedding: Tensor) -> Tensors:
    return {"lm_head.weight": embedding[: len(tensors["lm_head.weight"])]}  # the target's head is its embedding: tied


def no_embedding(_, embedding: Tensor) -> Tensors:
    return {"embed_tokens.weight": torch.zeros_like(embedding)}


def rolled_embedding(_, embedding: Tensor) -> Tensors:
    return {"embed_tokens.weight": embedding.roll(1, 0)}


# --------------------------------------------------------------------------------------------------------- patches


def _proposer():
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer


def unshifted_tokens() -> None:
    """Step 0 embeds the token of the slot itself instead of the next one."""
    proposer = _proposer()
    original = proposer.set_inputs_first_pass

    def patched(self, *, target_token_ids, **others):
        result = original(self, target_token_ids=target_token_ids, **others)
        self.input_ids[: len(target_token_ids)] = target_token_ids
        return result

    proposer.set_inputs_first_pass = patched


def unwritten_slots(prefill: bool):
    """The drafter's cache keeps what it holds, except at the slot where drafting starts.

    In prefill it holds nothing (zeros); in decoding, the states that the drafter made of its own outputs.
    """

    def patch() -> None:
        proposer = _proposer()
        original = proposer.set_inputs_first_pass

        def patched(self, **inputs):
            count, starts, metadata = original(self, **inputs)
            lengths = metadata.query_start_loc.diff().long()
            in_prefill = lengths > self.num_speculative_tokens + 1
            skipped = (in_prefill == prefill).repeat_interleave(lengths)
            skipped[starts.long()] = False
            slots = metadata.slot_mapping.masked_fill(skipped, -1)
            return count, starts, metadata.replace(slot_mapping=slots)

        proposer.set_inputs_first_pass = patched

    return patch


def frozen_positions() -> None:
    """Every drafting step rotates by the position of step 0; cache slots advance as they should."""
    proposer = _proposer()
    propose, update = proposer.propose, proposer._update_positions_dependent_metadata

    def patched_propose(self, *args, **others):
        self.first_positions = None
        return propose(self, *args, **others)

    def patched_update(self, positions, metadata, batch, *others):
        if self.first_positions is None:
            self.first_positions = positions[:batch].clone()
        advanced = update(self, positions, metadata, batch, *others).clone()
        self.positions[:batch] = self.first_positions
        return advanced

    proposer.propose, proposer._update_positions_dependent_metadata = patched_propose, patched_update


def cliff() -> None:
    """Drafts after the first are token 0."""
    proposer = _proposer()
    original = proposer.propose

    def patched(self, *args, **others):
        drafts = original(self, *args, **others)
        drafts[:, 1:] = 0
        return drafts

    proposer.propose = patched


def captured(value: Callable):
    """Boundaries captured as ``value(model, hidden_states, residual)``: their sum is the residual stream."""

    def patch() -> None:
        from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
        from vllm.model_executor.models.interfaces import EagleModelMixin

        def patched(self, aux_hidden_states, layer_idx, hidden_states, residual):
            if layer_idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(value(self, hidden_states, residual))
            return aux_hidden_states

        EagleModelMixin._maybe_add_hidden_state = patched
        _capture_deepseek(DeepseekV2Model, value)

    return patch


def _capture_deepseek(model_class: type[torch.nn.Module], value: Callable) -> None:
    """The same for DeepSeek and Kimi targets, whose forward pass sums by itself: what a boundary's layer is given."""
    original = model_class.forward

    def patched(self, *args, **others):
        boundaries, self.aux_hidden_state_layers = self.aux_hidden_state_layers, ()
        captured: list[Tensor] = []

        def before(_, inputs):
            captured.append(value(self, *inputs[1:3]))

        def after_last(_, __, outputs):
            captured.append(value(self, *outputs))

        last = len(self.layers)
        hooks = [self.layers[k].register_forward_pre_hook(before) for k in boundaries if k < last]
        hooks += [self.layers[-1].register_forward_hook(after_last) for k in boundaries if k == last]
        try:
            hidden = original(self, *args, **others)
        finally:
            self.aux_hidden_state_layers = boundaries
            for hook in hooks:
                hook.remove()
        return (hidden, captured) if captured else hidden

    model_class.forward = patched


def float8_features() -> None:
    """Features rounded to float8 (e4m3) with one scale for each token and boundary, as a quantised transfer does."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    original = Eagle3LlamaForCausalLM.combine_hidden_states

    def patched(self, hidden_states):
        parts = hidden_states.chunk(self.model.num_aux_hidden_states, -1)
        return original(self, torch.cat([to_float8(part) for part in parts], -1))

    Eagle3LlamaForCausalLM.combine_hidden_states = patched


INJECTIONS: dict[str, Injection] = {
    "none": Injection(),
    "boundaries -1": Injection(config=shifted_boundaries(-1)),
    "boundaries +1": Injection(config=shifted_boundaries(1)),
    "last three boundaries": Injection(config=lambda _, layers: {IDS: [layers - 2, layers - 1, layers]}),
    "last hidden only": Injection(config=lambda *_: {"eagle_config": {"use_aux_hidden_state": False}}),
    "boundaries reversed": Injection(tensors=blocks((2, 1, 0))),
    "first two boundaries swapped": Injection(tensors=blocks((1, 0, 2))),
    "low boundary dropped": Injection(tensors=blocks((None, 1, 2))),
    "middle boundary dropped": Injection(tensors=blocks((0, None, 2))),
    "high boundary dropped": Injection(tensors=blocks((0, 1, None))),
    "d2t dropped": Injection(tensors=lambda *_: {"d2t": None, "t2d": None}),
    "head of the target's first rows": Injection(tensors=first_head_rows),
    "embedding missing": Injection(tensors=no_embedding),
    "embedding off by one row": Injection(tensors=rolled_embedding),
    "norm_before_residual flipped": Injection(
        config=lambda c, _: {"norm_before_residual": not c.get("norm_before_residual", False)}
    ),
    "norm_output flipped": Injection(config=lambda c, _: {"norm_output": not c.get("norm_output", False)}),
    "fc_norm wrongly on": Injection(config=lambda *_: {"fc_norm": True}),
    "norm_before_fc wrongly on": Injection(config=lambda *_: {"norm_before_fc": True}),
    "rope theta 10000": Injection(config=lambda *_: {"rope_theta": 10000.0}),
    "token shift": Injection(patch=unshifted_tokens),
    "features after the final norm": Injection(
        patch=captured(lambda model, hidden, residual: model.norm(hidden + residual))
    ),
    "residual missing": Injection(patch=captured(lambda _, hidden, residual: hidden.clone())),
    "last update missing": Injection(patch=captured(lambda _, hidden, residual: residual.clone())),
    "cliff after step 0": Injection(patch=cliff),
    "stale drafter cache": Injection(patch=unwritten_slots(prefill=False)),
    "prompt missing in drafter cache": Injection(patch=unwritten_slots(prefill=True)),
    "positions not advanced": Injection(patch=frozen_positions),
    "float8 features": Injection(patch=float8_features),
}


class Worker:
    """vLLM's worker extension: nothing but a name."""


def extension(fault: str) -> str:
    """The value of ``--worker-extension-cls`` that breaks an engine's worker process by the fault's patch."""
    return f"{__name__}.{named(fault) and fault.replace(' ', '_')}"


def __getattr__(name: str):
    """Resolving ``eagle3_lib.broken.<fault with underscores>``, as vLLM does in its worker process, applies the patch."""
    fault = next((fault for fault in INJECTIONS if fault.replace(" ", "_") == name), None)
    if fault is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    _apply(fault)
    return Worker


@functools.cache
def _apply(fault: str) -> None:
    if patch := INJECTIONS[fault].patch:
        patch()
