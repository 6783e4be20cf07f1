"""Hypotheses that need more of the target than its streams: its rope, and how ranks divide its layers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import changes, diagnose, hypotheses, replay, rounds

ROPE, RANKS = "rope of the target", "captured before the sum over ranks"
NAMES = ["boundaries -1", "boundaries +1", "last update missing", "rope theta 10000", ROPE, RANKS]


@pytest.fixture(scope="module")
def tiny():
    target = targets.load(ROOT / "targets" / "tiny-mla")
    drafter = checkpoint.load_for("drafters/tiny-mla-public", "targets/tiny-mla", target)
    return SimpleNamespace(target=target, drafter=drafter, parts=changes.TargetParts.of(target))


def requests_of(recorded, rounds) -> list[dict]:
    """The first answers of the record, as an engine with these rounds gave them."""
    return [
        {"id": str(number), "prompt_ids": text[:start], "output_ids": text[start:], "accepted": accepted}
        for number, (text, start, accepted) in enumerate(
            zip(recorded.few.texts, recorded.few.prompt_lengths, rounds, strict=True)
        )
    ]


def judged(examined, recorded) -> diagnose.Verdict:
    return diagnose.judge({"drafter": "base", "positions": recorded.steps, "requests": examined})


def shares(verdict) -> dict[str, float]:
    return {row["hypothesis"]: row["value"] for row in verdict.evidence["ranking"]}


# ----------------------------------------------------------------------------------------------- rope of the target


def test_ropes_that_are_alike_are_no_hypothesis(recorded, target, tiny):
    assert changes.TargetParts.of(target).rope_parameters["rope_theta"] == 100000.0  # SmolLM2's and its drafter's
    assert ROPE not in recorded.setups and ROPE not in hypotheses.hypotheses(tiny.drafter, tiny.parts)
    more = tiny.parts.rope_parameters | {"beta_fast": 32, "factor": 4, "truncate": True}  # defaults, said
    assert ROPE not in hypotheses.hypotheses(tiny.drafter, replace(tiny.parts, rope_parameters=more))


@pytest.mark.parametrize(
    "rope",
    [
        {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "unheard of", "rope_theta": 1e4},
        None,
    ],
)
def test_ropes_that_no_one_cache_holds_are_none(rope):
    assert changes._rope_parameters(SimpleNamespace(rope_parameters=rope)) is None


def test_only_cos_and_sin_are_the_targets(tiny):
    """A latent drafter keeps the softmax scale of its own config: the cache holds no scale."""
    plain = {"rope_type": "default", "rope_theta": 5e6}
    shared = hypotheses.hypotheses(tiny.drafter, replace(tiny.parts, rope_parameters=plain), [ROPE])[ROPE].drafter
    assert shared.layers[0].self_attn.scale == tiny.drafter.layers[0].self_attn.scale
    expected = 5e6 ** (-torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(shared.rotary.inv_freq, expected)
    assert tiny.drafter.rotary.inv_freq[1] != shared.rotary.inv_freq[1]


@pytest.mark.slow
def test_an_engine_with_one_cache_for_both_is_named(recorded, target):
    """vllm-ascend#6612: a drafter of theta 100,000 turned by a target's 5,000,000."""
    plain = {"rope_type": "default", "rope_theta": 5e6}
    parts = replace(changes.TargetParts.of(target), rope_parameters=plain)
    setups = hypotheses.hypotheses(recorded.drafter, parts, NAMES)
    turned = replay.correct(changes.variant(recorded.drafter, rope_parameters=plain))
    slots = replay.all_slots(recorded.few)
    rounds = replay.own_rounds(replay.counts_at(turned, recorded.few, slots, recorded.steps), recorded.few)
    del setups[changes.HEALTHY]
    counts = hypotheses.replay_all(setups, recorded.few, rounds, recorded.steps)
    assert counts[ROPE] == rounds
    equal = {
        name: sum(a == b for some, right in zip(found, rounds, strict=True) for a, b in zip(some, right, strict=True))
        for name, found in counts.items()
    }
    assert max(value for name, value in equal.items() if name != ROPE) < 0.95 * equal[ROPE]


# ------------------------------------------------------------------------------------ captured before the sum over ranks


def rank_0(target, text, boundaries, ranks: int):
    """[T, boundaries x Ht] what rank 0 captures: gate, up and down are divided by their intermediate columns."""
    handed: dict[int, torch.Tensor] = {}

    def keep(k, layer):
        def before_the_norm(_, args):
            residual = args[0][0]
            mlp, normed = (
                layer.mlp,
                torch.nn.functional.rms_norm(
                    residual, residual.shape[-1:], layer.post_attention_layernorm.weight, 1e-5
                ),
            )
            columns = slice(0, mlp.gate_proj.out_features // ranks)
            gate, up = normed @ mlp.gate_proj.weight[columns].T, normed @ mlp.up_proj.weight[columns].T
            handed[k] = residual + torch.nn.functional.silu(gate) * up @ mlp.down_proj.weight[:, columns].T

        return layer.post_attention_layernorm.register_forward_pre_hook(before_the_norm)

    hooks = [keep(k, target.model.layers[k - 1]) for k in boundaries]
    with torch.no_grad():
        target.model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.cat([handed[k] for k in boundaries], -1)


def test_where_ranks_divide_nothing_it_is_no_hypothesis(recorded, target, tiny):
    assert RANKS not in recorded.setups  # one rank
    assert RANKS in hypotheses.hypotheses(recorded.drafter, changes.TargetParts.of(target, ranks=2))
    assert changes.TargetParts.of(target).divided_mlps == set(range(1, 31))
    assert changes.TargetParts.of(tiny.target, 2).divided_mlps == {1}  # experts from the second layer on
    assert RANKS not in hypotheses.hypotheses(tiny.drafter, changes.TargetParts.of(tiny.target, 2))
    granite = replace(changes.TargetParts.of(target, ranks=2), divided_mlps=frozenset(range(1, 20)))
    assert RANKS not in hypotheses.hypotheses(recorded.drafter, granite)


@pytest.mark.slow
def test_an_engine_that_captures_before_the_sum_is_named(recorded, target):
    boundaries = recorded.drafter.config.boundaries
    made, handed = [], []
    for text, start in zip(recorded.few.texts, recorded.few.prompt_lengths, strict=True):
        handed.append(rank_0(target, text, boundaries, 2))
        drafts = replay.drafts(recorded.drafter, handed[-1][None], torch.tensor([text]), recorded.steps)
        made.append(rounds.walk(replay.accepted_at(drafts[0], text), start))
    setups = hypotheses.hypotheses(recorded.drafter, changes.TargetParts.of(target, ranks=2), [RANKS])
    wanted = hypotheses.extra_streams(setups)
    assert wanted == {(kind, k) for k in boundaries for kind in (capture.RESIDUAL, capture.OtherRanks(2))}
    some = recorded.few.texts[0][:41]
    (features,) = capture.capture(target, [some], boundaries, also=wanted)
    laid, rows = replay.Texts([some], [1], [features.streams]), torch.arange(40)
    found = torch.cat([laid.source(source, rows, None) for source in setups[RANKS].sources], -1)
    torch.testing.assert_close(found, handed[0][:40], rtol=1e-4, atol=1e-3)
    examined = hypotheses.examine(target, recorded.drafter, requests_of(recorded, made), recorded.steps, NAMES, ranks=2)
    verdict = judged(examined, recorded)
    assert shares(verdict)[RANKS] == 1.0
    assert (verdict.kind, verdict.fault) == (diagnose.FAULT, RANKS), verdict.sentence


@pytest.mark.slow
def test_the_real_engine_that_captured_before_the_sum(recorded, target):
    """benchmarks/tp_agreement.py: vLLM at tensor parallel 2, where each rank drafts from its own part, so not quite this."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "tp_agreement.json").read_text())["requests"]["tp2_wrong"]
    examined = hypotheses.examine(target, recorded.drafter, measured, 4, [RANKS, "last update missing"], ranks=2)
    equal = {changes.HEALTHY: 0, RANKS: 0, "last update missing": 0}
    for request in examined:
        for number, row in enumerate(request["rows"]):
            if not row["cut"]:
                equal[changes.HEALTHY] += row["replay"] == row["engine"]
                for name, counts in request["hypotheses"].items():
                    equal[name] += counts[number] == row["engine"]
    assert equal == {changes.HEALTHY: 114, RANKS: 120, "last update missing": 112}  # of 125 rounds
