"""Figures: colours that everybody tells apart on a white and a dark page, and the values that they show."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest

from eagle3_lib.engines import timing
from eagle3_lib.reports import plots, report

# Machado, Oliveira, Fernandes 2009, https://doi.org/10.1109/TVCG.2009.113, severity 1.0, on linear RGB.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
PAGES = {"light": "#ffffff", "dark": "#16181c"}
XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
COLOURS = plt.rcParams["axes.prop_cycle"].by_key()["color"]


def linear(colour):
    values = np.array([int(colour.lstrip("#")[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    dark, light = sorted(float(linear(colour) @ XYZ[1]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def lab(values):
    x, y, z = (XYZ @ np.clip(values, 0, 1)) / [0.9505, 1, 1.089]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_stands_out_on_both_pages(colour):
    assert all(contrast(colour, page) >= 3 for page in PAGES.values())  # WCAG 2.2, 1.4.11


@pytest.mark.parametrize("vision", VISIONS)
def test_the_first_colours_are_told_apart(vision):
    seen = [lab(np.array(VISIONS[vision]) @ linear(colour)) for colour in COLOURS[:4]]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 12


def replayed(engine, replay, positions=4):
    from eagle3_lib.verdict import acceptance

    return {
        "positions": positions,
        "requests": [{"engine_rounds": e, "replay_rounds": r} for e, r in zip(engine, replay, strict=True)],
        "engine_acceptance": acceptance.summary(engine, positions),
        "replay_acceptance": acceptance.summary(replay, positions),
    }


def test_conditional_rates_are_of_the_rounds_that_got_there():
    # 6 rounds: position 1 accepted in 4, position 2 in 2 of those, position 3 in none, so position 4 was never reached.
    found = report.conditional_curve([[0, 1, 2], [2, 0, 1]], 4)
    assert found["value"] == pytest.approx([4 / 6, 1 / 2, 0, None], abs=1e-6)
    assert found["low"][3] is None and found["low"][0] <= found["value"][0] <= found["high"][0]


def test_curve_rows_hold_what_the_figure_shows():
    rows = report.curve_rows({"base": replayed([[0, 1, 2], [2, 0, 1]], [[0, 1, 2], [2, 0, 0]])})
    assert [row["rate"] for row in rows if row["who"] == "engine"] == pytest.approx([4 / 6, 2 / 6, 0, 0], abs=1e-6)
    assert {row["rounds"] for row in rows} == {6} and {row["requests"] for row in rows} == {2}
    cumulative, conditional = plots.acceptance_curves(rows).axes
    drawn = cumulative.containers[1].lines[0].get_ydata()
    assert list(drawn) == [row["rate"] for row in rows if row["who"] == "replay"]
    assert len(conditional.containers[0].lines[0].get_ydata()) == 3  # no point where no round came
    plt.close("all")


def test_times_are_medians_by_prompt_of_the_repeats():
    timed = [
        {"concurrency": 1, "repeat": r, "id": i, "tokens": 11, "steps": 5, "first_token_s": 0.1, "seconds": 0.1 + total}
        for i, totals in {"a": (1.0, 2.0, 9.0), "b": (4.0, 4.0, 4.0)}.items()
        for r, total in enumerate(totals)
    ] + [{"concurrency": 8, "repeat": 0, "id": "a", "tokens": 11, "steps": 5, "first_token_s": 9, "seconds": 99}]
    assert timing.step_time({"timed": timed})["value"] == pytest.approx((2 / 5 + 4 / 5) / 2)
    latency = timing.latency({"timed": timed})
    assert latency["later_token_s"]["value"] == pytest.approx((2 / 10 + 4 / 10) / 2)
    assert latency["first_token_s"] == {"value": 0.1, "low": 0.1, "high": 0.1, "n": 2}


def test_a_round_is_split_at_the_time_of_a_plain_step():
    interval = {"low": 0.04, "high": 0.06, "n": 4}
    figure = plots.step_times({"plain": {"value": 0.05, **interval}, "base": {"value": 0.08, **interval, "high": 0.09}})
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([50, 50, 30])
    plt.close("all")


def test_rounds_over_text_show_each_emitted_token_once():
    words = [f"w{i}" for i in range(8)]
    rows = [{"slot": slot, "engine": count, "replay": count} for slot, count in ((3, 2), (6, 0), (7, 1))]
    request = {"prompt_length": 4, "rows": rows}
    (axes,) = plots.rounds_over_text(request, words).axes
    assert [text.get_text() for text in axes.texts] == words[1:7]  # the first is prefill's; the last was not reached
    plt.close("all")
