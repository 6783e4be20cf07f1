"""Every format in, every format out: bit-equal tensors and the same drafts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_lib.compat import export
from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.errors import Eagle3Error

LAYERS = 12
BASE = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=60,
    draft_vocab_size=20,
    target_hidden_size=32,
    boundaries=(2, 6, 9),
)
LATENT = LatentSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 512}
MLA = BASE.with_(latent=LATENT, head_dim=4, num_key_value_heads=4, rope_parameters=YARN)
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "vocab_size": 60,
}


def drafter_of(config: DrafterConfig, seed: int = 0) -> Drafter:
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5 + (parameter.dim() == 1))
    small = config.draft_vocab_size < config.vocab_size
    drafter.set_vocabulary(torch.arange(config.draft_vocab_size) * (3 if small else 1))
    return drafter.eval()


def tensors_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("rotary.")}


def assert_equal(ours: Drafter, theirs: Drafter) -> None:
    """The same config, tensors and logits; a shared embedding is in no file, so it is handed over."""
    assert replace(theirs.config, rope_parameters=ours.config.rope_parameters) == ours.config
    assert {k: v for k, v in theirs.config.rope_parameters.items() if v is not None} == ours.config.rope_parameters
    theirs.share_embedding(ours.embed_tokens.weight)
    found, expected = tensors_of(theirs), tensors_of(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    features, ids = torch.randn(1, 8, ours.config.feature_size), torch.randint(60, (1, 8))
    with torch.no_grad():
        pairs = zip(ours.unroll(features, ids, 3), theirs.unroll(features, ids, 3), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def stored(drafter: Drafter, first: str = "layers.0.") -> dict[str, torch.Tensor]:
    return checkpoint.stored_tensors(drafter.config, drafter.state_dict(), torch.float32, first)


def write(
    folder: Path, config: dict, tensors: dict[str, torch.Tensor], files: int = 1, kind: str = "safetensors"
) -> Path:
    """A folder as others write it: one file or several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, stem = sorted(tensors), "model" if kind == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(files):
        part = {name: tensors[name] for name in names[i::files]}
        file = f"{stem}.{kind}" if files == 1 else f"{stem}-{i + 1:05d}-of-{files:05d}.{kind}"
        save_file(part, folder / file) if kind == "safetensors" else torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if files > 1:
        (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def safeailab(folder: Path, drafter: Drafter) -> Path:
    """SafeAILab EAGLE and SpecForge: midlayer.*, output ids inside eagle_config, a .bin file."""
    config = checkpoint.to_config_json(drafter.config, torch.float16)
    for name in (checkpoint.IDS, "num_aux_hidden_states", "norm_before_residual"):
        del config[name]
    return write(folder, config, stored(drafter, "midlayer."), kind="bin")


def flat(folder: Path, drafter: Drafter) -> Path:
    """vLLM: layers.0.*, boundaries at the top level, in shards."""
    config = checkpoint.to_config_json(drafter.config, torch.float32)
    del config["eagle_config"]
    return write(folder, config, stored(drafter), files=3)


def modelopt(folder: Path, drafter: Drafter) -> Path:
    """Model-Optimizer: layers.0.*, no t2d, output ids and its own switches inside eagle_config."""
    config = checkpoint.to_config_json(drafter.config, torch.float32)
    del config[checkpoint.IDS]
    own = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    config["eagle_config"] |= own
    tensors = stored(drafter)
    tensors.pop("t2d", None)
    return write(folder, config, tensors)


def torchspec(folder: Path, drafter: Drafter) -> Path:
    """TorchSpec: midlayer.*, its version in the config, shards of .bin."""
    config = checkpoint.to_config_json(drafter.config, torch.float32) | {"_torchspec_version": "0.1"}
    del config[checkpoint.IDS]
    return write(folder, config, stored(drafter, "midlayer."), files=2, kind="bin")


def speculators(folder: Path, drafter: Drafter) -> Path:
    """speculators 0.9: the layer's config holds only what differs from transformers' defaults."""
    config = export.speculators_json(drafter.config, TARGET, torch.float32)
    layer = config["transformer_layer_config"]
    for name in ("rope_theta", "rope_scaling", "num_aux_hidden_states", "attention_bias", "hidden_act"):
        del layer[name]
    return write(folder, config, stored(drafter))


WRITERS = {f.__name__: f for f in (safeailab, flat, modelopt, torchspec, speculators)}
NAMES = {
    "safeailab": "SafeAILab EAGLE, SpecForge (midlayer.*)",
    "flat": "flat (layers.0.*)",
    "modelopt": "ModelOpt (layers.0.*)",
    "torchspec": "TorchSpec (midlayer.*)",
    "speculators": "speculators 0.9.0",
}


@pytest.mark.parametrize("config", [BASE, BASE.with_(own_embedding=True), MLA], ids=["llama", "own_embedding", "mla"])
@pytest.mark.parametrize("writer", NAMES)
def test_each_format_in_and_out_again(writer, config, tmp_path):
    if writer == "speculators" and config.latent:
        pytest.skip("speculators has no latent attention")
    drafter = drafter_of(config)
    loaded = checkpoint.load(WRITERS[writer](tmp_path / "in", drafter), LAYERS)
    assert loaded.format == NAMES[writer] == checkpoint.survey(tmp_path / "in").format
    assert_equal(drafter, loaded.drafter)
    engines = [("vllm", "0.33.0"), ("sglang", "0.5.23"), ("speculators", "0.33.0")]
    for engine, version in engines:
        if (engine == "speculators" and config.latent) or (engine == "sglang" and config.own_embedding):
            continue
        out = export.export(loaded.drafter, tmp_path / engine, engine, version, TARGET, torch.float32)
        assert_equal(drafter, checkpoint.load(out, LAYERS).drafter)


SWITCHES = {
    "norm_before_residual": BASE.with_(norm_before_residual=True),
    "norm_output": BASE.with_(norm_output=True),
    "fc_norm": BASE.with_(fc_norm=True),
    "norm_before_fc": BASE.with_(norm_before_fc=True),
    "speculators_default": BASE.with_(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "one_boundary": BASE.with_(boundaries=(6,)),
    "five_boundaries": BASE.with_(boundaries=(1, 3, 6, 9, 12)),
    "full_vocabulary": BASE.with_(draft_vocab_size=60),
    "attention_bias": BASE.with_(attention_bias=True),
    "two_layers": BASE.with_(num_hidden_layers=2),
    "head_norms": BASE.with_(qk_norm=True),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_survives_every_export_that_is_not_refused(switch, tmp_path):
    drafter, refused = drafter_of(SWITCHES[switch]), []
    for engine, version in [("vllm", "0.32.0"), ("speculators", "0.32.0"), ("sglang", "0.5.23"), ("vllm", "0.16.0")]:
        try:
            out = export.export(drafter, tmp_path / f"{engine}{version}", engine, version, TARGET, torch.float32)
        except Eagle3Error as error:
            refused.append((engine, version))
            assert f"no export for {engine} " in str(error)
            assert not (tmp_path / f"{engine}{version}").exists()
        else:
            assert_equal(drafter, checkpoint.load(out, LAYERS).drafter)
    old_vllm, new_sglang = ("vllm", "0.16.0"), ("sglang", "0.5.23")
    expected = {
        "norm_before_residual": [new_sglang],
        "norm_output": [old_vllm],
        "fc_norm": [old_vllm],
        "norm_before_fc": [old_vllm],
        "speculators_default": [new_sglang, old_vllm],
        "one_boundary": [new_sglang, old_vllm],
        "five_boundaries": [new_sglang, old_vllm],  # SGLang: boundary 12 lies behind the last layer
        "full_vocabulary": [],
        "attention_bias": [new_sglang],
        "two_layers": [],
        "head_norms": [new_sglang, old_vllm],
    }
    assert refused == expected[switch]


def test_save_permutes_boundaries_that_do_not_rise(tmp_path):
    config = BASE.with_(boundaries=(9, 2, 6), norm_before_fc=True)
    drafter = drafter_of(config)
    saved = checkpoint.load(checkpoint.save(drafter, tmp_path / "out", torch.float32), LAYERS).drafter
    assert saved.config.boundaries == (2, 6, 9)
    parts = torch.randn(5, 3, 32)
    torch.testing.assert_close(drafter.fuse(parts.flatten(1)), saved.fuse(parts[:, [1, 2, 0]].flatten(1)))


def test_shim_puts_boundaries_where_every_version_looks(tmp_path):
    drafter = drafter_of(BASE.with_(fc_norm=True))
    folder = safeailab(tmp_path / "in", drafter)
    raw = json.loads((folder / "config.json").read_text())
    raw["eagle_config"]["fc_norm"] = raw.pop("fc_norm")
    (folder / "config.json").write_text(json.dumps(raw))
    out = export.shim(folder, tmp_path / "out", TARGET)
    shimmed = checkpoint.read_config(out)
    assert (shimmed[checkpoint.IDS], shimmed["num_aux_hidden_states"], shimmed["fc_norm"]) == ([2, 6, 9], 3, True)
    assert_equal(drafter, checkpoint.load(out, LAYERS).drafter)


@pytest.mark.parametrize(
    "ids, latent, boundaries",
    [
        ([1, 5, 8], False, (2, 6, 9)),
        ([6, 8, 12], False, (6, 8, 12)),
        ([2, 6, 9], True, (2, 6, 9)),
        ([1, 5, 8], True, (2, 6, 9)),
    ],
)
def test_nested_ids_are_outputs_unless_they_cannot_be(ids, latent, boundaries):
    raw = checkpoint.to_config_json(MLA if latent else BASE, torch.float32)
    del raw[checkpoint.IDS]
    raw["eagle_config"][checkpoint.IDS] = ids
    config, notes = checkpoint.parse_config(raw, "config.json", LAYERS, False)
    assert config.boundaries == boundaries and str(list(boundaries)) in notes[0]


def test_deepseek_ids_for_sglang():
    """SGLang 0.5.16 on DeepSeek targets adds 1 only to lists that begin with 1 (deepseek_v2.py)."""
    deepseek = TARGET | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert export.nested_ids(BASE, "sglang", "0.5.16", deepseek) == [1, 5, 8]
    assert export.nested_ids(BASE.with_(boundaries=(3, 6, 9)), "sglang", "0.5.16", deepseek) == [3, 6, 9]
    assert export.nested_ids(BASE.with_(boundaries=(3, 6, 9)), "sglang", "0.5.8", deepseek) == [2, 5, 8]
    with pytest.raises(Eagle3Error, match=r"captures? boundaries \[1, 6, 9\]|capture boundaries \[1, 6, 9\]"):
        export.nested_ids(BASE.with_(boundaries=(1, 6, 9)), "sglang", "0.5.16", deepseek)
