"""Training by training-time test on stored features.

Training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840): at every slot the drafter takes K steps on its own hidden
states, as it will when serving, while the embedded tokens stay the text's own. Step k at slot t is trained on the
target's distribution at position t+1+k, restricted to the draft vocabulary. Positions whose likeliest token is outside
that vocabulary teach nothing and count as misses.
"""

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_scheduler

from ..drafter import checkpoint
from ..drafter.model import Drafter
from ..errors import Eagle3Error
from ..features.store import Sample, Store
from ..files import sha256, write_text
from ..params import TrainParams
from ..paths import project_path, short_path
from ..targets import targets
from ..verdict import acceptance, replay, rounds
from . import losses
from .packing import Pass, divide, pack, read_ahead

Progress = Callable[[list[dict], list[dict]], None]
LIVE_SECONDS = 60  # between calls of on_progress inside an epoch
SCHEDULES = {"cosine": "cosine", "constant": "constant_with_warmup"}
# What may change when a killed run goes on: where and how it runs, not what it computes.
FREE = {"out", "device", "tokens_per_pass", "compile", "sharding", "save_every", "keep_checkpoints", "tracker"}


class TrainingTimeTest(nn.Module):
    """The training-time test of a drafter: K drafting steps at every slot, and the loss of each."""

    def __init__(self, drafter: Drafter, target_head: Tensor, params: TrainParams):
        super().__init__()
        self.drafter, self.target_head, self.params = drafter, target_head, params

    def forward(self, batch: Pass, weights: Tensor) -> losses.StepLosses:
        """``weights``: [K] of a position's loss in each step."""
        steps = self.drafter.hidden_states(batch.fused, batch.token_ids, self.params.ttt_steps, batch.documents)
        return losses.step_losses(
            torch.cat(list(steps)),  # [K, S, H]
            self.drafter.lm_head.weight,
            self.target_head,
            batch.labels,
            weights,
            self.params.loss,
            self.params.lk_eta,
            compiled=self.params.compile,
        )


@torch.no_grad()
def rounds_of(drafter: Drafter, sample: Sample, num_speculative_tokens: int) -> list[int]:
    """The rounds that a correct engine would make on a sample: accepted drafts in each."""
    ids = torch.tensor([sample.token_ids], device=drafter.d2t.device)
    fused = sample.features.fused.to(ids.device, drafter.fc.weight.dtype)[None]
    proposed = replay.drafts(drafter, fused, ids, num_speculative_tokens)[0]
    return rounds.walk(replay.accepted_at(proposed, sample.token_ids), sample.prompt_length)


@torch.no_grad()
def guesses(params: TrainParams, slots: int = 6) -> list[dict]:
    """What the trained drafter guesses from the first slots of a held-out answer, a row for each slot and step.

    Returns:
        [{"slot", "after": the token that the round starts after, "step", "guess", "text": the token in the text, "right",
        "accepted": right, as all steps before it}], tokens as text.
    """
    folder = targets.resolve(params.target)
    tokenizer, store = targets.load_tokenizer(folder), Store(project_path(params.features))
    drafter = checkpoint.load(
        project_path(params.out) / "drafter", targets.load_config(folder).num_hidden_layers
    ).drafter
    drafter.share_embedding(targets.embedding_and_head(folder)[0])
    sample, steps = store[store.split("held_out")[0]], params.num_speculative_tokens
    ids = torch.tensor([sample.token_ids])
    proposed = replay.drafts(drafter, sample.features.fused.float()[None], ids, steps)[0].tolist()
    accepted = replay.accepted_at(torch.tensor(proposed), sample.token_ids)
    first, rows = sample.prompt_length - 1, []
    for slot in range(first, min(first + slots, len(sample.token_ids) - 1 - steps)):
        for step, guess in enumerate(proposed[slot]):
            text = sample.token_ids[slot + 2 + step]
            names = dict(zip(("after", "guess", "text"), (sample.token_ids[slot + 1], guess, text), strict=True))
            row = {name: tokenizer.decode([token]) for name, token in names.items()}
            rows.append(row | {"slot": slot, "step": step, "right": guess == text, "accepted": step < accepted[slot]})
    return rows


# --- what a run starts from -------------------------------------------------------------------------------------------


def starting_drafter(params: TrainParams, store: Store) -> tuple[Drafter, Tensor]:
    """The drafter to train, and the target's head for its vocabulary [draft vocab, Ht].

    Raises:
        Eagle3Error: sizes, boundaries or draft vocabulary that are not the target's or the features'.
    """
    folder = targets.resolve(params.target)
    config = targets.load_config(folder)
    drafter = checkpoint.load(params.drafter, config.num_hidden_layers).drafter
    checkpoint.check_fits(drafter.config, config, params.drafter, params.target)
    if list(drafter.config.boundaries) != store.key["boundaries"]:
        raise Eagle3Error(
            f"{params.features}: boundaries: found {store.key['boundaries']}, expected {list(drafter.config.boundaries)} as in {params.drafter}"
        )
    map_file = project_path(params.features) / "vocabulary.safetensors"  # what stage 04 settled
    target_ids = load_file(map_file)["t2d"].nonzero().flatten() if map_file.is_file() else drafter.target_ids
    if not torch.equal(target_ids, drafter.target_ids):
        drafter = _with_vocabulary(drafter, target_ids, params.seed)
    if params.from_scratch:
        drafter = _fresh(drafter, params.seed)
    embedding, head = targets.embedding_and_head(folder)
    target_head = head[drafter.target_ids].float()
    drafter.share_embedding(embedding)
    if params.head == "target":
        if drafter.lm_head.weight.shape != target_head.shape:
            raise Eagle3Error(
                f"train: head: found 'target', whose rows have {target_head.shape[1]} values; expected 'drafter': its hidden size is {drafter.config.hidden_size}"
            )
        drafter.lm_head.weight.data.copy_(target_head)
    drafter.lm_head.requires_grad_(params.train_head)
    if params.train_embedding:
        drafter.config = drafter.config.with_(own_embedding=True)
        drafter.embed_tokens.requires_grad_(True)
    if params.precision == "bfloat16":
        target_head = target_head.bfloat16()
        if not params.train_embedding:
            drafter.embed_tokens.bfloat16()
    return drafter, target_head


def _with_vocabulary(drafter: Drafter, target_ids: Tensor, seed: int) -> Drafter:
    """The drafter with another draft vocabulary: lm_head's rows of tokens that both hold stay, the others are fresh."""
    new = drafter.adapted(drafter.config.with_(draft_vocab_size=len(target_ids)), seed=seed)
    new.set_vocabulary(target_ids)
    kept = torch.isin(target_ids, drafter.target_ids)
    rows = torch.searchsorted(drafter.target_ids, target_ids[kept])
    with torch.no_grad():
        new.lm_head.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
        new.lm_head.weight[kept] = drafter.lm_head.weight[rows]
    return new


def _fresh(drafter: Drafter, seed: int) -> Drafter:
    """Fresh weights in the sizes, switches and draft vocabulary of a drafter; its embedding, if it has its own, stays."""
    fresh = Drafter(drafter.config)
    fresh.initialise(seed)
    fresh.set_vocabulary(drafter.target_ids)
    fresh.embed_tokens.weight.data.copy_(drafter.embed_tokens.weight)
    return fresh


def make_accelerator(params: TrainParams):
    """Process group, device, mixed precision and trackers, as torchrun or accelerate started this process.

    Raises:
        Eagle3Error: no GPU, or the tracker's package is not installed.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if params.device != "cpu" and not torch.cuda.is_available():
        raise Eagle3Error(f"train: device: found {params.device!r}, expected 'cpu': torch sees no GPU")
    if params.tracker and not importlib.util.find_spec(params.tracker):
        raise Eagle3Error(f"train: tracker: found {params.tracker!r}, which is not installed; pip install it")
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())  # of an earlier run
    return Accelerator(
        cpu=params.device == "cpu",
        mixed_precision="bf16" if params.precision == "bfloat16" else "no",
        log_with=params.tracker or None,
        project_dir=project_path(params.out),
    )


# --- the trainer ------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """How far a run is. log: a row for each step that taught; skipped: the others, with their samples."""

    step: int = 0
    log: list[dict] = field(default_factory=list)
    skipped: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)


class Trainer:
    """The loop, and what it keeps: weights, optimiser, schedule, averaged weights, log."""

    def __init__(self, params: TrainParams, accelerator, store: Store):
        self.params, self.accelerator, self.store = params, accelerator, store
        self.out, self.state = project_path(params.out), State()
        self.train, self.held_out = (store.split(name) for name in ("train", "held_out"))
        self.drafter, target_head = starting_drafter(params, store)
        if params.overfit:
            self.train = self.held_out = self._sample_to_overfit()
        if not self.train or not self.held_out:
            raise Eagle3Error(
                f"{params.features}: found {len(self.train)} train and {len(self.held_out)} held-out samples, expected some of each"
            )
        self.target_ids = self.drafter.target_ids.clone()
        self.drafter.to(accelerator.device)
        if params.compile:
            self.drafter.compile_parts()
        self.model = self._distributed(TrainingTimeTest(self.drafter, target_head.to(accelerator.device), params))
        self.weights = {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.weights.items()} if params.ema else None
        self.optimiser = torch.optim.AdamW(
            self.weights.values(),
            lr=params.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=accelerator.device.type == "cuda",
        )
        self.steps_per_epoch = math.ceil(len(self.train) / params.batch_size)
        self.steps = self.steps_per_epoch * params.epochs
        warmup = round(self.steps * params.warmup_share)
        self.schedule = get_scheduler(SCHEDULES[params.schedule], self.optimiser, warmup, self.steps)

    def _distributed(self, model: TrainingTimeTest) -> nn.Module:
        """The module under DDP, or sharded whole by FSDP2: a drafter is small, so one all-gather a pass serves all steps."""
        if self.params.sharding == "ddp":
            return self.accelerator.prepare_model(model)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if not torch.distributed.is_initialized():
            raise Eagle3Error("train: sharding: found 'fsdp2', which needs torchrun or accelerate launch")
        low = torch.bfloat16 if self.params.precision == "bfloat16" else None
        frozen = {p for p in model.parameters() if not p.requires_grad}
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return fully_shard(model, mp_policy=policy, ignored_params=frozen)

    def fit(self, on_progress: Progress) -> None:
        """All steps from where the run is; evaluations and checkpoints on the way; the drafter at the end."""
        self._resume()
        if self.params.tracker:
            self.accelerator.init_trackers("eagle3", config=self.params.model_dump())
        if not self.state.evaluations:
            self._evaluate()
        on_progress(self.state.log, self.state.evaluations)
        shown = started = time.monotonic()
        tokens = 0
        with self._progress_bar() as bar:
            for numbers, passes in self._batches():
                row = self._guarded_step(numbers, passes)
                self._note(row)
                tokens += row["tokens"]
                self._show(bar, row, tokens / (time.monotonic() - started))
                ended = self.state.step % self.steps_per_epoch == 0
                if ended:
                    self._refuse_an_empty_epoch()
                if due := _due(self.state.step, self.params.evaluate_every, ended):
                    self._evaluate()
                if _due(self.state.step, self.params.save_every, ended):
                    self._save()
                if due or time.monotonic() - shown > LIVE_SECONDS:
                    on_progress(self.state.log, self.state.evaluations)
                    shown = time.monotonic()
                if due and self._stops():
                    break
        if not self.params.patience:
            self._export()
        if self.params.overfit:
            self._refuse_less_than_all()
        if self.accelerator.is_main_process:
            for path in self._checkpoints():
                path.unlink()

    # --- steps

    def _batches(self) -> Iterator[tuple[list[int], list[Pass]]]:
        """For each step left: the numbers of its samples, and the passes of this process, read ahead."""
        params, world, rank = self.params, self.accelerator.num_processes, self.accelerator.process_index

        def read(step: int) -> tuple[list[int], list[Pass]]:
            epoch, batch = divmod(step, self.steps_per_epoch)
            order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(params.seed + epoch))
            numbers = [self.train[i] for i in order.tolist()[batch * params.batch_size :][: params.batch_size]]
            lengths = [self.store.entries[number]["tokens"] for number in numbers]
            ours = divide(lengths, params.tokens_per_pass, world)[rank::world]
            return numbers, [self._pack([numbers[i] for i in some], numbers[:1]) for some in ours]

        return read_ahead(range(self.state.step, self.steps), read)

    def _pack(self, numbers: list[int], idle: list[int]) -> Pass:
        """The pass of some samples; of ``idle`` ones, that teach nothing, where there are none."""
        samples = [self.store[number] for number in numbers or idle]
        pin = self.accelerator.device.type == "cuda"
        return pack(samples, self.target_ids, self.params.ttt_steps, teaches=bool(numbers), pin=pin)

    def _step(self, numbers: list[int], passes: list[Pass]) -> dict:
        """One optimiser step: a row of the log. Accuracy: right / counted, out-of-vocabulary positions missed."""
        params, world = self.params, self.accelerator.num_processes
        tokens = sum(self.store.entries[number]["tokens"] for number in numbers)
        sent = torch.stack([sum(getattr(p.labels, name) for p in passes) for name in ("counted", "taught")])
        counted, taught = self._summed(sent.to(self.accelerator.device))
        decay = params.loss_decay ** torch.arange(params.ttt_steps, device=taught.device)
        weights = decay / taught.clamp_min(1)
        scaled = weights * world  # because gradients are averaged over processes
        if not taught.any():
            self.schedule.step()
            return {"tokens": tokens, "samples": [self.store.entries[number]["id"] for number in numbers]}
        self.optimiser.zero_grad()
        summed, right = 0, 0
        for number, batch in enumerate(passes):
            with self._synchronising(number == len(passes) - 1):
                found = self.model(batch.to(self.accelerator.device), scaled)
                found.total.backward()
            summed, right = summed + found.summed.detach(), right + found.right
        summed, right = self._summed(torch.stack([summed, right]))
        norm = _whole(nn.utils.clip_grad_norm_(self.weights.values(), params.clip_norm))
        row = {
            "tokens": tokens,
            "loss": (summed * weights).sum().item(),
            "loss_by_step": (summed / taught.clamp_min(1)).tolist(),
            "accuracy": (right / counted.clamp_min(1)).tolist(),
            "coverage": (taught[0] / counted[0].clamp_min(1)).item(),
            "grad_norm": norm.item(),
            "learning_rate": self.schedule.get_last_lr()[0],
        }
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            raise Eagle3Error(self._not_finite(row, numbers))
        self.optimiser.step()
        self.schedule.step()
        if self.average:
            for name, weight in self.weights.items():
                self.average[name].mul_(params.ema).add_(weight.detach(), alpha=1 - params.ema)
        return row

    def _guarded_step(self, numbers: list[int], passes: list[Pass]) -> dict:
        """A step; lack of memory is told by name."""
        try:
            return self._step(numbers, passes)
        except (RuntimeError, MemoryError) as error:
            lacking = "out of memory", "can't allocate memory", "not enough memory"  # CUDA's, the CPU allocator's
            if not isinstance(error, MemoryError) and not any(words in str(error) for words in lacking):
                raise
            most = max(batch.tokens for batch in passes)
            raise Eagle3Error(
                f"train: out of memory in step {self.state.step} with {most} tokens in a pass: lower tokens_per_pass "
                f"(now {self.params.tokens_per_pass}); {self._last_checkpoint()}\n{error}"
            ) from error

    def _synchronising(self, last: bool):
        """Gradients are summed over processes in the last pass of a step only."""
        if self.params.sharding == "fsdp2":
            self.model.set_requires_gradient_sync(last)
        elif not last:
            return self.accelerator.no_sync(self.model)
        return contextlib.nullcontext()

    def _summed(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, "sum")

    # --- what can go wrong

    def _not_finite(self, row: dict, numbers: list[int]) -> str:
        what = "loss" if not math.isfinite(row["loss"]) else "gradient's norm"
        said = f"train: the {what} is {row['loss' if what == 'loss' else 'grad_norm']} in step {self.state.step}"
        for number in numbers:
            sample = self.store[number]
            for name in ("fused", "last_hidden"):
                bad = ~getattr(sample.features, name).isfinite().all(-1)
                if bad.any():
                    where = f"{self.params.features}: sample {sample.id}: {name}: found NaN or infinite values"
                    return f"{said}. {where} at {int(bad.sum())} tokens, first at {int(bad.int().argmax())}; {self._last_checkpoint()}"
        return f"{said}; the features of its samples are finite: lower learning_rate; {self._last_checkpoint()}"

    def _refuse_an_empty_epoch(self) -> None:
        first = self.state.step - self.steps_per_epoch
        if not self.state.log or self.state.log[-1]["step"] < first:
            raise Eagle3Error(
                f"{self.params.features}: no position of the {len(self.train)} train samples teaches: none is of a response, or all have their likeliest token outside the draft vocabulary of {self.params.drafter}"
            )

    def _last_checkpoint(self) -> str:
        paths = self._checkpoints()
        return f"{short_path(paths[-1])} is whole" if paths else "no checkpoint has been written yet"

    # --- evaluation

    def served(self) -> Drafter:
        """The drafter as it would be served: whole on this process, with averaged weights if there are any."""
        if self.average is None and self.params.sharding == "ddp":
            return self.drafter
        whole = Drafter(self.drafter.config)
        whole.embed_tokens = self.drafter.embed_tokens if not self.params.train_embedding else whole.embed_tokens
        whole = whole.to(self.accelerator.device)
        tensors = {name: _whole(tensor) for name, tensor in self.drafter.state_dict().items()}
        tensors |= {name: _whole(tensor) for name, tensor in (self.average or {}).items()}
        whole.load_state_dict(tensors)
        return whole

    def _evaluate(self) -> None:
        """Replay the held-out samples, divided over processes; keep the drafter if it is the best and that matters."""
        drafter, positions = self.served().eval(), self.params.num_speculative_tokens
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        with self.accelerator.autocast():
            found = [(n, rounds_of(drafter, self.store[n], positions)) for n in self.held_out[rank::world]]
        self.drafter.train()
        if world > 1:
            gathered: list = [None] * world
            torch.distributed.all_gather_object(gathered, found)
            found = [pair for some in gathered for pair in some]
        rounds = [rounds for _, rounds in sorted(found)]
        if self.params.overfit:
            rounds = [some[:-1] for some in rounds]  # the text ends inside the last round
        names = [self.store.entries[number].get("slice", "") for number in self.held_out]
        slices = {
            name: acceptance.summary([r for r, n in zip(rounds, names, strict=True) if n == name], positions)
            for name in sorted(set(names) - {""})
        }
        epoch, rest = divmod(self.state.step, self.steps_per_epoch)
        result: dict = {
            "step": self.state.step,
            "epoch": epoch + round(rest / self.steps_per_epoch, 3) if rest else epoch,
        }
        result |= {"rounds_by_request": rounds, **acceptance.summary(rounds, positions), "slices": slices}
        self.state.evaluations.append(result)
        if self.params.patience and _best(self.state.evaluations) == len(self.state.evaluations) - 1:
            self._export()
        mean = result["mean_length"]
        self.accelerator.print(
            f"epoch {result['epoch']:g}: held-out mean acceptance length {mean['value']:.3f} ({mean['low']:.3f} to {mean['high']:.3f})"
        )
        if self.params.tracker:
            self.accelerator.log({"mean_acceptance_length": mean["value"]}, step=self.state.step)

    def _stops(self) -> bool:
        """Early: no better evaluation for ``patience`` of them; or the one sample of ``overfit`` is all accepted."""
        if self.params.overfit:
            return _all_accepted(self.state.evaluations[-1], self.params.num_speculative_tokens)
        since = len(self.state.evaluations) - 1 - _best(self.state.evaluations)
        return 0 < self.params.patience <= since

    def _sample_to_overfit(self) -> list[int]:
        """The first train sample that can be accepted whole: the target's own greedy answer, all in the draft vocabulary."""
        covered: list[float] = []  # share of each greedy answer that the vocabulary holds
        for number in self.train:
            sample = self.store[number]
            answer = torch.tensor(sample.token_ids[sample.prompt_length :])
            greedy = sample.features.argmax.long()[sample.prompt_length - 1 : -1]
            rounds = len(answer) // (self.params.num_speculative_tokens + 1)
            if rounds > 1 and torch.equal(answer, greedy):
                covered.append(self.drafter.t2d[answer].float().mean().item())
                if covered[-1] == 1:
                    return [number]
        raise Eagle3Error(
            f"{self.params.features}: overfit: found no train sample whose answer is the target's greedy one and lies in the "
            f"draft vocabulary, {len(covered)} of {len(self.train)} answers are greedy and of two rounds or more, and the "
            f"vocabulary holds at most {max(covered, default=0):.0%} of one; expected 100 %: other prompts, temperature 0, or "
            f"change_vocabulary in stage extract"
        )

    def _refuse_less_than_all(self) -> None:
        last, positions = self.state.evaluations[-1], self.params.num_speculative_tokens
        if not _all_accepted(last, positions):
            raise Eagle3Error(
                f"train: overfit: mean acceptance length {last['mean_length']['value']:.2f} after {self.state.step} steps on one sample, expected {positions + 1}: more epochs, or a fault in features, map or training"
            )

    # --- what is written

    def _note(self, row: dict) -> None:
        """Count the step, and append its row to log.jsonl and to the tracker."""
        row = {"epoch": self.state.step // self.steps_per_epoch, "step": self.state.step, **row}
        self.state.step += 1
        if "loss" not in row:
            self.state.skipped.append(row)
            self.accelerator.print(f"step {row['step']}: skipped, samples {', '.join(row['samples'])} teach nothing")
            return
        self.state.log.append(row)
        if self.accelerator.is_main_process:
            with (self.out / "log.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self.params.tracker:
            flat = {name: row[name] for name in ("loss", "coverage", "grad_norm", "learning_rate")}
            self.accelerator.log(flat | {f"accuracy/{k}": a for k, a in enumerate(row["accuracy"])}, step=row["step"])

    def _progress_bar(self) -> tqdm:
        quiet = not self.accelerator.is_main_process
        return tqdm(initial=self.state.step, total=self.steps, unit="step", mininterval=2, disable=quiet)

    def _show(self, bar: tqdm, row: dict, rate: float) -> None:
        """The bar: besides what tqdm tells (done, left, time), tokens a second, loss, accuracy and the GPU's use."""
        shown = {"tok/s": f"{rate:.0f}"}
        if "loss" in row:
            shown |= {"loss": f"{row['loss']:.3f}", "acc": f"{row['accuracy'][0]:.2f}"}
        if self.accelerator.device.type == "cuda":
            shown |= {"gpu": f"{torch.cuda.utilization()}%", "GiB": f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"}
        bar.set_postfix(shown, refresh=False)
        bar.update()

    def _export(self) -> None:
        drafter = self.served()  # on every process: sharded weights are gathered
        if self.accelerator.is_main_process:
            checkpoint.save(drafter, self.out / "drafter")

    def _key(self) -> dict:
        return self.params.model_dump(exclude=FREE) | {"index": sha256(self.store.folder / "index.json")}

    def _checkpoints(self) -> list[Path]:
        return sorted((self.out / "checkpoints").glob("step-*.pt"))

    def _save(self) -> None:
        """Write a checkpoint, whole or not at all, and drop the oldest; any number of processes can go on from it."""
        moments = {
            name: {key: _whole(value).cpu() for key, value in self.optimiser.state[weight].items()}
            for name, weight in self.weights.items()
        }
        state = {
            "key": self._key(),
            "step": self.state.step,
            "skipped": self.state.skipped,
            "evaluations": self.state.evaluations,
            "schedule": self.schedule.state_dict(),
            "moments": moments,
            "weights": {name: _whole(weight.detach()).cpu() for name, weight in self.weights.items()},
            "average": {name: _whole(weight).cpu() for name, weight in (self.average or {}).items()},
        }
        if self.accelerator.is_main_process:
            folder = self.out / "checkpoints"
            folder.mkdir(exist_ok=True)
            temporary = folder / f".step-{self.state.step:08d}.pt"
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / temporary.name.removeprefix("."))
            for path in self._checkpoints()[: -self.params.keep_checkpoints]:
                path.unlink()

    @torch.no_grad()
    def _resume(self) -> None:
        """Take up the last checkpoint of a killed run with the same parameters; without one, start anew."""
        log, paths = self.out / "log.jsonl", self._checkpoints()
        state = torch.load(paths[-1], weights_only=True, map_location="cpu") if paths else None
        if state and state["key"] != self._key():
            self.accelerator.print(f"{short_path(paths[-1])} is of other parameters: starting anew")
            state = None
        if state:
            for name, weight in self.weights.items():
                weight.copy_(_like(state["weights"][name], weight))
                self.optimiser.state[weight] = {k: _like(v, weight) for k, v in state["moments"][name].items()}
                if self.average:
                    self.average[name].copy_(_like(state["average"][name], weight))
            self.schedule.load_state_dict(state["schedule"])
            for group, rate in zip(self.optimiser.param_groups, self.schedule.get_last_lr(), strict=True):
                group["lr"] = rate
            rows = [json.loads(line) for line in log.read_text().splitlines()]
            rows = [row for row in rows if row["step"] < state["step"]]
            self.state = State(state["step"], rows, state["skipped"], state["evaluations"])
            self.accelerator.print(f"going on after step {self.state.step}")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for path in paths if not state else []:
                path.unlink()
            write_text(log, "".join(json.dumps(row) + "\n" for row in self.state.log))

    def summary(self) -> dict:
        first, last = self.state.evaluations[0], self.state.evaluations[-1]
        if self.params.patience:
            last = self.state.evaluations[_best(self.state.evaluations)]
        gain = acceptance.paired_length_difference(
            last["rounds_by_request"], first["rounds_by_request"], self.params.num_speculative_tokens
        )
        brief = [{k: v for k, v in e.items() if k != "rounds_by_request"} for e in self.state.evaluations]
        return {
            "train_samples": len(self.train),
            "skipped_steps": self.state.skipped,
            "held_out_samples": len(self.held_out),
            "evaluations": brief,
            "length_gain": gain,
        }


def _due(step: int, every: int, epoch_ended: bool) -> bool:
    """Every so many steps; 0: at the end of each epoch."""
    return step % every == 0 if every else epoch_ended


def _best(evaluations: list[dict]) -> int:
    """The first of those with the greatest mean acceptance length."""
    return max(range(len(evaluations)), key=lambda i: (evaluations[i]["mean_length"]["value"], -i))


def _all_accepted(evaluation: dict, positions: int) -> bool:
    return evaluation["accepted"] == [evaluation["rounds"]] * positions


def _whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or a sharded one (DTensor) gathered on every process."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(tensor: Tensor, weight: Tensor) -> Tensor:
    """``tensor`` where ``weight`` is, sharded as it is."""
    if hasattr(weight, "placements") and tensor.dim():
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(weight.device), weight.device_mesh, weight.placements)
    return tensor.to(weight.device)
