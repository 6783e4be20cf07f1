"""Stage 05: finetune a drafter by training-time test on stored features.

Training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840): at every slot the drafter takes K steps on its own hidden
states, as it will when serving, while the embedded tokens stay the text's own. Step k at slot t is trained on the
target's distribution at position t+1+k, restricted to the draft vocabulary. Positions whose likeliest token is outside
that vocabulary teach nothing and count as misses.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from . import acceptance, checkpoint, replay, targets
from .drafter import Drafter
from .errors import Eagle3Error
from .features import Sample, Store
from .params import TrainParams
from .provenance import project_path, short_path, stage, write_text


@dataclass
class Batch:
    """Samples padded on the right. fused [B, T, F], last_hidden [B, T, Ht], ids, argmax, mask [B, T].

    ``mask``: the position's next token belongs to the response, so its distribution is taught.
    """

    fused: Tensor
    last_hidden: Tensor
    ids: Tensor
    argmax: Tensor
    mask: Tensor


def collate(samples: list[Sample], device: str = "cpu") -> Batch:
    def pad(rows: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)

    def mask(sample: Sample) -> Tensor:
        return torch.arange(len(sample.token_ids)) >= sample.prompt_length - 1

    return Batch(
        pad([s.features.fused.float() for s in samples]),
        pad([s.features.last_hidden.float() for s in samples]),
        pad([torch.tensor(s.token_ids) for s in samples]),
        pad([s.features.argmax.long() for s in samples]),
        pad([mask(s) for s in samples]),
    )


@dataclass
class StepResult:
    """One drafting step over a batch: summed loss, right guesses, positions taught, positions that count."""

    loss: Tensor
    right: Tensor
    taught: Tensor
    counted: Tensor


def training_time_test(drafter: Drafter, batch: Batch, head: Tensor, steps: int) -> list[StepResult]:
    """Forward of ``steps`` steps with their soft-label cross-entropy.

    Args:
        head: [draft vocab, Ht] rows of the target's lm_head for the draft vocabulary.
    """
    in_vocabulary = drafter.t2d[batch.argmax]
    results = []
    for step, hidden in enumerate(drafter.hidden_states(batch.fused, batch.ids, steps)):
        first = 1 + step  # slot t is taught by position t + 1 + step
        counted = batch.mask[:, first:]
        likeliest, taught = batch.argmax[:, first:][counted], in_vocabulary[:, first:][counted]
        with torch.no_grad():
            soft = (batch.last_hidden[:, first:][counted] @ head.T).softmax(-1)
        logits = drafter.lm_head(hidden[:, : counted.shape[1]][counted])  # [counted positions, draft vocab]
        loss = -((soft * logits.log_softmax(-1)).sum(-1) * taught).sum()
        right = drafter.target_ids[logits.argmax(-1)] == likeliest
        results.append(StepResult(loss, right.sum(), taught.sum(), counted.sum()))
    return results


def combined_loss(results: list[StepResult], decay: float) -> Tensor:
    """Mean over taught positions of each step, later steps weighing ``decay`` ** step."""
    return sum(decay**k * r.loss / r.taught.clamp(min=1) for k, r in enumerate(results))


@torch.no_grad()
def evaluate(drafter: Drafter, samples: list[Sample], num_speculative_tokens: int) -> dict:
    """Replayed acceptance on samples: what an engine would accept there, not a product of per-step accuracies."""
    drafter.eval()
    rounds = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids], device=drafter.d2t.device)
        fused = sample.features.fused.float()[None].to(ids.device)
        proposed = replay.drafts(drafter, fused, ids, num_speculative_tokens)[0]
        rounds.append(replay.walk(replay.accepted_at(proposed, sample.token_ids), sample.prompt_length))
    return {"rounds_by_request": rounds, **acceptance.summary(rounds, num_speculative_tokens)}


def run(
    params: TrainParams, on_epoch: Callable[[list[dict], list[dict]], None] = lambda log, evaluations: None
) -> dict:
    """Finetune; after each epoch replay the held-out samples, save, and remember where to go on when killed.

    Args:
        on_epoch: called before the first and after each epoch with the log (a row a step) and the evaluations so far.
    Returns:
        the manifest's notes: acceptance of the base and after each epoch, and the paired gain.
    Raises:
        Eagle3Error: sizes that do not fit, no samples, or a loss that is not finite (the last epoch's state stays).
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    config = targets.load_config(folder)
    with stage(
        "train",
        params,
        {"features": project_path(params.features) / "index.json", "drafter": project_path(params.drafter)},
    ) as notes:
        store = Store(project_path(params.features))
        drafter = checkpoint.load(params.drafter, config.num_hidden_layers).drafter
        checkpoint.check_fits(drafter.config, config, params.drafter, params.target)
        if list(drafter.config.boundaries) != store.key["boundaries"]:
            raise Eagle3Error(
                f"{params.features}: boundaries: found {store.key['boundaries']}, expected {list(drafter.config.boundaries)} as in {params.drafter}"
            )
        train, held_out = ([store[i] for i in store.split(name)] for name in ("train", "held_out"))
        if not train or not held_out:
            raise Eagle3Error(
                f"{params.features}: found {len(train)} train and {len(held_out)} held-out samples, expected some of each"
            )
        embedding, head = targets.embedding_and_head(folder)
        drafter.share_embedding(embedding.float())
        drafter.to(params.device)
        head = head.float()[drafter.target_ids.cpu()].to(params.device)
        trainer = Trainer(params, drafter, head, out)
        trainer.resume()
        if not trainer.evaluations:
            trainer.note_evaluation(evaluate(drafter, held_out, params.num_speculative_tokens))
        on_epoch(trainer.log, trainer.evaluations)
        while trainer.epoch < params.epochs:
            trainer.run_epoch(train)
            trainer.note_evaluation(evaluate(drafter, held_out, params.num_speculative_tokens))
            trainer.save()
            on_epoch(trainer.log, trainer.evaluations)
        checkpoint.save(drafter, out / "drafter")
        write_text(out / "log.jsonl", "".join(json.dumps(row) + "\n" for row in trainer.log))
        notes |= trainer.summary(len(train), len(held_out))
        (out / "state.pt").unlink(missing_ok=True)
    return notes


class Trainer:
    """Optimiser, schedule and log of one finetune; its state after each epoch lies in ``state.pt``."""

    def __init__(self, params: TrainParams, drafter: Drafter, head: Tensor, out: Path):
        self.params, self.drafter, self.head, self.out = params, drafter, head, out
        self.weights = [p for p in drafter.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.weights, lr=params.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.schedule = None
        self.epoch, self.log, self.evaluations = 0, [], []

    def _start_schedule(self, batches: int) -> None:
        total = batches * self.params.epochs
        warmup = round(total * self.params.warmup_share)
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimiser, warmup, total, last_epoch=self.epoch * batches - 1
        )

    def run_epoch(self, samples: list[Sample]) -> None:
        """One pass over the samples in an order that the seed and the epoch decide."""
        params = self.params
        if self.schedule is None:
            self._start_schedule(math.ceil(len(samples) / params.batch_size))
        self.drafter.train()
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(params.seed + self.epoch)).tolist()
        batches = [order[i : i + params.batch_size] for i in range(0, len(order), params.batch_size)]
        with tqdm(batches, desc=f"epoch {self.epoch + 1}/{params.epochs}", mininterval=2, unit="batch") as bar:
            for indices in bar:
                row = self.step(collate([samples[i] for i in indices], params.device))
                self.log.append({"epoch": self.epoch, "step": len(self.log), **row})
                bar.set_postfix(loss=f"{row['loss']:.3f}", acc=f"{row['accuracy'][0]:.2f}", refresh=False)
        self.epoch += 1

    def step(self, batch: Batch) -> dict:
        """One optimiser step. Accuracy of a step: right guesses / counted positions, out-of-vocabulary ones missed."""
        results = training_time_test(self.drafter, batch, self.head, self.params.ttt_steps)
        loss = combined_loss(results, self.params.loss_decay)
        if not bool(loss.isfinite()):
            raise Eagle3Error(
                f"train: the loss is {loss.item()} in epoch {self.epoch + 1}; the state of epoch {self.epoch} is kept"
            )
        self.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights, self.params.clip_norm)
        self.optimiser.step()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        return {
            "loss": loss.item(),
            "accuracy": [(r.right / r.counted.clamp(min=1)).item() for r in results],
            "coverage": (results[0].taught / results[0].counted.clamp(min=1)).item(),
            "grad_norm": norm.item(),
            "learning_rate": rate,
        }

    def note_evaluation(self, result: dict) -> None:
        self.evaluations.append({"epoch": self.epoch, **result})
        mean = result["mean_length"]
        print(
            f"epoch {self.epoch}: held-out mean acceptance length {mean['value']:.3f} ({mean['low']:.3f} to {mean['high']:.3f})"
        )

    def _key(self) -> dict:
        return self.params.model_dump(exclude={"out", "device"})

    def save(self) -> None:
        state = {
            "key": self._key(),
            "epoch": self.epoch,
            "drafter": {k: v for k, v in self.drafter.state_dict().items() if not k.startswith("embed_tokens")},
            "optimiser": self.optimiser.state_dict(),
            "log": self.log,
            "evaluations": self.evaluations,
        }
        temporary = self.out / ".state.pt"
        torch.save(state, temporary)
        temporary.replace(self.out / "state.pt")

    def resume(self) -> None:
        """Take up the state of a killed run with the same parameters."""
        path = self.out / "state.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["key"] != self._key():
            print(f"{short_path(path)} is of other parameters: starting anew")
            return
        self.drafter.load_state_dict(state["drafter"], strict=False)
        self.optimiser.load_state_dict(state["optimiser"])
        self.epoch, self.log, self.evaluations = state["epoch"], state["log"], state["evaluations"]
        print(f"going on after epoch {self.epoch}")

    def summary(self, train: int, held_out: int) -> dict:
        first, last = self.evaluations[0], self.evaluations[-1]
        gain = acceptance.paired_length_difference(
            last["rounds_by_request"], first["rounds_by_request"], self.params.num_speculative_tokens
        )
        brief = [{k: v for k, v in e.items() if k != "rounds_by_request"} for e in self.evaluations]
        return {"train_samples": train, "held_out_samples": held_out, "evaluations": brief, "length_gain": gain}
