"""The recorded run of the real vLLM that replay is tested on, with everything that one forward pass of the target gives."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_lib.drafter import checkpoint
from eagle3_lib.targets import capture
from eagle3_lib.verdict import changes, hypotheses, replay

RECORDED = Path(__file__).parents[1] / "data" / "vllm_cpu_replay.json"


@pytest.fixture(scope="session")
def recorded(target):
    """vLLM 0.32 on a CPU, float32, greedy, K = 4, 12 prompts; the record's origin is in docs/faults.md."""
    record = json.loads(RECORDED.read_text())
    drafter = checkpoint.load_for("drafters/smollm2-135m-eagle3", "SmolLM2", target)
    setups = hypotheses.hypotheses(drafter, changes.TargetParts.of(target))
    requests = [(request["prompt_ids"], request["output_ids"]) for request in record["requests"]]
    texts = [prompt + output for prompt, output in requests]
    features = list(capture.capture(target, texts, drafter.config.boundaries, also=hypotheses.extra_streams(setups)))
    laid, steps = hypotheses.texts_of(requests, features), record["num_speculative_tokens"]
    few = slice(1, 6)  # enough requests for a verdict
    correct_counts = replay.counts_at(setups[changes.HEALTHY], laid, replay.all_slots(laid), steps)
    return SimpleNamespace(
        record=record,
        few=hypotheses.texts_of(requests[few], features[few]),
        correct_counts=correct_counts,
        few_correct_counts=correct_counts[few],
        steps=steps,
        drafter=drafter,
        setups=setups,
        features=features,
        texts=laid,
        rounds=[request["per_step_accepted"] for request in record["requests"]],
    )
