"""The trainer on a toy target: the step against a plain loop over slots, resume, several processes, refusals, modes."""

import json
import os
import signal
import time

import pytest
import torch
import train_processes
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle3_lib.drafter import checkpoint, vocabulary
from eagle3_lib.drafter.model import Drafter, DrafterConfig
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features.store import Sample, Store, Writer
from eagle3_lib.params import TrainParams
from eagle3_lib.paths import ROOT
from eagle3_lib.reports import train_plots
from eagle3_lib.stages import train
from eagle3_lib.targets.capture import Features
from eagle3_lib.training import trainer
from eagle3_lib.training.packing import pack

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
VOCABULARY = torch.arange(0, 40, 2)
HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(4))


def make_drafter(seed=0):
    drafter = Drafter(CONFIG)
    drafter.initialise(seed)
    drafter.set_vocabulary(VOCABULARY)
    drafter.share_embedding(HEAD)
    return drafter


def make_sample(name, tokens, prompt_length, split="train", language=False):
    """Random text; or of a language in which each token decides the next, as the target's greedy text."""
    generator = torch.Generator().manual_seed(tokens)
    fused, last = torch.randn(tokens, 48, generator=generator), torch.randn(tokens, 16, generator=generator)
    ids = torch.randint(0, 40, (tokens,), generator=generator)
    argmax = torch.randint(0, 40, (tokens,), generator=generator)
    if language:
        ids = (2 * torch.arange(tokens) * 3 + 2 * tokens) % 40  # the next token is 6 further
        argmax = (ids + 6) % 40
        last = 2 * HEAD[argmax]
    return Sample(name, split, prompt_length, ids.tolist(), Features(fused, last, argmax))


def write_store(folder, samples, boundaries=(1, 2, 3)):
    Writer(folder, {"boundaries": list(boundaries)}).add_shard(0, samples, torch.float32)


def toy(folder, language=False, **changes):
    """A target, a drafter and a feature store of toy size on disk, and parameters that train on them."""
    target = folder / "target"
    LlamaConfig(
        hidden_size=16, num_hidden_layers=8, vocab_size=40, intermediate_size=32, num_attention_heads=2
    ).save_pretrained(target)
    save_file({"model.embed_tokens.weight": HEAD}, target / "model.safetensors")
    checkpoint.save(make_drafter(), folder / "base", torch.float32)
    samples = [make_sample(f"s{i}", 10 + i, 3, "train" if i < 6 else "held_out", language) for i in range(9)]
    write_store(folder / "features", samples)
    values = {"out": str(folder / "out"), "features": str(folder / "features"), "drafter": str(folder / "base")}
    return TrainParams(**values, target=str(target), epochs=4, **changes)


@pytest.fixture
def tiny(tmp_path):
    return toy(tmp_path)


def weights_of(params):
    return load_file(f"{params.out}/drafter/model.safetensors")


def elsewhere(params, name, **changes):
    return params.model_copy(update={"out": f"{params.out}-{name}", **changes})


def assert_same_weights(found, expected, **tolerance):
    for name, tensor in weights_of(expected).items():
        torch.testing.assert_close(weights_of(found)[name], tensor, **tolerance or {"rtol": 0, "atol": 0})


# --- one step


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_counts_equal_a_loop_over_slots(steps):
    """A packed pass of two samples, against each slot of each sample on its own."""
    drafter, samples = make_drafter(), [make_sample("a", 9, 3), make_sample("b", 6, 2)]
    head = torch.randn(20, 16, generator=torch.Generator().manual_seed(3))
    batch = pack(samples, VOCABULARY, steps)
    module = trainer.TrainingTimeTest(drafter, head, TrainParams(ttt_steps=steps))
    found = module(batch, torch.ones(steps))
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
        assert found.summed[step].item() == pytest.approx(loss, rel=1e-5)
        assert found.right[step].item() == right
        assert batch.labels.taught[step].item() == taught and batch.labels.counted[step].item() == counted
    assert found.total.item() == pytest.approx(found.summed.sum().item())


def test_a_packed_pass_has_the_gradients_of_its_samples():
    samples = [make_sample("a", 9, 3), make_sample("b", 6, 2), make_sample("c", 14, 5)]

    def gradients(passes):
        drafter = make_drafter()
        module = trainer.TrainingTimeTest(drafter, HEAD[VOCABULARY], TrainParams(ttt_steps=5))
        for some in passes:
            module(pack(some, VOCABULARY, 5), 0.8 ** torch.arange(5)).total.backward()
        return {name: weight.grad for name, weight in drafter.named_parameters() if weight.requires_grad}

    together, apart = gradients([samples]), gradients([[sample] for sample in samples])
    for name in apart:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_row_of_a_step(tiny):
    """Later steps weigh loss_decay ** step; a step divided over passes is the same step."""
    notes = train.run(tiny)
    row = json.loads((ROOT / tiny.out / "log.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(sum(0.8**k * loss for k, loss in enumerate(row["loss_by_step"])))
    assert 0 < row["coverage"] < 1 and len(row["accuracy"]) == 3
    assert notes["evaluations"][-1]["epoch"] == 4 and notes["train_samples"] == 6
    divided = elsewhere(tiny, "divided", tokens_per_pass=12)
    train.run(divided)
    assert_same_weights(divided, tiny, rtol=1e-4, atol=1e-5)


# --- killed, and on several processes


@pytest.mark.slow
def test_a_sigkilled_training_ends_with_the_same_weights(tiny):
    """Killed between two checkpoints and started again: bit for bit the unbroken run."""
    whole = tiny.model_copy(update={"epochs": 20})
    unbroken = train.run(whole)
    killed = elsewhere(whole, "killed", save_every=2)
    (process,) = train_processes.start(killed)
    log, checkpoints = ROOT / killed.out / "log.jsonl", ROOT / killed.out / "checkpoints"
    while not log.is_file() or len(log.read_text().splitlines()) < 5:
        assert process.is_alive() or process.exitcode == 0
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 0 < len(list(checkpoints.glob("step-*.pt"))) <= 2
    again = train.run(killed)
    assert again["evaluations"] == unbroken["evaluations"]
    assert_same_weights(killed, whole)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(60))
    assert not list(checkpoints.glob("*"))


@pytest.mark.slow
def test_two_processes_equal_one_and_their_checkpoint_goes_on_in_one(tiny):
    """DDP and FSDP2 over gloo; a third run is killed after its first steps and goes on in one process."""
    params = tiny.model_copy(update={"batch_size": 3, "ema": 0.5, "tokens_per_pass": 20, "epochs": 2})
    train.run(params)
    ddp, sharded = elsewhere(params, "ddp"), elsewhere(params, "fsdp2", sharding="fsdp2")
    stopped = elsewhere(params, "stopped", sharding="fsdp2", save_every=1)
    processes = train_processes.start(ddp, sharded, stopped, processes=2)
    checkpoints = ROOT / stopped.out / "checkpoints"
    while not list(checkpoints.glob("step-*.pt")):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.001)
    for process in processes:
        process.kill()
        process.join()
    for some in (ddp, sharded):
        assert_same_weights(some, params, rtol=1e-4, atol=1e-5)
    assert not (ROOT / stopped.out / "manifest.json").exists()
    train.run(elsewhere(params, "stopped", save_every=1))
    assert_same_weights(stopped, params, rtol=1e-4, atol=1e-5)
    losses = [
        [json.loads(line)["loss"] for line in open(f"{p.out}/log.jsonl")] for p in (params, ddp, sharded, stopped)
    ]
    for some in losses[1:]:
        assert some == pytest.approx(losses[0], rel=1e-5)


# --- modes


def test_overfitting_one_sample_reaches_every_draft(tmp_path):
    params = toy(tmp_path, language=True, overfit=True, ttt_steps=4, learning_rate=0.01, schedule="constant")
    notes = train.run(params.model_copy(update={"epochs": 300, "evaluate_every": 10}))
    last = notes["evaluations"][-1]
    assert last["curve"]["value"] == [1.0] * 4 and last["mean_length"]["value"] == 5
    assert last["step"] < 300


def test_early_stopping_exports_the_best(tmp_path):
    params = toy(tmp_path, language=True, ttt_steps=4, learning_rate=0.02, schedule="constant", patience=2)
    notes = train.run(params.model_copy(update={"epochs": 60, "ema": 0.5}))
    means = [e["mean_length"]["value"] for e in notes["evaluations"]]
    assert means.index(max(means)) == len(means) - 3 and max(means) > means[0]
    drafter = checkpoint.load(f"{params.out}/drafter").drafter
    drafter.share_embedding(HEAD)
    store = Store(tmp_path / "features")
    rounds = [trainer.rounds_of(drafter, store[number], 4) for number in store.split("held_out")]
    assert 1 + sum(map(sum, rounds)) / sum(map(len, rounds)) == pytest.approx(max(means), abs=0.2)  # stored in bfloat16


def test_starts(tiny):
    """From a drafter (its map kept), from scratch, from the target's head, with a trained embedding, with each loss."""
    for changes in (
        {"from_scratch": True, "loss": "kl"},
        {"head": "target", "train_head": False, "loss": "lk_alpha"},
        {"train_embedding": True, "loss": "lk_lambda", "precision": "bfloat16"},
    ):
        params = elsewhere(tiny, "-".join(changes), epochs=1, **changes)
        train.run(params)
        made = checkpoint.load(f"{params.out}/drafter").drafter
        assert torch.equal(made.target_ids, VOCABULARY)
        assert made.config.own_embedding == params.train_embedding
        assert torch.equal(made.lm_head.weight, HEAD[VOCABULARY].bfloat16().float()) == (not params.train_head)


def test_another_vocabulary_that_the_features_were_made_for(tiny, tmp_path):
    ids = torch.tensor([0, 3, 4, 10, 11, 12])
    vocabulary.save(ids, 40, tmp_path / "features" / "vocabulary.safetensors")
    drafter, head = trainer.starting_drafter(tiny, Store(tmp_path / "features"))
    assert torch.equal(drafter.target_ids, ids) and torch.equal(head, HEAD[ids])
    old, rows = make_drafter(), [0, 2, 3, 5]
    assert torch.equal(drafter.lm_head.weight[rows], old.lm_head.weight[ids[rows] // 2])  # the even ones stay
    assert torch.equal(drafter.fc.weight, old.fc.weight)
    train.run(tiny.model_copy(update={"epochs": 1}))
    assert torch.equal(checkpoint.load(f"{tiny.out}/drafter").drafter.target_ids, ids)


def test_slices_of_held_out_samples(tiny, monkeypatch):
    init = Store.__init__

    def with_slices(self, *arguments):
        init(self, *arguments)
        for number, entry in enumerate(self.entries):
            entry["slice"] = "code" if number % 2 else "reasoning"

    monkeypatch.setattr(Store, "__init__", with_slices)
    last = train.run(tiny.model_copy(update={"epochs": 1}))["evaluations"][-1]
    assert {name: some["requests"] for name, some in last["slices"].items()} == {"code": 1, "reasoning": 2}
    assert sum(some["rounds"] for some in last["slices"].values()) == last["rounds"]


def test_the_figure_of_rounds_fills_what_is_accepted():
    row = {"after": "a$", "guess": " b", "text": " b"}
    looks = [(0, 0, True, True), (0, 1, False, False), (1, 0, False, False), (1, 1, True, False)]
    rows = [row | {"slot": s, "step": k, "right": right, "accepted": taken} for s, k, right, taken in looks]
    (axes,) = train_plots.rounds(rows).axes
    filled = [patch.get_xy() for patch in axes.patches if patch.get_facecolor()[3] > 0]
    dashed = [patch.get_xy() for patch in axes.patches if patch.get_linestyle() == "--"]
    assert filled == [(-0.48, -0.45)] and dashed == [(0.52, 0.55)]
    assert "25% of them accepted" in train_plots.show_rounds(rows).alt


# --- what goes wrong is told by name


@pytest.mark.parametrize(("name", "value"), [("fused", float("nan")), ("last_hidden", float("inf"))])
def test_features_that_are_not_finite_are_named_and_the_checkpoint_stays(tiny, tmp_path, name, value):
    samples = [make_sample(f"s{i}", 10 + i, 3, "train" if i < 6 else "held_out") for i in range(8)]
    getattr(samples[3].features, name)[5] = value
    write_store(tmp_path / "bad", samples)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(20)]
    late = next(seed for seed, order in enumerate(orders) if order.index(3) > 3)  # in the third step of the first epoch
    params = tiny.model_copy(update={"features": str(tmp_path / "bad"), "save_every": 1, "seed": late})
    message = rf"sample s3: {name}: found NaN or infinite values at 1 tokens, first at 5; .*step-00000002.pt is whole"
    with pytest.raises(Eagle3Error, match=message):
        train.run(params)
    (*_, last) = sorted((tmp_path / "out" / "checkpoints").glob("step-*.pt"))
    state = torch.load(last, weights_only=True)
    assert all(weight.isfinite().all() for weight in state["weights"].values())


def test_a_gradient_that_is_not_finite_is_named(tiny, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *arguments: torch.tensor(float("inf")))
    with pytest.raises(Eagle3Error, match="gradient's norm is inf in step 0; .* lower learning_rate; no checkpoint"):
        train.run(tiny)


def test_a_step_that_teaches_nothing_is_skipped_and_a_whole_epoch_refused(tiny, tmp_path):
    samples = [make_sample(f"s{i}", 10 + i, 3, "train" if i < 6 else "held_out") for i in range(8)]
    for sample in samples[:2]:
        sample.features.argmax[:] = 1  # outside the draft vocabulary
    write_store(tmp_path / "some", samples)
    params = tiny.model_copy(update={"features": str(tmp_path / "some"), "batch_size": 1, "epochs": 1})
    skipped = train.run(params)["skipped_steps"]
    assert sorted(row["samples"][0] for row in skipped) == ["s0", "s1"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows + skipped) == list(range(6))
    for sample in samples:
        sample.features.argmax[:] = 1
    write_store(tmp_path / "none", samples)
    with pytest.raises(Eagle3Error, match="no position of the 6 train samples teaches"):
        train.run(elsewhere(tiny, "none", features=str(tmp_path / "none")))


def test_lack_of_memory_is_named(tiny, monkeypatch):
    def lacking(*arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    monkeypatch.setattr(trainer.losses, "step_losses", lacking)
    with pytest.raises(Eagle3Error, match=r"out of memory in step 0 with 2\d tokens in a pass: lower tokens_per_pass"):
        train.run(tiny)


def test_features_of_other_boundaries_are_refused(tiny, tmp_path):
    write_store(tmp_path / "features", [make_sample("a", 9, 3)], (0, 1, 2))
    with pytest.raises(Eagle3Error, match=r"boundaries: found \[0, 1, 2\], expected \[1, 2, 3\]"):
        train.run(tiny)


def test_what_is_not_there_is_named(tiny, monkeypatch):
    monkeypatch.setattr(trainer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Eagle3Error, match="tracker: found 'wandb', which is not installed"):
        train.run(tiny.model_copy(update={"tracker": "wandb"}))
    with pytest.raises(Eagle3Error, match="sharding: found 'fsdp2', which needs torchrun"):
        train.run(tiny.model_copy(update={"sharding": "fsdp2"}))
    with pytest.raises(Eagle3Error, match="ttt_steps: found|ttt_steps of num_speculative_tokens = 4 at least"):
        TrainParams.check({"overfit": True, "ttt_steps": 2}, "notebook parameters")
