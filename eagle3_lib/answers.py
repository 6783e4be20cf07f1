"""The target's answers that stage 03 writes and stages 04, 05 and 07 read: one row of samples.jsonl each."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_origin

from .errors import Eagle3Error
from .provenance import project_path, short_path


@dataclass(frozen=True)
class Answer:
    """One row of samples.jsonl."""

    id: str
    split: str
    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    seconds: float


FIELDS = {field.name: get_origin(field.type) or field.type for field in fields(Answer)}


def read_lines(path: Path, expected: dict[str, type]) -> list[dict]:
    """Rows of a JSON-lines file; each must be an object with the fields ``expected``, of their types.

    Raises:
        Eagle3Error: naming the file, the line and what is wrong with it.
    """
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Eagle3Error(f"{short_path(path)}, line {number}: not JSON ({error}): found {line[:60]!r}") from error
        for name, kind in expected.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                found = type(row.get(name)).__name__ if isinstance(row, dict) else type(row).__name__
                raise Eagle3Error(
                    f"{short_path(path)}, line {number}: field {name}: found {found}, expected {kind.__name__}"
                )
        rows.append(row)
    return rows


def read_answers(folder: str | Path) -> list[Answer]:
    """The samples that stage 03 wrote, in the order of the prompts."""
    rows = read_lines(project_path(folder) / "samples.jsonl", FIELDS)
    return [Answer(**{name: row[name] for name in FIELDS}) for row in rows]
