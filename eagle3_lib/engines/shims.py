"""Deliberately broken engines: a real engine, made to misbehave in one known way.

Two ways in, none of which touches an installed file. A *shim* is a copy of a drafter folder whose config.json or tensors
are edited, so that the engine itself does the wrong thing; any engine can serve it. A *patch* runs in vLLM's worker
process (:mod:`eagle3_lib.engines.inside.broken`); see :func:`extension`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..drafter.checkpoint import IDS, default_boundaries, read_config, read_tensors
from ..errors import Eagle3Error
from ..files import whole_folder, write_json
from ..paths import project_path
from .inside import broken

Tensors = dict[str, Tensor]
Config = dict[str, Any]  # config.json
ConfigEdit = Callable[[Config, int], Config]
TensorEdit = Callable[[Tensors, Tensor], dict[str, Tensor | None]]


@dataclass(frozen=True)
class Injection:
    """How one fault is brought into the engine; the key of ``INJECTIONS`` is the fault's name in the catalogue.

    config: takes config.json and the number of target layers, returns the fields to set. tensors: takes the drafter's
    tensors and the target's embedding [vocab, H], returns the tensors to set; None removes one. patch: runs in the
    worker process before the engine loads a model.
    """

    config: ConfigEdit | None = None
    tensors: TensorEdit | None = None
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


def shifted_boundaries(by: int) -> ConfigEdit:
    return lambda config, layers: {IDS: [b + by for b in config.get(IDS) or default_boundaries(layers)]}


def blocks(order: tuple[int | None, ...]) -> TensorEdit:
    """The columns of fc as if the engine handed over the features in ``order``; None: one that is never handed over."""

    def edit(tensors: Tensors, _: Tensor) -> dict[str, Tensor | None]:
        columns = tensors["fc.weight"].chunk(len(order), 1)
        edited = [torch.zeros_like(columns[0]) for _ in order]
        for place, source in enumerate(order):
            if source is not None:
                edited[source] = columns[place]
        return {"fc.weight": torch.cat(edited, 1)}

    return edit


def first_head_rows(tensors: Tensors, embedding: Tensor) -> dict[str, Tensor | None]:
    return {"lm_head.weight": embedding[: len(tensors["lm_head.weight"])]}  # the target's head is its embedding: tied


def no_embedding(_: Tensors, embedding: Tensor) -> dict[str, Tensor | None]:
    return {"embed_tokens.weight": torch.zeros_like(embedding)}


def rolled_embedding(_: Tensors, embedding: Tensor) -> dict[str, Tensor | None]:
    return {"embed_tokens.weight": embedding.roll(1, 0)}


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
    **{fault: Injection(patch=patch) for fault, patch in broken.PATCHES.items()},
}


def extension(fault: str) -> str:
    """The value of ``--worker-extension-cls`` that breaks an engine's worker process by the fault's patch.

    For a fault that is brought in by the drafter's folder it names an extension that does nothing.
    """
    name = fault.replace(" ", "_") if named(fault).patch else broken.Worker.__name__
    return f"{broken.__name__}.{name}"
