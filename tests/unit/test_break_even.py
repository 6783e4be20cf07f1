"""Break-even model: exact where its assumptions hold, and what it says beyond what was measured."""

import matplotlib.pyplot as plt
import pytest

from eagle3_lib.engines import timing
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.reports import plots, report
from eagle3_lib.verdict import break_even

CURVE = [0.7, 0.5, 0.35, 0.2]


def test_two_measured_rounds_give_the_line():
    cost = break_even.fit(0.05, {2: 0.08, 4: 0.10})
    assert (cost.base, cost.per_draft) == pytest.approx((0.06, 0.01)) and cost.measured == (2, 4)
    rows = break_even.predict(cost, CURVE, 4)
    assert [row["mean_length"] for row in rows] == pytest.approx([1.7, 2.2, 2.55, 2.75])
    assert [row["round"] for row in rows] == pytest.approx([1.4, 1.6, 1.8, 2.0])
    assert [row["speedup"] for row in rows] == pytest.approx([1.7 / 1.4, 2.2 / 1.6, 2.55 / 1.8, 2.75 / 2.0], abs=1e-4)
    assert break_even.recommend(rows) == 3


def test_more_rounds_than_two_are_fitted_by_least_squares():
    cost = break_even.fit(1.0, {1: 1.5, 2: 1.5, 3: 2.0, 4: 2.0})
    assert (cost.base, cost.per_draft) == pytest.approx((1.25, 0.2))


def test_one_measured_round_starts_from_the_plain_step():
    cost = break_even.fit(0.05, {4: 0.09})
    assert (cost.base, cost.per_draft) == pytest.approx((0.05, 0.01))
    assert break_even.predict(cost, CURVE, 4)[3]["speedup"] == pytest.approx(2.75 * 0.05 / 0.09, abs=1e-4)


def test_plain_decoding_is_recommended_where_no_round_pays():
    rows = break_even.predict(break_even.fit(1.0, {4: 3.0}), [0.1, 0.01, 0.0, 0.0])
    assert break_even.recommend(rows) == break_even.PLAIN_IS_BEST and all(row["speedup"] < 1 for row in rows)


def test_beyond_the_curve_a_draft_is_accepted_as_at_the_last_position():
    rows = break_even.predict(break_even.fit(1.0, {2: 1.2}), [0.8, 0.4], 4)
    assert [row["beyond_curve"] for row in rows] == [False, False, True, True]
    assert [row["mean_length"] for row in rows] == pytest.approx([1.8, 2.2, 2.4, 2.5])
    dead = break_even.mean_length([0.5, 0.0, 0.0], 5)  # no conditional rate at a position that no round reached
    assert dead == 1.5


@pytest.mark.parametrize(("plain", "rounds"), [(0.05, {}), (0.0, {4: 0.1}), (0.05, {0: 0.1}), (0.05, {4: -1.0})])
def test_nonsense_is_refused(plain, rounds):
    with pytest.raises(Eagle3Error, match="expected times above 0"):
        break_even.fit(plain, rounds)


def test_a_runs_rounds_in_plain_steps_by_concurrency():
    def row(concurrency, tokens, steps):
        return {"concurrency": concurrency, "tokens": tokens, "steps": steps}

    timed = [row(1, 11, 5), row(8, 11, 4), row(8, 21, 8), row(64, 11, 0)]
    speedups = {level: {"value": 1.25} for level in ("1", "8", "64")}
    cost = {"step_ratio": 1.5, "mean_length": 2.0}
    found = timing.round_costs({"timed": timed}, speedups, cost)
    assert found == pytest.approx({"1": 1.5, "8": (30 / 12) / 1.25, "64": 2.0 / 1.25})
    levels = break_even.of_run(4, CURVE, found)
    assert levels["8"]["measured_K"] == 4 and levels["8"]["rows"][3]["round"] == pytest.approx(2.0)
    assert levels["64"]["recommended"] >= levels["8"]["recommended"]  # a cheaper round carries more drafts
    rows = report.break_even_rows({"base": levels})
    assert len(rows) == 3 * break_even.MOST and rows[0]["requests at a time"] == 1
    (axes,) = plots.break_even({"base, 1 at a time": levels["1"]}).axes
    drawn, ring, _ = axes.lines
    assert list(drawn.get_ydata()) == [row["speedup"] for row in levels["1"]["rows"]]
    assert ring.get_xdata()[0] == 4 and drawn.get_markevery() == [0, 1, 2, 3]
    plt.close("all")
