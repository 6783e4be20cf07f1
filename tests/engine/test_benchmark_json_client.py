"""The client of docs/benchmark_json.md against the real vLLM: what it writes is accepted, and is what the engine counted."""

import json
import re
import subprocess
import sys

import pytest

from eagle3_lib.engines import base, measured
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import ROOT

DRAFTER = "drafters/smollm2-135m-eagle3"
PROMPTS = [
    "Name three animals that live in the sea.",
    "Why is the sky blue?",
    "What is a list in Python?",
    "Count to five.",
]


@pytest.mark.slow
def test_the_client_of_the_page(target_folder, tmp_path):
    (client,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/benchmark_json.md").read_text(), re.DOTALL)
    (tmp_path / "client.py").write_text(client)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    params = BenchmarkParams(mode="base", drafter=DRAFTER, max_model_len=256)
    with vllm.serve(params, target_folder, tmp_path / "server.log", base.Speculation("base", DRAFTER, 4)) as server:
        before = vllm.counters(server)
        words = [server.url, params.target, "4", str(tmp_path / "prompts.jsonl"), str(tmp_path)]
        subprocess.run([sys.executable, str(tmp_path / "client.py"), *words], check=True, timeout=300)
        after = vllm.counters(server)
    bench = measured.read_rounds(tmp_path).bench
    assert bench["evidence"] == "told" and bench["positions"] == 4 and len(bench["requests"]) == len(PROMPTS)
    rounds = sum(len(request["accepted"]) for request in bench["requests"])
    assert rounds == after["rounds"] - before["rounds"] > 40
    assert sum(sum(request["accepted"]) for request in bench["requests"]) == sum(after["accepted"]) - sum(
        before["accepted"]
    )
    assert sum(sum(request["drafted"]) for request in bench["requests"]) == after["drafted"] - before["drafted"]
    for request in bench["requests"]:
        assert sum(request["chunks"]) == len(request["output_ids"]) and request["prompt_ids"]
