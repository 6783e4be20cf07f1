"""The whole pipeline on the real engine: killed, gone on with, and its report's numbers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from eagle3_lib.paths import ROOT

RUN = ROOT / "runs" / "test-tiny"
REPORT = RUN / "pages"
COMMAND = [sys.executable, "workflow/run.py", "tests/e2e/tiny.yaml"]


def left_over():
    """Processes of this run: its workflow, notebooks, kernels' servers."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            ours = "test-tiny" in words or "tiny.yaml" in words or words.startswith("VLLM::")
            if ours and "pytest" not in words and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def files_of_reports():
    """The published files and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (ROOT / "reports").rglob("*")}


def start(log):
    return subprocess.Popen(COMMAND, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Kill the pipeline twice, in a stage that serves and in one that trains, then let it end."""
    shutil.rmtree(RUN, ignore_errors=True)
    published = files_of_reports()
    log = tmp_path_factory.mktemp("log") / "log.txt"
    others = {p.pid for p in left_over()}
    finished = {}
    with log.open("w") as sink:
        for stage, sign in (("generate", "generate/server.log"), ("train", "notebooks/05_train_drafter.ipynb")):
            process = start(sink)
            wait_for(lambda sign=sign, process=process: (RUN / sign).exists() or process.poll() is not None, 1200)
            time.sleep(5)
            process.kill()
            process.wait()
            wait_for(lambda: not {p.pid for p in left_over()} - others, 12)
            assert not (RUN / stage / "manifest.json").exists()
            finished = {path: path.stat().st_mtime_ns for path in RUN.rglob("manifest.json")}
        assert {path.parent.name for path in finished} >= {"preflight", "generate", "extract"}
        process = start(sink)
        code = process.wait(1200)
    assert code == 0, log.read_text()[-3000:]
    assert files_of_reports() == published, "only `make publish` changes what is published"
    yield {"log": log.read_text(), "finished": finished, "report": json.loads((REPORT / "report.json").read_text())}
    shutil.rmtree(RUN, ignore_errors=True)


def test_it_says_where_the_report_is(run):
    assert run["log"].rstrip().endswith("runs/test-tiny/pages/index.html")


def test_no_finished_stage_ran_again(run):
    for path, written in run["finished"].items():
        assert path.stat().st_mtime_ns == written, path
    assert not left_over()


def test_engine_and_replay_agree_and_tokens_are_right(run):
    result = run["report"]["engines"]["vllm"]
    for name in ("base", "finetuned"):
        agreement = result["drafters"][name]["agreement"]
        assert agreement["rounds"] > 20
        assert agreement["equal"] + agreement["cut"] == agreement["rounds"]
        assert agreement["equal"] >= 0.9 * agreement["rounds"]  # texts of 24 tokens: more last rounds than usual
        assert agreement["tokens_not_greedy"] == 0
    assert set(result["tokens"]["requests_differing_from_plain"].values()) == {0}
    assert result["throughput"]["plain"]["tokens_per_s"]["value"] > 0
    assert set(result["speedup"]) == {"ngram", "base", "finetuned"}


def test_the_report_is_self_contained(run):
    page = (REPORT / "index.html").read_text()
    assert len(list(REPORT.glob("*.html"))) == 14  # nine stages; audit and replay twice, benchmark four times
    fetched = re.findall(r"(?:src|href)=[\"'](https?:[^\"']+)", page)
    assert not [url for url in fetched if url.endswith((".js", ".css"))] and "<script src" not in page
    # curves, lengths and rates, losses, hypotheses of two drafters, throughput, latency, step time, break-even, profile, communication,
    # answers, vocabulary, training
    assert page.count('role="img"') == 14
    assert str(ROOT) not in page and 'aria-label="Line charts. base engine position 1' in page


def test_one_notebook_alone_by_papermill(run, tmp_path):
    values = f"{{run: test-tiny, epochs: 1, out: {tmp_path}/again}}"
    command = ["-m", "papermill", "notebooks/05_train_drafter.ipynb", str(tmp_path / "out.ipynb"), "-y", values]
    done = subprocess.run([sys.executable, *command, "--no-progress-bar"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "again" / "drafter" / "model.safetensors").is_file()
    refused = subprocess.run(
        [sys.executable, *command[:4], "-y", "{run: test-tiny, eopchs: 1}"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode != 0 and "unknown parameter eopchs" in refused.stderr


def test_only_one_process_works_on_a_run(run):
    import fcntl

    with (RUN / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([*COMMAND, "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "is being executed by another process" in done.stderr


def test_ctrl_c_ends_everything():
    process = subprocess.Popen([*COMMAND, "-n"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
