"""acceptance.csv and perf_results.csv of speculators' evaluation script.

Read in vllm-project/speculators at c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b, before release 0.9.0 (scripts/evaluate/perf_utils.py:
extract_spec_decode_metrics, acceptance_csv_columns, parse_sweep_results, CsvWriter; the wheel does not hold the script).
Each row is the difference of two /metrics scrapes around one subset; perf_results.csv repeats it in every row of a sweep.
Before its issue 1095 was fixed (September 2026), acceptance_at_pos_* held one engine's counts over the rounds of all, so that
they are too small on a data-parallel server.
"""

import csv
import io
import re

from ...errors import Eagle3Error
from ...results import Counters
from .document import Document
from .recorded import Recorded, add_up, choose, counters, mean_length, parse_amount, parse_count, refuse_impossible
from .vllm_bench import WHOLE
from .vllm_metrics import OTHERS, PAST_END, short_drafts

TOOL = "speculators"
SUBSET, ROUNDS, DRAFTED, ACCEPTED, LENGTH = (
    "subset",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_length",
)
RATE = re.compile(r"acceptance_at_pos_(\d+)")
Row = tuple[str, int, int, int, tuple[float, ...]]  # subset, rounds, drafted, accepted, rates


def recognise(document: Document) -> bool:
    header = document.text.lstrip().split("\n", 1)[0]
    return (
        not document.values
        and header.startswith(f"{SUBSET},")
        and bool({ROUNDS, "rps_median"} & set(header.split(",")))
    )


def read(document: Document, of: str = "") -> Recorded:
    """The sum over the subsets, or the one named by ``of``.

    Raises:
        Eagle3Error: a cell is missing or no number, or a row contradicts itself.
    """
    reader = csv.DictReader(io.StringIO(document.text))
    header = list(reader.fieldnames or [])
    missing = [name for name in (ROUNDS, DRAFTED, ACCEPTED, LENGTH, "acceptance_at_pos_0") if name not in header]
    if missing:
        raise Eagle3Error(f"{document.where}: {missing[0]}: found none, expected this column")
    is_sweep = "strategy" in header
    positions = sum(RATE.fullmatch(name) is not None for name in header)
    rows = []
    for cells in reader:
        row = _row(cells, positions, f"{document.where}: line {reader.line_num}")
        if not (is_sweep and row in rows):  # every row of a sweep repeats its subset's counts
            rows.append(row)
    if not rows:
        raise Eagle3Error(f"{document.where}: found no row, expected one for each subset")
    subsets = sorted({row[0] for row in rows})
    if of:
        choose(subsets, of, document.where, SUBSET)
        rows = [row for row in rows if row[0] == of]
    return _sum(rows, positions, document.where)


def _row(cells: dict[str, str], positions: int, where: str) -> Row:
    rounds, drafted, accepted = (parse_count(cells[name], f"{where}: {name}") for name in (ROUNDS, DRAFTED, ACCEPTED))
    names = [f"acceptance_at_pos_{place}" for place in range(positions)]
    rates = tuple(parse_amount(cells.get(name), f"{where}: {name}") for name in names)
    length = parse_amount(cells[LENGTH], f"{where}: {LENGTH}")
    if rounds and abs(1 + accepted / rounds - length) > 1e-6:
        raise Eagle3Error(
            f"{where}: {LENGTH}: found {length}, expected 1 + accepted / rounds = {1 + accepted / rounds:.6f}"
        )
    return cells[SUBSET], rounds, drafted, accepted, rates


def _sum(rows: list[Row], positions: int, where: str) -> Recorded:
    rounds, drafted, total = (sum(row[place] for row in rows) for place in (1, 2, 3))  # type: ignore[misc]
    subsets = sorted({row[0] for row in rows})
    notes = [f"Each row is the difference of two scrapes of /metrics; {len(rows)} rows are summed.", OTHERS, PAST_END]
    if len(subsets) < len(rows):
        notes.append("A subset is in it more than once: a later run appends to the same file.")
    length = 1 + total / rounds if rounds else None
    by_position = [_accepted(row) for row in rows]
    if not all(sum(accepted) == row[3] for accepted, row in zip(by_position, rows, strict=True)):
        return Recorded(
            TOOL,
            "vllm",
            positions,
            mean_length=length,
            notes=notes,
            warnings=[
                "acceptance_at_pos_* do not sum to the accepted tokens and are not used; the length is. On a data-parallel "
                "server, speculators before its issue 1095 was fixed divided one engine's counts by the rounds of all."
            ],
        )
    told: Counters = counters(rounds, add_up(by_position), drafted)
    refuse_impossible(told, where)
    return Recorded(
        TOOL, "vllm", positions, counters=told, mean_length=mean_length(told), notes=[*notes, *short_drafts(told)]
    )


def _accepted(row: Row) -> list[int]:
    """Accepted by position; [] where a rate is no count over the rounds."""
    found = [rate * row[1] for rate in row[4]]
    return [round(value) for value in found] if all(abs(value - round(value)) < WHOLE for value in found) else []
