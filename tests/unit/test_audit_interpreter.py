"""Stage 06 audits the engine of ``engine_python``: its version, and its source tree where that can be read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_audit import OLD_TREE
from test_checkpoint_formats import BASE, TARGET, drafter_of

from eagle3_lib.compat import gates
from eagle3_lib.drafter import checkpoint
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import AuditParams, Run
from eagle3_lib.stages import audit

VERSION = "0.16.0"


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory):
    """An environment of its own that has vLLM 0.16.0, as far as its metadata and a few source files go."""
    folder = tmp_path_factory.mktemp("engine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    (packages / f"vllm-{VERSION}.dist-info").mkdir()
    (packages / f"vllm-{VERSION}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {VERSION}\n")
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    for path, lines in OLD_TREE.items():
        (packages / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / "vllm" / path).write_text("\n".join(lines))
    return str(python)


def audited(tmp_path, **params):
    """audit.json of a small drafter for a target whose type vLLM 0.16's list of EAGLE-3 targets does not have."""
    target = tmp_path / "target"
    target.mkdir()
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = TARGET | sizes | {"model_type": "mistral"}
    (target / "config.json").write_text(json.dumps(config))
    drafter = checkpoint.save(drafter_of(BASE), tmp_path / "drafter", torch.float32)
    values = {"drafter": str(drafter), "target": str(target), "out": str(tmp_path / "audit"), "answers": 0}
    audit.run(AuditParams(**values | params))
    return json.loads((tmp_path / "audit" / "audit.json").read_text())


def test_the_version_and_the_gates_are_those_of_engine_python(tmp_path, engine_python):
    report = audited(tmp_path, engine_python=engine_python)
    assert report["version"] == VERSION
    gate = next(finding for finding in report["findings"] if finding["rule"] == "gate_whitelist")
    assert gate["source"].startswith(f"vllm {VERSION}: config/speculative.py")


def test_a_named_version_goes_first_and_has_no_gates_of_another(tmp_path, engine_python):
    report = audited(tmp_path, engine_python=engine_python, engine_version="0.23.0")
    assert report["version"] == "0.23.0"
    assert not [finding for finding in report["findings"] if finding["rule"].startswith("gate")]


def test_a_source_tree_that_cannot_be_read_is_left_out(tmp_path):
    """An interpreter in a container, say: it tells its version, and a folder that is not on this machine."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ $# -gt 3 ] && echo "vllm 0.23.0" || echo /elsewhere/vllm\n')
    python.chmod(0o755)
    assert gates.source_tree("vllm", str(python)) is None
    report = audited(tmp_path, engine_python=str(python))
    assert report["version"] == "0.23.0"
    assert not [finding for finding in report["findings"] if finding["rule"].startswith("gate")]


def test_an_interpreter_without_the_engine_is_told_with_the_way_out(tmp_path, engine_python):
    with pytest.raises(
        Eagle3Error, match="engine_python: found no sglang in .*; or name .* in engine_version, such as"
    ):
        audited(tmp_path, engine="sglang", engine_python=engine_python)
    with pytest.raises(Eagle3Error, match="engine_python: .*absent.* does not run: .*engine_version"):
        audit.installed_version("vllm", os.path.join(tmp_path, "absent"))


def test_a_drafter_is_audited_for_the_first_engine_of_the_run(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "run: r\nshared: {engine_python: shared/python}\n"
        "engines: {first: {engine: sglang, engine_python: own/python, engine_args: [--x]}, second: {engine: vllm}}\n"
    )
    flat = Run(path).flat("audit")
    assert (flat["engine"], flat["engine_python"]) == ("sglang", "own/python")
    path.write_text("run: r\nshared: {engine_python: shared/python}\nengines: [vllm]\n")
    flat = Run(path).flat("audit")
    assert (flat["engine"], flat["engine_python"]) == ("vllm", "shared/python")
