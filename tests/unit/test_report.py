"""What stage 09 says and draws of a verdict, on simulated runs whose truth is known."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from eagle3_lib.reports import plots, publish, report
from eagle3_lib.verdict import diagnose

POSITIONS, REQUESTS, ROUNDS = 4, 16, 40
CORRECT = [[1 + (index + number) % 3 for number in range(ROUNDS)] for index in range(REQUESTS)]
FAULTY = [[count - 1 for count in some] for some in CORRECT]


def replay_of(engine: list[list[int]], hypotheses: dict | None = None, **more) -> dict:
    """A replay whose answers begin after 10 tokens and whose rounds start at every second token."""
    requests = []
    for index, (ours, theirs) in enumerate(zip(engine, CORRECT, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=True))
        rows = [
            {"slot": 10 + 2 * number, "engine": a, "replay": b, "cut": False, "outside": number % 4 == 0}
            for number, (a, b) in pairs
        ]
        request = {"id": str(index), "prompt_length": 10, "engine_rounds": ours, "replay_rounds": theirs, "rows": rows}
        request["hypotheses"] = {name: counts[index] for name, counts in (hypotheses or {}).items()}
        requests.append(request)
    return {"drafter": "drafter", "positions": POSITIONS, "requests": requests, "dtype": "float32"} | more


def judged(replay: dict, break_even: float | None = None) -> dict:
    return diagnose.judge(replay, break_even).as_dict()


def late() -> dict:
    """Faulty from round 20 on, which is token 40 of the answers."""
    engine = [[*some[:20], *other[20:]] for some, other in zip(CORRECT, FAULTY, strict=True)]
    return judged(replay_of(engine, {"this": FAULTY}))


def of_half() -> dict:
    """Faulty in every second request."""
    engine = [FAULTY[index] if index % 2 else CORRECT[index] for index in range(REQUESTS)]
    return judged(replay_of(engine, {"this": FAULTY}))


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def shaded(axes) -> list[tuple[float, float]]:
    bars = {bar for container in axes.containers for bar in container}
    areas = [patch for patch in axes.patches if patch not in bars]
    return [(area.get_x(), area.get_x() + area.get_width()) for area in areas]


def test_a_fault_from_a_place_on_is_told_and_shaded_there():
    verdict = late()
    assert verdict["fault"] == "this" and verdict["where"]["by"] in ("place", "round")
    of = {"place": "token 40 of the answers", "round": "round 20 of the requests"}[verdict["where"]["by"]]
    told = report.departing_told(verdict)
    assert told == f"this holds from {of} on: 320 of 320 rounds depart there, 0 of 320 elsewhere"
    rows = report.departing_rows(verdict)
    assert [sum(r["departing"] for r in rows if r["by"] == by) for by in ("place", "round", "request")] == [320] * 3
    assert {row["share"] for row in rows if row["by"] == "place" and row["to"] < 40} == {0}
    assert {row["share"] for row in rows if row["by"] == "place" and row["from"] >= 40} == {1}
    assert {row["share"] for row in rows if row["by"] == "request"} == {0.5}
    figure = plots.departures(rows, verdict["where"])
    panels = {axes.get_xlabel(): axes for axes in figure.axes}
    assert list(panels) == [plots.ORDERS[by] for by in ("place", "round", "request")], "nothing is told of company"
    by = verdict["where"]["by"]
    assert shaded(panels[plots.ORDERS[by]]) == [(verdict["where"]["since"] - 0.5, {"place": 78.5, "round": 39.5}[by])]
    assert not shaded(panels["request"]) and len(figure.legends) == 1


def test_a_fault_of_half_of_the_requests_is_told_and_shaded_in_them():
    verdict = of_half()
    assert verdict["fault"] == "this" and verdict["where"]["requests"] == list(range(1, REQUESTS, 2))
    told = report.departing_told(verdict)
    assert told == "this holds in 8 of 16 requests: 320 of 320 rounds depart there, 0 of 320 elsewhere"
    rows = report.departing_rows(verdict)
    panels = {axes.get_xlabel(): axes for axes in plots.departures(rows, verdict["where"]).axes}
    assert shaded(panels["request"]) == [(number - 0.5, number + 0.5) for number in range(1, REQUESTS, 2)]
    heights = [bar.get_height() for bar in panels["request"].containers[0]]
    assert heights == [0, 1] * 8


def test_a_fault_of_the_whole_run_and_no_departing_round():
    everywhere = judged(replay_of(FAULTY, {"this": FAULTY}))
    assert report.departing_told(everywhere) == "640 of 640 rounds depart; this explains them in the whole run"
    assert not plots.departures(report.departing_rows(everywhere), everywhere["where"]).legends
    healthy = judged(replay_of(CORRECT, {"this": FAULTY}))
    assert report.departing_told(healthy) == "no round departs from a correct engine"
    assert report.departing_rows(healthy) == []


def test_a_verdict_that_compares_no_round_says_so_everywhere():
    replay = replay_of(CORRECT, contradictions=["accepted: found 3, expected 4"])
    verdict = judged(replay)
    assert verdict["kind"] == diagnose.CANNOT_TELL
    assert report.departing_told(verdict) == "cannot tell, so its rounds are not held against a correct engine's"
    assert report.config_told(verdict) == "cannot tell, so no other config.json is scored"
    assert report.departing_rows(verdict) == report.config_rows(verdict) == report.not_excluded_rows(verdict) == []


def test_lost_drafts_add_up_and_what_is_not_known_is_left_out():
    verdicts = {"e: drafter": of_half()}
    (row,) = report.loss_rows(verdicts)
    # Counts 1, 2, 3 of 4 drafts: no round is full, and in every fourth a correct engine stops outside the vocabulary.
    assert row["rounds"] == 640 and row["later draft wrong"] == 0.75 and row["first draft wrong"] == 0
    assert (
        row["all drafts accepted"] == 0 and row["outside the vocabulary"] is None and row["vocabulary allows"] is None
    )
    assert row["the engine loses"] == 0.5
    assert row["the engine accepts"] == pytest.approx(np.mean(CORRECT) - 0.5, abs=1e-3)
    replay = replay_of(CORRECT)
    for request in replay["requests"]:
        request |= {"output_length": 1 + sum(request["engine_rounds"]) + ROUNDS, "in_vocabulary": 100}
    (row,) = report.loss_rows({"e: drafter": judged(replay)})
    assert [row[end] for end in report.ENDS] == [0, 0.25, 0, 0.75]
    assert row["vocabulary allows"] == pytest.approx(1600 / (16 + 640 + np.sum(CORRECT)))
    bars = plots.losses([row]).axes[0].containers
    assert [bars[n][0].get_x() + bars[n][0].get_width() for n in range(4)] == pytest.approx([0, 0.25, 0.25, 1])
    assert report.loss_rows({"e: drafter": {"evidence": {"losses": {}}}}) == []


def test_what_is_not_excluded_is_cut_at_eight_rows():
    near = {f"fault {number}": CORRECT for number in range(11)}
    verdict = judged(replay_of(CORRECT, near))
    rows = report.not_excluded_rows(verdict)
    assert len(rows) == 9 and rows[-1]["not excluded"] == "and 3 more"
    assert rows[0]["rounds that differ, of 640"] == "0"
    assert len(report.not_excluded_rows(verdict, most=11)) == 11


def with_suspects(more: int) -> dict:
    """Two values of config.json: one that accepts ``more`` in every second round, one that accepts the same."""
    told = [
        {"name": name, "field": name.split()[0], "value": 1, "fault": None, "shim": f"cp -rL x 'x-{name}'"}
        for name in ("rope_theta 10000", "no rope_scaling")
    ]
    replay = replay_of(CORRECT, {"this": FAULTY}, suspects=told)
    for request, counts in zip(replay["requests"], CORRECT, strict=True):
        other = [count + more * (number % 2) for number, count in enumerate(counts)]
        request["suspects"] = {"rope_theta 10000": other, "no rope_scaling": counts}
    return judged(replay)


def test_the_suspect_comes_with_its_shell_line():
    verdict = with_suspects(1)
    assert verdict["kind"] == diagnose.CONFIG
    told = report.config_told(verdict)
    assert told.startswith("rope_theta 10000 describes the drafter better than its config.json. To try:\ncp -rL x")
    first, second = report.config_rows(verdict)
    assert first["config.json with"] == "rope_theta 10000" and first["rounds that differ"] == 320
    assert first["accepted a round"] - first["as it is"] == pytest.approx(0.5) and first["gain"]["value"] == 0.5
    assert second["gain"] == {"value": 0, "low": 0, "high": 0, "n": REQUESTS}
    assert len(report.config_rows(verdict, most=1)) == 1


def test_no_suspect_and_a_replay_without_scores():
    assert report.config_told(with_suspects(-1)) == "no other value would surely accept more"
    assert report.config_told(of_half()) == "replay.json scores no other config.json"


def test_a_hypothesis_that_no_round_can_tell_has_words_in_the_place_of_a_share():
    shares = {"low": 0.9, "high": 1.0, "n": 4}
    ranking = [
        {"hypothesis": "correct engine", "value": None, "low": None, "high": None},
        {"hypothesis": "captured before the sum over ranks", "value": 0.95} | shares,
    ]
    (axes,) = plots.agreement(ranking).axes
    assert [text.get_text() for text in axes.texts] == ["no round can tell", "95.0%"]
    assert [name.get_text() for name in axes.get_yticklabels()] == [
        "correct engine",
        "captured before the sum\nover ranks",
    ]


def test_the_finding_has_the_warnings_after_each_sentence():
    verdicts = [{"sentence": "base: healthy.", "warnings": ["3 of 900 tokens."]}, {"sentence": "other: weak."}]
    found = {"version": "1", "together": {"sentence": "No sign."}, "verdicts": verdicts}
    assert (
        publish.finding({"engines": {"vllm": found}}) == "vllm 1. No sign. base: healthy. 3 of 900 tokens. other: weak."
    )
