"""Reading what stage 07 measured, apart from measuring it, so that the stages after it need no HTTP client."""

import json
from pathlib import Path

import numpy as np

from .errors import Eagle3Error
from .provenance import project_path, short_path


def read(folder: str | Path) -> dict:
    """A benchmark.json that :func:`run` wrote."""
    path = project_path(folder) / "benchmark.json"
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run stage benchmark first")
    return json.loads(path.read_text())


def throughput(timed: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [prompts] at one request at a time, summed over repeats, in the order of the prompts' ids."""
    timed = [row for row in timed if row["concurrency"] == 1]
    ids = sorted({row["id"] for row in timed})
    total = {i: [0.0, 0.0] for i in ids}
    for row in timed:
        total[row["id"]][0] += row["tokens"]
        total[row["id"]][1] += row["seconds"]
    return np.array([total[i][0] for i in ids]), np.array([total[i][1] for i in ids])
