"""SGLang's hidden states as features: real SmolLM2 states behind a server that follows SGLang's source."""

import json
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from pydantic import ValidationError

from eagle3_lib.compat.rules import Target
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features import sglang_tap
from eagle3_lib.features.backends import offered
from eagle3_lib.features.store import Store
from eagle3_lib.features.wanted import Wanted
from eagle3_lib.params import ExtractParams
from eagle3_lib.paths import ROOT
from eagle3_lib.stages import extract
from eagle3_lib.targets import capture, targets
from eagle3_lib.targets.answers import Answer, write_parquet
from eagle3_lib.targets.targets import render

LAYERS, HIDDEN = 30, 576
BOUNDARIES = (15, 2, 27)  # the order is the drafter's, not SGLang's
QUESTIONS = ["Name three animals that live in the sea.", "Why is the sky blue?"]


def interpreter(folder, version, server):
    """An interpreter that has a package "sglang" of some version, whose launch_server is this Python text."""
    site = folder / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text(server)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def served(target, target_folder, tokenizer, tmp_path_factory):
    """Two texts, what transformers has of them at each boundary, and an interpreter whose SGLang returns it."""
    texts = [render(tokenizer, [{"role": "user", "content": question}])[-24:] for question in QUESTIONS]
    draft_ids = torch.arange(0, 49_152, 6)
    whole = [f for text in texts for f in capture.capture(target, [text], range(LAYERS + 1), draft_ids=draft_ids)]
    folder = tmp_path_factory.mktemp("sglang")
    python = interpreter(folder, "0.5.23", (ROOT / "tests/stub_sglang.py").read_text())
    recorded = {
        ",".join(map(str, text)): torch.cat([f.fused.unflatten(-1, (-1, HIDDEN)).movedim(1, 0), f.last_hidden[None]])
        for text, f in zip(texts, whole, strict=True)
    }
    numpy.savez(folder / "site/sglang/states.npz", **recorded)
    wanted = Wanted(target_folder, BOUNDARIES, draft_ids, engine_python=python)
    return SimpleNamespace(texts=texts, whole=whole, wanted=wanted, python=python)


@pytest.fixture(scope="module")
def data(served, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [Answer(f"s{n}", "train", "p", text[:9], text[9:], "t", "stop", 0.1) for n, text in enumerate(served.texts)]
    write_parquet(rows, folder / "samples.parquet")
    return str(folder)


@pytest.fixture
def loaded(target, monkeypatch):
    """transformers takes the target that the tests have loaded already."""
    monkeypatch.setattr(targets, "load", lambda *_: target)


def params_for(served, data, out, **more):
    return ExtractParams(
        data=data, out=str(out), engine_python=served.python, boundaries=list(BOUNDARIES), parity_samples=2, **more
    )


def with_(wanted, **more):
    return Wanted(**(vars(wanted) | more))


@pytest.mark.slow
def test_features_are_the_targets_own(served):
    with sglang_tap.backend(served.wanted) as features:
        found = [*features(served.texts), *features(served.texts)]  # asked again, nothing comes from a cache
    for ours, theirs in zip(found, served.whole * 2, strict=True):
        fused = torch.cat([theirs.fused[:, k * HIDDEN : (k + 1) * HIDDEN] for k in BOUNDARIES], -1)
        assert torch.equal(ours.fused, fused) and torch.equal(ours.last_hidden, theirs.last_hidden)
        assert torch.equal(ours.argmax, theirs.argmax)
        assert torch.allclose(ours.draft_mass, theirs.draft_mass, atol=1e-6)


@pytest.mark.slow
def test_numbers_survive_json_in_the_targets_dtype(served):
    with sglang_tap.backend(with_(served.wanted, dtype="bfloat16", boundaries=(1, 29), last_hidden=False)) as features:
        (found,) = features(served.texts[:1])
    theirs = served.whole[0].fused.unflatten(-1, (-1, HIDDEN))[:, [1, 29]].flatten(1)
    assert found.fused.dtype == torch.bfloat16 and torch.equal(found.fused, theirs.bfloat16())
    assert found.last_hidden.shape == (len(served.texts[0]), 0)  # its server was not started


@pytest.mark.slow
def test_a_store_by_sglang_is_checked_by_transformers_first(served, data, loaded, tmp_path, monkeypatch):
    params = params_for(served, data, tmp_path / "out", backend="sglang", parity_with="transformers")
    notes = extract.run(params)
    assert [row["boundary"] for row in notes["parity"]["boundaries"]] == list(BOUNDARIES)
    assert all(row["relative_error"] < 1e-5 and row["cosine"] > 0.9999 for row in notes["parity"]["boundaries"])
    stored, theirs = Store(tmp_path / "out", verify=True)[0].features, served.whole[0]
    assert torch.equal(stored.last_hidden, theirs.last_hidden.bfloat16())
    assert torch.equal(stored.argmax.long(), theirs.argmax)

    monkeypatch.setenv("STUB_SHIFT", "1")
    with pytest.raises(
        Eagle3Error,
        match=r"(?s)sglang holds there what transformers has at boundary 16: off by one.*"
        r"All are off by \+1",
    ):
        extract.run(params.model_copy(update={"out": str(tmp_path / "late")}))
    assert not list((tmp_path / "late").glob("shard-*"))


@pytest.mark.slow
def test_sglang_as_the_reference(served, data, loaded, tmp_path, monkeypatch):
    params = params_for(served, data, tmp_path / "out", parity_with="sglang")
    assert all(row["agrees"] for row in extract.run(params)["parity"]["boundaries"])
    monkeypatch.setenv("STUB_SHIFT", "1")
    with pytest.raises(Eagle3Error, match=r"transformers holds there what sglang has at boundary 14: off by one"):
        extract.run(params.model_copy(update={"out": str(tmp_path / "late")}))
    with pytest.raises(Eagle3Error, match="parity_with: sglang gives no boundary 30"):
        extract.run(params.model_copy(update={"out": str(tmp_path / "last"), "boundaries": [2, 30]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"chunked_prefill_size": 16},
            r"sglang 0\.5\.23: found hidden states \[8, 1728\] of a text, expected \[24, 1728\]",
        ),
        ({"no_such_option": 1}, r"(?s)sglang ended with code 2.*unrecognized arguments: --no-such-option 1"),
        ({"context_length": 20}, r"sglang 0\.5\.23 failed a completion: .*400"),
    ],
)
def test_what_sglang_does_not_return_is_named(served, given, said):
    wanted = with_(served.wanted, engine_options=given, last_hidden=False)
    with pytest.raises(Eagle3Error, match=said), sglang_tap.backend(wanted) as features:
        list(features(served.texts))


def test_a_version_without_boundaries_is_named(served, tmp_path):
    """The options of 0.5.16 as its help names them."""
    known = json.loads((ROOT / "tests/data/engine_options.json").read_text())["options"]["sglang 0.5.16"]
    python = interpreter(tmp_path, "0.5.16", f"print({' '.join(known)!r})")
    with (
        pytest.raises(Eagle3Error, match=r"sglang 0\.5\.16 returns the last hidden state alone; .* such as 0\.5\.23"),
        sglang_tap.backend(with_(served.wanted, engine_python=python)),
    ):
        pass


@pytest.mark.parametrize(
    ("architecture", "boundaries", "ids"),
    [
        ("LlamaForCausalLM", [2, 15, 27], [1, 14, 26]),
        ("LlamaForCausalLM", list(range(1, 30)), list(range(29))),
        ("DeepseekV3ForCausalLM", [2, 15, 27], [1, 14, 26]),
        ("KimiK25ForConditionalGeneration", [3, 15, 27], [3, 15, 27]),
        ("GlmMoeDsaForCausalLM", [3, 15, 27], [3, 15, 27]),
        ("Glm4MoeLiteForCausalLM", [3, 15, 27], [3, 15, 27]),
        ("DeepseekV3ForCausalLM", [1, 15, 27], [27, 15, 1]),
        ("GptOssForCausalLM", [2, 15, 29], [1, 14, 28]),
    ],
)
def test_layer_ids(architecture, boundaries, ids):
    target = Target(architecture, LAYERS, HIDDEN, 100, False, False)
    assert sglang_tap.layer_ids(boundaries, "0.5.23", target) == ids


@pytest.mark.parametrize("boundaries", [[0, 15], [15, 30]])
def test_boundaries_that_sglang_does_not_give(boundaries):
    target = Target("LlamaForCausalLM", LAYERS, HIDDEN, 100, False, False)
    with pytest.raises(Eagle3Error, match=r"of which sglang 0\.5\.23 gives not all; expected 1 to 29"):
        sglang_tap.layer_ids(boundaries, "0.5.23", target)
    assert offered("sglang", LAYERS) == tuple(range(1, 30)) and offered("vllm", 2) == (0, 1, 2)


def test_options_become_words():
    given = {"tp_size": 2, "trust_remote_code": True, "enable_mixed_chunk": False, "last_hidden": {"base_gpu_id": 2}}
    assert sglang_tap._words(given) == ["--tp-size", "2", "--trust-remote-code"]


@pytest.mark.parametrize("pair", [("sglang", ""), ("sglang", "sglang"), ("sglang", "vllm"), ("vllm", "sglang")])
def test_sglang_goes_with_transformers(pair):
    with pytest.raises(ValidationError, match="expected 'transformers' beside sglang"):
        ExtractParams(backend=pair[0], parity_with=pair[1])
