"""A subset of the fault matrix on the real vLLM: one fault by config, one by a patch of the runner."""

import importlib.util
from pathlib import Path

import pytest

from eagle3_lib.verdict import diagnose

FILE = Path(__file__).parents[2] / "benchmarks" / "fault_matrix.py"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, target_folder):
    pytest.importorskip("vllm")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(FILE.parent)  # of its sibling engine_runs
    spec = importlib.util.spec_from_file_location("fault_matrix", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUNS = str(tmp_path_factory.mktemp("fault_matrix"))
    yield module
    monkeypatch.undo()


@pytest.mark.parametrize("fault", ["boundaries +1", "positions not advanced"])
def test_a_broken_engine_is_named(matrix, fault):
    replay = matrix.examine(matrix.run_engine(fault, fault))
    verdict = diagnose.judge(replay)
    assert (verdict.kind, verdict.fault) == (diagnose.FAULT, fault), verdict.sentence
    assert verdict.evidence["rounds_compared"] >= 400
    assert verdict.evidence["ranking"][0]["value"] > 0.98
    assert verdict.evidence["tokens_not_greedy"]["share"] == 0
