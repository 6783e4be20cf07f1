"""Engines beside each other, on the measurements of published runs."""

import json

import pytest

from eagle3_lib.paths import ROOT
from eagle3_lib.reports import beside


def engines(run: str) -> dict:
    return json.loads((ROOT / "reports" / run / "report.json").read_text())["engines"]


def test_two_engines_on_a_gpu():
    rows = {(row["engine"], row["mode"]): row for row in beside.engine_rows(engines("smollm2_h200"))}
    assert len(rows) == 8
    assert rows["vllm 0.23.0", "base"]["rounds equal"] == "6189 of 6216, 10 others cut"
    assert rows["sglang 0.5.16", "finetuned"]["tokens a step"] == pytest.approx(1.725, abs=1e-3)
    slow, quick = rows["vllm 0.23.0", "ngram"], rows["sglang 0.5.16", "ngram"]
    assert slow["drafted in"] == pytest.approx(1003 / 6079) and quick["drafted in"] is None
    assert (slow["a step, ms"], quick["a step, ms"]) == (pytest.approx(6.91, abs=0.01), pytest.approx(1.11, abs=0.01))
    assert rows["vllm 0.23.0", "plain"]["over plain"] is None


def test_the_fastest_is_told_with_its_doubt():
    at_one, at_eight, at_64 = beside.fastest_rows(engines("smollm2_h200"))
    assert (at_one["fastest"], at_one["every repeat faster"]) == ("sglang ngram", "yes")
    assert (at_eight["fastest"], at_eight["next"], at_eight["every repeat faster"]) == (
        "sglang plain",
        "vllm plain",
        "no",
    )
    assert (at_64["requests at a time"], at_64["fastest"]) == (64, "sglang plain")


def test_rounds_that_an_engine_tells_are_not_all_steps_of_n_gram():
    (row,) = [row for row in beside.engine_rows(engines("quickstart")) if row["mode"] == "ngram"]
    assert (row["tokens a step"], row["a step, ms"], row["drafted in"]) == (None, None, None)
    assert row["tokens/s"] == pytest.approx(13.48, abs=0.01)
