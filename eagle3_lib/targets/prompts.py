"""What the target is asked: prompts and conversations from JSON lines, Parquet or a ``datasets`` id, each once, in splits.

A row holds ``prompt`` (text), ``messages`` (as the OpenAI API has them) or ``conversations`` (``from`` and ``value``, as
ShareGPT has them); besides, where wanted, ``system`` (text) and ``tools`` (as the OpenAI API has them). Assistant turns
of a row are not used: the target gives its own. A turn that calls tools is the exception, since the tools' results that
follow belong to that call. A ShareGPT row without a human turn asks nothing: it is skipped and counted.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Eagle3Error
from ..paths import project_path, short_path

DATASETS = "datasets:"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """What one row asks. ``messages``: everything but the assistant's turns that the target is to give itself.

    A message of role "assistant" that has no content and no tool calls stands where the target speaks; one at the end.
    """

    id: str
    messages: list[dict]
    tools: list[dict] = field(default_factory=list)

    @property
    def first_prompt(self) -> str:
        """What decides the split: the first user message, after the system prompt where there is one."""
        texts = []
        for message in self.messages:
            if message["role"] == "assistant":
                break
            texts.append(content_text(message))
        return "\n".join(texts)

    @property
    def turns(self) -> list[int]:
        """Places in ``messages`` where the target speaks."""
        return [place for place, message in enumerate(self.messages) if message == TURN]


TURN = {"role": "assistant"}


class NoHumanTurn(Eagle3Error):
    """A ShareGPT row in which nobody asks anything."""


def content_text(message: dict) -> str:
    """The text of a message, also of one made of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def hash16(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def share_of(text: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int(hash16(text), 16) / 16**16


def split_of(first_prompt: str, held_out_share: float) -> str:
    """Train or held out, by the prompt's hash: the same prompt never changes sides, whatever else is in the file."""
    return "held_out" if share_of(first_prompt) < held_out_share else "train"


def read(source: str, most: int = 0) -> list[Conversation]:
    """The conversations of a prompts source; see :func:`read_counted`. Skipped rows are told."""
    found, skipped = read_counted(source, most)
    if skipped:
        print(f"note: {skipped_words(source, skipped)}")
    return found


def skipped_words(source: str, skipped: int) -> str:
    """A sentence for notes and reports."""
    return f"prompts: {source}: {skipped} ShareGPT rows without a human turn are skipped"


def read_counted(source: str, most: int = 0) -> tuple[list[Conversation], int]:
    """The conversations of a prompts source, each once, in its order, and the number of rows that were skipped.

    Args:
        source: a .jsonl or .parquet file (relative to the project root or absolute), or "datasets:NAME" or
            "datasets:NAME:SPLIT" for a data set of the ``datasets`` library ("train" when no split is named).
        most: stop after so many (0: all).
    Returns:
        (conversations, skipped): a conversation whose text differs from an earlier one's in white space alone is left out;
        skipped counts ShareGPT rows without a human turn.
    Raises:
        Eagle3Error: naming the file, the row, the field, what was found and expected.
    """
    found: dict[str, Conversation] = {}
    skipped = 0
    for where, row in _rows(source):
        try:
            conversation = parse(row, where)
        except NoHumanTurn:
            skipped += 1
            continue
        said = json.dumps([[m["role"], content_text(m).split()] for m in conversation.messages]) + str(
            conversation.tools
        )
        found.setdefault(hash16(said), conversation)
        if most and len(found) == most:
            break
    if not found:
        without = f" with a human turn ({skipped} without one)" if skipped else ""
        raise Eagle3Error(f"{source}: found no row{without}, expected prompts")
    return list(found.values()), skipped


def parse(row: dict, where: str) -> Conversation:
    """One row as a conversation, checked.

    Raises:
        Eagle3Error: no text where one belongs, an unknown role, or no user turn (:class:`NoHumanTurn` for a ShareGPT row).
    """
    if not isinstance(row, dict):
        raise Eagle3Error(f"{where}: found {type(row).__name__}, expected an object")
    tools = _optional(row, "tools", (list, str), where) or []
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if (messages := _optional(row, "messages", (list,), where)) is not None:
        messages = [_message(m, f"{where}: messages[{i}]") for i, m in enumerate(messages)]
    elif (said := _optional(row, "conversations", (list,), where)) is not None:
        messages = [_sharegpt_message(m, f"{where}: conversations[{i}]") for i, m in enumerate(said)]
    else:
        if not isinstance(row.get("prompt"), str):
            raise Eagle3Error(f"{where}: field prompt: found {type(row.get('prompt')).__name__}, expected str")
        messages = [{"role": "user", "content": row["prompt"]}]
    if system := _optional(row, "system", (str,), where):
        messages = [{"role": "system", "content": system}, *messages]
    messages = _with_turns(messages)
    if not any(message["role"] == "user" for message in messages):
        kind = NoHumanTurn if "conversations" in row and row.get("messages") is None else Eagle3Error
        raise kind(f"{where}: found no message of role user, expected one at least")
    plain = len(messages) == 2 and not tools  # a bare prompt keeps the hash of its text
    text = content_text(messages[0]) if plain else json.dumps([messages, tools], sort_keys=True)
    return Conversation(hash16(text), messages, tools)


def _with_turns(messages: list[dict]) -> list[dict]:
    """The target's own turns where the row has an assistant's, and one at the end; calls of tools stay.

    What an assistant says before anybody has asked something is left out: the target has nothing to answer there.
    """
    kept = []
    for place, message in enumerate(messages):
        after = messages[place + 1]["role"] if place + 1 < len(messages) else ""
        if message["role"] != "assistant" or (after == "tool" and message.get("tool_calls")):
            kept.append(message)
        elif any(earlier["role"] == "user" for earlier in kept) and kept[-1] != TURN:
            kept.append(TURN)
    return kept if kept and kept[-1] == TURN else [*kept, TURN]


def _message(message, where: str) -> dict:
    if not isinstance(message, dict):
        raise Eagle3Error(f"{where}: found {type(message).__name__}, expected an object")
    if message.get("role") not in ROLES:
        raise Eagle3Error(f"{where}: role: found {message.get('role')!r}, expected one of {', '.join(ROLES)}")
    if message["role"] != "assistant" and not content_text(message):
        raise Eagle3Error(f"{where}: content: found {message.get('content')!r}, expected text")
    return {name: value for name, value in message.items() if value is not None}


def _sharegpt_message(message, where: str) -> dict:
    if not isinstance(message, dict) or message.get("from") not in SHAREGPT_ROLES:
        found = repr(message.get("from")) if isinstance(message, dict) else type(message).__name__
        raise Eagle3Error(f"{where}: from: found {found}, expected one of {', '.join(SHAREGPT_ROLES)}")
    return _message({"role": SHAREGPT_ROLES[message["from"]], "content": message.get("value")}, where)


def _optional(row: dict, name: str, kinds: tuple[type, ...], where: str):
    value = row.get(name)
    if value is not None and not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise Eagle3Error(f"{where}: field {name}: found {type(value).__name__}, expected {expected}")
    return value


def _rows(source: str) -> Iterator[tuple[str, dict]]:
    """(where, row) of a source, row by row."""
    if source.startswith(DATASETS):
        yield from _datasets_rows(source)
        return
    path = project_path(source)
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; expected prompts (.jsonl, .parquet or {DATASETS}NAME)")
    yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            where = f"{short_path(path)}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise Eagle3Error(f"{where}: not JSON ({error}): found {line[:60]!r}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=512):
            for row in batch.to_pylist():
                number += 1
                yield f"{short_path(path)}, row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise Eagle3Error(f"{short_path(path)}: not a whole Parquet file: {error}") from error


def _datasets_rows(source: str) -> Iterator[tuple[str, dict]]:
    name, _, split = source.removeprefix(DATASETS).partition(":")
    try:
        import datasets
    except ImportError as error:
        raise Eagle3Error(
            f"prompts: {source}: the package datasets is not installed; pip install datasets, or give a .jsonl or .parquet file"
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{source}, row {number}", row
    except (OSError, ValueError) as error:
        raise Eagle3Error(f"prompts: {source}: the data set could not be read: {error}") from error
