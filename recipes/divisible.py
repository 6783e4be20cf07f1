"""Targets and drafters that several GPUs can share: a recipe for params/tensor_parallel.yaml.

    python -m recipes.divisible

Tensor parallelism gives each rank whole heads, so their number must be a multiple of the ranks. SmolLM2-135M has 9 query
and 3 KV heads: three ranks can share it, two cannot. With one more KV group of zero weights (12 and 4 heads) two and four
can, and it computes what it did: a head whose values are zero adds nothing. The same is done to its drafter.

vLLM pads a vocabulary to a multiple of 64 and divides it, the drafter's too: three ranks refuse one of 8192 tokens, and
take it with 64 more.

For timing, a target of 1.7 billion parameters: the sizes of SmolLM2-1.7B (arXiv:2502.02737, table of architectures) as
config.json with SmolLM2's tokenizer. It has no weights; the engine makes some (--load-format dummy).
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3_lib.drafter import checkpoint
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import whole_folder, write_json
from eagle3_lib.params import BASE_DRAFTER
from eagle3_lib.paths import project_path, short_path
from eagle3_lib.targets import targets

TARGET, DRAFTER = "models/SmolLM2-135M-12-heads", "models/smollm2-135m-12-heads-eagle3"
TIMED = "models/SmolLM2-1.7B-sizes"
TIMED_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
}
WEIGHTS = "model.safetensors"


def with_more_heads(folder: str | Path, out: str | Path, kv_heads: int) -> Path:
    """A Llama-shaped checkpoint, target or drafter, with KV heads of zero weights and their query heads added.

    Args:
        folder: config.json and model.safetensors in transformers' names; other files are copied.
        kv_heads: how many ``out`` has; query heads grow in proportion.
    Raises:
        Eagle3Error: no such checkpoint, a head size that its config does not tell, or fewer heads than it has.
    """
    folder, out = project_path(folder), project_path(out)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise Eagle3Error(f"{short_path(folder)}: found no {name}, expected a checkpoint in one file")
    config = json.loads((folder / "config.json").read_text())
    if not config.get("head_dim"):
        raise Eagle3Error(f"{short_path(folder)}/config.json: head_dim: found none, expected the size of a head")
    had = config["num_key_value_heads"]
    if kv_heads < had:
        raise Eagle3Error(f"kv_heads: found {kv_heads}, expected {had} or more, as {short_path(folder)} has")
    of_query = config["num_attention_heads"] // had
    more = (kv_heads - had) * config["head_dim"]
    rows = {"q_proj": more * of_query, "k_proj": more, "v_proj": more}
    with safe_open(folder / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        module, kind = name.split(".")[-2:] if "." in name else (name, "")
        if module in rows:
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows[module], *tensor.shape[1:])])
        elif (module, kind) == ("o_proj", "weight"):
            tensors[name] = torch.cat([tensor, tensor.new_zeros(len(tensor), more * of_query)], 1)
    with whole_folder(out) as work:
        shutil.copytree(folder, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS, "*.md"))
        save_file(tensors, work / WEIGHTS, metadata)
        heads = {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * of_query}
        write_json(work / "config.json", config | heads)
    return out


def with_more_tokens(folder: str | Path, out: str | Path, draft_vocab_size: int, target_layers: int) -> Path:
    """A drafter whose draft vocabulary has more tokens, the first ones that it had not, with rows of zeros in lm_head.

    A token of such a row is drafted only where all others have a negative logit.

    Raises:
        Eagle3Error: no drafter, or fewer tokens than it has.
    """
    drafter = checkpoint.load(folder, target_layers).drafter
    had = drafter.config.draft_vocab_size
    if draft_vocab_size < had:
        raise Eagle3Error(f"draft_vocab_size: found {draft_vocab_size}, expected {had} or more, as {folder} has")
    more = (~drafter.t2d).nonzero().flatten()[: draft_vocab_size - had]
    ids = torch.cat([drafter.target_ids, more]).sort().values
    new = drafter.adapted(drafter.config.with_(draft_vocab_size=draft_vocab_size))
    new.set_vocabulary(ids)
    with torch.no_grad():
        new.lm_head.weight.zero_()
        new.lm_head.weight[torch.isin(ids, drafter.target_ids)] = drafter.lm_head.weight
    return checkpoint.save(new, out)


def without_weights(folder: str | Path, out: str | Path, sizes: dict) -> Path:
    """A folder like ``folder``, tokenizer included, with other ``sizes`` in its config.json and no weights."""
    folder, out = project_path(folder), project_path(out)
    with whole_folder(out) as work:
        shutil.copytree(folder, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        write_json(work / "config.json", json.loads((folder / "config.json").read_text()) | sizes)
    return out


def main() -> None:
    """Write the three folders."""
    smollm2 = targets.resolve(targets.SMOLLM2)
    print(short_path(with_more_heads(smollm2, TARGET, 4)))
    print(short_path(with_more_heads(BASE_DRAFTER, DRAFTER, 4)))
    print(short_path(without_weights(smollm2, TIMED, TIMED_SIZES)))


if __name__ == "__main__":
    main()
