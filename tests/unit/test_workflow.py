"""Results are never stale: what a rule depends on are its inputs and params, and a change runs again just what has it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import pytest

from eagle3_lib.paths import ROOT
from workflow import closure

MODULES = sorted(closure.graph().modules)
NOTEBOOKS = {
    rule: next((ROOT / "notebooks").glob(f"{number:02}_*.ipynb"))
    for number, rule in enumerate(
        ("preflight", "profile", "generate", "extract", "train", "audit", "benchmark", "replay", "diagnose"), 1
    )
}
# Where a module's name stands in a text for a reader.
TOLD = {("eagle3_lib.reports.leaks", "eagle3_lib.reports.publish")}


# --- the closure ------------------------------------------------------------------------------------------------------


def strings(tree):
    """The texts of a module that are no docstrings."""
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {id(n.body[0].value) for n in documented if n.body and isinstance(n.body[0], ast.Expr)}
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [node.value for node in constants if id(node) not in docstrings]


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["0", "1"])
def test_what_is_started_by_name_is_in_the_closure(variable, monkeypatch):
    monkeypatch.setenv(closure.SWITCH, variable)
    for module in MODULES:
        files = closure.of_modules([module])
        for named in closure.named_in(strings(ast.parse(closure.file_of(module).read_text()))):
            assert str(closure.file_of(named).relative_to(ROOT)) in files or (module, named) in TOLD, (module, named)
    plugin = "eagle3_lib/compat/vllm_plugin.py"
    assert (plugin in closure.of_modules(["eagle3_lib.stages.benchmark"])) == (variable == "1")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    started = {name for table in closure.STARTED_IF.values() for names in table.values() for name in names}
    assert {entry.partition(":")[0] for entry in entries.values()} == started


def test_the_tables_name_modules_that_exist():
    started = [*closure.STARTED.values(), *(names for t in closure.STARTED_IF.values() for names in t.values())]
    named = {*closure.STARTED, *closure.DATA, *(name for names in started for name in names)}
    assert named <= set(MODULES)


def test_every_data_file_belongs_to_a_module():
    read = {path for module in MODULES for path in closure.data_of(module)}
    there = {path for path in (ROOT / "eagle3_lib").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there if path.suffix != ".py"} == read


def test_arguments_of_an_engine_name_modules():
    words = ["['--worker-extension-cls', 'eagle3_lib.engines.inside.broken.cliff_after_step_0']"]
    assert closure.named_in(words) == ["eagle3_lib.engines.inside.broken"]
    assert closure.named_in(["eagle3_lib", "nothing"]) == []


def test_the_closure_is_quick():
    closure.graph.cache_clear()
    started = time.process_time()
    for notebook in NOTEBOOKS.values():
        closure.of_notebook(f"notebooks/{notebook.name}", figures=True)
    assert time.process_time() - started < 2  # 0.2 s on an idle core


IMPORTS = """
import ast, json, os, sys
import accelerate, IPython.display, matplotlib.pyplot, openai, pandas, prometheus_client, scipy.stats, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
for name, source in json.load(open(sys.argv[1])).items():
    if os.fork() == 0:
        exec(source)
        names = sorted(n for n in sys.modules if n.partition(".")[0] == "eagle3_lib")
        open(f"{sys.argv[2]}/{name}.json", "w").write(json.dumps(names))
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def imports_of(notebook):
    """The import statements of a notebook, as one program."""
    cells = json.loads(notebook.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    statements = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(node) for node in statements)


# --- the rules --------------------------------------------------------------------------------------------------------


class Project:
    """A copy of the project with a run of small made-up files, all of whose results are there and up to date."""

    def __init__(self, root):
        self.root = root
        for name in ("eagle3_lib", "workflow", "notebooks"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("target", "drafter"):
            (root / "models" / name).mkdir(parents=True)
            (root / "models" / name / "config.json").write_text("{}")
            (root / "models" / name / "model.safetensors").write_text("weights")
        (root / "version").write_text("vllm 0.32.0\n")
        python = root / "python"
        python.write_text(f"#!/bin/sh\ncat {root}/version\n")
        python.chmod(0o755)
        (root / "params").mkdir()
        (root / "params" / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        (root / "params" / "x.yaml").write_text(
            f"run: x\nengines: {{one: {{engine: vllm, engine_python: {python}}}, two: {{engine: vllm}}}}\n"
            "drafters: {given: models/drafter, own: 'runs/{run}/train/drafter'}\n"
            "shared: {target: models/target}\ngenerate: {prompts: params/prompts.jsonl}\n"
            + "".join(f"{stage}: {{drafter: models/drafter}}\n" for stage in ("preflight", "extract", "train"))
        )
        self.jobs = self.plan()
        for job in self.jobs:
            for path in job.output:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text("{}")
        self.run("--touch", "--forceall")

    def run(self, *options):
        env = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "workflow/run.py", "x", *options]
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    def plan(self):
        """The jobs that would run, each with its rule, inputs, outputs and why."""
        jobs = []
        for text in re.split(r"^rule ", self.run("-n"), flags=re.MULTILINE)[1:]:
            fields = dict(re.findall(r"^    (input|output|reason): (.*)$", text, re.MULTILINE))
            rule = text.partition(":")[0]
            paths = {name: fields.get(name, "").split(", ") for name in ("input", "output")}
            if rule != "all":
                jobs.append(SimpleNamespace(rule=rule, why=fields["reason"], **paths))
        return jobs

    def because_of(self, path, text):
        """The plan after a file got another content, which it has no longer afterwards."""
        file = self.root / path
        before = file.read_text()
        file.write_text(text(before))
        try:
            return self.plan()
        finally:
            file.write_text(before)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project") / "copy")


@pytest.mark.slow
def test_every_imported_module_is_an_input_of_the_rule(project, tmp_path):
    programs = tmp_path / "programs.json"
    programs.write_text(json.dumps({rule: imports_of(notebook) for rule, notebook in NOTEBOOKS.items()}))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORTS, str(programs), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for rule in NOTEBOOKS:
        imported = json.loads((tmp_path / f"{rule}.json").read_text())
        counted = [name for name in imported if rule == "diagnose" or not name.startswith(closure.DRAWING)]
        files = {str(closure.file_of(module).relative_to(ROOT)) for module in counted}
        jobs = [job for job in project.jobs if job.rule == rule]
        assert f"eagle3_lib/stages/{rule}.py" in files and jobs
        for job in jobs:
            assert files <= set(job.input), rule


def expected(jobs, changed):
    """The outputs of the jobs that have one of these files as an input, and of those that depend on them."""
    due = set(changed)
    while more := [job for job in jobs if due & set(job.input) and not set(job.output) <= due]:
        due |= {path for job in more for path in job.output}
    return due - set(changed)


def outputs(jobs):
    return {path for job in jobs for path in job.output}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, direct",
    [
        ("eagle3_lib/verdict/slices.py", {"replay", "diagnose", "pages"}),
        ("eagle3_lib/compat/audit_rules.yaml", {"audit", "extract"}),
        ("eagle3_lib/reports/template/style.css", {"pages"}),
        ("eagle3_lib/reports/plots.py", {"diagnose"}),
    ],
)
def test_a_changed_file_runs_again_just_the_stages_that_have_it(project, path, direct):
    planned = project.because_of(path, lambda text: f"{text}\n\n")
    assert {job.rule for job in project.jobs if path in job.input} == direct
    assert outputs(planned) == expected(project.jobs, [path])
    told = {job.rule for job in planned if "Updated input files" in job.why}
    assert told and told <= direct


def test_rounds_are_of_stage_08(project):
    assert "replay" in {job.rule for job in project.jobs if "eagle3_lib/verdict/rounds.py" in job.input}


@pytest.mark.slow
def test_what_is_touched_and_equal_runs_nothing_again(project):
    for path in ("models/target/model.safetensors", "models/drafter/config.json", "eagle3_lib/verdict/rounds.py"):
        (project.root / path).touch()
    assert project.plan() == []


def changed_params(planned):
    return {job.rule for job in planned if "Params have changed" in job.why}


@pytest.mark.slow
def test_replaced_weights_of_the_drafter_run_again_what_depends_on_them(project):
    planned = project.because_of("models/drafter/model.safetensors", lambda _: "others")
    assert {"preflight", "generate", "profile"}.isdisjoint(job.rule for job in planned)
    assert {"extract", "audit"} <= changed_params(planned)
    plain = [path for path in outputs(planned) if "/plain/" in path or "/ngram/" in path]
    assert plain == [] and "runs/x/replay/two/given/replay.json" in outputs(planned)


@pytest.mark.slow
def test_replaced_weights_of_the_target_run_again_everything(project):
    planned = project.because_of("models/target/model.safetensors", lambda _: "others")
    assert changed_params(planned) == {"preflight"}
    assert outputs(planned) == outputs(project.jobs)


@pytest.mark.slow
def test_an_upgraded_engine_runs_again_what_it_did(project):
    planned = project.because_of("version", lambda _: "vllm 0.33.0\n")
    assert changed_params(planned) == {"preflight"}
    assert outputs(planned) == outputs(project.jobs), "the first engine of a run makes its data"
