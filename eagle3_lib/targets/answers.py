"""The target's answers that stage 03 writes and stages 04, 05 and 07 read: one row an assistant turn.

They lie in samples.parquet, in row groups that are read one at a time; samples.jsonl, one object a line, is read where
there is no Parquet file, so that answers made elsewhere can be put in by hand.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from ..errors import Eagle3Error
from ..paths import project_path, short_path

ROWS_PER_GROUP = 256


@dataclass(frozen=True)
class Answer:
    """One assistant turn of the target.

    prompt: the last user message; prompt_ids: all that the target read; output_ids: all that it wrote, thought and end
    token included; text: what it said after its thought. ids_from: "server", or "tokenizer" where the server gave none.
    reasoning_span: [start, end) of the thought in output_ids, its tags included, or []. rendered: "ids", "text" or "no",
    as :class:`eagle3_lib.targets.reasoning.Captured`, or "unchecked". tool_calls: JSON, "" without calls. sampling: JSON of the
    settings. seconds: from the request to the whole reply; started: Unix time of the request; tries: requests it took.
    """

    id: str
    split: str
    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    seconds: float
    turn: int = 0
    reasoning: str = ""
    reasoning_span: list[int] = field(default_factory=list)
    tool_calls: str = ""
    ids_from: str = "server"
    rendered: str = "unchecked"
    server: str = ""
    sampling: str = ""
    started: float = 0.0
    tries: int = 1

    @property
    def loss_mask(self) -> list[bool]:
        """For each id of prompt and output: the target wrote it, so a drafter is taught there."""
        return [False] * len(self.prompt_ids) + [True] * len(self.output_ids)


FIELDS: dict[str, Any] = {f.name: get_origin(f.type) or f.type for f in fields(Answer)}
REQUIRED: dict[str, Any] = {
    f.name: FIELDS[f.name] for f in fields(Answer) if f.default is MISSING and f.default_factory is MISSING
}


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


def samples_file(folder: str | Path) -> Path:
    """The file of a folder's samples: samples.parquet, or samples.jsonl where there is none."""
    parquet = project_path(folder) / "samples.parquet"
    return parquet if parquet.is_file() else parquet.with_suffix(".jsonl")


def iter_answers(folder: str | Path) -> Iterator[Answer]:
    """The samples that stage 03 wrote, in the order of the prompts, some hundred in memory at a time.

    Raises:
        Eagle3Error: no samples, a damaged file, or a field that is missing or of another type.
    """
    path = samples_file(folder)
    if path.suffix == ".jsonl":
        for row in read_lines(path, REQUIRED):
            yield Answer(**{name: row[name] for name in FIELDS if name in row})
        return
    import pyarrow  # here, since most that imports this module reads no Parquet
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if missing := REQUIRED.keys() - set(file.schema_arrow.names):
            raise Eagle3Error(f"{short_path(path)}: found no column {', '.join(sorted(missing))}")
        names = [name for name in FIELDS if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=names):
            for row in batch.to_pylist():
                yield Answer(**row)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Eagle3Error(f"{short_path(path)}: not a whole Parquet file: {error}") from error


def read_answers(folder: str | Path) -> list[Answer]:
    """All samples that stage 03 wrote, in the order of the prompts."""
    return list(iter_answers(folder))


def write_parquet(answers: Iterable[Answer], path: Path) -> int:
    """Write samples.parquet: whole or not at all, some hundred rows in memory at a time; returns the number of rows."""
    import pyarrow
    import pyarrow.parquet

    ids, strings = pyarrow.list_(pyarrow.int32()), {str: pyarrow.string(), int: pyarrow.int32()}
    kinds = strings | {float: pyarrow.float64(), list: ids}
    schema = pyarrow.schema(
        [(name, kinds[kind]) for name, kind in FIELDS.items()] + [("loss_mask", pyarrow.list_(pyarrow.bool_()))]
    )
    answers, rows = iter(answers), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with pyarrow.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while group := list(itertools.islice(answers, ROWS_PER_GROUP)):
            table = [asdict(answer) | {"loss_mask": answer.loss_mask} for answer in group]
            writer.write_table(pyarrow.Table.from_pylist(table, schema))
            rows += len(group)
    os.replace(temporary, path)
    return rows
