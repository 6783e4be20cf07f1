"""The real vLLM's extract_hidden_states beside transformers, on a CPU."""

from dataclasses import replace

import pytest
import torch

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features import parity
from eagle3_lib.features.backends import vllm_backend
from eagle3_lib.features.wanted import Wanted
from eagle3_lib.targets import capture
from eagle3_lib.targets.targets import render

BOUNDARIES, LAYERS = (2, 15, 27), 30
QUESTIONS = ["Name three animals that live in the sea.", "Why is the sky blue? Answer in one sentence."]


def test_vllm_and_transformers_agree_and_an_off_by_one_is_named(target, target_folder, tokenizer, tmp_path):
    texts = [render(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    draft_ids = torch.arange(0, 49_152, 6)
    shifted = tuple(k + 1 for k in BOUNDARIES)
    wanted = Wanted(target_folder, (*BOUNDARIES, *shifted), draft_ids, max_model_len=256, log=tmp_path / "log")
    with vllm_backend(replace(wanted, engine_options={"max_num_seqs": 4})) as features:
        found = list(features(texts))
    whole = list(capture.capture(target, texts, range(LAYERS + 1), draft_ids=draft_ids))
    every = dict(enumerate(torch.cat([f.fused for f in whole]).unflatten(-1, (LAYERS + 1, -1)).unbind(-2)))
    streams = torch.cat([f.fused for f in found]).unflatten(-1, (6, -1)).unbind(-2)

    right = parity.compare(dict(zip(BOUNDARIES, streams[:3], strict=True)), every, "float32")
    result = parity.demand(right, "vllm", "transformers")
    assert all(row["relative_error"] < 1e-4 and row["cosine"] > 0.9999 for row in result["boundaries"])
    for ours, theirs in zip(found, whole, strict=True):
        assert torch.equal(ours.argmax, theirs.argmax)
        assert torch.allclose(ours.last_hidden, theirs.last_hidden, rtol=1e-3, atol=1e-2)
        assert torch.allclose(ours.draft_mass, theirs.draft_mass, atol=1e-3)

    late = parity.compare(dict(zip(BOUNDARIES, streams[3:], strict=True)), every, "float32")
    with pytest.raises(Eagle3Error, match=r"vllm holds there what transformers has at boundary 16: off by one"):
        parity.demand(late, "vllm", "transformers")
    early = {k: every[max(k - 1, 0)] for k in every}
    with pytest.raises(Eagle3Error, match=r"(?s)at boundary 16: off by one.*All are off by \+1"):
        parity.demand(parity.compare(dict(zip(BOUNDARIES, streams[:3], strict=True)), early, "float32"), "vllm", "it")
