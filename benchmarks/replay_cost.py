"""What replay costs: one hypothesis against a plain forward pass of the target, and thirty against one.

    python benchmarks/replay_cost.py

On the recorded tokens (12 requests, tests/data/vllm_cpu_replay.json). A replay is the whole of it: the target's pass
with its features and greedy choices, and the accepted counts at every slot where a round can start (one hypothesis) or
at the engine's rounds (thirty). The plain pass is `target(ids).logits` on the same padded batch. Medians of repeats,
taken in turns. Writes benchmarks/results/replay_cost.json.
"""

import argparse
import datetime
import json
import statistics
import time

import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import changes, hypotheses

RECORD = "tests/data/vllm_cpu_replay.json"
HYPOTHESES = 30


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    record = json.loads(project_path(RECORD).read_text())
    target = targets.load(targets.resolve(targets.SMOLLM2))
    drafter = checkpoint.load_for("drafters/smollm2-135m-eagle3", "SmolLM2", target)
    every = hypotheses.hypotheses(drafter, changes.TargetParts.of(target))
    costliest = "stale drafter cache"  # its rounds run one after the other
    thirty = {name: every[name] for name in [*list(every)[: HYPOTHESES - 1], costliest]}
    one = {changes.HEALTHY: every[changes.HEALTHY]}
    requests = [(request["prompt_ids"], request["output_ids"]) for request in record["requests"]]
    rounds, steps = [request["per_step_accepted"] for request in record["requests"]], record["num_speculative_tokens"]
    texts = [prompt + output for prompt, output in requests]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)

    def run(setups, rounds):
        features = capture.capture(target, texts, drafter.config.boundaries, also=hypotheses.extra_streams(setups))
        return hypotheses.replay_all(setups, hypotheses.texts_of(requests, features), rounds, steps)

    work = {
        "forward": lambda: target(padded).logits.argmax(-1),
        "one": lambda: run(one, None),
        "thirty": lambda: run(thirty, rounds),
    }
    work["one"]()  # warm-up
    times = {name: [] for name in work}
    for _ in range(repeats):
        for name, function in work.items():
            times[name].append(seconds(function))
    median = {name: statistics.median(some) for name, some in times.items()}
    result = {
        "command": "python benchmarks/replay_cost.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "tokens": sum(map(len, texts)),
        "hypotheses": list(thirty),
        "seconds": {name: [round(value, 3) for value in some] for name, some in times.items()},
        "one_over_forward": round(median["one"] / median["forward"], 3),
        "thirty_over_one": round(median["thirty"] / median["one"], 3),
    }
    write_json(project_path("benchmarks/results/replay_cost.json"), result)
    print(f"one hypothesis over a plain forward pass: {result['one_over_forward']:.2f} (limit 2)")
    print(f"{HYPOTHESES} hypotheses over one:                   {result['thirty_over_one']:.2f} (limit 3)")


if __name__ == "__main__":
    main()
