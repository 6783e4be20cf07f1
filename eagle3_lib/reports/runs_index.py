"""reports/index.html: every published run with its key figures, and any of them side by side."""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from .. import results
from ..errors import Eagle3Error
from ..files import write_text
from ..paths import short_path
from .report import machine

TEMPLATES = Path(__file__).with_name("template")


@dataclass(frozen=True)
class Figure:
    """A key figure: its heading, how it is written, and whether more is better (None: neither)."""

    title: str
    words: str
    more_is_better: bool | None = None


FIGURES = {
    "mean_length": Figure("mean length", "{:.2f}", True),
    "replayed": Figure("replayed", "{:.2f}"),
    "acceptance_rate": Figure("acceptance rate", "{:.1%}", True),
    "rounds_equal": Figure("rounds equal", "{:.1%}", True),
    "tokens_per_s": Figure("tokens/s", "{:.1f}", True),
    "over_plain": Figure("over plain", "{:.2f}", True),
    "first_token_s": Figure("first token (s)", "{:.3f}", False),
    "later_token_s": Figure("later token (s)", "{:.4f}", False),
}


def write_index(reports: Path) -> None:
    """Write index.html for all REPORTS/*/report.json."""
    listed = [entry for path in sorted(reports.glob("*/report.json")) for entry in entries(path)]
    figures = {key: vars(figure) for key, figure in FIGURES.items()}
    pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, keep_trailing_newline=True)
    pages.policies["json.dumps_kwargs"] = {}  # keeps the figures in their order
    style, script = (Markup((TEMPLATES / name).read_text()) for name in ("style.css", "compare.js"))
    page = pages.get_template("runs.html.j2").render(entries=listed, figures=figures, style=style, script=script)
    write_text(reports / "index.html", page)


def entries(path: Path) -> list[dict]:
    """The key figures of one report.json.

    Returns:
        for each engine and mode {"run", "href", "engine", "mode", "verdict", "machine", "target", "date", "commit",
        "figures": {key of FIGURES: {"value", "low", "high"} or {"value"}}}; what a mode does not have is left out.
    Raises:
        Eagle3Error: the file is no report.json.
    """
    report = results.read_json(path)
    try:
        return _entries(report, path.parent.name)
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # pages of earlier versions are listed too
        raise Eagle3Error(f"{short_path(path)}: found no report that stage 09 wrote: {error!r}") from error


def _entries(report: dict, folder: str) -> list[dict]:
    last, preflight = report["stages"][-1], report["preflight"]
    target = "" if preflight is None else Path(preflight["target"]["folder"]).name
    common = {
        "run": report["run"],
        "href": f"{folder}/index.html",
        "machine": machine(report),
        "target": target,
        "date": last["started"][:10],
        "commit": (last["git"]["commit"] or "none")[:10],
    }
    return [
        common
        | {"engine": f"{engine} {found['version']}", "mode": mode}
        | {"verdict": next((v["kind"] for v in found["verdicts"] if v["drafter"] == mode), "")}
        | {"figures": _figures(found, mode)}
        for engine, found in report["engines"].items()
        for mode in found["throughput"]
    ]


def _figures(found: dict, mode: str) -> dict[str, dict]:
    """The key figures of one mode of one engine, from the engine's part of a report."""
    figures = {"tokens_per_s": found["throughput"][mode]["tokens_per_s"], "over_plain": found["speedup"].get(mode)}
    figures |= found.get("latency", {}).get(mode, {})
    if drafter := found["drafters"].get(mode):
        acceptance, agreement = drafter["engine_acceptance"], drafter["agreement"]
        figures |= {
            "mean_length": acceptance["mean_length"],
            "acceptance_rate": acceptance["acceptance_rate"],
            "replayed": drafter["replay_acceptance"]["mean_length"],
        }
        if agreement["rounds"]:
            figures["rounds_equal"] = {"value": agreement["equal"] / agreement["rounds"]}
    elif mode == "ngram" and (acceptance := found["ngram_acceptance"]):
        figures["mean_length"] = acceptance["mean_length"]
        if not (found["evidence"][mode]["cross_check"] or {}).get("contradictions"):  # else some steps drafted nothing
            figures["acceptance_rate"] = acceptance["acceptance_rate"]
    return {key: value for key, value in figures.items() if value and key in FIGURES}
