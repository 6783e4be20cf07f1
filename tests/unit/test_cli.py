"""The commands on real parts: the base drafter, the recorded rounds of the real vLLM, a published run's measurements."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.models import OptionInfo
from typer.testing import CliRunner

from eagle3_lib import cli
from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import shims
from eagle3_lib.paths import ROOT
from eagle3_lib.reports import publish
from eagle3_lib.targets.targets import SMOLLM2
from eagle3_lib.verdict import faults

BASE = "drafters/smollm2-135m-eagle3"
DATA = Path(__file__).parents[1] / "data"
RECORDED = DATA / "vllm_cpu_replay.json"
PUBLISHED = ROOT / "reports" / "quickstart"
COMMANDS = ("run", "plan", "publish", "diagnose", "audit", "export", "shim", "catalogue")


def eagle3(*words, code: int = 0):
    """A command called as from a shell; its exit code is checked."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words], prog_name="eagle3")
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def script(*words) -> subprocess.CompletedProcess:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "eagle3_lib.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def benchmark(tmp_path):
    """A folder with the benchmark.json that somebody else would write: three requests of the record."""
    record = json.loads(RECORDED.read_text())
    requests = [
        {
            "id": f"prompt {index}",
            "prompt_ids": request["prompt_ids"],
            "output_ids": request["output_ids"],
            "accepted": request["per_step_accepted"],
        }
        for index, request in enumerate(record["requests"][1:4])
    ]
    told = {"mode": "base", "target": SMOLLM2, "positions": record["num_speculative_tokens"], "requests": requests}
    folder = tmp_path / "benchmark"
    folder.mkdir()
    (folder / "benchmark.json").write_text(json.dumps(told | {"engine": "vllm"}))
    return folder


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_loads_no_torch():
    code = """
import sys
from eagle3_lib import cli
sys.argv = ["eagle3", "--help"]
try:
    cli.main()
except SystemExit as done:
    assert not done.code
assert not {"torch", "transformers", "snakemake", "pandas"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"^  {command} ", done.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_is_read_and_written_and_gives_an_example(command):
    told = eagle3(command, "--help").stdout
    assert all(word in told for word in ("Reads  ", "Writes  ", "Example", f"\n      eagle3 {command}"))


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_whose_metavar_is_its_name_is_named(command):
    """typer 0.27 takes such a metavar for the option itself: `--URL`."""
    for name, parameter in inspect.signature(getattr(cli, command)).parameters.items():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                assert option.default == f"--{name}", "the first positional argument of an Option in Annotated"


def test_run_passes_its_words_on_to_snakemake():
    done = script("run", "quickstart", "-n", "--forceall")
    assert done.returncode == 0, done.stderr
    assert "This was a dry-run" in done.stdout + done.stderr


def test_run_keeps_the_words_as_they_are(monkeypatch):
    called = []
    monkeypatch.setattr(cli.os, "execv", lambda path, words: called.append((path, words)))
    words = ["runs/quickstart/train/manifest.json", "-n", "--profile", "workflow/profiles/slurm", "--", "--help"]
    eagle3("run", "quickstart", *words)
    assert called == [(sys.executable, [sys.executable, str(ROOT / "workflow" / "run.py"), "quickstart", *words])]


@pytest.mark.slow
def test_plan_of_the_quickstart_by_name_and_by_path(target_folder):
    told = eagle3("plan", "quickstart").stdout
    assert "Engine arguments" in told and "captures [2, 15, 27]" in told
    by_path = eagle3("plan", ROOT / "params" / "quickstart.yaml").stdout
    arguments = "Engine arguments"  # above them stands how much of the disk is free at the moment
    assert by_path.partition(arguments)[2] == told.partition(arguments)[2]


def test_publish_takes_a_folder_and_harmless_texts(monkeypatch):
    called = []
    monkeypatch.setattr(publish, "run", lambda *given: called.append(given) or ROOT / "pages" / "mine" / "index.html")
    told = eagle3("publish", "mine", "--to", "pages", "--allow", "/home/ann", "--allow", "ann").stdout
    assert told.endswith("pages/mine/index.html\n") and called == [("mine", "pages", ("/home/ann", "ann"), False)]
    eagle3("publish", "mine")
    assert called[1] == ("mine", "reports", (), False)


@pytest.mark.slow
def test_an_error_is_one_line_on_stderr():
    result = eagle3("plan", "nobody", code=1)
    assert result.stdout == "" and result.stderr.startswith("eagle3: params/nobody.yaml: no such params file")
    assert result.stderr.count("\n") == 1
    done = script("publish", "nobody")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "eagle3: runs/nobody: found no executed 09_diagnose; run the workflow first\n"


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.slow
def test_diagnose_a_benchmark_of_anybodys(benchmark, tmp_path, target_folder):
    words = ["--benchmark", benchmark, "--drafter", BASE, "--target", SMOLLM2]
    told = eagle3("diagnose", *words, "--out", tmp_path / "out").stdout
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())["verdict"]
    assert f"vllm  {verdict['kind']}: smollm2-135m-eagle3: " in told and verdict["sentence"] in told
    assert verdict["kind"] == "healthy"
    assert (tmp_path / "out" / "replay.json").is_file()
    refused = eagle3("diagnose", *words[:-1], "models/other", code=4)
    assert f"target: found '{SMOLLM2}', expected 'models/other'" in refused.stderr


def test_diagnose_takes_one_of_four(benchmark):
    expected = "expected one of RUN, --url, --benchmark, --metrics"
    assert f"found none, {expected}" in flat(eagle3("diagnose", code=4).stderr)
    assert f"found RUN and --url, {expected}" in flat(eagle3("diagnose", "quickstart", "--url", "x", code=4).stderr)
    assert "--benchmark needs --drafter and --target" in flat(
        eagle3("diagnose", "--benchmark", benchmark, code=4).stderr
    )
    assert "go without RUN" in flat(eagle3("diagnose", "quickstart", "--drafter", BASE, code=4).stderr)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--url", "ftp://host"], "expected http://HOST:PORT"),
        (
            ["--url", "http://127.0.0.1:9", "--api-key-env", "NOT_SET_HERE"],
            "found no environment variable NOT_SET_HERE",
        ),
        (["--url", "http://127.0.0.1:9", "--header-env", "X-Team"], "expected HEADER=VARIABLE"),
        (["--metrics", "README.md"], "found none of the known formats"),
        (["--metrics", "nowhere.txt"], "nowhere.txt"),
        (["--an-option"], "No such option"),
    ],
)
def test_an_error_of_diagnose_is_no_verdict(words, said):
    both = ["--drafter", BASE, "--target", SMOLLM2] if "--url" in words else []
    assert said in flat(eagle3("diagnose", *words, *both, code=4).stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnos"], "No such command 'diagnos'. Did you mean 'diagnose'?"),
        (["--no-such-option"], "No such option: --no-such-option"),
        (["--no-such-option", "diagnose"], "No such option: --no-such-option"),
        (["audit", BASE, "--target", SMOLLM2, "--versoin", "0.23.0"], "No such option: --versoin"),
        (["audit", BASE], "Missing option '--target'"),
        (["export", BASE, "--engine", "tgi", "--target", SMOLLM2, "--out", "x"], "'tgi' is not one of"),
        (["plan"], "Missing argument 'NAME'"),
        (["catalogue", "more"], "Got unexpected extra argument"),
    ],
)
def test_a_wrong_command_line_ends_with_4_for_every_command(words, said):
    """2, which Typer has for it, is an engine fault for whoever runs `diagnose` in CI."""
    assert said in flat(eagle3(*words, code=4).stderr)


@pytest.mark.slow
def test_a_mistyped_command_ends_the_script_with_4():
    assert script("diagnos", "quickstart").returncode == 4
    assert script("diagnose", "--no-such-option").returncode == 4
    assert script("--help").returncode == 0


def test_an_unforeseen_error_of_diagnose_is_no_verdict(monkeypatch):
    def fails(*_):
        raise KeyError("something")

    monkeypatch.setattr(cli, "_diagnose_metrics", fails)
    assert "KeyError: 'something'" in eagle3("diagnose", "--metrics", "x", code=4).stderr


def test_diagnose_metrics_of_another_tool():
    """AIPerf's record of a real run of the base drafter: its mean length with an interval, against a gate."""
    file = DATA / "records" / "aiperf" / "profile_export.jsonl"
    told = flat(eagle3("diagnose", "--metrics", file, "--expect-length", "1.2", code=3).stdout)
    assert "cannot tell" in told and "1.46 tokens a round" in told and "met: a mean acceptance length of 1.2" in told
    assert "K = 4" in told and "Exit code 3" in told


def run_in(folder: Path) -> Path:
    """A params file of a run that lies in ``folder``: the quickstart, and a drafter that was not measured."""
    replay = {
        "benchmark": f"{folder}/benchmark/{{engine}}/{{name}}",
        "plain": f"{folder}/benchmark/{{engine}}/plain",
        "out": f"{folder}/replay/{{engine}}/{{name}}",
    }
    sections = {
        "run": "cli_test",
        "drafters": {"base": BASE, "later": "runs/{run}/train/drafter"},
        "replay": replay,
        "diagnose": {"folder": str(folder), "out": f"{folder}/diagnose"},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_diagnose_a_run_that_has_measured_nothing(tmp_path):
    told = eagle3("diagnose", run_in(tmp_path), code=4).stderr
    assert "found no benchmark.json of drafters base, later in engines vllm" in told


@pytest.mark.slow
def test_diagnose_a_run_of_which_only_a_drafter_was_measured(benchmark, tmp_path, target_folder):
    (tmp_path / "benchmark" / "vllm" / "base").mkdir(parents=True)
    shutil.move(benchmark / "benchmark.json", tmp_path / "benchmark" / "vllm" / "base")
    told = eagle3("diagnose", run_in(tmp_path)).stdout
    assert told.startswith("vllm  healthy: base: ")
    for line in (
        "vllm, plain: stage 07 has not run",
        "vllm, later: stage 08 has not run",
        "profile: stage 02 has not run",
    ):
        assert f"not in the report: {line}\n" in told
    report = json.loads((tmp_path / "diagnose" / "report.json").read_text())
    assert [verdict["kind"] for verdict in report["engines"]["vllm"]["verdicts"]] == ["healthy"]
    assert report["engines"]["vllm"]["speedup"] == {} and report["preflight"] is None


@pytest.mark.slow
def test_diagnose_a_run_with_what_the_quickstart_measured(tmp_path, target_folder):
    """Stages 08 and 09 on published measurements of a few requests: what is printed is the report's verdict."""
    published = json.loads((PUBLISHED / "report.json").read_text())
    for mode in ("plain", "ngram", "base"):
        measured = json.loads((PUBLISHED / "data" / "benchmark" / "vllm" / mode / "benchmark.json").read_text())
        folder = tmp_path / "benchmark" / "vllm" / mode
        folder.mkdir(parents=True)
        few = {"requests": measured["requests"][:6]}
        (folder / "benchmark.json").write_text(json.dumps(measured | few | {"schema": 2}))
    of_stage = {"git": {}, "seconds": 1.0, "started": "2026-01-01T00:00:00+00:00"}
    for stage, notes in (("train", "training"), ("generate", "generated"), ("extract", "extracted")):
        (tmp_path / stage).mkdir()
        manifest = of_stage | {"stage": stage, "params": {"out": stage}, "notes": published[notes]}
        (tmp_path / stage / "manifest.json").write_text(json.dumps(manifest))
    found = {f"{stage}/{stage}.json": published[stage] for stage in ("profile", "preflight")}
    found |= {"extract/coverage.json": published["coverage"], "audit/base/audit.json": published["audit"]["base"]}
    for name, values in found.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    told = eagle3("diagnose", run_in(tmp_path), code=3).stdout  # not enough data
    report = json.loads((tmp_path / "diagnose" / "report.json").read_text())
    (verdict,) = report["engines"]["vllm"]["verdicts"]
    assert told.startswith(f"vllm  {verdict['kind']}: {verdict['sentence']}\n") and "report: report.json" in told
    assert report["run"] == "cli_test" and list(report["engines"]["vllm"]["cost"]) == ["base"]
    assert not (ROOT / "runs" / "cli_test").exists()


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_audit_of_the_base_drafter(tmp_path, target_folder):
    told = eagle3("audit", BASE, "--target", SMOLLM2, "--version", "0.23.0", "--out", tmp_path).stdout
    assert told.startswith(f"{BASE} in vllm 0.23.0: note; boundaries guessed [2, 15, 27], captured [2, 15, 27]\n")
    assert "\nnote    boundaries: captures boundaries [2, 15, 27]" in told and "sglang" not in told
    assert json.loads((tmp_path / "audit.json").read_text())["worst"] == "note"


def test_audit_that_finds_wrong_ends_with_1_and_tells_every_version(tmp_path, target_folder):
    folder = tmp_path / "drafter"
    shutil.copytree(ROOT / BASE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_config": {checkpoint.IDS: [4, 14, 24]}}))
    words = ["audit", folder, "--target", SMOLLM2, "--engine", "vllm", "--version", "0.16.0", "--matrix"]
    told = eagle3(*words, code=1).stdout
    assert re.search(r"^wrong   boundaries: captures boundaries \[2, 15, 27\]", told, re.MULTILINE)
    assert re.search(r"^sglang 0\.5\.16 .*\[5, 15, 25\]", told, re.MULTILINE)


def test_export_writes_what_can_be_loaded_and_nothing_over_it(tmp_path, target_folder):
    words = ["export", BASE, "--engine", "sglang", "--version", "0.5.16", "--target", SMOLLM2, "--out", tmp_path / "o"]
    assert "read as: tensor names midlayer.* -> layers.0.*" in eagle3(*words).stdout
    assert checkpoint.load(tmp_path / "o").drafter.config.boundaries == (2, 15, 27)
    stored, ours = (checkpoint.read_tensor(folder, "fc.weight") for folder in (ROOT / BASE, tmp_path / "o"))
    assert ours.dtype == stored.dtype and bool((ours == stored).all())
    assert "found a folder with files in it" in eagle3(*words, code=1).stderr


def test_shim_writes_the_fault(tmp_path, target_folder):
    shifted, patched = tmp_path / "shifted", tmp_path / "patched"
    eagle3("shim", BASE, "boundaries +1", "--target", SMOLLM2, "--out", shifted)
    assert checkpoint.read_config(shifted)[checkpoint.IDS] == [3, 16, 28]
    told = eagle3("shim", BASE, "token shift", "--target", SMOLLM2, "--out", patched).stdout
    assert "--worker-extension-cls eagle3_lib.engines.inside.broken.token_shift" in told
    assert checkpoint.read_config(patched) == checkpoint.read_config(ROOT / BASE)
    assert "found 'no such'" in eagle3("shim", BASE, "no such", "--target", SMOLLM2, "--out", shifted, code=1).stderr


def test_shim_lists_the_faults():
    lines = eagle3("shim", "--list").stdout.splitlines()
    assert len(lines) == len(shims.INJECTIONS)
    assert {"copy   none", "shim   boundaries +1"} <= set(lines)
    assert "patch  token shift  --worker-extension-cls eagle3_lib.engines.inside.broken.token_shift" in lines


# ------------------------------------------------------------------------------------------------------------ catalogue


def test_catalogue_writes_its_section_and_nothing_else(tmp_path):
    assert eagle3("catalogue").stdout.strip() == faults.markdown().strip()
    page, original = tmp_path / "faults.md", (ROOT / "docs" / "faults.md").read_text()
    page.write_text(original.replace("### token shift", "### shifted tokens") + "\n## Later\n\nmore\n")
    eagle3("catalogue", "--write", page)
    assert page.read_text() == original + "\n## Later\n\nmore\n"
    page.write_text("# Another page\n")
    told = eagle3("catalogue", "--write", page, code=1).stderr
    assert told == "eagle3: faults.md: found no heading '## The catalogue', expected one to write under\n"
