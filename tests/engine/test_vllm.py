"""The real vLLM on this machine: rounds, tokens, and a clean end when a notebook's cell is interrupted."""

import time

import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel

from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import base, vllm
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture
from eagle3_lib.targets.targets import render
from eagle3_lib.verdict import acceptance, replay, rounds

DRAFTER = "drafters/smollm2-135m-eagle3"
QUESTIONS = ["Name three animals that live in the sea.", "Why is the sky blue?", "Write a short story about a fox."]
CELL = f"""
import time
from pathlib import Path
from eagle3_lib.targets import targets
from eagle3_lib.engines import base, vllm
from eagle3_lib.params import BenchmarkParams
params = BenchmarkParams(mode="base", drafter="{DRAFTER}", max_model_len=256)
with vllm.serve(params, targets.resolve(params.target), Path("LOG"), base.Speculation("base", params.drafter)) as server:
    print("SERVING", flush=True)
    time.sleep(300)
"""


def test_rounds_equal_the_replay_and_tokens_the_targets_own(target, target_folder, tokenizer, tmp_path):
    params = BenchmarkParams(mode="base", drafter=DRAFTER, max_model_len=256)
    prompts = [render(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    with vllm.serve(params, target_folder, tmp_path / "server.log", base.Speculation("base", DRAFTER, 4)) as server:
        answers = [base.complete(server, prompt, 48) for prompt in prompts]
        counted = vllm.counters(server)
        assert vllm.decode(server, prompts[0], tokens=5, batch=3) == 15
        with pytest.raises(Eagle3Error, match="failed a completion"):
            base.complete(server, [1] * 500, 8)  # longer than max_model_len
    drafter = checkpoint.load_for(DRAFTER, params.target, target)
    texts = [prompt + answer.output_ids for prompt, answer in zip(prompts, answers, strict=True)]
    rows = []
    for prompt, answer, text, features in zip(
        prompts, answers, texts, capture.capture(target, texts, drafter.config.boundaries), strict=True
    ):
        assert features.argmax[len(prompt) - 1 : -1].tolist() == answer.output_ids
        assert answer.drafted == [4] * len(answer.accepted) and 0 < answer.first_token_s < answer.seconds
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), 4)[0]
        rows += rounds.compare(answer.accepted, replay.accepted_at(proposed, text), len(prompt), 4)
    assert len(rows) > 40
    total = acceptance.request_counts([answer.accepted for answer in answers], 4).sum(0).tolist()
    assert counted == {"rounds": total[0], "drafted": 4 * total[0], "accepted": total[1:]}
    for answer in answers:  # one request at a time: a streamed chunk is a round; the limit may cut the last
        assert answer.rounds_from_chunks()[:-1] == answer.accepted[:-1]
    assert [row for row in rows if row["engine"] != row["replay"] and not row["cut"]] == []


def test_interrupting_a_cell_ends_its_server_within_ten_seconds(tmp_path):
    manager, client = start_new_kernel(cwd=str(ROOT))
    try:
        client.execute(CELL.replace("LOG", str(tmp_path / "server.log")))
        while True:
            message = client.get_iopub_msg(timeout=200)
            if "SERVING" in message["content"].get("text", ""):
                break
            assert message["msg_type"] != "error", message["content"]
        kernel = psutil.Process(manager.provisioner.process.pid)
        children = kernel.children(recursive=True)
        assert len(children) >= 3  # supervisor, API server, engine core
        manager.interrupt_kernel()
        started = time.monotonic()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive and time.monotonic() - started < 10
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_target_that_does_not_load_shows_the_engines_own_words(target_folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in target_folder.iterdir():
        if path.suffix != ".safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    with (
        pytest.raises(Eagle3Error) as error,
        vllm.serve(BenchmarkParams(max_model_len=256), broken, tmp_path / "server.log"),
    ):
        pass
    assert "while loading" in str(error.value) and "server.log" in str(error.value)
