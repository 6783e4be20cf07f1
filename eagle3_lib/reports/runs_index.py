"""reports/index.html: every published run with its key figures, and any of them side by side."""

import html
import json
from dataclasses import dataclass
from pathlib import Path

from ..files import write_text

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
    found = [entry for path in sorted(reports.glob("*/report.json")) for entry in entries(path)]
    style, script = ((TEMPLATES / name).read_text() for name in ("style.css", "compare.js"))
    head = "".join(f'<th scope="col">{html.escape(figure.title)}</th>' for figure in FIGURES.values())
    rows = "".join(_row(index, entry) for index, entry in enumerate(found))
    data = json.dumps({"entries": found, "figures": {key: vars(f) for key, f in FIGURES.items()}})
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Published runs</title><style>{style}</style></head>
<body><div class="page single"><main id="main"><h1>Published runs</h1>
<p>One line for each engine and mode of each run. Below a value stands its 95 % interval, by request for acceptance and by
prompt for time. Mark two or more lines to set them side by side; the first one marked is what the others are compared with.</p>
<div class="wide" tabindex="0"><table id="runs"><thead><tr><th scope="col">compare</th><th scope="col">run</th><th scope="col">engine</th>
<th scope="col">mode</th><th scope="col">verdict</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<section id="comparison" aria-live="polite" hidden><h2>Side by side</h2>
<div class="wide" tabindex="0"><table></table></div><p id="caution"></p></section>
<script type="application/json" id="data">{data.replace("</", "<" + chr(92) + "/")}</script><script>{script}</script>
</main></div></body></html>
"""
    write_text(reports / "index.html", text)


def entries(path: Path) -> list[dict]:
    """The key figures of one report.json.

    Returns:
        for each engine and mode {"run", "href", "engine", "mode", "verdict", "machine", "target", "date", "commit",
        "figures": {key of FIGURES: {"value", "low", "high"} or {"value"}}}; what a mode does not have is left out.
    """
    report = json.loads(path.read_text())
    preflight, last = report["preflight"], report["stages"][-1]
    hardware = preflight["hardware"]
    common = {
        "run": report["run"],
        "href": f"{path.parent.name}/index.html",
        "machine": ", ".join(gpu["name"] for gpu in hardware["gpus"])
        or f"{hardware['cores']} cores, {hardware['cpu']}",
        "target": Path(preflight["target"]["folder"]).name,
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
            "rounds_equal": {"value": agreement["equal"] / agreement["rounds"]},
        }
    elif mode == "ngram" and (acceptance := found["ngram_acceptance"]):
        figures |= {key: acceptance[key] for key in ("mean_length", "acceptance_rate")}
    return {key: value for key, value in figures.items() if value and key in FIGURES}


def _row(index: int, entry: dict) -> str:
    name = f"{entry['run']}, {entry['engine']}, {entry['mode']}"
    box = f'<input type="checkbox" value="{index}" aria-label="compare {html.escape(name)}">'
    link = f'<a href="{html.escape(entry["href"])}">{html.escape(entry["run"])}</a>'
    words = (html.escape(entry[key]) for key in ("engine", "mode", "verdict"))
    return "".join(
        [
            f"<tr><td>{box}</td><td>{link}</td>",
            *(f"<td>{word}</td>" for word in words),
            *(f"<td>{_written(entry['figures'].get(key), figure)}</td>" for key, figure in FIGURES.items()),
            "</tr>",
        ]
    )


def _written(interval: dict | None, figure: Figure) -> str:
    """A value, and its interval in a small line below."""
    if interval is None:
        return "–"
    value = figure.words.format(interval["value"])
    if "low" not in interval:
        return value
    return f"{value}<small>{figure.words.format(interval['low'])} to {figure.words.format(interval['high'])}</small>"
