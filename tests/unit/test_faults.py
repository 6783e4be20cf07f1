"""The catalogue: every entry is whole, and an engine that has a fault is told from one that has another."""

import re
from pathlib import Path

import pytest
import torch

from eagle3_lib.targets import capture
from eagle3_lib.verdict import changes, diagnose, faults, hypotheses, pooled, replay, rounds


def test_entries_are_whole():
    names = [fault.name for fault in faults.CATALOGUE]
    assert len(names) == len(set(names)) >= 36
    for fault in faults.CATALOGUE:
        for text in (fault.stands_for, fault.looks, fault.experiment, fault.remedy):
            assert len(text) > 10, fault.name
        assert all(re.fullmatch(r"[\w.-]+(#\d+| norm_output)", bug) for bug in fault.bugs), fault.name


def test_faults_that_cannot_show_are_left_out(recorded):
    missing = set(faults.FAULTS) - set(recorded.setups)
    assert missing == {
        "default boundaries",  # the drafter's boundaries are the default ones
        "last feature after the final norm",  # no boundary at the target's end
        "fc_norm ignored",
        "norm_before_fc ignored",
        "rope scaling ignored",  # the drafter has none
        "rope of the target",  # the drafter's own
        "captured before the sum over ranks",  # one rank
    }


def test_variants_share_tensors_and_leave_the_drafter_alone(recorded):
    drafter = recorded.drafter
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items() if "embed" not in name}
    other = recorded.setups["head missing"].drafter
    assert other.fc.weight is drafter.fc.weight and other.lm_head.weight is not drafter.lm_head.weight
    assert recorded.setups["norm_before_residual flipped"].drafter.layers[0].norm_before_residual
    assert not drafter.layers[0].norm_before_residual
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in before.items())


def test_one_target_pass_serves_all(recorded):
    needed = hypotheses.extra_streams(recorded.setups)
    boundaries = {1, 2, 3, 14, 15, 16, 26, 27, 28, 29, 30}
    assert {k for kind, k in needed if kind == capture.RESIDUAL} == boundaries
    assert {k for kind, k in needed if kind == capture.UPDATE} == {2, 15, 27}
    assert needed <= set(recorded.features[0].streams)


def engine_with(fault: str, recorded) -> dict:
    """What the replay stage would write of an engine with ``fault``, its rounds being the hypothesis's own."""
    texts, steps = recorded.few, recorded.steps
    names = (
        "boundaries -1",
        "boundaries +1",
        "norm_output flipped",
        "token shift",
        "d2t dropped",
        "cliff after step 0",
    )
    slots = replay.all_slots(texts)
    made = replay.own_rounds(replay.counts_at(recorded.setups[fault], texts, slots, steps), texts)
    setups = {name: recorded.setups[name] for name in names}
    counts = hypotheses.replay_all(setups, texts, made, steps)
    examined = []
    for index, (text, start) in enumerate(zip(texts.texts, texts.prompt_lengths, strict=True)):
        accepted = [0] * (start - 1) + recorded.few_correct_counts[index]
        examined.append(
            {
                "id": str(index),
                "prompt_length": start,
                "output_length": len(text) - start,
                "engine_rounds": made[index],
                "drafted": [steps] * len(made[index]),
                "replay_rounds": rounds.walk(accepted, start),
                "rows": rounds.compare(made[index], accepted, start, steps),
                "hypotheses": {name: by_request[index] for name, by_request in counts.items()},
                "lossless": 0,
            }
        )
    return {"drafter": "base", "positions": steps, "requests": examined}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["boundaries -1", "norm_output flipped", "cliff after step 0"])
def test_an_engine_with_a_fault_is_named(recorded, fault):
    verdict = diagnose.judge(engine_with(fault, recorded))
    assert (verdict.kind, verdict.fault, verdict.ties) == (diagnose.FAULT, fault, [])
    assert verdict.evidence["ranking"][0]["value"] == 1.0
    assert verdict.evidence["ranking"][1]["value"] < 0.95


@pytest.mark.slow
def test_a_fault_outside_the_catalogue_is_unknown(recorded):
    verdict = diagnose.judge(engine_with("middle boundary dropped", recorded))
    assert (verdict.kind, verdict.fault) == (diagnose.UNKNOWN, None)


@pytest.mark.slow
def test_a_healthy_engine_is_healthy(recorded):
    verdict = diagnose.judge(engine_with(changes.HEALTHY, recorded))
    assert verdict.kind == diagnose.HEALTHY
    assert verdict.evidence["agreement"]["value"] == 1.0
    assert verdict.evidence["gap"]["value"] == 0.0


@pytest.mark.slow
def test_histograms_are_enough(recorded):
    texts, steps = recorded.few, recorded.steps
    names = (changes.HEALTHY, "boundaries -1", "boundaries +1", "norm_output flipped")
    own = hypotheses.replay_all({name: recorded.setups[name] for name in names}, texts, None, steps)
    assert own[changes.HEALTHY] == replay.own_rounds(recorded.few_correct_counts, texts)
    requests = [
        {
            "histogram": torch.bincount(torch.tensor(own["boundaries +1"][index])).tolist(),
            "own_rounds": {name: own[name][index] for name in names},
        }
        for index in range(len(texts.texts))
    ]
    verdict = pooled.judge_histograms("base", steps, requests)
    assert (verdict.kind, verdict.fault) == (diagnose.FAULT, "boundaries +1")


def test_the_page_holds_the_catalogue():
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert page.endswith("## The catalogue\n\n" + faults.markdown()), (
        "docs/faults.md: paste faults.markdown() at its end"
    )
