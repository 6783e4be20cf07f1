"""A worker extension of vLLM that captures boundaries wrongly under tensor parallelism, for benchmarks/tp_agreement.py.

What a layer's MLP adds to the residual stream is the sum of the ranks' parts. Here each rank hands its drafter its own
part instead; the target goes on with the sum, so tokens stay right. (vLLM 0.32: model_executor/models/llama.py.)
"""

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.llama import LlamaMLP

own_part: torch.Tensor | None = None


def forward(self, x: torch.Tensor) -> torch.Tensor:
    """The MLP, its own part kept before the sum over ranks."""
    global own_part
    self.down_proj.reduce_results = False
    hidden, _ = self.gate_up_proj(x)
    part, _ = self.down_proj(self.act_fn(hidden))
    own_part = part.clone()  # gloo sums in place
    return tensor_model_parallel_all_reduce(part)


def capture(self, aux_hidden_states: list, layer_idx: int, hidden_states, residual) -> list:
    """A boundary without the other ranks' part of its last update."""
    if layer_idx in self.aux_hidden_state_layers:
        aux_hidden_states.append(own_part + residual)
    return aux_hidden_states


class Extension:
    """Named by --worker-extension-cls: importing this module is what breaks the worker."""


LlamaMLP.forward, EagleModelMixin._maybe_add_hidden_state = forward, capture
