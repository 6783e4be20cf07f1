"""What a target and a drafter take of each GPU's memory, from their config.json files alone.

Weights are counted on modules without storage. Under tensor parallelism each GPU holds its part of every matrix, and all
of what vLLM and SGLang replicate: norms, routers, fc of a drafter, and the down-projections of latent attention
(vLLM 0.16.0: model_executor/models/deepseek_v2.py, llama_eagle3.py). The latent cache is replicated too.
"""

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from ..drafter import checkpoint
from ..drafter.model import Drafter, DrafterConfig
from ..engines.base import Speculation
from ..engines.options import tensor_parallel
from ..errors import Eagle3Error
from ..params import PreflightParams, Serving

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = {"F32", "F16", "BF16"}  # safetensors' names; the engine casts these to its dtype, others stay as stored
STORED_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # others: one byte
NOT_SIZES = ("architectures", "model_type", "quantization_config")
REPLICATED = re.compile(r"norm|mlp\.gate\.weight|^fc\.|q_a_proj|kv_a_proj_with_mqa")
NOT_LINEAR = re.compile(r"norm|mlp\.gate\.weight|embed_tokens")
SCALE_BITS = 16  # compressed-tensors keeps a bfloat16 scale for each group
TRAINING_BYTES = 16  # of a trained parameter: float32 weight and gradient, and the two moments of Adam


def text_config(config: dict) -> dict:
    """The part of a config.json that describes the text model."""
    return config.get("text_config") or config


def target_weights(config: dict, gpus: int, dtype: str) -> dict:
    """Weights of a target's text model.

    Args:
        config: its config.json; quantization is read for compressed-tensors with one group.
        gpus: over which tensors are divided; dtype: of what is not quantized.
    Returns:
        {"parameters", "bytes": of all, "gpu_bytes": of each GPU}.
    Raises:
        Eagle3Error: transformers has no such architecture, or the quantization is of another kind.
    """
    text = text_config(config)
    name = (text.get("architectures") or config.get("architectures") or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise Eagle3Error(
            f"the target's config.json: architectures: found {name!r}, expected one that transformers has"
        )
    with torch.device("meta"):
        model = model_class(model_class.config_class(**{k: v for k, v in text.items() if k not in NOT_SIZES}))
    quantization = text.get("quantization_config") or config.get("quantization_config")
    bits = quantized_bits(quantization)
    plain = 8 * DTYPE_BYTES[dtype]
    sizes = [
        (key, p.numel(), bits if quantization and _is_quantized(key, quantization["ignore"]) else plain)
        for key, p in model.named_parameters()
    ]
    return _summed(sizes, gpus, text.get("num_key_value_heads", gpus))


def quantized_bits(quantization: dict | None) -> float:
    """Bits of a quantized weight, its share of the scale included; 0 without quantization.

    Raises:
        Eagle3Error: not compressed-tensors with one group of weights.
    """
    if not quantization:
        return 0
    groups = list((quantization.get("config_groups") or {}).values())
    if quantization.get("quant_method") != "compressed-tensors" or len(groups) != 1:
        found = f"{quantization.get('quant_method')!r} with {len(groups)} groups"
        raise Eagle3Error(f"quantization_config: found {found}, expected 'compressed-tensors' with one")
    weights = groups[0]["weights"]
    return weights["num_bits"] + (SCALE_BITS / weights["group_size"] if weights.get("group_size") else 0)


def _is_quantized(key: str, ignore: list[str]) -> bool:
    module = key.removesuffix(".weight")
    named = any(re.match(p.removeprefix("re:"), module) if p.startswith("re:") else p == module for p in ignore)
    return not NOT_LINEAR.search(key) and not named


def _summed(sizes: Iterable[tuple[str, int, float]], gpus: int, kv_heads: int) -> dict:
    parameters = total = each = 0.0
    for key, numel, bits in sizes:
        shares = 1 if REPLICATED.search(key) else min(gpus, kv_heads) if re.search(r"[kv]_proj", key) else gpus
        parameters += numel
        total += numel * bits / 8
        each += numel * bits / 8 / shares
    return {"parameters": int(parameters), "bytes": round(total), "gpu_bytes": round(each)}


def drafter_weights(config: DrafterConfig, gpus: int, dtype: str) -> dict:
    """Weights of a drafter; an embedding shared with the target counts nothing.

    Returns:
        as :func:`target_weights`, and "training_bytes" on each GPU that trains it whole, optimiser included.
    """
    with torch.device("meta"):
        drafter = Drafter(config)
    stored = [(k, p) for k, p in drafter.named_parameters() if config.own_embedding or not k.startswith("embed_tokens")]
    weights = _summed(((k, p.numel(), 8 * DTYPE_BYTES[dtype]) for k, p in stored), gpus, config.num_key_value_heads)
    trained = sum(p.numel() for k, p in stored if p.requires_grad)
    frozen = DTYPE_BYTES["float32"] * config.vocab_size * config.hidden_size
    return weights | {"training_bytes": TRAINING_BYTES * trained + frozen}


def kv_bytes_per_token(text: dict, gpus: int, dtype: str) -> int:
    """KV cache of one token on each GPU: of a target's text config, or of a Llama drafter's config.json.

    Latent attention keeps one latent and one rope part for all heads, so each GPU holds it whole.
    """
    size, layers = DTYPE_BYTES[dtype], text["num_hidden_layers"]
    if text.get("kv_lora_rank"):
        return layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * size
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return layers * 2 * -(-heads // gpus) * head_dim * size


def drafter_config(raw: dict, where: str, target: dict, own_embedding: bool) -> DrafterConfig:
    """A drafter's config from its config.json, without its weights."""
    return checkpoint.parse_config(raw, where, text_config(target)["num_hidden_layers"], own_embedding)[0]


def memory_needs(params: Serving | PreflightParams, folder: Path, speculation: Speculation) -> dict:
    """What a server holds at least, in GiB: weights, the drafter's, and the KV cache of one request of full length.

    Returns:
        {"gpus": of tensor parallelism, "weights_gib", "drafter_gib": in all, "kv_gib", "gpu_gib": on each GPU}.
    """
    config = json.loads((folder / "config.json").read_text())
    text, gpus = config.get("text_config") or config, tensor_parallel(params.engine_args)
    drafter = weight_bytes(speculation.folder(), params.dtype) if speculation.drafter else 0
    weights, kv = (
        weight_bytes(folder, params.dtype),
        kv_bytes_per_token(text, gpus, params.dtype) * params.max_model_len,
    )
    sizes = {"weights_gib": weights, "drafter_gib": drafter, "kv_gib": kv, "gpu_gib": (weights + drafter) / gpus + kv}
    return {"gpus": gpus} | {name: round(size / 2**30, 3) for name, size in sizes.items()}


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a checkpoint's weights as served: floats in ``dtype``, quantized tensors as stored (safetensors headers)."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                numel = 1
                for size in tensor["shape"]:
                    numel *= size
                stored = STORED_BYTES.get(tensor["dtype"], 1)
                total += numel * (DTYPE_BYTES[dtype] if tensor["dtype"] in FLOATS else stored)
    return total
