"""Published pages in a real browser: nothing is fetched, axe-core finds nothing serious, nothing is wider than a phone."""

import json
from types import SimpleNamespace

import browser
import pytest
from nbformat import v4

from eagle3_lib.engines import timing
from eagle3_lib.paths import ROOT
from eagle3_lib.reports import plots, publish, report
from eagle3_lib.reports.runs_index import write_index
from eagle3_lib.verdict import break_even

PUBLISHED = ROOT / "reports" / "quickstart"


@pytest.fixture(scope="module")
def chromium():
    command = browser.find()
    if command is None:
        pytest.skip(f"needs an installed Chromium: looked for {', '.join(browser.NAMES)}")
    with browser.start(command) as started:
        yield started


def data(place):
    return json.loads((PUBLISHED / place).read_text())


def code(source, *shown, tags=()):
    """An executed cell with what it showed: text, or anything with an HTML form."""
    outputs = [
        v4.new_output("stream", name="stdout", text=item)
        if isinstance(item, str)
        else v4.new_output("display_data", {"text/html": item._repr_html_()})
        for item in shown
    ]
    return v4.new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Pages with every figure, of the published quickstart's data; two runs under one index, the second with half the speed."""
    folder = tmp_path_factory.mktemp("site")
    published = data("report.json")
    engine = published["engines"]["vllm"]
    replays = {name: data(f"data/replay/vllm/{name}/replay.json") for name in engine["drafters"]}
    runs = {mode: data(f"data/benchmark/vllm/{mode}/benchmark.json") for mode in engine["throughput"]}
    log = [json.loads(line) for line in (PUBLISHED / "data/train/log.jsonl").read_text().splitlines()]
    answers = [
        SimpleNamespace(split=split, output_ids=[0] * n, reasoning_span=[0, n // 2])
        for split, n in [("train", 80), ("train", 60), ("held_out", 80)]
    ]
    sizes = [{"size": 2**k, "coverage": k / 16} for k in range(4, 16)]
    levels = {mode: {"1": v, "8": v} for mode, v in engine["speedup"].items()}
    request = replays["finetuned"]["requests"][0]
    figures = [
        plots.acceptance_curves(report.curve_rows(replays)),
        plots.acceptance(report.acceptance_rows(replays)),
        plots.agreement(engine["verdicts"][0]["evidence"]["ranking"]),
        plots.losses([{"drafter": "finetuned"} | dict.fromkeys(plots.LOSSES, 1 / len(plots.LOSSES))]),
        plots.departures(
            [
                {
                    "by": by,
                    "from": 20 * part,
                    "to": 20 * part + 19,
                    "rounds": 40,
                    "departing": 10 * part,
                    "share": part / 4,
                }
                for by in ("place", "round", "request")
                for part in range(4)
            ],
            {"by": "place", "since": 40, "until": None, "requests": None},
        ),
        plots.round_strip(request),
        plots.rounds_over_text(request, [f" word{i}" for i in range(request["output_length"])]),
        plots.throughput(engine["speedup"]),
        plots.throughput_by_concurrency(levels),
        plots.latency({mode: timing.latency(run) for mode, run in runs.items()}),
        plots.step_times({mode: timing.step_time(runs[mode]) for mode in ("plain", "base", "finetuned")}),
        plots.break_even(break_even.of_run(4, [0.7, 0.5, 0.3, 0.2], {"1": 1.5, "8": 2.0})),
        plots.profile(published["profile"]),
        plots.training(log, published["training"]["evaluations"]),
        plots.token_lengths(answers),
        plots.coverage({"held out (n = 2391)": sizes}, 8192),
    ]
    wide = [{f"a rather long heading {i}": i / 7 for i in range(12)}]
    notebook = v4.new_notebook(
        cells=[
            v4.new_markdown_cell("# 09 Diagnosis\n\nA page with **every** figure, a diagram and a [link](https://example.org).\n\n```\n" + "x" * 90 + "\n```"),
            code("run = 1", tags=["parameters"]),
            code("import json"),
            v4.new_markdown_cell("## Figures\n\nOne after the other."),
            *(code(f"show({i})", plots.show(figure, f"Figure {i}.", f"Alt {i}.")) for i, figure in enumerate(figures)),
            v4.new_markdown_cell("## A table\n\nWider than a phone."),
            code("table", plots.table(wide), "one line\n", "another line\n"),
        ],
    )  # fmt: skip
    names = {"09_diagnose": "index.html", "08_replay.vllm.base": "08_replay.vllm.base.html"}
    manifest = {
        "stage": "diagnose",
        "params": {"run": "quickstart", "out": "runs/quickstart/diagnose", "engines": ["vllm", "other"]},
        "inputs": {"benchmark": {"path": "runs/quickstart/benchmark.json", "sha256": "0" * 64}},
        "versions": published["preflight"]["versions"],
        **published["stages"][-1],
    }
    for run in ("quickstart", "slower"):
        (folder / run).mkdir()
        for stem, name in names.items():
            (folder / run / name).write_text(publish.page(notebook, stem, names, published, {stem: manifest}))
        (folder / run / "report.json").write_text(json.dumps(published | {"run": run}))
        for mode in engine["throughput"].values():
            mode["tokens_per_s"] = {key: value / 2 for key, value in mode["tokens_per_s"].items()}
        published["preflight"]["hardware"]["cores"] += 2
    write_index(folder)
    return folder


def pages(site):
    return [site / "index.html", site / "quickstart" / "index.html"]


def test_a_page_opens_without_the_network_and_asks_for_nothing(chromium, site):
    for path in pages(site):
        with browser.opened(chromium, path) as (page, requests):
            assert requests == [path.resolve().as_uri()], path.name
            assert page.evaluate("document.querySelector('h1').innerText.length") > 5
    tempting = site / "tempting.html"
    tempting.write_text("<link rel=stylesheet href='https://example.org/a.css'><img src='b.png'>")
    with browser.opened(chromium, tempting) as (_, requests):
        assert requests[1:] == ["https://example.org/a.css", (site / "b.png").resolve().as_uri()]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_axe_finds_nothing_serious(chromium, site, scheme, width):
    for path in pages(site):
        with browser.opened(chromium, path, width, scheme) as (page, _):
            found = filter(browser.serious, browser.violations(page))
            serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found]
        assert not serious, f"{path.name}, {scheme}: {serious}"


def test_axe_is_really_asked(chromium, site):
    path = site / "bad.html"
    path.write_text("<title>x</title><p style='color: #ccc; background: #fff'>faint</p><img src='data:,'>")
    with browser.opened(chromium, path) as (page, _):
        assert {"image-alt", "color-contrast"} <= {v["id"] for v in browser.violations(page)}


def test_nothing_is_wider_than_a_phone_and_figures_stay_readable(chromium, site):
    for path in pages(site):
        with browser.opened(chromium, path, 400) as (page, _):
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, path.name
            # The size on screen of each text in a figure, in CSS pixels.
            sizes = page.evaluate(
                "[...document.querySelectorAll('figure.eagle3 svg')].flatMap(svg => {"
                "const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;"
                "return [...svg.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * scale)})"
            )
        assert min(sizes, default=99) >= 8.5, path.name


def test_both_schemes_are_there(chromium, site):
    backs = {}
    for scheme in browser.SCHEMES:
        with browser.opened(chromium, site / "index.html", 1400, scheme) as (page, _):
            backs[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert backs == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}


def test_runs_are_set_side_by_side(chromium, site):
    drafters = data("report.json")["engines"]["vllm"]["drafters"]
    values = [drafters[name]["engine_acceptance"]["mean_length"]["value"] for name in ("base", "finetuned")]
    with browser.opened(chromium, site / "index.html") as (page, _):
        shown = comparison(page)
        assert shown["mean length"][0] == f"{values[0]:.2f}"
        assert shown["mean length"][1] == f"{values[1]:.2f}\n+{100 * (values[1] / values[0] - 1):.0f} %, better"
        # Leave only one mode marked, then mark the same one of the other run, measured on another machine.
        page.evaluate("boxes.filter(b => b.checked).slice(1).forEach(b => b.click())")
        page.evaluate("boxes.find(b => entries[b.value].run === 'slower' && entries[b.value].mode === 'base').click()")
        assert comparison(page)["tokens/s"][1].endswith("−50 %, worse")
        assert "machine: times are not comparable" in page.locator("#caution").inner_text()


def comparison(page) -> dict[str, list[str]]:
    """The table that sets runs side by side: the heading of each row -> its values."""
    table = "[...document.querySelectorAll('#comparison tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    return {row[0]: row[1:] for row in page.evaluate(table)}
