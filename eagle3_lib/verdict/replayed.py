"""replay.json: written request by request and read back the same way, so that no more than one is in memory.

The file is plain JSON. Each request stands on a line of its own, between the fields known before it and those known after.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypedDict, overload

from .. import results
from ..errors import Eagle3Error
from ..paths import short_path
from ..results import Acceptance, Agreement, Replay, ReplayedRequest
from . import acceptance

OPENING, CLOSING = ' "requests":[\n', " ]"  # without the space that json.dumps puts there: it marks this layout


class Writer:
    """Writes one replay.json; a reader sees the old file until :meth:`finish`.

    A context manager: what is not finished leaves nothing behind.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]):
        """header: the fields that are known before the first request."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}")
        self.file, self.count = self.temporary.open("w"), 0
        self.file.write(_fields({"schema": results.REPLAY_SCHEMA, **header}, "{\n", ",\n") + OPENING)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, request: ReplayedRequest) -> None:
        self.file.write(",\n" if self.count else "")
        self.file.write(json.dumps(request, allow_nan=False, separators=(",", ":")))
        self.count += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """summary: the fields that the requests together give."""
        self.file.write("\n" + CLOSING + _fields(summary, ",\n", "\n}\n"))
        self.file.close()
        os.replace(self.temporary, self.path)


def _fields(values: Mapping[str, Any], before: str, after: str) -> str:
    lines = json.dumps(values, indent=1, allow_nan=False).split("\n")[1:-1]
    return before + "\n".join(lines) + after


class Requests(Sequence[ReplayedRequest]):
    """The requests of a replay.json, each read from the file and checked when it is asked for."""

    def __init__(self, path: Path, offsets: list[int]):
        self.path, self.offsets = path, offsets

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> ReplayedRequest: ...

    @overload
    def __getitem__(self, index: slice) -> list[ReplayedRequest]: ...

    def __getitem__(self, index: int | slice) -> ReplayedRequest | list[ReplayedRequest]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with self.path.open("rb") as file:
            file.seek(self.offsets[index])
            return self._request(file.readline(), index)

    def __iter__(self) -> Iterator[ReplayedRequest]:
        with self.path.open("rb") as file:
            for index, offset in enumerate(self.offsets):
                file.seek(offset)
                yield self._request(file.readline(), index)

    def _request(self, line: bytes, index: int) -> ReplayedRequest:
        where = f"{short_path(self.path)}: requests: [{index}]"
        return results.check_line(ReplayedRequest, line.rstrip().removesuffix(b","), where)


def read(path: Path) -> Replay:
    """A replay.json; "requests" are read when they are asked for.

    Raises:
        Eagle3Error: there is no such file, or it is not one that stage 08 wrote.
    """
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run the stage that writes it first")
    before: list[bytes] = []
    after: list[bytes] = []
    offsets: list[int] = []
    with path.open("rb") as file:
        lines, part = iter(file.readline, b""), before
        for line in lines:
            if part is before and line == OPENING.encode():
                offsets, part = _offsets(file, line_end=CLOSING.encode()), after
                continue
            part.append(line)
    text = b"".join([*before, b' "requests": []' if part is after else b"", *after])
    try:
        result = json.loads(text)
    except ValueError as error:
        raise Eagle3Error(f"{short_path(path)}: not JSON: {error}; run stage 08 again") from error
    found = results.check(Replay, result, short_path(path), results.REPLAY_SCHEMA)
    if part is after:
        found["requests"] = Requests(path, offsets)
    return found


def _offsets(file: BinaryIO, line_end: bytes) -> list[int]:
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


class Tallied(TypedDict):
    """Fields of replay.json that the requests together give."""

    agreement: Agreement
    engine_acceptance: Acceptance
    replay_acceptance: Acceptance


class Tally:
    """What the requests of a replay give together, added one by one."""

    def __init__(self, positions: int):
        self.positions = positions
        self.engine: list[Sequence[int]] = []
        self.drafted: list[Sequence[int] | None] = []
        self.replay: list[Sequence[int]] = []
        self.replay_drafted: list[Sequence[int] | None] = []
        self.agreement: Agreement = {
            "rounds": 0,
            "equal": 0,
            "cut": 0,
            "unsure": 0,
            "without_drafts": 0,
            "tokens_not_greedy": 0,
        }

    def add(self, request: ReplayedRequest) -> None:
        rows = request["rows"]
        unequal = [row for row in rows if row["engine"] != row["replay"]]
        self.agreement["rounds"] += len(rows)
        self.agreement["equal"] += len(rows) - len(unequal)
        self.agreement["cut"] += sum(row["cut"] for row in unequal)
        self.agreement["unsure"] += sum(not row["sure"] and not row["cut"] for row in unequal)
        self.agreement["without_drafts"] += request["without_drafts"]
        self.agreement["tokens_not_greedy"] += request.get("lossless", 0)
        self.engine.append(request["engine_rounds"])
        self.drafted.append(request["drafted"])
        self.replay.append(request["replay_rounds"])
        self.replay_drafted.append(request["replay_drafted"])

    def summary(self) -> Tallied:
        return {
            "agreement": self.agreement,
            "engine_acceptance": acceptance.summary(self.engine, self.positions, self.drafted),
            "replay_acceptance": acceptance.summary(self.replay, self.positions, self.replay_drafted),
        }
