"""README says what the data says, and names what is there."""

import importlib.util
import json
import re

from eagle3_lib.paths import ROOT

README = (ROOT / "README.md").read_text()


def table_maker():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_table_is_made_from_its_data():
    readme = table_maker()
    assert readme.written(README) == readme.table(), "run python benchmarks/readme.py"


def test_the_demo_takes_as_long_as_the_readme_says():
    low, high = map(int, re.search(r"(\d+) to (\d+) minutes after the installation", README).groups())
    report = json.loads((ROOT / "reports" / "quickstart" / "report.json").read_text())
    assert 60 * low <= sum(stage["seconds"] for stage in report["stages"]) <= 60 * high


def test_every_result_says_how_it_was_made():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        made = json.loads(path.read_text())
        script = re.search(r"benchmarks/\w+\.py", made["command"])
        assert (ROOT / script.group()).is_file(), path.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"]), path.name


def test_what_the_pages_link_to_is_there():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_commands_of_the_readme_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    assert set(re.findall(r"(?:^|`|: )make ([a-z][\w-]*)", README, re.MULTILINE)) <= targets


def test_the_table_of_the_h200_is_of_its_report():
    engines = json.loads((ROOT / "reports" / "smollm2_h200" / "report.json").read_text())["engines"].values()
    page = (ROOT / "docs" / "gpus.md").read_text()

    def row(name, values):
        assert f"| {name} | {' | '.join(values)} |" in page, (name, values)

    for drafter in ("base", "finetuned"):
        agreements = [engine["drafters"][drafter]["agreement"] for engine in engines]
        row(
            f"rounds equal to the replay, {drafter} drafter",
            [f"{found['equal']} of {found['rounds']}, {found['cut']} others cut" for found in agreements],
        )
    row("tokens/s, plain", [f"{engine['throughput']['plain']['tokens_per_s']['value']:.0f}" for engine in engines])
    names = {"ngram": "n-gram", "base": "base drafter", "finetuned": "finetuned drafter"}
    for mode, name in names.items():
        row(f"{name} over plain", [f"{engine['speedup'][mode]['value']:.2f}" for engine in engines])
    row(
        "mean acceptance length from which the finetuned drafter pays",
        [f"{engine['cost']['finetuned']['break_even_length']:.2f}" for engine in engines],
    )
    loads = [[engine["throughput"][mode]["load_s"] for mode in ("plain", "finetuned")] for engine in engines]
    row("seconds until the server answers, plain and finetuned", [f"{a:.0f}, {b:.0f}" for a, b in loads])
