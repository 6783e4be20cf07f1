"""replay.json: written request by request and read back the same way, so that no more than one is in memory.

The file is plain JSON. Each request stands on a line of its own, between the fields known before it and those known after.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import Eagle3Error
from ..paths import short_path
from . import acceptance

SCHEMA = 2
OPENING, CLOSING = ' "requests":[\n', " ]"  # without the space that json.dumps puts there: it marks this layout


class Writer:
    """Writes one replay.json; a reader sees the old file until :meth:`finish`.

    A context manager: what is not finished leaves nothing behind.
    """

    def __init__(self, path: Path, header: dict):
        """header: the fields that are known before the first request."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}")
        self.file, self.count = self.temporary.open("w"), 0
        self.file.write(_fields({"schema": SCHEMA} | header, "{\n", ",\n") + OPENING)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, request: dict) -> None:
        self.file.write(",\n" if self.count else "")
        self.file.write(json.dumps(request, allow_nan=False, separators=(",", ":")))
        self.count += 1

    def finish(self, summary: dict) -> None:
        """summary: the fields that the requests together give."""
        self.file.write("\n" + CLOSING + _fields(summary, ",\n", "\n}\n"))
        self.file.close()
        os.replace(self.temporary, self.path)


def _fields(values: dict, before: str, after: str) -> str:
    lines = json.dumps(values, indent=1, allow_nan=False).split("\n")[1:-1]
    return before + "\n".join(lines) + after


class Requests(Sequence):
    """The requests of a replay.json, each read from the file when it is asked for."""

    def __init__(self, path: Path, offsets: list[int]):
        self.path, self.offsets = path, offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with self.path.open("rb") as file:
            file.seek(self.offsets[index])
            return _request(file.readline())

    def __iter__(self) -> Iterator[dict]:
        with self.path.open("rb") as file:
            for offset in self.offsets:
                file.seek(offset)
                yield _request(file.readline())


def _request(line: bytes) -> dict:
    return json.loads(line.rstrip().removesuffix(b","))


def read(path: Path) -> dict:
    """A replay.json; "requests" are read when they are asked for.

    Raises:
        Eagle3Error: there is no such file, or it is not one that stage 08 wrote.
    """
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run the stage that writes it first")
    before, after, offsets = [], [], []
    with path.open("rb") as file:
        lines, part = iter(file.readline, b""), before
        for line in lines:
            if part is before and line == OPENING.encode():
                offsets, part = _offsets(file, line_end=CLOSING.encode()), after
                continue
            part.append(line)
    text = b"".join([*before, b' "requests": null' if part is after else b"", *after])
    try:
        result = json.loads(text)
    except json.JSONDecodeError as error:
        raise Eagle3Error(f"{short_path(path)}: not JSON: {error}; run stage 08 again") from error
    if part is after:
        result["requests"] = Requests(path, offsets)
    return result


def _offsets(file, line_end: bytes) -> list[int]:
    """Where each request's line begins; leaves ``file`` after the closing bracket."""
    offsets = []
    while True:
        offset = file.tell()
        line = file.readline()
        if line.startswith(line_end) or not line:
            file.seek(offset + len(line_end))
            return offsets
        if line.strip():
            offsets.append(offset)


class Tally:
    """What the requests of a replay give together, added one by one."""

    def __init__(self, positions: int):
        self.positions, self.engine, self.replay = positions, ([], []), ([], [])
        names = ("rounds", "equal", "cut", "unsure", "without_drafts", "tokens_not_greedy")
        self.agreement = dict.fromkeys(names, 0)

    def add(self, request: dict) -> None:
        rows = request["rows"]
        unequal = [row for row in rows if row["engine"] != row["replay"]]
        self.agreement["rounds"] += len(rows)
        self.agreement["equal"] += len(rows) - len(unequal)
        self.agreement["cut"] += sum(row["cut"] for row in unequal)
        self.agreement["unsure"] += sum(not row["sure"] and not row["cut"] for row in unequal)
        self.agreement["without_drafts"] += request["without_drafts"]
        self.agreement["tokens_not_greedy"] += request.get("lossless", 0)
        for kept, rounds, drafted in (
            (self.engine, "engine_rounds", "drafted"),
            (self.replay, "replay_rounds", "replay_drafted"),
        ):
            kept[0].append(request[rounds])
            kept[1].append(request[drafted])

    def summary(self) -> dict:
        return {
            "agreement": self.agreement,
            "engine_acceptance": acceptance.summary(self.engine[0], self.positions, self.engine[1]),
            "replay_acceptance": acceptance.summary(self.replay[0], self.positions, self.replay[1]),
        }
