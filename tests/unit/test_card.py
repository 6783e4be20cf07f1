"""The decision card: every verdict has one, with an exit code; what it says, and how it is shown."""

import json

import pytest

from eagle3_lib import results
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import DiagnoseParams
from eagle3_lib.paths import ROOT
from eagle3_lib.reports import card as shown
from eagle3_lib.verdict import acceptance, card, diagnose
from eagle3_lib.verdict.card import Asked, Card

KINDS = sorted(
    {
        value
        for name, value in vars(diagnose).items()
        if name.isupper() and isinstance(value, str) and value in card.EXIT
    }
)
ASKED = Asked("vllm", "drafters/base", "org/target", "runs/x/benchmark", 4, "x")


def verdict(kind: str, engine: list | None = None, correct: list | None = None, **more) -> dict:
    evidence = more.pop("evidence", {})
    if engine is not None:
        evidence = {
            "engine": acceptance.summary(engine, 4),
            "replay": acceptance.summary(correct or engine, 4),
        } | evidence
    return diagnose.Verdict("base", kind, f"base: {kind} it is.", evidence, **more).as_dict()


LOW, HIGH = [[0, 1, 0, 1, 0] * 6] * 4, [[2, 1, 3, 1, 0] * 6] * 4


def test_every_kind_has_a_card_and_an_exit_code():
    assert len(KINDS) == len(card.EXIT) == 12
    for kind in KINDS:
        found = Card.of(verdict(kind, LOW, HIGH, fault="token shift" if kind == diagnose.FAULT else None))
        assert found.exit_code in (0, 1, 2, 3) and found.headline and found.next and found.after and found.cost
        assert "None" not in found.text() and "nan" not in found.text()
        results.check(results.StoredCard, {"schema": 1, **found.as_dict()}, "card.json", results.CARD_SCHEMA)
        assert Card.read(json.loads(json.dumps(found.as_dict()))) == found


def test_exit_codes():
    codes = {kind: Card.of(verdict(kind)).exit_code for kind in KINDS}
    assert {kind for kind, code in codes.items() if code == 2} == set(diagnose.OF_ENGINE)
    assert {kind for kind, code in codes.items() if code == 1} == {diagnose.WEAK, diagnose.CONFIG}
    assert {kind for kind, code in codes.items() if code == 0} == {diagnose.HEALTHY, diagnose.NO_ALARM, diagnose.SMALL}


def test_what_it_costs_and_what_mending_brings():
    speed = {"step_ratio": 1.4, "break_even_length": 1.4, "mean_length": 1.4, "throughput_ratio": 0.9, "repeats": [0]}
    found = Card.of(verdict(diagnose.FAULT, LOW, HIGH, fault="token shift", evidence={"ranking": [{}]}), speed)
    assert found.cost == (
        "now -> mended: 10.0% -> 35.0% of the drafts accepted; 1.40 -> 2.40 tokens a round; 0.90 -> 1.54 times plain decoding at the "
        "same time of a round."
    )
    untimed = Card.of(verdict(diagnose.UNKNOWN, LOW, HIGH))
    assert "speed unknown: not timed" in untimed.cost and untimed.mended["over_plain"] is None
    lossy = Card.of(verdict(diagnose.FAULT, LOW, HIGH, fault="verification is not lossless"))
    assert lossy.mended is None and "What mending brings is unknown" in lossy.cost
    assert Card.of(verdict(diagnose.CANNOT_TELL)).cost == "unknown: no round was measured"


def test_a_suspect_of_config_json():
    suspect = {"name": "rope_theta 10000", "field": "rope_theta", "value": 1e4, "fault": None, "shim": "cp -rL a b"}
    gain = {"value": 1.0, "low": 0.8, "high": 1.2, "n": 12}
    suspect |= {
        "accepted": 1.4,
        "of_config": 0.4,
        "gain": gain,
        "surely": 0.7,
        "requests": 12,
        "differ": 90,
        "p": 0.0,
        "ties": [],
    }
    found = Card.of(verdict(diagnose.CONFIG, LOW, suspect=suspect), asked=ASKED)
    assert (found.next, found.exit_code) == ("cp -rL a b", 1)
    assert found.mended["mean_length"] == 2.4 and "+1.00 (+0.80 to +1.20)" in found.confidence
    assert "rope_theta should be 10000.0" in found.headline


def test_the_next_command_is_the_engines_or_the_projects():
    for kind in KINDS:
        for engine in ("vllm", "sglang"):
            command = Card.of(
                verdict(kind, LOW, HIGH, fault="cliff after step 0"),
                asked=Asked(engine, *list(vars(ASKED).values())[1:]),
            ).next
            assert command.split()[0] in ("vllm", "python", "eagle3"), command
    assert "--enforce-eager" in Card.of(verdict(diagnose.FAULT, fault="cliff after step 0"), asked=ASKED).next
    scores = [{"name": "boundaries [2, 14, 26]", "fault": "boundaries +1", "shim": "cp later"}]
    assert (
        Card.of(verdict(diagnose.FAULT, fault="boundaries -1", evidence={"config": scores}), asked=ASKED).next
        == "cp later"
    )
    lower = Card.of(verdict(diagnose.CANNOT_TELL), grade="histograms", asked=ASKED)
    assert "--per-request-spec-decode-metrics detailed" in lower.next
    assert Card.of(verdict(diagnose.HEALTHY), asked=Asked(target="pypi:x")).next.startswith("vllm serve TARGET ")


@pytest.mark.parametrize(
    ("kind", "expected", "met", "code"),
    [
        (diagnose.HEALTHY, 1.3, True, 0),
        (diagnose.HEALTHY, 2.0, False, 1),
        (diagnose.WEAK, 1.1, True, 1),
        (diagnose.FAULT, 1.1, True, 2),
        (diagnose.FAULT, 9.0, False, 2),
    ],
)
def test_a_gate(kind, expected, met, code):
    found = Card.of(verdict(kind, LOW), expect_length=expected)
    assert (found.gate["met"], found.exit_code) == (met, code)
    words = card.gate_words(found.gate)
    assert words.startswith("met: " if met else "not met: ") and "1.40 (1.40 to 1.40) was found" in words


def test_a_gate_without_rounds_and_beside_its_interval():
    found = Card.of(verdict(diagnose.HEALTHY), expect_length=1.2)
    assert found.gate["met"] is None and found.exit_code == 3 and "cannot tell" in card.gate_words(found.gate)
    near = Card.of(verdict(diagnose.HEALTHY, [[0, 1] * 20, [2, 2] * 20, [1, 1] * 20]), expect_length=2.2)
    assert "more requests may decide otherwise" in card.gate_words(near.gate)
    with pytest.raises(Eagle3Error, match="expect_length: found 0.5, expected a mean acceptance length of 1 or more"):
        Card.of(verdict(diagnose.HEALTHY, LOW), expect_length=0.5)
    with pytest.raises(Eagle3Error, match="expect_length: found nan"):
        Card.of(verdict(diagnose.HEALTHY, LOW), expect_length=float("nan"))


def test_unknown_kinds_and_grades_are_refused():
    with pytest.raises(Eagle3Error, match="kind: found 'odd', expected one of healthy"):
        Card.of(verdict("odd"))
    with pytest.raises(Eagle3Error, match="evidence: found 'rumour', expected one of told"):
        Card.of(verdict(diagnose.HEALTHY), grade="rumour")


@pytest.mark.parametrize("width", [60, 100])
def test_text_keeps_its_width_and_commands_whole(width):
    found = Card.of(
        verdict(diagnose.FAULT, LOW, HIGH, fault="token shift", ties=["a", "b"]),
        asked=ASKED,
        files=["a.json", "b.json"],
    )
    lines = found.text(width).splitlines()
    assert any(line.strip() == found.next for line in lines)
    assert all(len(line) <= width for line in lines if line.strip() != found.next)
    assert "a.json, b.json" in " ".join(found.text(width).split())


def test_html_is_escaped_and_asks_for_nothing():
    evil = verdict(diagnose.CANNOT_TELL, LOW, warnings=["<img src=x onerror=alert(1)>"])
    evil["drafter"], evil["sentence"] = "<b>d</b>", "cannot tell, because <script>alert(1)</script> & more."
    page = shown.html(Card.of(evil, asked=Asked("v'\"<llm", "$(rm -rf /)", "a b")))
    for raw in ("<script>", "<img", "<b>d", "<llm", "http"):
        assert raw not in page
    assert "&lt;script&gt;" in page and "&#39;$(rm -rf /)&#39;" in page
    assert page == shown.ShownCard(Card.of(evil, asked=Asked("v'\"<llm", "$(rm -rf /)", "a b")))._repr_html_()


def test_cards_of_published_verdicts():
    """The published quickstart: the base drafter weak, the finetuned one healthy."""
    codes = {}
    for path in sorted((ROOT / "reports/quickstart/data/replay").glob("*/*/verdict.json")):
        judged = json.loads(path.read_text())
        found = Card.of(judged["verdict"], judged["cost"], asked=ASKED)
        codes[found.drafter] = found.exit_code
        assert found.now["mean_length"] > 1 and found.now["over_plain"] > 0
    assert codes == {"base": 1, "finetuned": 0}


def test_cards_of_a_run_that_has_some(tmp_path):
    folder = tmp_path / "replay" / "vllm" / "base"
    folder.mkdir(parents=True)
    found = Card.of(verdict(diagnose.HEALTHY, LOW))
    (folder / "card.json").write_text(json.dumps({"schema": results.CARD_SCHEMA, **found.as_dict()}))
    params = DiagnoseParams(folder=str(tmp_path), drafters=["base", "other"])
    assert [some.card for some in shown.of_run(params)] == [found]
    (folder / "card.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(Eagle3Error, match="card.json: schema: found 99, expected 1"):
        shown.of_run(params)
