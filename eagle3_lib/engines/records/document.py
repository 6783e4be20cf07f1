"""A file of another tool, opened: its text, and its JSON values where it has any."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ...errors import Eagle3Error
from ...paths import project_path, short_path

EVENT = re.compile(r"^data: ?(\{.*)$", re.MULTILINE)  # of a server-sent event stream


@dataclass(frozen=True)
class Document:
    """where: its name for an error. values: of JSON one, of JSON lines and of a saved event stream one each; none of other
    text. places: where each value stands. is_stream: it is an event stream. fault: why text that looks like JSON is none."""

    path: Path
    where: str
    text: str
    values: list[Any]
    places: list[str]
    is_stream: bool = False
    fault: str = ""

    @functools.cached_property
    def objects(self) -> list[dict[str, Any]]:
        """The values that are JSON objects."""
        return [value for value in self.values if isinstance(value, dict)]


def open_document(path: str | Path) -> Document:
    """Read a file.

    Raises:
        Eagle3Error: there is none, it is empty or not text, or a line of JSON lines or of an event stream is cut off.
    """
    path = project_path(path)
    where = short_path(path)
    if not path.is_file():
        raise Eagle3Error(f"{where}: found {'a folder' if path.is_dir() else 'no such file'}, expected a file")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Eagle3Error(f"{where}: not text: {error}") from error
    if not text.strip():
        raise Eagle3Error(f"{where}: the file is empty")
    if EVENT.search(text):
        return _open_stream(path, where, text)
    try:
        return Document(path, where, text, [json.loads(text)], [where])
    except (ValueError, RecursionError) as error:
        fault = str(error)
    return _open_lines(path, where, text, fault)


def families_of(document: Document) -> list[Metric]:
    """The metrics of Prometheus text.

    Raises:
        Eagle3Error: it is none.
    """
    try:
        return list(text_string_to_metric_families(document.text))
    except ValueError as error:
        raise Eagle3Error(f"{document.where}: not Prometheus text (cut off?): {error}") from error


def _open_stream(path: Path, where: str, text: str) -> Document:
    values, places = [], []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 inside an answer
        event = EVENT.match(line)
        if event:
            values.append(_load(event[1], f"{where}: line {number}"))
            places.append(f"{where}: line {number}")
    return Document(path, where, text, values, places, is_stream=True)


def _open_lines(path: Path, where: str, text: str, fault: str) -> Document:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first = lines[0][1].strip()
    if not first.startswith("{"):
        is_json = bool(re.match(r"\[\s*([\[{]|$)", first))  # a log line may begin with [2026-11-30
        return Document(path, where, text, [], [], fault=fault if is_json else "")
    if not first.endswith("}") or len(lines) == 1:  # not one object a line
        return Document(path, where, text, [], [], fault=fault)
    places = [f"{where}: line {number}" for number, _ in lines]
    values = [_load(line, place) for (_, line), place in zip(lines, places, strict=True)]
    return Document(path, where, text, values, places)


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Eagle3Error(f"{where}: not JSON (cut off?): {error}") from error
