"""Drafters out: a folder that one engine version serves exactly as it was trained, or a refusal with the reason.

Every export is audited before it appears: what the rules of :mod:`eagle3_lib.compat.audit` call wrong or failing in the named
version is why it is refused.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafter import checkpoint
from ..drafter.checkpoint import IDS
from ..drafter.model import Drafter, DrafterConfig
from ..engines.registry import ENGINES
from ..errors import Eagle3Error
from ..files import whole_folder, write_json
from ..paths import project_path, short_path
from . import audit, rules

FORMATS = (*ENGINES, "speculators")
SPECULATORS_VERSION = "0.9.0"


def export(
    drafter: Drafter,
    folder: str | Path,
    engine: str,
    version: str,
    target_config: dict,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a drafter for one engine version.

    Args:
        engine: an engine's name, or "speculators" (its format, which vLLM serves).
        version: of the engine (of vLLM for "speculators"); "" is the installed one.
        target_config: the target's config.json.
    Raises:
        Eagle3Error: naming everything that this version would serve otherwise than trained, or not at all.
    """
    if engine not in FORMATS:
        raise Eagle3Error(f"engine: found {engine!r}, expected one of {', '.join(FORMATS)}")
    folder, server = project_path(folder), "vllm" if engine == "speculators" else engine
    version = version or rules.installed_version(server)
    config, tensors = checkpoint.ascending(drafter)
    if engine == "speculators":
        _refuse(short_path(folder), f"speculators {SPECULATORS_VERSION}", speculators_refusals(config))
        config_json, first = speculators_json(config, target_config, dtype), "layers.0."
    else:
        nested = None
        if ENGINES[engine].spec.ids_in_eagle_config:
            nested = nested_ids(config, engine, version, target_config)
        config_json, first = checkpoint.to_config_json(config, dtype, nested), "midlayer."
    with whole_folder(folder) as work:
        save_file(
            checkpoint.stored_tensors(config, tensors, dtype, first), work / "model.safetensors", {"format": "pt"}
        )
        write_json(work / "config.json", config_json)
        faults = [f.what for f in audit.check(work, target_config, server, version) if f.severity in ("wrong", "fails")]
        _refuse(
            short_path(folder), f"{engine} {version}" if engine == server else f"{engine} in {server} {version}", faults
        )
    return folder


def _refuse(name: str, engine: str, reasons: list[str]) -> None:
    if reasons:
        raise Eagle3Error(f"{name}: no export for {engine}: " + "; ".join(reasons))


def nested_ids(config: DrafterConfig, engine: str, version: str, target_config: dict) -> list[int]:
    """The ids in eagle_config that make a version of an engine capture the drafter's boundaries, such as SGLang.

    Raises:
        Eagle3Error: no list of ids does (a DeepSeek target from 0.5.16 on, with 1 as the first boundary).
    """
    target = rules.Target.from_config(target_config)
    for ids in ([b - 1 for b in config.boundaries], list(config.boundaries)):
        capture = rules.captured({"eagle_config": {IDS: ids}}, engine, version, target)
        if capture.boundaries == config.boundaries and not capture.undecided:
            return ids
    raise Eagle3Error(
        f"{engine} {version}: no {IDS} makes it capture boundaries {list(config.boundaries)} of {target.architecture} "
        f"({capture.source})"
    )


def speculators_refusals(config: DrafterConfig) -> list[str]:
    """What speculators' Eagle3DraftModel cannot hold (speculators 0.9.0 models/eagle3/config.py, core.py)."""
    reasons = {
        "latent attention has no class in it": config.latent is not None,
        "norm_before_fc and fc_norm exclude each other in it": config.norm_before_fc and config.fc_norm,
        "its fc takes features of the drafter's own hidden size": config.target_hidden_size != config.hidden_size,
    }
    return [reason for reason, found in reasons.items() if found]


def speculators_json(config: DrafterConfig, target_config: dict, dtype: torch.dtype) -> dict:
    """config.json of speculators 0.9.0, from whose layer config vLLM builds the drafter's."""
    layer = checkpoint.layer_json(config)
    rope = {"rope_type": "default", **config.rope_parameters}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": {
            **layer,
            "rope_parameters": rope,
            "num_aux_hidden_states": len(config.boundaries),
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        IDS: list(config.boundaries),
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": None, "architectures": target_config.get("architectures", [])},
        },
    }


def shim(folder: str | Path, out: str | Path, target_config: dict) -> Path:
    """The same weights behind a config.json that every vLLM version and runner reads alike; nothing is converted.

    The boundaries go to the top level, with their number, and so do switches that stand inside ``eagle_config``. Weight
    files are linked where the file system allows it, else copied.

    Returns:
        ``out``.
    """
    folder, out = project_path(folder), project_path(out)
    raw = checkpoint.read_config(folder)
    layers = rules.Target.from_config(target_config).layers
    config, _ = checkpoint.parse_config(raw, short_path(folder / "config.json"), layers, own_embedding=False)
    if list(config.boundaries) != sorted(config.boundaries):
        where = short_path(folder / "config.json")
        raise Eagle3Error(
            f"{where}: {IDS}: found {list(config.boundaries)}; engines feed fc in rising order: use export"
        )
    raw[IDS] = list(config.boundaries)
    raw.get("transformer_layer_config", raw)["num_aux_hidden_states"] = len(config.boundaries)
    nested = raw.get("eagle_config") or {}
    for flag in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"):
        if nested.get(flag) is not None:
            raw.setdefault(flag, nested[flag])
    with whole_folder(out) as work:
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                _link(path.resolve(), work / path.name)
        write_json(work / "config.json", raw)
    return out


def _link(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:
        shutil.copyfile(source, copy)
