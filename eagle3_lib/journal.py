"""Rows of a long stage, kept as they finish, so that a run that ended early goes on with the rest."""

import json
from pathlib import Path

from .files import write_text
from .paths import short_path


class Journal:
    """A JSON-lines file: its settings in the first line, then one finished row a line.

    A last line that a kill cut off is dropped. Rows that were made with other settings are not gone on with.

    Attributes:
        rows: what earlier runs finished.
    """

    def __init__(self, path: Path, settings: dict):
        self.path, self.rows = path, []
        header = json.dumps({"settings": settings}, sort_keys=True)
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        if lines[:1] == [header]:
            self.rows = [json.loads(line) for line in lines[1:]]
        elif lines:
            print(f"{short_path(path)}: the settings changed; its {len(lines) - 1} rows are made again")
            lines = []
        write_text(path, "\n".join([*(lines or [header]), ""]))

    def add(self, row: dict) -> None:
        """Append one row, on disk before this returns to the caller."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def delete(self) -> None:
        """The stage is finished and has written its result."""
        self.path.unlink()
