"""The pages beside a run: in one folder of their own, with nothing of other runs, and reports/ as it was."""

import json
import subprocess

from nbformat import v4

from eagle3_lib.paths import ROOT
from eagle3_lib.reports import publish

REPORT = ROOT / "reports" / "quickstart" / "report.json"


def test_pages_beside_the_run_leave_reports_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "project_path", lambda path: tmp_path / path)
    run = tmp_path / "runs" / "r"
    for folder in (run / "diagnose", run / "notebooks"):
        folder.mkdir(parents=True)
    (run / "diagnose" / "report.json").write_text(REPORT.read_text())
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# 09 Diagnosis")])
    (run / "notebooks" / "09_diagnose.ipynb").write_text(json.dumps(notebook))
    first = publish.run("r", to="runs/r/pages", alone=True)
    assert first == run / "pages" / "index.html"
    assert {path.name for path in first.parent.iterdir()} == {"index.html", "report.json"}
    assert not (tmp_path / "reports").exists() and "../index.html" not in first.read_text()
    published = publish.run("r")
    assert published == tmp_path / "reports" / "r" / "index.html" and "../index.html" in published.read_text()


def test_git_ignores_where_a_run_writes():
    ignored = subprocess.run(["git", "check-ignore", "-q", "runs/quickstart/pages/index.html"], cwd=ROOT)
    assert ignored.returncode == 0
    rules = (ROOT / "workflow" / "Snakefile").read_text()
    assert 'f"reports/' not in rules
