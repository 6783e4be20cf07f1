"""Another config.json: which values are tried, when one is named, and that its shim serves them."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.params import AuditParams
from eagle3_lib.reports import audit_tables
from eagle3_lib.stages import audit
from eagle3_lib.targets.answers import Answer, write_parquet
from eagle3_lib.verdict import changes, replay, suspects

BASE = "drafters/smollm2-135m-eagle3"
LATENT = "drafters/tiny-mla-public"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 100000.0}


@pytest.fixture(scope="module")
def parts(target):
    return changes.TargetParts.of(target)


@pytest.fixture(scope="module")
def judge(recorded, parts):
    """What is named of a drafter with changed config fields, at every place of five recorded answers: (field, value).

    Suspects that need a boundary that the recorded features do not have are left out.
    """

    def judged(**config):
        changed, texts = changes.variant(recorded.drafter, **config), recorded.few
        tried = suspects.suspects(changed, parts)
        setups = {name: s.setup for name, s in tried.items() if replay.captured_for([s.setup]) <= texts.streams.keys()}
        assert len(setups) >= 10
        slots = replay.all_slots(texts)
        accepted = {name: replay.counts_at(setup, texts, slots, recorded.steps) for name, setup in setups.items()}
        of_config = replay.counts_at(replay.correct(changed), texts, slots, recorded.steps)
        best = suspects.clearly_better(suspects.score(accepted, of_config))
        return best and (tried[best["name"]].field, tried[best["name"]].value)

    return judged


def test_suspects_of_the_base_drafter(recorded, parts):
    found = suspects.suspects(recorded.drafter, parts)
    assert {name: suspect.fault for name, suspect in found.items()} == {
        "boundaries [1, 14, 26]": "boundaries -1",
        "boundaries [3, 16, 28]": "boundaries +1",
        "boundaries [0, 13, 25]": None,
        "boundaries [4, 17, 29]": None,
        "boundaries [28, 29, 30]": "last three boundaries",
        "rope_theta 10000": "rope theta 10000",
        "rope_theta 500000": None,
        "rope_theta 1000000": None,
        "rope_theta 5000000": None,
        "norm_before_residual true": "norm_before_residual flipped",
        "norm_output true": "norm_output flipped",
        "use_aux_hidden_state false": "last hidden only",
        "head_dim 32 (18 heads)": None,
        "head_dim 96 (6 heads)": None,
    }
    assert found["rope_theta 10000"].value == 10000.0
    assert found["boundaries [3, 16, 28]"].field == checkpoint.IDS


def test_what_a_config_can_have_is_tried_and_no_value_twice(recorded, parts):
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    drafter = changes.variant(recorded.drafter, rope_parameters=scaled, fc_norm=True, norm_before_fc=True)
    found = suspects.suspects(replace_boundaries(drafter, (3, 16, 28)), parts)
    assert found["boundaries [2, 15, 27]"].fault == "boundaries -1"  # the default too, once
    assert found["no rope_scaling"].setup.drafter.config.rope_parameters["rope_type"] == "default"
    assert found["rope_parameters of the target"].value == DEFAULT_ROPE
    assert found["fc_norm false"].value is False and found["norm_before_fc false"].value is False
    assert "rope_theta 10000" not in found and found["rope_theta 100000"].value == 100000.0


def replace_boundaries(drafter, boundaries):
    return changes.variant(drafter, boundaries=boundaries)


def test_a_drafter_with_latent_attention_has_suspects_too():
    drafter = checkpoint.load(LATENT).drafter
    parts = changes.TargetParts(11, torch.zeros(2048, 128), torch.zeros(2048, 128), torch.nn.RMSNorm(128))
    found = suspects.suspects(drafter, parts)
    assert {"boundaries [1, 5, 8]", "rope_theta 500000", "no rope_scaling", "norm_output true"} <= set(found)
    assert not [name for name in found if name.startswith("head_dim")]
    plain = found["no rope_scaling"].setup.drafter.layers[0].self_attn.scale
    assert plain < drafter.layers[0].self_attn.scale, "without YaRN's factor of the softmax"


# --- judgement --------------------------------------------------------------------------------------------------------


def rounds(generator, requests, mean, each=40):
    return [torch.poisson(torch.full((each,), mean), generator).long().clamp_max(4).tolist() for _ in range(requests)]


def test_scores_are_means_and_paired_differences():
    correct, more = [[0, 1, 2], [1], []], [[1, 1, 2], [3], []]
    (row,) = suspects.score({"a": more}, correct)
    assert (row["of_config"], row["accepted"], row["gain"]["value"], row["differ"]) == (1.0, 1.75, 0.75, 2)
    assert suspects.score({"a": [[], []]}, [[], []]) == []
    with pytest.raises(ValueError, match="rounds by request"):
        suspects.score({"a": [[1, 1]]}, [[1]])


def test_a_suspect_must_gain_surely_by_five_percent_and_in_twenty_rounds():
    correct = [[1] * 40 for _ in range(10)]  # 400 accepted tokens
    gains = {
        "much": [[2] * 10 + [1] * 30 for _ in range(10)],
        "too little": [[2] + [1] * 39 for _ in range(10)],
        "in too few rounds": [[2] + [1] * 39 for _ in range(10)],
        "in one request": [[4] * 40, *correct[1:]],
    }
    named = {name: suspects.clearly_better(suspects.score({name: some}, correct)) for name, some in gains.items()}
    assert {name for name, row in named.items() if row} == {"much"}
    assert named["much"]["accepted"] == 1.25 and named["much"]["p"] < 1e-9


@pytest.mark.slow
def test_false_alarms_of_chance_are_below_one_percent():
    """Fourteen suspects that draft as well as the config, in 100 runs."""
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        accepted = {str(i): rounds(generator, 12, 0.5) for i in range(14)}
        alarms += suspects.clearly_better(suspects.score(accepted, rounds(generator, 12, 0.5))) is not None
    assert alarms <= 1


def test_suspects_that_rounds_do_not_tell_apart_are_named_beside(recorded):
    correct = [[0] * 40 for _ in range(8)]
    better, as_good = ([[1] * 20 + [0] * 20 for _ in range(8)], [[0] * 20 + [1] * 20 for _ in range(8)])
    best = suspects.clearly_better(suspects.score({"a": better, "b": as_good, "c": correct}, correct))
    assert best["name"] in "ab" and best["ties"] == [({"a", "b"} - {best["name"]}).pop()]


# --- public cases -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_17_a_config_with_another_theta_is_named(judge):
    assert judge(rope_parameters=DEFAULT_ROPE | {"rope_theta": 1000.0}) == ("rope_theta", 100000.0)


@pytest.mark.slow
def test_case_02_a_config_with_other_layers_is_named(judge):
    assert judge(boundaries=(3, 16, 28)) == (checkpoint.IDS, [2, 15, 27])


@pytest.mark.slow
def test_flags_are_named(judge):
    assert judge(norm_before_residual=True) == ("norm_before_residual", False)


@pytest.mark.slow
def test_a_healthy_drafter_has_no_suspect(judge):
    assert judge() is None


@pytest.mark.slow
def test_rounds_of_the_engine_are_compared_where_there_are_some(target, recorded):
    requests = [r | {"accepted": r["per_step_accepted"]} for r in recorded.record["requests"][:2]]
    found = suspects.examine(target, recorded.drafter, requests, recorded.steps)
    assert found.slots == sum(len(r["accepted"]) for r in requests) and found.suspect is None
    # A round that the end of an answer cuts may accept less here than in the engine, never more.
    engine = sum(sum(r["accepted"]) for r in requests) / found.slots
    assert engine - 0.05 < found.scores[0]["of_config"] <= engine


# --- to try one -------------------------------------------------------------------------------------------------------


def folder_with(tmp_path, name="a drafter's", **fields):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint.read_config(checkpoint.project_path(BASE)) | fields))
    return folder


def tried(suspect, folder):
    subprocess.run(suspects.shim(suspect, folder), shell=True, check=True)
    (copy,) = [path for path in folder.parent.iterdir() if path != folder]
    raw = checkpoint.read_config(copy)
    return raw, checkpoint.parse_config(raw, "copy", 30, own_embedding=False)[0]


@pytest.mark.parametrize(
    "name, fields",
    [
        ("boundaries [3, 16, 28]", {}),
        ("rope_theta 10000", {}),
        ("rope_theta 10000", {"rope_parameters": DEFAULT_ROPE}),
        ("norm_output true", {"eagle_config": {"norm_output": False}}),
        ("head_dim 32 (18 heads)", {}),
    ],
)
def test_the_shim_serves_the_suspect(name, fields, recorded, parts, tmp_path):
    suspect = suspects.suspects(recorded.drafter, parts)[name]
    raw, config = tried(suspect, folder_with(tmp_path, **fields))
    expected = suspect.setup.drafter.config
    if suspect.field == checkpoint.IDS:
        expected = replace(expected, boundaries=(3, 16, 28))
        assert raw["eagle_config"][checkpoint.IDS] == [2, 15, 27]  # as SGLang reads them
    assert config == expected


def test_the_shim_of_a_speculators_folder_writes_into_its_layer_config(recorded, parts):
    raw = {"transformer_layer_config": {"rope_theta": 1000.0, "hidden_size": 576}}
    new = suspects.config_fields(suspects.suspects(recorded.drafter, parts)["rope_theta 10000"], raw)
    assert new["transformer_layer_config"]["rope_theta"] == 10000.0
    assert new["transformer_layer_config"]["hidden_size"] == 576


# --- stage 06 ---------------------------------------------------------------------------------------------------------


def audited(tmp_path, drafter, **params):
    values = {"name": "x", "drafter": str(drafter), "engine_version": "0.32.0", "out": str(tmp_path / "audit")}
    return audit.run(AuditParams(**values | {"data": str(tmp_path / "answers")} | params))


@pytest.mark.slow
def test_the_audit_names_a_value_from_held_out_answers(recorded, tmp_path):
    (tmp_path / "answers").mkdir()
    rows = [
        Answer(str(i), "held_out", "", r["prompt_ids"], r["output_ids"], "", "stop", 0.0)
        for i, r in enumerate(recorded.record["requests"][1:7])
    ]
    write_parquet(rows, tmp_path / "answers" / "samples.parquet")
    folder = tmp_path / "drafter"
    wrong = changes.variant(recorded.drafter, norm_before_residual=True)
    checkpoint.save(wrong, folder, torch.float32)
    report = audited(tmp_path, folder, answers=4)
    assert (report["config"]["answers"], report["config"]["slots"]) == (4, 436)
    assert report["config"]["suspect"]["field"] == "norm_before_residual" and report["worst"] == "wrong"
    finding = next(f for f in report["findings"] if f["rule"] == "config_value")
    assert "cp -rL" in finding["remedy"] and '{"norm_before_residual": false' in finding["remedy"]
    assert report["boundaries"] == {"trained": [2, 15, 27], "guessed": False, "captured": [2, 15, 27]}
    assert audit_tables.scores_table(report["config"]).iloc[0]["with"] == "norm_before_residual false"


@pytest.mark.slow
def test_the_audit_says_that_layers_are_guessed_and_why_nothing_was_measured(tmp_path):
    report = audited(tmp_path, BASE)
    assert report["boundaries"]["guessed"] and report["worst"] == "note"
    finding = next(f for f in report["findings"] if f["rule"] == "boundaries")
    assert "config.json names no layers: every engine guesses [2, 15, 27]" in finding["what"]
    assert finding["remedy"].startswith("write the boundaries that it was trained on")
    assert "no answers of stage 03" in report["config"]["not_measured"]
    assert audited(tmp_path, BASE, answers=0)["config"] == {"not_measured": "the parameter answers is 0"}


def test_replay_of_a_suspect_is_that_of_its_fault(recorded, parts):
    """Where the catalogue has the setup, both draft the same."""
    found = suspects.suspects(recorded.drafter, parts)["boundaries [1, 14, 26]"]
    slots = replay.all_slots(recorded.few)
    ours, theirs = (
        replay.counts_at(setup, recorded.few, slots, 4) for setup in (found.setup, recorded.setups[found.fault])
    )
    assert ours == theirs


def score_of(gain, half, p, differ=60):
    """A row of :func:`suspects.score`: gain in accepted drafts a round over a config that accepts 0.5, its interval's half width."""
    interval = {"value": gain, "low": gain - half, "high": gain + half, "n": 10}
    row = {"name": "a", "accepted": 0.5 + gain, "of_config": 0.5, "gain": interval, "surely": gain - 1.3 * half}
    return row | {"requests": 10, "differ": differ, "p": p, "ties": []}


def test_a_suspect_that_would_lift_a_weak_drafter_and_may_be_chance_is_in_doubt():
    others = [score_of(-0.1, 0.1, 1.0)] * 9
    row, needed = suspects.unsettled([score_of(0.15, 0.16, 0.3), *others], rounds=300)
    assert row["gain"]["value"] == 0.15 and 600 < needed < 1500
    assert suspects.unsettled([score_of(0.07, 0.03, 0.2), *others], rounds=300) is None, "it would still be weak"
    assert suspects.unsettled([score_of(0.15, 0.16, 1.0), *others], rounds=300) is None, "chance"
    assert suspects.unsettled([score_of(0.15, 0.05, 0.001), *others], rounds=300) is None, "clearly better: no doubt"
    assert suspects.unsettled(others, rounds=300) is None and suspects.unsettled([], rounds=0) is None
