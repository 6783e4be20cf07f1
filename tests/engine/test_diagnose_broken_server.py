"""Stage 00 on a real vLLM that is broken, or whose drafter has a wrong config."""

import json
import shutil

import httpx
import pytest
from real_vllm import DRAFTER, asked, speculating, started

from eagle3_lib.engines.inside import broken
from eagle3_lib.engines.vllm.server import DETAILED_METRICS
from eagle3_lib.stages import counters, server

pytestmark = pytest.mark.slow


def test_a_broken_server_is_named(target_folder, tmp_path):
    extension = f"{broken.__name__}.cliff_after_step_0"
    options = [*speculating(DRAFTER), DETAILED_METRICS, "detailed", "--worker-extension-cls", extension]
    with started(target_folder, tmp_path / "server.log", *options) as url:
        card = server.run(asked(url, tmp_path / "out"))
        metrics = tmp_path / "metrics.txt"
        metrics.write_text(httpx.get(f"{url}/metrics").text)
    assert (card.exit_code, card.grade) == (2, "told") and "cliff after step 0" in card.headline, card.text()
    assert card.mended["mean_length"] > card.now["mean_length"] + 0.1
    assert counters.run(str(metrics)).kind == "cannot tell", (
        "a hundred rounds that reach the cliff are too few for a sign"
    )


def test_a_wrong_config_is_told_with_the_field(target_folder, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(DRAFTER, wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["norm_output"] = True  # the drafter was trained without
    (wrong / "config.json").write_text(json.dumps(config))
    with started(target_folder, tmp_path / "server.log", *speculating(wrong)) as url:
        card = server.run(asked(url, tmp_path / "out", drafter=str(wrong)))
    assert card.exit_code == 1 and card.kind == "config does not describe the drafter", card.text()
    assert "norm_output should be False" in card.headline
    assert card.mended["mean_length"] > card.now["mean_length"] + 0.1


def test_a_fault_that_shows_after_a_prefix_cache_hit_only_is_named_by_the_condition(target_folder, tmp_path):
    extension = f"{broken.__name__}.cached_prefix_spoiled"
    options = [*speculating(DRAFTER), DETAILED_METRICS, "detailed", "--worker-extension-cls", extension]
    with started(target_folder, tmp_path / "server.log", *options, "--enable-prompt-tokens-details") as url:
        card = server.run(asked(url, tmp_path / "out", max_prompts=4, max_tokens=40, states=True))
    requests = json.loads((tmp_path / "out" / "benchmark.json").read_text())["requests"]
    cached = {request["id"]: request["cached_tokens"] for request in requests}
    assert sum(cached.values()) and all(name.endswith("warm") for name, tokens in cached.items() if tokens)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())["verdict"]
    assert card.exit_code == 2 and "only after a prefix-cache hit" in card.headline, card.text()
    assert verdict["where"]["outside"][0] == 0 and verdict["where"]["inside"][0] >= 10
    assert "--no-enable-prefix-caching" in card.next
