"""Drafter checkpoints in and out, strict in both directions: every tensor is wanted, has its shape, and is finite.

Read: ``midlayer.*`` (SafeAILab EAGLE, SpecForge, TorchSpec), flat ``layers.N.*`` (vLLM, ModelOpt, AngelSlim) and
speculators folders, with grouped-query or latent attention; safetensors or .bin, in one file or sharded. A .bin file is
read with ``weights_only``: a pickle that wants to run code is refused.

Written: ``midlayer.*`` with the boundaries in both places where engines look: top level as boundaries (vLLM, all
versions) and inside ``eagle_config`` as ids of the layer whose output is taken, boundary - 1 (SGLang adds 1:
srt/models/llama.py ``set_eagle3_layers_to_capture``). :mod:`eagle3_lib.compat.export` says which engine serves that rightly.
"""

import json
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..errors import Eagle3Error
from ..files import whole_folder, write_json
from ..paths import project_path, short_path
from .model import Drafter, DrafterConfig, LatentSizes

IDS = "eagle_aux_hidden_state_layer_ids"
NOT_STORED = ("rotary.",)  # buffers that the module computes
CONFIG_BYTES = 2**22  # a drafter's config.json has some kilobytes
LEGACY_NAMES = {  # older names of SGLang and SafeAILab -> those of the module
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
Positive = Annotated[int, Field(gt=0)]


@dataclass
class Loaded:
    """A drafter, the config.json it came with, and every conversion that reading it took."""

    drafter: Drafter
    config_json: dict[str, Any]
    conversions: list[str]
    format: str = ""


@dataclass(frozen=True)
class Survey:
    """A folder as it is: config.json, each tensor's shape by its name in the drafter module, d2t, naming, format."""

    raw: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    d2t: Tensor | None
    naming: str
    format: str


class EagleConfigJson(BaseModel):
    """``eagle_config`` of a drafter's config.json (SGLang, ModelOpt, TorchSpec)."""

    model_config = ConfigDict(extra="allow", strict=True)
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    layer_ids: list[int] | None = None
    use_aux_hidden_state: bool = True
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None


class ConfigJson(BaseModel):
    """The fields of a drafter's config.json that this project reads, with their kinds."""

    model_config = ConfigDict(extra="allow", strict=True)
    architectures: list[str] | None = None
    model_type: str = "llama"
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab_size: Positive
    draft_vocab_size: Positive | None = None
    target_hidden_size: Positive | None = None
    num_hidden_layers: Positive = 1
    rms_norm_eps: Annotated[float, Field(gt=0)]
    max_position_embeddings: Positive
    attention_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive | None = None
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: Positive | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_before_fc: bool | None = None
    eagle_config: EagleConfigJson | None = None

    def flag(self, name: str, notes: list[str]) -> bool:
        """A switch at the top level, else inside ``eagle_config``."""
        top, nested = getattr(self, name), getattr(self.eagle_config, name, None)
        if top is None and nested:
            notes.append(f"{name} stands inside eagle_config")
        return bool(nested if top is None else top)


def default_boundaries(target_layers: int) -> tuple[int, int, int]:
    """What EAGLE-3 captures when nobody says otherwise (EAGLE modeling_llama_kv.py; vLLM and SGLang take it over)."""
    return 2, target_layers // 2, target_layers - 3


def names_boundaries(raw: dict[str, Any]) -> bool:
    """Whether a drafter's config.json says which layers it was trained on; engines guess them otherwise."""
    nested = raw.get("eagle_config") or {}
    return bool(raw.get(IDS) or nested.get(IDS) or nested.get("layer_ids"))


def _where(path: Path) -> str:
    return f"{short_path(path.parent)}/{path.name}"


# --- reading files ----------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        Eagle3Error: there is none, or it is too large, no JSON, or no object.
    """
    path = folder / "config.json"
    if not path.is_file():
        found = "a folder without it" if folder.is_dir() else "no such folder"
        raise Eagle3Error(f"{_where(path)}: found {found}; expected a drafter's config.json")
    if path.stat().st_size > CONFIG_BYTES:
        raise Eagle3Error(f"{_where(path)}: found {path.stat().st_size} bytes, expected less than {CONFIG_BYTES}")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise Eagle3Error(f"{_where(path)}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise Eagle3Error(f"{_where(path)}: found a {type(raw).__name__}, expected an object of fields")
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of an index, else every safetensors file, else every .bin file.

    Raises:
        Eagle3Error: none, an index that names a file outside the folder, or one that is not there.
    """
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            return _indexed_files(folder / index)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise Eagle3Error(f"{short_path(folder)}: found no *.safetensors or *.bin file; expected the drafter's weights")
    return files


def _indexed_files(index: Path) -> list[Path]:
    where = _where(index)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Eagle3Error(f"{where}: found no weight_map of tensor to file: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise Eagle3Error(f"{where}: weight_map: found {name!r}, expected the name of a file beside it")
        if not (index.parent / name).is_file():
            raise Eagle3Error(f"{where}: weight_map: {name} is not in the folder")
    return [index.parent / name for name in names]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files, as they are named there. Truncated or damaged files are named."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise Eagle3Error(f"{_where(path)}: tensor {twice[0]} stands in another file of the folder too")
        tensors |= found
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise Eagle3Error(f"{_where(path)}: not a whole safetensors file: {error}") from error


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        wants = re.search(r"GLOBAL (\S+)", str(error))
        found = f"a pickle that asks for {wants[1]}" if wants else "a pickle of more than tensors"
        raise Eagle3Error(f"{_where(path)}: found {found}, expected tensors alone; nothing in it was run") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise Eagle3Error(f"{_where(path)}: not a whole torch file of zip kind: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise Eagle3Error(f"{_where(path)}: found a {type(tensors).__name__}, expected tensors by name")
    return tensors


def read_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of a folder by the end of its name, as a target and a drafter prefix it differently."""
    for path in weight_files(folder):
        if path.suffix == ".bin":
            tensors = _read_bin(path)
            found = next((key for key in tensors if key.endswith(name)), None)
            if found:
                return tensors[found]
            continue
        with safe_open(path, "pt") as file:
            found = next((key for key in file.keys() if key.endswith(name)), None)
            if found:
                return file.get_tensor(found)
    return None


def survey(folder: str | Path) -> Survey:
    """Look at a drafter folder without judging it; of the weights only d2t is read."""
    folder = project_path(folder)
    raw, shapes, d2t = read_config(folder), {}, None
    for path in weight_files(folder):
        if path.suffix == ".bin":
            tensors = _read_bin(path)  # mapped, so nothing is read yet
            shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            d2t = tensors.get("d2t", d2t)
            continue
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
                d2t = file.get_tensor("d2t") if "d2t" in file.keys() else d2t
        except (SafetensorError, OSError) as error:
            raise Eagle3Error(f"{_where(path)}: not a whole safetensors file: {error}") from error
    naming = "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0"
    shapes = {_module_name(name): shape for name, shape in shapes.items()}
    return Survey(raw, shapes, d2t, naming, format_of(raw, naming, "t2d" in shapes))


def format_of(raw: dict[str, Any], naming: str, has_t2d: bool) -> str:
    """Who wrote a folder, as far as it shows."""
    if "transformer_layer_config" in raw:
        return f"speculators {raw.get('speculators_version', '')}".strip()
    if "_torchspec_version" in raw:
        return f"TorchSpec ({naming}.*)"
    nested = raw.get("eagle_config")
    if naming == "layers.0" and isinstance(nested, dict) and "use_last_layernorm" in nested and not has_t2d:
        return "ModelOpt (layers.0.*)"
    return "SafeAILab EAGLE, SpecForge (midlayer.*)" if naming == "midlayer" else "flat (layers.0.*)"


def _module_name(name: str) -> str:
    for old, new in LEGACY_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# --- config.json ------------------------------------------------------------------------------------------------------


def parse_config(
    raw: dict[str, Any], where: str, target_layers: int | None, own_embedding: bool
) -> tuple[DrafterConfig, list[str]]:
    """The drafter's config from its config.json, and the conversions made.

    Args:
        raw: config.json of any of the formats; where: its name for error messages.
        target_layers: decoder layers of the target; needed only when the file names no boundaries.
    Raises:
        Eagle3Error: naming each missing field, each value of a wrong kind, and what no engine serves.
    """
    notes: list[str] = []
    if "transformer_layer_config" in raw:
        raw = _flattened(raw, where, notes)
    try:
        fields = ConfigJson.model_validate(raw)
    except ValidationError as error:
        raise Eagle3Error("\n".join(_explain(fault, where) for fault in error.errors())) from None
    heads, latent = fields.num_attention_heads, _latent(fields, where)
    config = DrafterConfig(
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else fields.num_key_value_heads or heads,
        head_dim=latent.qk_rope_head_dim if latent else fields.head_dim or fields.hidden_size // heads,
        vocab_size=fields.vocab_size,
        draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
        target_hidden_size=fields.target_hidden_size or fields.hidden_size,
        boundaries=_boundaries(fields, where, target_layers, bool(latent), notes),
        rms_norm_eps=fields.rms_norm_eps,
        rope_parameters=_rope(fields, notes),
        max_position_embeddings=fields.max_position_embeddings,
        num_hidden_layers=fields.num_hidden_layers,
        latent=latent,
        qk_norm="qwen3" in fields.model_type or any("Qwen3" in name for name in fields.architectures or []),
        attention_bias=fields.attention_bias,
        norm_before_residual=fields.flag("norm_before_residual", notes),
        norm_output=fields.flag("norm_output", notes),
        fc_norm=fields.flag("fc_norm", notes) or bool(fields.use_aux_norm),
        norm_before_fc=fields.flag("norm_before_fc", notes),
        own_embedding=own_embedding,
    )
    return config, notes


def _explain(fault: ErrorDetails, where: str) -> str:
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{where}: field {field} is missing"
    return f"{where}: {field}: found {fault['input']!r}, expected: {fault['msg'].removeprefix('Input should be ')}"


def _flattened(raw: dict[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """A speculators config as a flat one. Its layer config holds only what differs from transformers' defaults."""
    layer = raw["transformer_layer_config"]
    if raw.get("speculators_model_type") != "eagle3" or not isinstance(layer, dict):
        found = raw.get("speculators_model_type")
        raise Eagle3Error(f"{where}: speculators_model_type: found {found!r}, expected 'eagle3' with a layer config")
    try:
        filled = AutoConfig.for_model(**({"model_type": "llama"} | layer)).to_dict()
        filled = {name: value for name, value in filled.items() if value is not None}
    except (ValueError, TypeError) as error:
        raise Eagle3Error(f"{where}: transformer_layer_config: {error}") from error
    top = {name: raw[name] for name in ("draft_vocab_size", "target_hidden_size", IDS) if raw.get(name) is not None}
    flags = {name: raw.get(name, False) for name in ("norm_output", "fc_norm", "norm_before_fc")}
    if "norm_before_residual" not in raw:
        notes.append("no norm_before_residual: true, as vLLM serves a speculators folder")
    notes.append("transformer_layer_config filled with transformers' defaults")
    return filled | top | flags | {"norm_before_residual": raw.get("norm_before_residual", True)}


def _refuse_unknown_kinds(raw: dict[str, Any], where: str) -> None:
    """What the drafter module does not have, and would silently compute otherwise."""
    raw = raw.get("transformer_layer_config", raw)
    nested = raw.get("eagle_config") or {}
    latent = raw.get("kv_lora_rank") is not None
    for field, found, expected in (
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("layer_types", "sliding_attention" in (raw.get("layer_types") or []) and "sliding_attention", False),
        ("attention_bias of latent attention", latent and raw.get("attention_bias", False), False),
        ("eagle_config.use_aux_hidden_state", nested.get("use_aux_hidden_state", True), True),
        ("eagle_config.use_mtp_layernorm", nested.get("use_mtp_layernorm") or False, False),
        ("eagle_config.parallel_draft_step", nested.get("parallel_draft_step") or 1, 1),
    ):
        if found != expected:
            raise Eagle3Error(f"{where}: {field}: found {found!r}, expected {expected!r}")


def _latent(fields: ConfigJson, where: str) -> LatentSizes | None:
    if fields.kv_lora_rank is None:
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: getattr(fields, name) for name in names}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise Eagle3Error(f"{where}: field {', '.join(missing)} is missing; latent attention needs it")
    return LatentSizes(**sizes)


def _boundaries(fields: ConfigJson, where: str, layers: int | None, latent: bool, notes: list[str]) -> tuple[int, ...]:
    """Boundaries from whichever place names them; what a nested id means is a convention, so it is noted."""
    nested = fields.eagle_config or EagleConfigJson()
    if ids := fields.eagle_aux_hidden_state_layer_ids or nested.layer_ids:
        boundaries = tuple(ids)
    elif ids := nested.eagle_aux_hidden_state_layer_ids:
        outputs = max(ids) != layers and (not latent or ids[0] == 1)
        boundaries = tuple(i + outputs for i in ids)
        meaning = "ids of layers whose output is taken" if outputs else "boundaries"
        notes.append(f"eagle_config.{IDS} {ids} read as {meaning}: boundaries {list(boundaries)}")
    elif layers:
        boundaries = default_boundaries(layers)
        notes.append(f"no {IDS}: guessed, the engines' default for {layers} layers, boundaries {list(boundaries)}")
    else:
        raise Eagle3Error(f"{where}: field {IDS} is missing, and the target that would give the default is not known")
    if len(set(boundaries)) != len(boundaries) or min(boundaries) < 0:
        raise Eagle3Error(f"{where}: {IDS}: found {list(boundaries)}, expected different boundaries from 0 on")
    return boundaries


def _rope(fields: ConfigJson, notes: list[str]) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling of transformers 4 made into them."""
    if fields.rope_parameters is not None:
        rope = {"rope_theta": fields.rope_theta or 10000.0, **fields.rope_parameters}
    else:
        rope = {"rope_theta": fields.rope_theta or 10000.0, **(fields.rope_scaling or {})}
        if fields.rope_theta is None:
            notes.append("no rope_theta: 10000, as every engine assumes")
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return rope


# --- in ---------------------------------------------------------------------------------------------------------------


def load(folder: str | Path, target_layers: int | None = None, dtype: torch.dtype = torch.float32) -> Loaded:
    """Read a drafter folder of any format into the drafter module.

    Args:
        target_layers: decoder layers of the target; needed only when config.json names no boundaries.
    Raises:
        Eagle3Error: naming the file and the tensor or field, for anything unknown, missing, misshaped, not finite, or a
            d2t that is no strictly increasing map into the target's vocabulary.
    """
    folder = project_path(folder)
    where, raw, stored = short_path(folder), read_config(folder), read_tensors(folder)
    naming = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    tensors = {_module_name(name): tensor for name, tensor in stored.items()}
    config, notes = parse_config(raw, f"{where}/config.json", target_layers, "embed_tokens.weight" in tensors)
    _refuse_unknown_kinds(raw, f"{where}/config.json")
    if naming == "midlayer":
        notes.append("tensor names midlayer.* -> layers.0.*")
    _settle_later_norms(tensors, config, where, notes)
    _fill_output_bias(tensors, config, notes)
    _settle_vocabulary(tensors, config, where, notes)
    drafter, optional = Drafter(config), () if config.own_embedding else ("embed_tokens.weight",)
    _check_tensors(tensors, drafter.state_dict(), where, optional)
    drafter.load_state_dict(tensors, strict=False)
    return Loaded(drafter.to(dtype), raw, notes, format_of(raw, naming, "t2d" in stored))


def _settle_later_norms(tensors: dict[str, Tensor], config: DrafterConfig, where: str, notes: list[str]) -> None:
    """Layers after the first have one input norm: input_layernorm in vLLM, hidden_norm in SGLang."""
    for layer in range(1, config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.input_layernorm.weight", f"layers.{layer}.hidden_norm.weight"
        norm = tensors.pop(theirs, None)
        if norm is None:
            continue
        if ours in tensors and not torch.equal(tensors[ours], norm):
            raise Eagle3Error(f"{where}: {ours} and {theirs} differ; vLLM applies the first, SGLang the second")
        tensors[ours] = norm
        notes.append(f"{theirs} -> {ours}")


def _fill_output_bias(tensors: dict[str, Tensor], config: DrafterConfig, notes: list[str]) -> None:
    for layer in range(config.num_hidden_layers) if config.attention_bias else ():
        name = f"layers.{layer}.self_attn.o_proj.bias"
        if name not in tensors:
            tensors[name] = torch.zeros(config.hidden_size)
            notes.append(f"no {name}: zeros")


def _settle_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig, where: str, notes: list[str]) -> None:
    if "d2t" in tensors:
        check_vocabulary(tensors["d2t"], tensors.get("t2d"), config, where)
        if "t2d" not in tensors:
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
            tensors["t2d"][tensors["d2t"].long() + torch.arange(config.draft_vocab_size)] = True
            notes.append("no t2d: made from d2t")
    elif config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
        notes.append("no d2t: the draft vocabulary is the target's")


def check_vocabulary(d2t: Tensor, t2d: Tensor | None, config: DrafterConfig, where: str) -> None:
    """d2t holds offsets (vLLM llama_eagle3.py and SGLang llama_eagle3.py: target id = draft id + d2t[draft id])."""
    if d2t.shape != (config.draft_vocab_size,):
        raise Eagle3Error(f"{where}: d2t: found shape {list(d2t.shape)}, expected [{config.draft_vocab_size}]")
    ids = d2t.long() + torch.arange(len(d2t))
    rising = bool((ids[1:] > ids[:-1]).all())
    if not rising or ids[0] < 0 or ids[-1] >= config.vocab_size:
        absolute = bool((d2t[1:] > d2t[:-1]).all()) and 0 <= d2t[0] and d2t[-1] < config.vocab_size
        hint = "; its values look like target ids, which must be stored as offsets" if absolute else ""
        raise Eagle3Error(
            f"{where}: d2t: expected offsets whose target ids rise strictly inside the vocabulary of "
            f"{config.vocab_size}; found ids from {int(ids.min())} to {int(ids.max())}, "
            f"{'rising' if rising else 'not rising'}{hint}"
        )
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise Eagle3Error(f"{where}: t2d marks {int(t2d.sum())} tokens that are not the {len(ids)} target ids of d2t")


def _check_tensors(
    found: dict[str, Tensor], expected: dict[str, Tensor], where: str, optional: tuple[str, ...]
) -> None:
    expected = {name: tensor for name, tensor in expected.items() if not name.startswith(NOT_STORED)}
    if unknown := sorted(found.keys() - expected.keys()):
        raise Eagle3Error(f"{where}: unknown tensors {unknown}; the config's switches name {len(expected)} others")
    if missing := sorted(expected.keys() - found.keys() - set(optional)):
        raise Eagle3Error(f"{where}: missing tensors {missing}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            shapes = f"found shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            raise Eagle3Error(f"{where}: {name}: {shapes}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Eagle3Error(f"{where}: {name}: found NaN or infinite values")


def check_fits(config: DrafterConfig, target_config: PreTrainedConfig, drafter: str, target: str) -> None:
    """Refuse a drafter whose sizes are not the target's (``target_config``: the target's transformers text config)."""
    layers, where = target_config.num_hidden_layers, f"{drafter}/config.json"
    for name, found, expected in (
        ("target_hidden_size", config.target_hidden_size, target_config.hidden_size),
        ("vocab_size", config.vocab_size, target_config.vocab_size),
    ):
        if found != expected:
            raise Eagle3Error(f"{where}: {name}: found {found}, expected {expected} as in the target {target}")
    if not all(0 <= b <= layers for b in config.boundaries):
        raise Eagle3Error(f"{where}: {IDS}: found {list(config.boundaries)}, expected 0 to {layers} for {target}")
    if not config.own_embedding and config.hidden_size != target_config.hidden_size:
        raise Eagle3Error(
            f"{where}: hidden_size: found {config.hidden_size}, expected {target_config.hidden_size}: without "
            f"embed_tokens.weight it shares the embedding of the target {target}"
        )


def load_for(
    folder: str | Path, target: str, target_model: PreTrainedModel, dtype: torch.dtype = torch.float32
) -> Drafter:
    """A drafter checked against its target, sharing the target's embedding, on the target's device, for evaluation."""
    config = target_model.config.get_text_config()
    drafter = load(folder, config.num_hidden_layers, dtype).drafter
    check_fits(drafter.config, config, short_path(folder), target)
    drafter.share_embedding(target_model.get_input_embeddings().weight)
    drafter.to(target_model.device).eval()
    return drafter


# --- out --------------------------------------------------------------------------------------------------------------


def layer_json(config: DrafterConfig) -> dict[str, Any]:
    """The sizes of the decoder layer, as config.json files of every format name them."""
    plain = config.rope_parameters.get("rope_type", "default") == "default"
    fields = {
        "model_type": "kimi_k2" if config.latent else "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if plain else {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"},
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
    }
    return fields | (vars(config.latent) if config.latent else {})


def architecture(config: DrafterConfig) -> str:
    if config.latent:
        return "Eagle3DeepseekV2ForCausalLM"
    return "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"


def to_config_json(config: DrafterConfig, dtype: torch.dtype, nested_ids: list[int] | None = None) -> dict[str, Any]:
    """A config.json that vLLM and SGLang read alike.

    Args:
        nested_ids: what SGLang reads; by default the layers whose output is taken, boundary - 1.
    """
    return {
        "architectures": [architecture(config)],
        **layer_json(config),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "num_aux_hidden_states": len(config.boundaries),
        IDS: list(config.boundaries),
        "eagle_config": {"use_aux_hidden_state": True, IDS: nested_ids or [b - 1 for b in config.boundaries]},
    }


def ascending(drafter: Drafter) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The config and tensors with the boundaries in rising order, the only one in which engines feed them to fc."""
    config, tensors = drafter.config, drafter.state_dict()
    order = sorted(range(len(config.boundaries)), key=config.boundaries.__getitem__)
    if order == list(range(len(order))):
        return config, tensors

    def blocks(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (len(order), -1))[..., order, :].flatten(-2)

    tensors["fc.weight"] = blocks(tensors["fc.weight"])
    if config.norm_before_fc:
        tensors["input_norm.weight"] = blocks(tensors["input_norm.weight"])
    if config.fc_norm:
        norms = [tensors[f"fc_norm.{i}.weight"] for i in order]
        tensors |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}
    return replace(config, boundaries=tuple(sorted(config.boundaries))), tensors


def stored_tensors(
    config: DrafterConfig, tensors: dict[str, Tensor], dtype: torch.dtype, first: str
) -> dict[str, Tensor]:
    """The tensors to write, in ``dtype``; ``first``: the prefix of the first layer.

    A shared embedding is left out, and so are the maps of a full vocabulary: vLLM 0.32 has no parameter for them.
    """
    stored, full = {}, config.draft_vocab_size == config.vocab_size
    for name, tensor in tensors.items():
        shared = name.startswith("embed_tokens") and not config.own_embedding
        if name.startswith(NOT_STORED) or shared or (full and name in ("d2t", "t2d")):
            continue
        tensor = tensor.detach().cpu().contiguous()
        name = name.replace("layers.0.", first, 1) if name.startswith("layers.0.") else name
        stored[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    for layer in range(1, config.num_hidden_layers):  # vLLM applies the first, SGLang the second
        stored[f"layers.{layer}.hidden_norm.weight"] = stored[f"layers.{layer}.input_layernorm.weight"].clone()
    return stored


def save(drafter: Drafter, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a drafter folder with ``midlayer.*`` names and the boundaries for both engines."""
    config, tensors = ascending(drafter)
    with whole_folder(project_path(folder)) as work:
        save_file(
            stored_tensors(config, tensors, dtype, first="midlayer."), work / "model.safetensors", {"format": "pt"}
        )
        write_json(work / "config.json", to_config_json(config, dtype))
    return project_path(folder)
