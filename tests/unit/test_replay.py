"""Replay against the recorded rounds of the real vLLM, and the sparse replay against the dense one."""

from dataclasses import replace

import pytest
import torch

from eagle3_lib.drafter.model import Drafter, DrafterConfig
from eagle3_lib.targets import capture
from eagle3_lib.verdict import acceptance, changes, replay, rounds


def dense(drafter, recorded, requests=None):
    """Accepted counts at all slots where rounds can start, from every step at every slot."""
    counts = []
    for text, start, features in zip(
        recorded.texts.texts[:requests], recorded.texts.prompt_lengths, recorded.features, strict=False
    ):
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), recorded.steps)[0]
        counts.append(replay.accepted_at(proposed, text)[start - 1 :])
    return counts


def own_curve(setup, recorded):
    counts = replay.counts_at(setup, recorded.texts, replay.all_slots(recorded.texts), recorded.steps)
    return acceptance.summary(replay.own_rounds(counts, recorded.texts), recorded.steps)


def test_recorded_engine_counts(recorded):
    engine = acceptance.summary(recorded.rounds, recorded.steps)
    assert engine["rounds"] == 605
    assert engine["accepted"] == recorded.record["counters"]["num_accepted_tokens_per_pos"]
    assert engine["mean_length"]["value"] == pytest.approx(2.02, abs=0.005)


def test_replay_reproduces_the_engine(recorded):
    healthy = own_curve(recorded.setups[changes.HEALTHY], recorded)
    assert healthy["rounds"] == 605
    assert healthy["curve"]["value"] == pytest.approx([0.4843, 0.2793, 0.1587, 0.0876], abs=1e-4)
    assert healthy["mean_length"]["value"] == pytest.approx(2.01, abs=0.005)


@pytest.mark.slow
def test_602_of_605_rounds_are_equal_and_the_others_are_cut(recorded):
    rows, every = [], dense(recorded.drafter, recorded)
    assert every == recorded.correct_counts  # the sparse replay is the dense one
    for accepted, start, counts in zip(
        recorded.rounds,
        recorded.texts.prompt_lengths,
        every,
        strict=True,
    ):
        rows += rounds.compare(accepted, [0] * (start - 1) + counts, start, recorded.steps)
    assert len(rows) == 605
    unequal = [row for row in rows if row["engine"] != row["replay"]]
    assert len(unequal) == 3 and all(row["cut"] for row in unequal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boundaries", "curve"),
    [
        ((1, 14, 26), [0.467, 0.250, 0.126, 0.068]),
        ((3, 16, 28), [0.398, 0.199, 0.114, 0.063]),
        ((15, 2, 27), [0.433, 0.215, 0.116, 0.062]),
    ],
)
def test_replay_under_wrong_boundaries(recorded, boundaries, curve):
    setup = replace(recorded.setups[changes.HEALTHY], sources=tuple((capture.RESIDUAL, k) for k in boundaries))
    assert own_curve(setup, recorded)["curve"]["value"] == pytest.approx(curve, abs=6e-4)


def test_replay_of_the_last_three_with_the_last_one_normed(recorded, target):
    """transformers' hidden_states ends with the stream after the final norm: the figure of the record is of that one."""
    sources = (capture.RESIDUAL, 28), (capture.RESIDUAL, 29), (capture.NORMED, 30)
    setup = replace(recorded.setups[changes.HEALTHY], sources=sources, final_norm=target.base_model.norm)
    assert own_curve(setup, recorded)["curve"]["value"] == pytest.approx([0.047, 0.008, 0.003, 0.000], abs=6e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"norm_output": True}, {"norm_before_residual": True}, {"fc_norm": True}])
def test_sparse_replay_equals_the_dense_one(recorded, config):
    drafter = changes.variant(recorded.drafter, **config)
    slots = [some if index < 2 else [] for index, some in enumerate(replay.all_slots(recorded.texts))]
    sparse = replay.counts_at(replay.correct(drafter), recorded.texts, slots, recorded.steps)
    assert sparse[:2] == dense(drafter, recorded, 2)
    assert sum(map(sum, sparse)) > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_sparse_replay_of_other_drafters(layers):
    """Random weights accept nothing by themselves, so the text is the drafter's own."""
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=60,
        draft_vocab_size=60,
        target_hidden_size=24,
        boundaries=(1, 2),
        num_hidden_layers=layers,
        own_embedding=True,
        qk_norm=True,
    )
    drafter = Drafter(config).eval()
    drafter.initialise()
    torch.nn.init.normal_(drafter.embed_tokens.weight, generator=torch.Generator().manual_seed(1))
    for name, weight in drafter.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            weight.data *= 12  # far from ties
    generator = torch.Generator().manual_seed(2)
    streams = {(capture.RESIDUAL, k): torch.randn(40, 24, generator=generator) for k in (1, 2)}
    fused = torch.cat([streams[capture.RESIDUAL, k] for k in (1, 2)], -1)
    text = torch.randint(0, 60, (40,), generator=generator).tolist()
    for slot in range(0, 36, 5):  # runs of right drafts of different lengths
        for step in range(slot // 5 % 4):
            text[slot + 2 + step] = int(replay.drafts(drafter, fused[None], torch.tensor([text]), 4)[0, slot, step])
    expected = replay.accepted_at(replay.drafts(drafter, fused[None], torch.tensor([text]), 4)[0], text)
    texts = replay.Texts([text], [1], [streams])
    assert replay.counts_at(replay.correct(drafter), texts, [list(range(39))], 4) == [expected]
    assert max(expected) >= 3


def test_walk_and_slots_agree():
    accepted = [0, 2, 0, 0, 1, 0, 3, 0, 0, 0, 0]
    walked = rounds.walk(accepted, prompt_length=2)
    assert walked == [2, 1, 3]
    assert rounds.round_slots(walked, 2) == [1, 4, 6]
