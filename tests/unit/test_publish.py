"""Published pages: nothing of this machine, figures with alternative text, colours of the page, where it comes from."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from nbformat import v4

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT
from eagle3_lib.reports import leaks, plots, publish, runs_index

REPORT = ROOT / "reports" / "quickstart" / "report.json"


def test_a_page_that_shows_a_folder_of_this_machine_is_refused():
    with pytest.raises(Eagle3Error, match="reports/x/index.html: shows a folder of this machine: .*secret"):
        leaks.refuse(f"<p>{ROOT}/secret</p>", "reports/x/index.html")
    kinds = {leak.kind for leak in leaks.find(f"<p>{ROOT}ish is another word</p>")}
    assert "a folder of this machine" not in kinds


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cached in /home/ann/.cache/models", "a home folder"),
        (r"C:\Users\Ann\models", "a home folder"),
        ("unpacked to /tmp/tree", "a temporary folder"),
        ("served by http://10.1.2.3:8000/v1", "a private address"),
        ("node7.cluster.local answered", "a private host name"),
        ("HF_TOKEN=hf_" + "a1B2" * 8, "a token"),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwxyz", "a token"),
        ("ghp_" + "0a" * 18, "a token"),
        ("-----BEGIN RSA PRIVATE KEY-----", "a private key"),
        ("https://ann:pass@example.org/x", "a password in a URL"),
    ],
)
def test_what_would_leak_is_found_and_placed(text, kind):
    (leak,) = [leak for leak in leaks.find(f"first line\nsecond line, {text}, and more") if leak.kind == kind]
    assert leak.line == 2
    secret = text.split("=")[-1].split(" ")[-1]
    assert (secret in leak.shown) == (kind not in leaks.SECRET), "a secret itself is not told again"


def test_names_of_user_and_host_and_secrets_of_the_environment_are_found(monkeypatch):
    monkeypatch.setattr(leaks.getpass, "getuser", lambda: "annlee")
    monkeypatch.setattr(leaks.socket, "gethostname", lambda: "gpubox7.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    text = 'by annlee on gpubox7\n{"key": "0123456789abcdef"}'
    assert {(leak.kind, leak.line) for leak in leaks.find(text)} == {
        ("the user's name", 1),
        ("this host's name", 1),
        ("the value of WANDB_API_KEY", 2),
    }
    assert all("0123456789" not in leak.shown for leak in leaks.find(text))
    assert not list(leaks.find(text, allow=("annlee", "gpubox7", "0123456789abcdef")))
    assert not list(leaks.find("annlees, mygpubox7x, 0123456789"))


def test_common_text_is_no_leak(monkeypatch):
    monkeypatch.setattr(leaks.getpass, "getuser", lambda: "root")
    text = (
        "root mean square; 1/2; /v1/completions; and/or; 10.5; 0.10.1.2; docs/tmp/x; user@; a sk-etch; https://x.org/a"
    )
    assert not list(leaks.find(text))


@pytest.mark.slow
def test_nothing_of_what_is_published_leaks():
    assert leaks.refuse_folder(ROOT / "reports", "reports") > 20


def test_every_leak_is_told_with_its_place_and_the_old_pages_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "project_path", lambda path: tmp_path / path)
    run, old = tmp_path / "runs" / "r", tmp_path / "reports" / "r" / "index.html"
    for folder in (run / "diagnose", run / "notebooks", run / "train", old.parent):
        folder.mkdir(parents=True)
    old.write_text("old")
    (run / "diagnose" / "report.json").write_text(REPORT.read_text())
    (run / "train" / "log.jsonl").write_text('{"step": 1}\n{"from": "/home/ann/data"}\n')
    cell = v4.new_code_cell("1", outputs=[v4.new_output("stream", name="stdout", text="read /Users/ann/x\n")])
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# 09 Diagnosis"), cell])
    (run / "notebooks" / "09_diagnose.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(Eagle3Error) as refused:
        publish.run("r")
    assert "reports/r/data/train/log.jsonl: shows a home folder" in str(refused.value)
    assert "(line 2)" in str(refused.value)
    (run / "train" / "log.jsonl").unlink()
    with pytest.raises(Eagle3Error, match="reports/r/index.html: shows a home folder: .*/Users/ann/x"):
        publish.run("r")
    assert old.read_text() == "old" and [path.name for path in old.parent.iterdir()] == ["index.html"]
    assert publish.run("r", allow=("/Users/ann",)) == old and "/Users/ann/x" in old.read_text()


def test_a_page_says_where_it_comes_from():
    report = json.loads(REPORT.read_text())
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# 05 Train\n\n## One & two")])
    pages = {"05_train": "05_train.html", "09_diagnose": "index.html", "08_replay.vllm.base": "08.html"}
    manifest = {
        "stage": "train",
        "params": {"run": "quickstart", "out": "runs/quickstart/train", "epochs": 7, "features": "elsewhere"},
        "inputs": {"base drafter": {"path": "drafters/x", "sha256": "ab" * 32}},
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "started": "2026-11-29T10:00:00+00:00",
        "seconds": 81.2,
    }
    page = publish.page(notebook, "05_train", pages, report, {"05_train": manifest})
    for pair in [
        ("commit", "0123456789ab with changes"),
        ("date", "2026-11-29"),
        ("stage", "81 s"),
        ("epochs", "7"),
        ("features", "elsewhere"),
        ("base drafter", f"drafters/x, sha256 {'ab' * 32}"),
        ("command", "make run RUN=quickstart"),
    ]:
        assert "<dt>{}</dt><dd>{}</dd>".format(*pair) in page
    assert "<dt>out</dt>" not in page, "defaults with their braces filled are no change"
    assert re.search(r'<a [^>]*aria-current="page"[^>]*>05 train', page) and '<a href="index.html">Report</a>' in page
    assert page.count("<span>08 replay</span> <a ") == 1 and 'class="finding"' not in page
    report_page = publish.page(notebook, "09_diagnose", pages, report, {"05_train": manifest, "09_diagnose": {}})
    assert "<dt>train</dt><dd>epochs = 7; features = elsewhere</dd>" in report_page
    assert "<dt>train base drafter</dt><dd>drafters/x" in report_page
    assert 'class="finding">vllm 0.32.0. No sign of an engine fault' in report_page
    seconds = sum(stage["seconds"] for stage in report["stages"])
    assert f"<dt>all stages</dt><dd>{seconds:.0f} s</dd>" in report_page


def test_the_index_has_the_reports_figures():
    rows = {row["mode"]: row for row in runs_index.entries(REPORT)}
    found = json.loads(REPORT.read_text())["engines"]["vllm"]
    assert list(rows) == ["plain", "ngram", "base", "finetuned"]
    base = rows["base"]["figures"]
    assert base["mean_length"] == found["drafters"]["base"]["engine_acceptance"]["mean_length"]
    assert base["over_plain"] == found["speedup"]["base"] and rows["base"]["verdict"] == "weak drafter"
    assert "over_plain" not in rows["plain"]["figures"] and "mean_length" not in rows["plain"]["figures"]


def test_a_run_without_rounds_has_no_share_of_equal_rounds(tmp_path):
    """All answers of one token: drafts were never verified."""
    report = json.loads(REPORT.read_text())
    report["engines"]["vllm"]["drafters"]["base"]["agreement"] = {"rounds": 0, "equal": 0}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.json").write_text(json.dumps(report))
    rows = {row["mode"]: row for row in runs_index.entries(tmp_path / "r" / "report.json")}
    assert "rounds_equal" not in rows["base"]["figures"] and "mean_length" in rows["base"]["figures"]
    assert "rounds_equal" in rows["finetuned"]["figures"]
    runs_index.write_index(tmp_path)
    assert (tmp_path / "index.html").read_text().count("<tr>") == 5  # the heading and four modes


def test_names_in_the_index_are_text(tmp_path):
    report = json.loads(REPORT.read_text()) | {"run": "</script><b>\"a\" & 'b'"}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.json").write_text(json.dumps(report))
    runs_index.write_index(tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<b>" not in page and page.count("</script>") == 2
    assert '">&lt;/script&gt;&lt;b&gt;&#34;a&#34; &amp; &#39;b&#39;</a>' in page
    data = re.search(r'id="data">(.*)</script><script>', page).group(1)
    read = json.loads(data)
    assert read["entries"][0]["run"] == report["run"] and list(read["figures"]) == list(runs_index.FIGURES)


def test_a_figure_carries_its_text_data_and_the_pages_colour(tmp_path):
    figure, axes = plt.subplots()
    axes.plot([1, 2], [3, 4])
    axes.set_title("title & more")
    shown = plots.show(
        figure, "A <caption>.", 'Rises from 3 to 4 "fast".', tmp_path / "figures" / "f", [{"x": 1, "y": 3}]
    )
    page = shown._repr_html_()
    assert 'aria-label="Rises from 3 to 4 &quot;fast&quot;."' in page and "A &lt;caption&gt;." in page
    assert "currentColor" in page and plots.PAGE_TEXT not in page
    assert 'href="figures/f.pdf"' in page and 'href="figures/f.csv"' in page
    assert (tmp_path / "figures" / "f.csv").read_text() == "x,y\n1,3\n"
    assert plots.PAGE_TEXT in (tmp_path / "figures" / "f.svg").read_text()


def test_error_bars_reach_from_low_to_high():
    assert plots._errors({"value": [0.5, 0.2], "low": [0.4, 0.2], "high": [0.7, 0.3]}) == [
        pytest.approx([0.1, 0.0]),
        pytest.approx([0.2, 0.1]),
    ]


@pytest.mark.parametrize("values", [{}, [], {"engines": {}}, {"stages": [], "preflight": None}])
def test_what_is_no_report_is_one_error_in_the_list_of_runs(tmp_path, values):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.json").write_text(json.dumps(values))
    with pytest.raises(Eagle3Error, match="report.json: found no report that stage 09 wrote"):
        runs_index.write_index(tmp_path)


@pytest.mark.parametrize("values", [{}, {"schema": 2, "run": "r"}])
def test_a_report_of_another_version_is_not_published(tmp_path, monkeypatch, values):
    monkeypatch.setattr(publish, "project_path", lambda path: tmp_path / path)
    for folder in ("diagnose", "notebooks"):
        (tmp_path / "runs" / "r" / folder).mkdir(parents=True)
    (tmp_path / "runs" / "r" / "diagnose" / "report.json").write_text(json.dumps(values))
    (tmp_path / "runs" / "r" / "notebooks" / "09_diagnose.ipynb").write_text("{}")
    with pytest.raises(
        Eagle3Error, match="report.json: schema: found .*, expected 3; run the stage that writes it again"
    ):
        publish.run("r")


def test_pages_of_a_machine_that_nobody_looked_at():
    report = json.loads(REPORT.read_text()) | {"preflight": None}
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# 09 Diagnosis")])
    page = publish.page(notebook, "09_diagnose", {"09_diagnose": "index.html"}, report, {})
    assert "<dt>machine</dt>" not in page and f"<dt>run</dt><dd>{report['run']}</dd>" in page
