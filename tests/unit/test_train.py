"""Training: the loss against a plain loop over slots, resume, and refusals."""

import math

import pytest
import torch

from eagle3_lib import train
from eagle3_lib.drafter import Drafter, DrafterConfig
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features import Sample, Writer
from eagle3_lib.params import TrainParams
from eagle3_lib.replay import Features

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=20,
    target_hidden_size=16,
    boundaries=(1, 2, 3),
)


def make_drafter(seed=0):
    drafter = Drafter(CONFIG)
    drafter.initialise(seed)
    drafter.set_vocabulary(torch.arange(0, 40, 2))
    drafter.share_embedding(torch.randn(40, 16, generator=torch.Generator().manual_seed(9)))
    return drafter


def make_sample(name, tokens, prompt_length, split="train"):
    generator = torch.Generator().manual_seed(tokens)
    fused, last = torch.randn(tokens, 48, generator=generator), torch.randn(tokens, 16, generator=generator)
    ids = torch.randint(0, 40, (tokens,), generator=generator)
    argmax = torch.randint(0, 40, (tokens,), generator=generator)
    return Sample(name, split, prompt_length, ids.tolist(), Features(fused, last, argmax))


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_counts_equal_a_loop_over_slots(steps):
    drafter, samples = make_drafter(), [make_sample("a", 9, 3), make_sample("b", 6, 2)]
    head = torch.randn(20, 16, generator=torch.Generator().manual_seed(3))
    found = train.training_time_test(drafter, train.collate(samples), head, steps)
    for step in range(steps):
        loss, right, taught, counted = 0.0, 0, 0, 0
        for s in samples:
            every = list(drafter.unroll(s.features.fused[None], torch.tensor([s.token_ids]), steps))
            for position in range(max(1 + step, s.prompt_length - 1), len(s.token_ids)):
                logits = every[step][0, position - 1 - step]
                likeliest = s.features.argmax[position].item()
                counted += 1
                right += drafter.target_ids[logits.argmax()].item() == likeliest
                if likeliest % 2 == 0:
                    taught += 1
                    soft = (head @ s.features.last_hidden[position]).softmax(-1)
                    loss += -(soft * logits.log_softmax(-1)).sum().item()
        assert found[step].loss.item() == pytest.approx(loss, rel=1e-5)
        assert (found[step].right.item(), found[step].taught.item(), found[step].counted.item()) == (
            right,
            taught,
            counted,
        )


def test_decay_weighs_steps():
    results = [train.StepResult(torch.tensor(6.0), *(torch.tensor(n) for n in (1, 3, 4))) for _ in range(3)]
    assert train.combined_loss(results, 0.5).item() == pytest.approx(2 * (1 + 0.5 + 0.25))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A feature store and a drafter of toy size, through the real stage with the target's reading replaced."""
    samples = [make_sample(f"s{i}", 10 + i, 3, "train" if i < 6 else "held_out") for i in range(8)]
    writer = Writer(tmp_path / "features", {"boundaries": [1, 2, 3]})
    writer.add_shard(samples, torch.float32)
    from eagle3_lib import checkpoint, targets

    checkpoint.save(make_drafter(), tmp_path / "base", torch.float32)
    config = type("Config", (), {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 40})()
    monkeypatch.setattr(targets, "resolve", lambda name: tmp_path)
    monkeypatch.setattr(targets, "load_config", lambda folder: config)
    weights = torch.randn(40, 16, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(targets, "embedding_and_head", lambda folder: (weights, weights))
    return TrainParams(
        out=str(tmp_path / "out"),
        features=str(tmp_path / "features"),
        drafter=str(tmp_path / "base"),
        epochs=4,
        batch_size=2,
    )


def weights_of(params):
    from safetensors.torch import load_file

    return load_file(f"{params.out}/drafter/model.safetensors")


def test_a_killed_training_ends_with_the_same_weights(tiny, monkeypatch, tmp_path):
    whole = train.run(tiny)
    expected, losses = weights_of(tiny), [e["mean_length"]["value"] for e in whole["evaluations"]]
    killed = tiny.model_copy(update={"out": str(tmp_path / "killed")})
    real = train.Trainer.run_epoch

    def dies_in_the_third(self, samples):
        if self.epoch == 2:
            raise KeyboardInterrupt
        real(self, samples)

    monkeypatch.setattr(train.Trainer, "run_epoch", dies_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        train.run(killed)
    monkeypatch.setattr(train.Trainer, "run_epoch", real)
    again = train.run(killed)
    assert [e["mean_length"]["value"] for e in again["evaluations"]] == losses
    found = weights_of(killed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_loss_that_is_not_finite_is_named(tiny, monkeypatch):
    monkeypatch.setattr(train, "combined_loss", lambda results, decay: torch.tensor(math.nan, requires_grad=True))
    with pytest.raises(Eagle3Error, match="loss is nan in epoch 1"):
        train.run(tiny)


def test_features_of_other_boundaries_are_refused(tiny, tmp_path):
    Writer(tmp_path / "features", {"boundaries": [0, 1, 2]}).add_shard([make_sample("a", 9, 3)], torch.float32)
    with pytest.raises(Eagle3Error, match=r"boundaries: found \[0, 1, 2\], expected \[1, 2, 3\]"):
        train.run(tiny)
