"""Does the real vLLM emit what the target would have emitted: plain and with EAGLE-3, greedy and at temperature 0.8?

    python benchmarks/losslessness.py

Each of the four runs serves the recorded prompts on a CPU in float32; runs that exist are kept. Greedy tokens must be the
target's first choice (or a near tie); sampled ones are judged by eagle3_lib/verdict/lossless.py. Also, at each temperature: how
many rounds equal the replay, which needs correct rejection sampling where the temperature is above 0. Writes
benchmarks/results/losslessness.json.
"""

import datetime
import json

import torch
from fault_matrix import DRAFTER, POSITIONS, TARGET, run_engine, target

from eagle3_lib.drafter import checkpoint
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import capture
from eagle3_lib.verdict import lossless, replay

TEMPERATURE = 0.8
RUNS = {
    "plain, greedy": {"plain": True},
    "eagle3, greedy": {},
    "plain, temperature 0.8": {"plain": True, "temperature": TEMPERATURE, "seed": 0},
    "eagle3, temperature 0.8": {"temperature": TEMPERATURE, "seed": 0},
}


@torch.no_grad()
def judged(record: dict, drafter) -> dict:
    requests, temperature = record["requests"], record["temperature"]
    texts = [request["prompt_ids"] + request["output_ids"] for request in requests]
    emitted, greedy, rows = [], [], []
    captured = capture.capture(target(), texts, drafter.config.boundaries)
    for request, text, features in zip(requests, texts, captured, strict=True):
        start, rounds = len(request["prompt_ids"]), request["per_step_accepted"]
        logits = target().lm_head(features.last_hidden[start - 1 : -1])
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), POSITIONS)[0]
        at_tokens = proposed[start - 2 :][: len(request["output_ids"])]  # row i: a round that begins with token i
        if temperature:
            emitted.append(lossless.emission(logits, request["output_ids"], rounds, at_tokens, temperature))
        else:
            greedy.append(lossless.greedy(logits, torch.tensor(request["output_ids"])))
        rows += rounds.compare(rounds, replay.accepted_at(proposed, text), start, POSITIONS)
    whole = [row for row in rows if not row["cut"]]
    result = {"temperature": temperature, "rounds": len(rows), "uncut_rounds": len(whole)}
    result["rounds_equal_to_replay"] = sum(row["engine"] == row["replay"] for row in whole)
    if temperature:
        return result | lossless.judge(lossless.Emission.join(emitted), temperature)
    totals = {name: sum(part[name] for part in greedy) for name in ("tokens", "not_first_choice", "near_ties")}
    passed = totals["not_first_choice"] == totals["near_ties"]
    return result | totals | {"largest_margin": max(part["largest_margin"] for part in greedy), "lossless": passed}


def main() -> None:
    drafter = checkpoint.load_for(DRAFTER, TARGET, target())
    runs = {}
    for name, settings in RUNS.items():
        runs[name] = judged(json.loads(run_engine(name, "none", **settings).read_text()), drafter)
        print(name, json.dumps(runs[name]), flush=True)
    result = {
        "command": "python benchmarks/losslessness.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "runs": runs,
    }
    write_json(project_path("benchmarks/results/losslessness.json"), result)


if __name__ == "__main__":
    main()
