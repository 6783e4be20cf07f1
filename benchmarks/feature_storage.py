"""What storing features as float32, bfloat16 or float8 costs in acceptance.

    python benchmarks/feature_storage.py [--epochs 1]

The samples of the quickstart, stored three times; the base drafter is finetuned from each store with the same seed and
schedule. Acceptance is replayed on the held-out samples with the float32 features, which are what an engine computes, so
that only training differs; beside it that of the base drafter on each store's own features, so that only the features
differ. Intervals resample requests. Writes benchmarks/results/feature_storage.json.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import torch

from eagle3_lib.compat.disk_plan import VALUE_BYTES
from eagle3_lib.drafter import checkpoint
from eagle3_lib.features.store import Store, Writer
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BASE_DRAFTER, ExtractParams, TrainParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import extract, train
from eagle3_lib.targets import targets
from eagle3_lib.verdict import acceptance, replay

STEPS = 4


@torch.no_grad()
def rounds_of(drafter, store: Store) -> list[list[int]]:
    """Accepted counts of the rounds of each held-out sample, by replay."""
    rounds = []
    for sample in (store[i] for i in store.split("held_out")):
        ids, fused = torch.tensor([sample.token_ids]), sample.features.fused.float()[None]
        proposed = replay.drafts(drafter, fused, ids, STEPS)[0]
        rounds.append(rounds.walk(replay.accepted_at(proposed, sample.token_ids), sample.prompt_length))
    return rounds


def rewritten(exact: Store, folder: Path, dtype: str) -> int:
    """The same features in another storage type; returns bytes per token."""
    writer = Writer(folder, exact.key | {"feature_dtype": dtype})
    numbers = {file: [n for n, entry in enumerate(exact.entries) if entry["file"] == file] for file in exact.files}
    for place, shard in enumerate(exact.files):
        if not writer.has(place, [exact.entries[n]["id"] for n in numbers[shard]]):
            writer.add_shard(place, [exact[n] for n in numbers[shard]], getattr(torch, dtype))
    tokens = sum(entry["tokens"] for entry in exact.entries)
    return round(sum(shard["bytes"] for shard in writer.shards.values()) / tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="runs/quickstart/generate")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    folder = targets.resolve(targets.SMOLLM2)
    layers, (embedding, _) = targets.load_config(folder).num_hidden_layers, targets.embedding_and_head(folder)

    def drafter_of(path):
        drafter = checkpoint.load(path, layers).drafter
        drafter.share_embedding(embedding.float())
        return drafter.eval()

    rows, rounds = [], {}
    with tempfile.TemporaryDirectory(dir=project_path("runs")) as name:
        work, base = Path(name), drafter_of(BASE_DRAFTER)
        extract.run(ExtractParams(out=str(work / "float32/extract"), data=arguments.data, feature_dtype="float32"))
        exact = Store(work / "float32/extract")
        for dtype in VALUE_BYTES:
            out = work / dtype
            size = rewritten(exact, out / "extract", dtype)
            train.run(TrainParams(out=str(out / "train"), features=str(out / "extract"), epochs=arguments.epochs))
            rounds[dtype] = rounds_of(drafter_of(out / "train" / "drafter"), exact)
            trained = acceptance.summary(rounds[dtype], STEPS)
            read = acceptance.summary(rounds_of(base, Store(out / "extract")), STEPS)
            rows.append(
                {
                    "stored_as": dtype,
                    "bytes_per_token": size,
                    "finetuned": {key: trained[key] for key in ("acceptance_rate", "mean_length")},
                    "base_on_stored": {key: read[key] for key in ("acceptance_rate", "mean_length")},
                    "length_over_float32": acceptance.paired_length_difference(rounds[dtype], rounds["float32"], STEPS),
                }
            )
            print(rows[-1], flush=True)
    result = {
        "command": f"python benchmarks/feature_storage.py --epochs {arguments.epochs}",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "held_out_samples": len(rounds["float32"]),
        "epochs": arguments.epochs,
        "rows": rows,
    }
    write_json(project_path("benchmarks/results/feature_storage.json"), result)


if __name__ == "__main__":
    main()
