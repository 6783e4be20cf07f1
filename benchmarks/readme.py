"""The table of README's section "What has been measured", made from the files in benchmarks/results.

python benchmarks/readme.py          writes it into README.md
python benchmarks/readme.py --check  says whether README has what the data says
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
START, END = "| what | result | data |\n|---|---|---|\n", "\n\n"


def fault_matrix(data: dict) -> tuple[str, str]:
    rows = data["rows"]
    alarms = data["healthy_false_alarms"] or "no"
    return (
        f"faults injected into the running engine, {min(r['rounds'] for r in [*rows, *data['healthy']])} rounds or more each",
        f"{data['first_or_tied']} of {len(rows)} ranked first or tied, {data['named']} named, {data['wrong_names']} named wrongly; "
        f"{alarms} alarm on {len(data['healthy'])} healthy runs",
    )


def outside_catalogue(data: dict) -> tuple[str, str]:
    partial = data["partial"]
    pairs = len({row["pair"] for row in data["rows"]})
    return (
        f"{data['faults']} faults that the catalogue does not have, {pairs} pairs of drafter and texts; faults that begin at token "
        f"60 or hold in half of the requests",
        f"{data['wrong_names']} wrong names, {data['called_healthy']} called healthy; {partial['named_with_its_place']} of "
        f"{partial['runs']} named with their place",
    )


def config_suspect(data: dict) -> tuple[str, str]:
    return (
        f"wrong values in config.json that the engine obeys: {len({row['config'] for row in data['rows']})}, on "
        f"{len({row['pair'] for row in data['rows']})} pairs of drafter and texts",
        f"{data['right']} of {len(data['rows'])} named with the right field, {data['wrong']} with another; "
        f"{data['false_alarms'] or 'no'} alarm on {len(data['healthy'])} healthy drafters",
    )


def weak_or_broken(data: dict) -> tuple[str, str]:
    weak, broken = (
        next(verdict for verdict in data["verdicts"] if verdict["drafter"] == name)
        for name in ("weak drafter, healthy engine", "good drafter, broken engine")
    )
    rates = [100 * verdict["evidence"]["engine"]["acceptance_rate"]["value"] for verdict in (weak, broken)]
    apart = (weak["kind"], broken["kind"]) == ("weak drafter", "engine fault")
    return (
        "a drafter trained too little in a healthy engine, beside a good drafter in a broken one: "
        f"{rates[0]:.1f} and {rates[1]:.1f} % accepted",
        "told apart" if apart else f"not told apart: {weak['kind']}, {broken['kind']}",
    )


def losslessness(data: dict) -> tuple[str, str]:
    passed = {name: "lossless" if run["lossless"] else f"not: {run['fault']}" for name, run in data["runs"].items()}
    return (
        "tokens emitted by the CPU build, against the target: plain, EAGLE-3; the same at temperature 0.8",
        f"{passed['plain, greedy']}, {passed['eagle3, greedy']}; "
        f"{passed['plain, temperature 0.8']}, {passed['eagle3, temperature 0.8']}",
    )


def healthy_zoo(data: dict) -> tuple[str, str]:
    rows = data["rows"]
    rounds = min(row["rounds"] for row in rows if row["drafter"] != "plain")
    untold = sum(row["verdict"] == "cannot tell" for row in rows)
    return (
        f"the healthy engine under {len({row['setting'] for row in rows})} ordinary settings, two drafters each, "
        f"{rounds} rounds or more",
        f"{data['false_alarms'] or 'no'} false alarm and {data['crashes'] or 'no'} crash in {len(rows)} runs; in {untold} it "
        f"says why it cannot tell",
    )


def replay_cost(data: dict) -> tuple[str, str]:
    return (
        "replay of one hypothesis over a plain forward of the target; of thirty over one",
        f"{data['one_over_forward']:.1f}; {data['thirty_over_one']:.1f}",
    )


def audit_on_engine(data: dict) -> tuple[str, str]:
    served = [row for row in data["rows"] if not row["refused"]]
    equal = sum(row["agreement_as_audited"] == 1 for row in served)
    return (
        f"{len(served)} audit findings shown on the engine",
        "every round as audited" if equal == len(served) else f"as audited in {equal} of {len(served)}",
    )


def gates_of_wheels(data: dict) -> tuple[str, str]:
    def places(version: str) -> str:
        (row,) = (r for r in data["rows"] if (r["version"], r["target"]) == (version, "Kimi-K2.5"))
        count = sum(finding["severity"] == "fails" for finding in row["findings"])
        return ("none", "one", "two", "three", "four")[count]

    return (
        "places that stop Kimi-K2.5 with an EAGLE-3 drafter in vLLM 0.16.0; in 0.23.0",
        f"{places('0.16.0')}; {places('0.23.0')}",
    )


def tp_agreement(data: dict) -> tuple[str, str]:
    right = [row for row in data["rows"] if not row["extension"]]
    (wrong,) = (row for row in data["rows"] if row["extension"])
    equal = {f"{row['equal']} of {row['rounds']}" for row in right}
    return (
        f"rounds equal to the replay at tensor parallel {', '.join(str(row['ranks']) for row in right)}; at "
        f"{wrong['ranks']} with boundaries captured before the sum over ranks",
        f"{', '.join(sorted(equal))}{' each' if len(equal) == 1 else ''}; {wrong['equal']} of {wrong['rounds']}",
    )


# Each function reads benchmarks/results/ITS_NAME.json; the page tells more.
ROWS: list[tuple[Callable[[dict], tuple[str, str]], str]] = [
    (fault_matrix, "docs/faults.md"),
    (outside_catalogue, "docs/faults.md"),
    (config_suspect, "docs/faults.md"),
    (weak_or_broken, ""),
    (healthy_zoo, "docs/faults.md"),
    (losslessness, "docs/faults.md"),
    (replay_cost, ""),
    (audit_on_engine, "docs/audit.md"),
    (tp_agreement, "docs/gpus.md"),
    (gates_of_wheels, ""),
]


def table() -> str:
    """The table's rows in Markdown."""
    lines = []
    for row, page in ROWS:
        file = f"{row.__name__}.json"
        what, result = row(json.loads((ROOT / "benchmarks" / "results" / file).read_text()))
        lines.append(f"| {what} | {result} | `{file}`{f', [{page}]({page})' if page else ''} |")
    return "\n".join(lines)


def written(readme: str) -> str:
    """README's table as it stands, without its head."""
    return readme.split(START, 1)[1].split(END, 1)[0]


def main() -> None:
    readme = README.read_text()
    if written(readme) == table():
        return
    if "--check" in sys.argv:
        sys.exit("README.md: its table is not what benchmarks/results says; run python benchmarks/readme.py")
    README.write_text(readme.replace(written(readme), table(), 1))


if __name__ == "__main__":
    main()
