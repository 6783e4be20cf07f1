"""What a backend is asked for, and the target after its last layer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..drafter import checkpoint
from ..errors import Eagle3Error
from ..paths import short_path
from ..targets import targets
from ..targets.capture import RESIDUAL, Features, choices

Backend = Callable[[list[list[int]]], Iterable[Features]]


@dataclass(frozen=True)
class Wanted:
    """What is extracted from which target.

    folder: the target's; boundaries: in the drafter's order; draft_ids: target ids of the draft vocabulary, None: all.
    dtype: of the target's weights. engine_python, engine_options: the engine's interpreter, and further arguments of
    vllm.LLM or SGLang's server. last_hidden: False where ``fused`` is enough, which spares SGLang a server.
    """

    folder: Path
    boundaries: tuple[int, ...]
    draft_ids: Tensor | None = None
    dtype: str = "float32"
    device: str = "cpu"
    engine_python: str = ""
    engine_options: dict | None = None
    max_model_len: int = 2048
    log: Path | None = None
    last_hidden: bool = True


class Tail:
    """The target after its last layer: final norm and head, from its files alone.

    Raises:
        Eagle3Error: a target whose final norm is no plain RMSNorm.
    """

    def __init__(self, wanted: Wanted):
        config = targets.load_config(wanted.folder)
        if not hasattr(config, "rms_norm_eps") or config.model_type.startswith("gemma"):
            raise Eagle3Error(
                f"target: found model_type {config.model_type!r}; expected one with a plain RMSNorm at its end"
            )
        dtype = getattr(torch, wanted.dtype)
        norm = checkpoint.read_tensor(wanted.folder, "model.norm.weight")
        if norm is None:
            raise Eagle3Error(
                f"{short_path(wanted.folder)}: found no tensor *model.norm.weight; expected the final norm"
            )
        self.norm = norm.to(wanted.device, dtype)
        self.head = targets.embedding_and_head(wanted.folder)[1].to(wanted.device, dtype)
        self.eps, self.wanted = config.rms_norm_eps, wanted
        self.draft_ids = None if wanted.draft_ids is None else wanted.draft_ids.to(wanted.device)

    @torch.no_grad()
    def features(self, streams: dict, layers: int) -> Features:
        """Features of one text from its residual streams."""
        stream = streams[RESIDUAL, layers].to(self.head.device)
        last_hidden = torch.nn.functional.rms_norm(stream, self.norm.shape, self.norm, self.eps)
        fused = torch.cat([streams[RESIDUAL, k] for k in self.wanted.boundaries], -1)
        argmax, mass = choices(lambda hidden: hidden @ self.head.T, last_hidden, self.draft_ids)
        return Features(fused, last_hidden, argmax, streams, mass)
