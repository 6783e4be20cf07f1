"""Files and folders that appear whole or not at all, and their hashes."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never a part."""
    _write(path, [text])


def write_json(path: Path, value) -> None:
    """As :func:`write_text`; the text is made piece by piece, so that it never stands in memory as a whole."""
    _write(path, itertools.chain(json.JSONEncoder(indent=1, allow_nan=False).iterencode(value), ["\n"]))


def _write(path: Path, pieces: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path):
    """A folder that appears whole or not at all: yields a hidden one beside it, which then takes its place."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def settle(built: Path, folder: Path) -> None:
    """Rename a finished folder to its place. Where another process was first, its folder stays."""
    try:
        os.replace(built, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hash(path: Path) -> str:
    """One hash over the names and contents of a folder's files (or over one file)."""
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path)} {sha256(file)}\n".encode())
    return digest.hexdigest()
