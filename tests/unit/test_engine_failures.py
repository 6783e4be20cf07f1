"""Engines that hang, end or never come up: one clear error each, no process left, finished repeats kept."""

import contextlib
import json
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from eagle3_lib.engines import (
    base,
    clean_room,  # CHECK
)
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import ROOT
from eagle3_lib.stages import benchmark


@contextlib.contextmanager
def stub(fault, answers, log, timeout_s=20):
    port = base.pick_port(0)
    command = [sys.executable, str(ROOT / "tests/stub_engine.py"), str(port), fault, str(answers)]
    server = base.Server(f"http://127.0.0.1:{port}", "target", "vllm", "stub", stall_s=1)
    try:
        with base.launch(command, {}, log, server, timeout_s) as running:
            yield running
    finally:
        time.sleep(0.2)
        left = [p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or [])]
        assert not [p for p in left if "stub_engine" in " ".join(p.info["cmdline"])]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_is_told_from_a_slow_answer(tmp_path, stream):
    with stub("hang", 2, tmp_path / "server.log") as server:
        assert base.complete(server, [1], 10, stream=stream).output_ids == list(range(10))
        started = time.monotonic()
        with pytest.raises(
            Eagle3Error, match="hangs: a request got no token for 1 s .* while /health answers 200"
        ) as error:
            base.complete(server, [1], 10, stream=stream)
        assert time.monotonic() - started < 15 and "answer 3: hang" in str(error.value)


def test_a_servers_processes_carry_its_mark(tmp_path):
    with stub("hang", 9, tmp_path / "server.log") as server:
        supervisor = psutil.Process(server.group)
        marks = {process.environ()[clean_room.MARK] for process in (supervisor, *supervisor.children(recursive=True))}
        assert len(marks) == 1 and marks != {""}


def test_an_engine_that_dies_in_the_run(tmp_path):
    with stub("die", 1, tmp_path / "server.log") as server, pytest.raises(Eagle3Error, match="ended while") as error:
        base.complete(server, [1], 10)
    assert "answer 2: die" in str(error.value)


@pytest.mark.slow
def test_an_engine_that_needs_longer_than_its_deadline(tmp_path):
    with (
        pytest.raises(Eagle3Error, match="has not answered in start_timeout_s"),
        stub("load", 0, tmp_path / "server.log", timeout_s=2),
    ):
        pass


@pytest.mark.slow
def test_finished_repeats_outlive_an_engine_that_dies(tmp_path, monkeypatch):
    """Ten answers a request, two prompts, three repeats: the first engine ends in the second repeat."""
    prompts = [SimpleNamespace(id=name, split="held_out", prompt_ids=[1]) for name in "ab"]
    monkeypatch.setattr(benchmark, "read_answers", lambda folder: prompts)
    monkeypatch.setattr(benchmark, "stage", lambda *_: contextlib.nullcontext({}))
    monkeypatch.setattr(benchmark, "folder_hash", lambda path: "0")
    monkeypatch.setattr(benchmark.targets, "resolve", lambda target: tmp_path)
    monkeypatch.setattr(benchmark.serving, "counters", lambda server: None)
    params = BenchmarkParams(out=str(tmp_path), timed_prompts=2, timed_tokens=2, max_tokens=10)
    first = 1 + 2 + 1 + 2 + 1  # readiness, acceptance, warm-up, one repeat, half of the next
    engine = {"answers": first}
    monkeypatch.setattr(benchmark.launch, "serve", lambda *_: stub("die", engine["answers"], tmp_path / "server.log"))
    with pytest.raises(Eagle3Error, match="ended while"):
        benchmark.run(params)
    kept = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()][1:]
    assert [list(row) for row in kept] == [["request"], ["request"], ["wave", "timed"]]
    engine["answers"] = 99
    result = benchmark.run(params)
    assert result["waves"][0] == kept[2]["wave"] and [wave["repeat"] for wave in result["waves"]] == [0, 1, 2]
    assert [request["id"] for request in result["requests"]] == ["a", "b"] and len(result["timed"]) == 6
    assert not (tmp_path / "finished.jsonl").exists()


def test_the_first_error_of_a_long_log_is_told(tmp_path):
    """As vLLM 0.32 ends that cannot divide a drafter's 8192 tokens over three ranks."""
    cause = "(Worker_TP0 pid=22003) ERROR 11-29 23:45:11 [multiproc_executor.py:953] AssertionError: 8192 is not divisible by 3"
    lines = [
        "WARNING [system_utils.py:255] Found ulimit of 20000, which can cause errors like `OSError: [Errno 24] Too many`"
    ]
    lines += ["Traceback (most recent call last):", cause, *["  frames of the API server"] * 40]
    lines += ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"]
    (tmp_path / "server.log").write_text("\n".join(lines))
    told = base.log_tail(tmp_path / "server.log").splitlines()
    assert told[:2] == ["First error in server.log:", f"  {cause}"] and told[-1] == f"  {lines[-1]}"
    (tmp_path / "server.log").write_text("\n".join(lines[-20:]))
    assert base.log_tail(tmp_path / "server.log").splitlines()[0] == "Last lines of server.log:"
