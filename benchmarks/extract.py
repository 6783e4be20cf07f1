"""Stage 04: extraction beside a plain forward pass, the write path beside a sequential write, and random reads.

    python benchmarks/extract.py [extraction] [writing] [reading]

Without a name all three; figures of the others stay. Extraction: samples of the quickstart through extract.run (loading the target and checking left out), beside
`target(ids).logits` on the same padded passes. Write: one shard of 256 MiB in bfloat16 by the store's writer (hashed, on
the disk, renamed, indexed), beside one buffer of the same bytes written and synced. Read: windows of 512 tokens in random
order, copied into a batch, after the store was read once. Repeats in turns; medians. Writes benchmarks/results/extract.json.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from eagle3_lib.compat.disk_plan import bytes_per_token
from eagle3_lib.features import backends
from eagle3_lib.features.store import Sample, Store, Writer
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import ExtractParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import extract
from eagle3_lib.targets import capture, targets
from eagle3_lib.targets.answers import read_answers, write_parquet

BOUNDARIES, HIDDEN = 3, 2048  # of the stores that are written and read
WINDOW, BATCH = 512, 8


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@torch.no_grad()
def forward(target, texts: list[list[int]]) -> None:
    """What a plain script does: each padded pass through the target, up to its logits."""
    for group in capture._passes(texts, 4096):
        rows = [torch.tensor(text) for text in group]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        target(ids, attention_mask=mask, use_cache=False).logits.argmax(-1)


def extraction(data: str, samples: int, repeats: int) -> dict:
    target = targets.load(targets.resolve(targets.SMOLLM2))

    @contextlib.contextmanager
    def loaded(wanted):
        yield lambda texts: capture.capture(target, texts, wanted.boundaries, draft_ids=wanted.draft_ids)

    backends.BACKENDS["transformers"] = extract.BACKENDS["transformers"] = loaded
    with tempfile.TemporaryDirectory() as name:
        work, answers = Path(name), read_answers(data)[:samples]
        write_parquet(answers, work / "samples.parquet")
        texts = sorted((a.prompt_ids + a.output_ids for a in answers), key=len)
        rates = {"forward": [], "extract": []}
        forward(target, texts[:8])  # warm-up
        for repeat in range(repeats):
            took = seconds(lambda: forward(target, texts))
            rates["forward"].append(round(sum(map(len, texts)) / took, 1))
            params = ExtractParams(out=str(work / f"out{repeat}"), data=str(work))
            notes = extract.run(params)
            rates["extract"].append(notes["tokens_per_s"])
    return {
        "tokens": notes["tokens"],
        "tokens_per_s": rates,
        "extract_over_forward": round(statistics.median(rates["extract"]) / statistics.median(rates["forward"]), 3),
        "bytes_over_plan": round(notes["bytes"] / notes["planned_bytes"], 4),
    }


def samples_of(tokens: int, length: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(length, BOUNDARIES * HIDDEN, generator=generator).bfloat16()
    last, ids = fused[:, :HIDDEN].contiguous(), torch.arange(length)
    features = capture.Features(fused, last, ids, draft_mass=torch.ones(length))
    return [Sample(str(i), "train", 2, ids.tolist(), features) for i in range(tokens // length)]


def sequential_write(path: Path, data: memoryview, piece: int = 2**24) -> None:
    with path.open("wb") as file:
        for start in range(0, len(data), piece):
            file.write(data[start : start + piece])
        file.flush()
        os.fsync(file.fileno())


def writing(repeats: int) -> dict:
    """Both on the disk and in memory (/dev/shm), where only the work of the processor is left."""
    samples = samples_of(2**28 // bytes_per_token(BOUNDARIES, HIDDEN, "bfloat16"), 1024)
    tokens = sum(len(sample.token_ids) for sample in samples)
    data = memoryview(os.urandom(2**20) * (tokens * bytes_per_token(BOUNDARIES, HIDDEN, "bfloat16") // 2**20))
    ratios, rates = {}, {}
    for place, parent in (("disk", project_path("runs")), ("memory", Path("/dev/shm"))):
        rates[place] = {"sequential": [], "store": []}
        for repeat in range(2 * repeats + 1):
            with tempfile.TemporaryDirectory(dir=parent) as name:
                writer = Writer(Path(name), {})
                work = {
                    "store": lambda writer=writer: writer.add_shard(0, samples, torch.bfloat16),
                    "sequential": lambda name=name: sequential_write(Path(name) / "plain", data),
                }
                for kind in list(work)[:: 1 if repeat % 2 else -1]:  # each goes first every other time
                    took = seconds(work[kind])
                    if repeat:  # the first is a warm-up
                        rates[place][kind].append(round(len(data) / took / 1e9, 3))
        ratios[place] = statistics.median(rates[place]["store"]) / statistics.median(rates[place]["sequential"])
    (shard,) = writer.shards.values()
    return {
        "shard_bytes": shard["bytes"],
        "write_gb_s": rates,
        "write_over_sequential": round(ratios["disk"], 3),
        "write_over_sequential_in_memory": round(ratios["memory"], 3),
        "shard_bytes_over_plan": round(shard["bytes"] / tokens / bytes_per_token(BOUNDARIES, HIDDEN, "bfloat16"), 5),
    }


def reading(repeats: int) -> dict:
    torch.set_num_threads(1)  # one reader
    samples = samples_of(2**28 // bytes_per_token(BOUNDARIES, HIDDEN, "bfloat16"), 4096)
    with tempfile.TemporaryDirectory(dir=project_path("runs")) as name:
        folder, rates = Path(name), []
        writer = Writer(folder, {})
        for number in range(4):
            writer.add_shard(number, samples, torch.bfloat16)
        store = Store(folder, verify=True)  # reads it all once
        windows = [
            (number, start)
            for number in range(len(store))
            for start in range(0, store.entries[number]["tokens"], WINDOW)
        ]
        sizes = {"fused": BOUNDARIES * HIDDEN, "last_hidden": HIDDEN}
        batch = {n: torch.empty(BATCH, WINDOW, w, dtype=torch.bfloat16) for n, w in sizes.items()}
        for repeat in range(repeats):
            random.Random(repeat).shuffle(windows)

            def read() -> None:
                for place, (number, start) in enumerate(windows):
                    features = store.window(number, start, start + WINDOW).features
                    batch["fused"][place % BATCH].copy_(features.fused)
                    batch["last_hidden"][place % BATCH].copy_(features.last_hidden)

            size = sum(t[0].nbytes for t in batch.values()) * len(windows)
            rates.append(round(size / seconds(read) / 1e9, 2))
    return {"windows": len(windows), "read_gb_s_of_repeats": rates, "read_gb_s": statistics.median(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="runs/quickstart/generate")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    work = {
        "writing": lambda: writing(arguments.repeats),
        "reading": lambda: reading(arguments.repeats),
        "extraction": lambda: extraction(arguments.data, arguments.samples, arguments.repeats),
    }
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(work)}")
    arguments = parser.parse_args()
    path = project_path("benchmarks/results/extract.json")
    result = json.loads(path.read_text()) if path.is_file() and arguments.parts else {}
    result |= {
        "command": "python benchmarks/extract.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    for name in arguments.parts or work:
        result |= work[name]()
    write_json(path, result)
    for name, limit in (
        ("extract_over_forward", "at least 0.9"),
        ("write_over_sequential", "at least 0.7"),
        ("read_gb_s", "at least 2"),
        ("shard_bytes_over_plan", "within 1 %"),
    ):
        print(f"{name}: {result.get(name)} ({limit})")


if __name__ == "__main__":
    main()
