"""Drafter checkpoints in and out, strict in both directions: every tensor is wanted, has its shape, and is finite.

Read: ``midlayer.*`` (SafeAILab EAGLE, SpecForge, SGLang) and flat ``layers.0.*`` (vLLM) Llama drafters, safetensors,
in one file or sharded. Written: ``midlayer.*``, which every engine version reads, with the boundaries in both places
where engines look: top level as boundaries (vLLM, all versions) and inside ``eagle_config`` as ids of the layer whose
output is taken, boundary - 1 (SGLang adds 1: srt/models/llama.py ``set_eagle3_layers_to_capture``).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .drafter import Drafter, DrafterConfig
from .errors import Eagle3Error
from .provenance import project_path, short_path, whole_folder, write_json

IDS = "eagle_aux_hidden_state_layer_ids"
NOT_STORED = ("rotary.",)  # buffers that the module computes


@dataclass
class Loaded:
    """A drafter, the config.json it came with, and every conversion that reading it took."""

    drafter: Drafter
    config_json: dict
    conversions: list[str]


def default_boundaries(target_layers: int) -> tuple[int, int, int]:
    """What EAGLE-3 captures when nobody says otherwise (EAGLE modeling_llama_kv.py; vLLM and SGLang take it over)."""
    return 2, target_layers // 2, target_layers - 3


def read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        found = "a folder without it" if folder.is_dir() else "no such folder"
        raise Eagle3Error(f"{short_path(path)}: found {found}; expected a drafter's config.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Eagle3Error(f"{short_path(path)}: not JSON: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files. Truncated or damaged files are named."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Eagle3Error(f"{short_path(folder)}: found no *.safetensors file; expected the drafter's weights")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    if name in tensors:
                        raise Eagle3Error(f"{short_path(path)}: tensor {name} stands in another file of the folder too")
                    tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Eagle3Error(f"{short_path(path)}: not a whole safetensors file: {error}") from error
    return tensors


@dataclass(frozen=True)
class Survey:
    """A folder as it is: its config.json, the shape of every tensor by its name in the drafter module, d2t, the format."""

    raw: dict
    shapes: dict[str, tuple[int, ...]]
    d2t: Tensor | None
    naming: str
    format: str


def survey(folder: str | Path) -> Survey:
    """Look at a drafter folder without judging it and without reading its weights."""
    folder = project_path(folder)
    raw, shapes, d2t = read_config(folder), {}, None
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
                d2t = file.get_tensor("d2t") if "d2t" in file.keys() else d2t
        except (SafetensorError, OSError) as error:
            raise Eagle3Error(f"{short_path(path)}: not a whole safetensors file: {error}") from error
    naming = "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0"
    shapes = {name.replace("midlayer.", "layers.0.", 1): shape for name, shape in shapes.items()}
    return Survey(raw, shapes, d2t, naming, f"{naming}.*")


def parse_config(
    raw: dict, where: str, target_layers: int | None, own_embedding: bool
) -> tuple[DrafterConfig, list[str]]:
    """The drafter's config from its config.json, and the conversions made.

    Args:
        target_layers: decoder layers of the target; needed only when the file names no boundaries.
    """
    notes, nested = [], raw.get("eagle_config") or {}

    def field(name, default=None):
        value = raw.get(name, default)
        if value is None:
            raise Eagle3Error(f"{where}: field {name} is missing")
        return value

    if raw.get("num_hidden_layers", 1) != 1:
        raise Eagle3Error(f"{where}: num_hidden_layers: found {raw['num_hidden_layers']}, expected 1")
    if raw.get(IDS):
        boundaries = tuple(raw[IDS])
    elif nested.get(IDS):
        boundaries = tuple(i + 1 for i in nested[IDS])
        notes.append(
            f"eagle_config.{IDS} {nested[IDS]} are ids of layers whose output is taken: boundaries {list(boundaries)}"
        )
    elif target_layers:
        boundaries = default_boundaries(target_layers)
        notes.append(f"no {IDS}: the engines' default for {target_layers} layers, boundaries {list(boundaries)}")
    else:
        raise Eagle3Error(f"{where}: field {IDS} is missing, and the target that would give the default is not known")
    hidden, heads = field("hidden_size"), field("num_attention_heads")
    rope = raw.get("rope_parameters")
    if rope is None:
        scaling = {key: value for key, value in (raw.get("rope_scaling") or {}).items()}
        rope = {
            "rope_type": scaling.pop("type", "default"),
            **scaling,
            "rope_theta": float(raw.get("rope_theta", 10000.0)),
        }
        if "rope_theta" not in raw:
            notes.append("no rope_theta: 10000, as every engine assumes")
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=field("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or hidden // heads,
        vocab_size=field("vocab_size"),
        draft_vocab_size=raw.get("draft_vocab_size") or field("vocab_size"),
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        boundaries=boundaries,
        rms_norm_eps=field("rms_norm_eps"),
        rope_parameters=rope,
        max_position_embeddings=field("max_position_embeddings"),
        attention_bias=raw.get("attention_bias", False),
        norm_before_residual=raw.get("norm_before_residual", False),
        norm_output=raw.get("norm_output", nested.get("norm_output", False)),
        fc_norm=raw.get("fc_norm", nested.get("fc_norm", False)),
        norm_before_fc=raw.get("norm_before_fc", nested.get("norm_before_fc", False)),
        own_embedding=own_embedding,
    )
    return config, notes


def load(folder: str | Path, target_layers: int | None = None, dtype: torch.dtype = torch.float32) -> Loaded:
    """Read a drafter folder into the drafter module.

    Raises:
        Eagle3Error: naming the file and the tensor or field, for anything unknown, missing, misshaped, not finite, or a
            d2t that is no strictly increasing map into the target's vocabulary.
    """
    folder = project_path(folder)
    raw, tensors = read_config(folder), read_tensors(folder)
    config, notes = parse_config(
        raw, short_path(folder / "config.json"), target_layers, "embed_tokens.weight" in tensors
    )
    if any(name.startswith("midlayer.") for name in tensors):
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        notes.append("tensor names midlayer.* (SafeAILab EAGLE, SpecForge)")
    where = short_path(folder)
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
    drafter = Drafter(config)
    _check_tensors(
        tensors, drafter.state_dict(), where, optional=() if config.own_embedding else ("embed_tokens.weight",)
    )
    drafter.load_state_dict(tensors, strict=False)
    return Loaded(drafter.to(dtype), raw, notes)


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
            f"{where}: d2t: expected offsets whose target ids rise strictly inside the vocabulary of {config.vocab_size}; "
            f"found ids from {int(ids.min())} to {int(ids.max())}, {'rising' if rising else 'not rising'}{hint}"
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
            raise Eagle3Error(
                f"{where}: {name}: found shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Eagle3Error(f"{where}: {name}: found NaN or infinite values")


def check_fits(config: DrafterConfig, target_config, drafter: str, target: str) -> None:
    """Refuse a drafter whose sizes are not the target's (``target_config``: the target's transformers text config)."""
    layers = target_config.num_hidden_layers
    for name, found, expected in (
        ("target_hidden_size", config.target_hidden_size, target_config.hidden_size),
        ("vocab_size", config.vocab_size, target_config.vocab_size),
    ):
        if found != expected:
            raise Eagle3Error(
                f"{drafter}/config.json: {name}: found {found}, expected {expected} as in the target {target}"
            )
    if not all(0 <= b <= layers for b in config.boundaries):
        raise Eagle3Error(
            f"{drafter}/config.json: {IDS}: found {list(config.boundaries)}, expected 0 to {layers} for {target}"
        )
    if not config.own_embedding and config.hidden_size != target_config.hidden_size:
        raise Eagle3Error(
            f"{drafter}/config.json: hidden_size: found {config.hidden_size}, expected {target_config.hidden_size}: without "
            f"embed_tokens.weight it shares the embedding of the target {target}"
        )


def load_for(folder: str | Path, target: str, target_model, dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter checked against its target, sharing the target's embedding, on the target's device, for evaluation."""
    config = target_model.config.get_text_config()
    drafter = load(folder, config.num_hidden_layers, dtype).drafter
    check_fits(drafter.config, config, short_path(folder), target)
    drafter.share_embedding(target_model.get_input_embeddings().weight)
    return drafter.to(target_model.device).eval()


def to_config_json(config: DrafterConfig, dtype: torch.dtype) -> dict:
    """A config.json that vLLM (all versions) and SGLang (all versions) read alike."""
    plain = config.rope_parameters.get("rope_type", "default") == "default"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if plain else {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"},
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        IDS: list(config.boundaries),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [b - 1 for b in config.boundaries]},
    }


def save(drafter: Drafter, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a drafter folder (config.json, model.safetensors with ``midlayer.*`` names); it appears whole or not at all."""
    folder, config = project_path(folder), drafter.config
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith(NOT_STORED) or (name.startswith("embed_tokens") and not config.own_embedding):
            continue
        tensor = tensor.detach().cpu()
        tensors[name.replace("layers.0.", "midlayer.", 1)] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    with whole_folder(folder) as work:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            work / "model.safetensors",
            {"format": "pt"},
        )
        write_json(work / "config.json", to_config_json(config, dtype))
    return folder
