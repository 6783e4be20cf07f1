"""DeepSeek-V3 and Kimi-K2.5 for vLLM 0.16 with captured boundaries: what :mod:`eagle3_lib.compat.vllm_plugin` registers.

Boundary k is the residual stream after k decoder layers, so it is captured before layer k, as hidden states plus
residual; the last one after the last layer, before the final norm. That is what vLLM 0.16 does for Llama
(model_executor/models/llama.py) and what the later releases do for DeepSeek. Each layer ends with its sum over the GPUs,
so what is captured is whole.
"""

from typing import Any

import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV2Model
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration
from vllm.sequence import IntermediateTensors

from ...errors import Eagle3Error


class CapturingModel(DeepseekV2Model):
    """The decoder stack; without boundaries to capture it is vLLM's own."""

    aux_hidden_state_layers: tuple[int, ...] = ()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """input_ids or inputs_embeds of [tokens] -> hidden states [tokens, H], and with boundaries a list of as many."""
        if not self.aux_hidden_state_layers:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual, captured = None, []
        for boundary, layer in enumerate(self.layers):
            if boundary in self.aux_hidden_state_layers:
                captured.append(_stream(hidden, residual))
            hidden, residual = layer(positions, hidden, residual)
        if len(self.layers) in self.aux_hidden_state_layers:
            captured.append(_stream(hidden, residual))
        return self.norm(hidden, residual)[0], captured


def _stream(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream as a tensor of its own: vLLM's norms overwrite theirs."""
    return hidden.clone() if residual is None else hidden + residual


class CapturingDeepseek(DeepseekV2ForCausalLM, SupportsEagle3):
    """DeepSeek-V2, DeepSeek-V3 and Kimi-K2."""

    model_cls = CapturingModel

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Capture these boundaries.

        Raises:
            Eagle3Error: a boundary that the target does not have, or a setup whose residual stream is not whole here.
        """
        depth = len(self.model.layers)
        if not layers or not all(0 <= layer <= depth for layer in layers):
            raise Eagle3Error(f"boundaries: found {list(layers)}, expected some from 0 to {depth}")
        if (self.model.start_layer, self.model.end_layer) != (0, depth):
            raise Eagle3Error("pipeline parallelism: found the layers of a part, expected all of them on each rank")
        if getattr(self.config, "llama_4_scaling", None) is not None:
            raise Eagle3Error("the target's config.json: found llama_4_scaling, expected a DeepSeek-V3 or Kimi target")
        if self.model.embed_tokens.weight.dtype == torch.float16:
            raise Eagle3Error("dtype: found float16, in which DeepSeek's residual stream is scaled; expected bfloat16")
        self.model.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """EAGLE-3's default, which vLLM asks for where the drafter names no boundaries."""
        depth = len(self.model.layers)
        return 2, depth // 2, depth - 3


class CapturingKimiK25(KimiK25ForConditionalGeneration, SupportsEagle3):
    """Kimi-K2.5: its text model captures; its image token has the name that 0.16's proposer reads."""

    def __init__(self, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config, prefix)
        self.config.image_token_index = self.config.media_placeholder_token_id

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.get_language_model().set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.get_language_model().get_eagle3_aux_hidden_state_layers()
        return layers
