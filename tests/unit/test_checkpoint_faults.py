"""Strict in: one clear error for each fault, no code run, memory bounded."""

import json
import os
import pickle
import resource
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint_formats import BASE, LAYERS, TARGET, drafter_of

from eagle3_lib.compat import audit
from eagle3_lib.drafter import checkpoint
from eagle3_lib.errors import Eagle3Error


@pytest.fixture
def folder(tmp_path):
    return checkpoint.save(drafter_of(BASE), tmp_path / "drafter", torch.float32)


def change(folder, **tensors):
    """Set tensors (None: remove) in a folder's file."""
    path = folder / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, path)


def refuses(folder, *parts):
    with pytest.raises(Eagle3Error) as caught:
        checkpoint.load(folder, LAYERS)
    assert all(part in str(caught.value) for part in ("drafter", *parts)), str(caught.value)


def absolute(d2t):
    return d2t + torch.arange(len(d2t))


def nan(tensor):
    return torch.full_like(tensor, float("nan"))


@pytest.mark.parametrize(
    "name, value, parts",
    [
        ("midlayer.extra.weight", lambda _: torch.ones(3), ["unknown tensors ['layers.0.extra.weight']"]),
        ("lm_head.weight", lambda _: None, ["missing tensors ['lm_head.weight']"]),
        ("d2t", lambda _: None, ["missing tensors ['d2t']"]),
        ("fc.weight", lambda t: t[:, 1:].contiguous(), ["fc.weight: found shape [32, 95], expected [32, 96]"]),
        ("norm.weight", nan, ["norm.weight: found NaN or infinite values"]),
        ("d2t", absolute, ["d2t: expected offsets", "must be stored as offsets"]),
        ("d2t", lambda t: t - 1, ["d2t: expected offsets", "found ids from -1"]),
        ("d2t", lambda t: t[1:].contiguous(), ["d2t: found shape [19], expected [20]"]),
        ("t2d", lambda t: ~t, ["t2d marks 40 tokens that are not the 20 target ids of d2t"]),
    ],
)
def test_tensor_faults_are_named(folder, name, value, parts):
    before = load_file(folder / "model.safetensors").get(name)
    change(folder, **{name: value(before)})
    if name == "d2t" and value(before) is None:
        change(folder, t2d=None)
        parts = ["missing tensors ['d2t', 't2d']"]
    refuses(folder, *parts)


@pytest.mark.parametrize(
    "field, value, parts",
    [
        ("hidden_size", "32", ["config.json: hidden_size: found '32', expected: a valid integer"]),
        ("rms_norm_eps", [1e-5], ["config.json: rms_norm_eps: found [1e-05]"]),
        (checkpoint.IDS, ["2", 6, 9], ["config.json: eagle_aux_hidden_state_layer_ids.0: found '2'"]),
        (checkpoint.IDS, [2, 2, 9], ["found [2, 2, 9], expected different boundaries"]),
        ("eagle_config", 7, ["config.json: eagle_config: found 7"]),
        ("intermediate_size", None, ["config.json: intermediate_size: found None"]),
        ("hidden_act", "gelu", ["config.json: hidden_act: found 'gelu', expected 'silu'"]),
        ("transformer_layer_config", {"model_type": "nonsense"}, ["config.json: "]),
    ],
)
def test_config_faults_are_named(folder, field, value, parts):
    raw = checkpoint.read_config(folder)
    (folder / "config.json").write_text(json.dumps(raw | {field: value}))
    refuses(folder, *parts)


def as_bin(folder, content: bytes):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


class Code:
    def __reduce__(self):
        return os.mkdir, (os.environ["EAGLE3_TEST_TRAP"],)


def test_a_pickle_with_code_is_refused_and_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_TEST_TRAP", str(tmp_path / "trap"))
    as_bin(folder, b"")
    torch.save({"fc.weight": Code()}, folder / "pytorch_model.bin")
    refuses(folder, "pytorch_model.bin: found a pickle that asks for posix.mkdir", "nothing in it was run")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    refuses(folder, "pytorch_model.bin")
    with pytest.raises(Eagle3Error, match="pytorch_model.bin"):
        audit.check(folder, TARGET, "vllm", "0.33.0")
    assert not (tmp_path / "trap").exists()


def test_a_header_of_two_gigabytes_takes_no_memory(folder):
    path, before = folder / "model.safetensors", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**31))
        file.truncate(2**31 + 8)  # sparse
    refuses(folder, "model.safetensors: not a whole safetensors file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_an_index_stays_in_its_folder(folder, tmp_path):
    os.link(folder / "model.safetensors", tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), 3):
        index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        refuses(folder, "model.safetensors.index.json: ")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    refuses(folder, "weight_map: gone.safetensors is not in the folder")
    index.write_text("{}")
    refuses(folder, "found no weight_map")


@pytest.mark.parametrize("size", [0, 4, 1000])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_empty_and_truncated_files_are_named(folder, name, size):
    if name.endswith(".bin"):
        tensors = load_file(folder / "model.safetensors")
        as_bin(folder, b"")
        torch.save(tensors, folder / name)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])
    refuses(folder, f"{name}: not a whole" if name.endswith("s") else name)
    with pytest.raises(Eagle3Error):
        checkpoint.survey(folder)


def test_config_json_that_is_none(folder):
    for text, part in (("[1]", "found a list"), ("{", "not JSON"), ("[" * 100_000, "not JSON"), (" " * 2**23, "bytes")):
        (folder / "config.json").write_text(text)
        refuses(folder, part)
