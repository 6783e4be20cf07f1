"""Training on several GPUs beside one: tokens/s, and whether the loss is the same.

    python benchmarks/train_scaling.py                  # stage 05 on 1 and 2 GPUs, over NCCL, with DDP and FSDP2
    python benchmarks/train_scaling.py --shape toy --device cpu --dry   # proves the command by 2 processes over gloo; writes nothing

Stage 05 as torchrun starts it, on a store of random features: the same samples in each optimiser step, however many
processes they are divided over (strong scaling). A drafter of 1.7 billion parameters' target sizes, 8 texts of 2048
tokens a step, bfloat16 with float32 master weights. Time of a step: between two lines of the log; the median, the first
epoch left out. Writes benchmarks/results/train_scaling.json.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from transformers import LlamaConfig

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig
from eagle3_lib.features.store import Sample, Writer
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import TrainParams
from eagle3_lib.paths import project_path
from eagle3_lib.targets.capture import Features
from recipes.divisible import TIMED_SIZES

EPOCHS, STEPS_PER_EPOCH, NEVER = 4, 5, 10**9
LOG_POLL_S = 0.001


@dataclass(frozen=True)
class Shape:
    """Sizes of the target, which are the drafter's too; ``batch`` texts of ``tokens`` tokens a step."""

    sizes: dict
    vocabulary: int
    draft_vocabulary: int
    tokens: int
    batch: int


TOY_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8}
TOY_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
SHAPES = {
    "smollm2-1.7b": Shape(TIMED_SIZES, 49152, 32000, tokens=2048, batch=8),
    "toy": Shape(TOY_SIZES, 100, 50, tokens=64, batch=4),
}


def write_run(folder: Path, shape: Shape) -> None:
    """A target (its embedding alone), a fresh drafter and random features, as stage 05 reads them."""
    config = LlamaConfig(**shape.sizes, vocab_size=shape.vocabulary, tie_word_embeddings=True)
    config.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    embedding = 0.02 * torch.randn(shape.vocabulary, config.hidden_size, generator=generator)
    save_file({"model.embed_tokens.weight": embedding.bfloat16()}, folder / "target" / "model.safetensors")
    boundaries = 2, config.num_hidden_layers // 2, config.num_hidden_layers - 3
    drafter = Drafter(
        DrafterConfig(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            shape.vocabulary,
            shape.draft_vocabulary,
            config.hidden_size,
            boundaries,
        )
    )
    drafter.initialise()
    drafter.set_vocabulary(torch.arange(shape.draft_vocabulary))
    checkpoint.save(drafter, folder / "drafter")
    writer = Writer(folder / "features", {"boundaries": list(boundaries)})
    for shard in range(STEPS_PER_EPOCH):
        samples = [random_sample(f"{shard}-{text}", "train", shape, generator) for text in range(shape.batch)]
        writer.add_shard(shard, samples, torch.bfloat16)
    writer.add_shard(STEPS_PER_EPOCH, [random_sample("held out", "held_out", shape, generator)], torch.bfloat16)


def random_sample(name: str, split: str, shape: Shape, generator: torch.Generator) -> Sample:
    hidden, tokens = shape.sizes["hidden_size"], shape.tokens
    fused, last = (torch.randn(tokens, width, generator=generator) for width in (3 * hidden, hidden))
    ids, argmax = torch.randint(shape.draft_vocabulary, (2, tokens), generator=generator)
    return Sample(name, split, 1, ids.tolist(), Features(fused, last, argmax))


def measure(folder: Path, shape: Shape, sharding: str, processes: int, device: str) -> dict:
    """Stage 05 by so many processes; a row of the result."""
    params = TrainParams(
        run="train_scaling",
        out=str(folder / f"out-{sharding}-{processes}"),
        features=str(folder / "features"),
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        epochs=EPOCHS,
        batch_size=shape.batch,
        tokens_per_pass=2 * shape.tokens,
        precision="bfloat16" if device == "cuda" else "float32",
        compile=device == "cuda",
        sharding=sharding,
        evaluate_every=NEVER,
        save_every=NEVER,
        device=device,
    )
    flat = folder / "train.yaml"
    flat.write_text(yaml.safe_dump(params.model_dump()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    output = folder / "output.txt"
    with output.open("w") as sink:
        process = subprocess.Popen([*torchrun, "-m", "eagle3_lib.stages.train", str(flat)], stdout=sink, stderr=sink)
        seen = arrivals(process, Path(params.out) / "log.jsonl")
    if process.returncode:
        sys.exit(f"{processes} processes, {sharding}: status {process.returncode}:\n{output.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (Path(params.out) / "log.jsonl").read_text().splitlines()]
    steps = [
        later - earlier for earlier, later in zip(seen[STEPS_PER_EPOCH:], seen[STEPS_PER_EPOCH + 1 :], strict=False)
    ]
    return {
        "sharding": sharding,
        "processes": processes,
        "tokens_per_s": round(rows[0]["tokens"] / statistics.median(steps), 1),
        "step_s": [round(step, 4) for step in steps],
        "loss": [row["loss"] for row in rows],
    }


def arrivals(process: subprocess.Popen, log: Path) -> list[float]:
    """When each line of a log appeared, until the process that writes it ends."""
    seen: list[float] = []
    while process.poll() is None:
        lines = log.read_bytes().count(b"\n") if log.is_file() else 0
        seen += [time.perf_counter()] * (lines - len(seen))
        time.sleep(LOG_POLL_S)
    return seen


def beside_one(row: dict, one: dict) -> dict:
    """Scaling, and the largest relative difference of a step's loss."""
    difference = max(abs(a - b) / abs(b) for a, b in zip(row["loss"], one["loss"], strict=True))
    return {"over_one": round(row["tokens_per_s"] / one["tokens_per_s"], 3), "largest_loss_difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="GPUs; 1 is always measured")
    parser.add_argument("--sharding", nargs="+", default=["ddp", "fsdp2"], choices=["ddp", "fsdp2"])
    parser.add_argument("--shape", default="smollm2-1.7b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="write no results file")
    options = parser.parse_args()
    shape, rows = SHAPES[options.shape], []
    counts = [1, *(count for count in options.processes if count != 1)]
    with tempfile.TemporaryDirectory() as work:
        write_run(Path(work), shape)
        for sharding in options.sharding:
            first = len(rows)
            for count in counts:
                row = measure(Path(work), shape, sharding, count, options.device)
                one = rows[first] if rows[first:] else row
                rows.append(row | beside_one(row, one))
                print({key: value for key, value in rows[-1].items() if key not in ("step_s", "loss")}, flush=True)
    if not options.dry:
        result = {
            "command": "python benchmarks/train_scaling.py",
            "date": datetime.date.today().isoformat(),
            "hardware": hardware(),
            "versions": versions(),
            "shape": options.shape,
            "tokens_per_step": shape.batch * shape.tokens,
            "rows": rows,
        }
        write_json(project_path("benchmarks/results/train_scaling.json"), result)


if __name__ == "__main__":
    main()
