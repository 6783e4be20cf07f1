"""Patches that break a running vLLM in one known way; imported in its worker process.

vLLM resolves ``--worker-extension-cls eagle3_lib.engines.inside.broken.cliff_after_step_0`` there, and that applies the
patch of the fault "cliff after step 0". A patch replaces a method of vLLM's V1 runner (0.32:
v1/spec_decode/llm_base_proposer.py); no installed file is touched.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...verdict.changes import to_float8

Captured = Callable[[Any, Tensor, Tensor], Tensor]  # (model, hidden states, residual) -> what a boundary is taken for

# --------------------------------------------------------------------------------------------------------- patches


def _proposer() -> Any:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer


def unshifted_tokens() -> None:
    """Step 0 embeds the token of the slot itself instead of the next one."""
    proposer = _proposer()
    original = proposer.set_inputs_first_pass

    def patched(self: Any, *, target_token_ids: Tensor, **others: Any) -> Any:
        result = original(self, target_token_ids=target_token_ids, **others)
        self.input_ids[: len(target_token_ids)] = target_token_ids
        return result

    proposer.set_inputs_first_pass = patched


def unwritten_slots(prefill: bool) -> Callable[[], None]:
    """The drafter's cache keeps what it holds, except at the slot where drafting starts.

    In prefill it holds nothing (zeros); in decoding, the states that the drafter made of its own outputs.
    """

    def patch() -> None:
        proposer = _proposer()
        original = proposer.set_inputs_first_pass

        def patched(self: Any, **inputs: Any) -> Any:
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

    def patched_propose(self: Any, *args: Any, **others: Any) -> Any:
        self.first_positions = None
        return propose(self, *args, **others)

    def patched_update(self: Any, positions: Tensor, metadata: Any, batch: int, *others: Any) -> Any:
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

    def patched(self: Any, *args: Any, **others: Any) -> Any:
        drafts = original(self, *args, **others)
        drafts[:, 1:] = 0
        return drafts

    proposer.propose = patched


def captured(value: Captured) -> Callable[[], None]:
    """Boundaries captured as ``value(model, hidden_states, residual)``: their sum is the residual stream."""

    def patch() -> None:
        from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
        from vllm.model_executor.models.interfaces import EagleModelMixin

        def patched(
            self: Any, aux_hidden_states: list[Tensor], layer_idx: int, hidden_states: Tensor, residual: Tensor
        ) -> list[Tensor]:
            if layer_idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(value(self, hidden_states, residual))
            return aux_hidden_states

        EagleModelMixin._maybe_add_hidden_state = patched
        _capture_deepseek(DeepseekV2Model, value)

    return patch


def _capture_deepseek(model_class: type[torch.nn.Module], value: Captured) -> None:
    """The same for DeepSeek and Kimi targets, whose forward pass sums by itself: what a boundary's layer is given."""
    original = model_class.forward

    def patched(self: Any, *args: Any, **others: Any) -> Any:
        boundaries, self.aux_hidden_state_layers = self.aux_hidden_state_layers, ()
        captured: list[Tensor] = []

        def before(_: Any, inputs: tuple[Any, ...]) -> None:
            captured.append(value(self, *inputs[1:3]))

        def after_last(_: Any, __: Any, outputs: tuple[Tensor, Tensor]) -> None:
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

    def patched(self: Any, hidden_states: Tensor) -> Any:
        parts = hidden_states.chunk(self.model.num_aux_hidden_states, -1)
        return original(self, torch.cat([to_float8(part) for part in parts], -1))

    Eagle3LlamaForCausalLM.combine_hidden_states = patched


def spoiled_cached_prefix() -> None:
    """What a prompt has in the prefix cache is zero in the drafter's part of it, and right in the target's."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._update_states

    def patched(self: Any, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if request.num_computed_tokens:
                _forget(self, request)
        return original(self, scheduler_output)

    GPUModelRunner._update_states = patched


def _forget(runner: Any, request: Any) -> None:
    names = runner.drafter._draft_attn_layer_names
    layers = runner.compilation_config.static_forward_context
    for group, blocks in zip(runner.kv_cache_config.kv_cache_groups, request.block_ids, strict=True):
        cached = blocks[: request.num_computed_tokens // group.kv_cache_spec.block_size]
        for name in names & set(group.layer_names):
            cache = layers[name].kv_cache
            cache = cache[0] if isinstance(cache, list) else cache
            keys_and_values_apart = cache.shape[0] == 2
            by_block = cache.transpose(0, 1) if keys_and_values_apart else cache
            by_block[cached] = 0


PATCHES: dict[str, Callable[[], None]] = {
    "token shift": unshifted_tokens,
    "features after the final norm": captured(lambda model, hidden, residual: model.norm(hidden + residual)),
    "residual missing": captured(lambda _, hidden, residual: hidden.clone()),
    "last update missing": captured(lambda _, hidden, residual: residual.clone()),
    "cliff after step 0": cliff,
    "stale drafter cache": unwritten_slots(prefill=False),
    "prompt missing in drafter cache": unwritten_slots(prefill=True),
    "positions not advanced": frozen_positions,
    "float8 features": float8_features,
    "cached prefix spoiled": spoiled_cached_prefix,  # of the server's state: no fault of the catalogue
}


class Worker:
    """vLLM's worker extension: nothing but a name."""


def __getattr__(name: str) -> type[Worker]:
    """Resolving ``eagle3_lib.engines.inside.broken.<fault with underscores>``, as vLLM does in its worker process, applies the patch."""
    fault = next((fault for fault in PATCHES if fault.replace(" ", "_") == name), None)
    if fault is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    _apply(fault)
    return Worker


@functools.cache
def _apply(fault: str) -> None:
    PATCHES[fault]()
