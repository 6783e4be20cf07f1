"""What a feature store will take of the disk, before anything is written."""

import math
import shutil
from pathlib import Path

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
SCALE_BLOCK = 64  # values of a float8 row that share one float32 scale
OTHER_BYTES = (
    12  # of a token: its id and the target's choice (int32 each), and its mass in the draft vocabulary (float32)
)
RESERVE = 0.02  # of the disk's free space, left to logs and to what others write


def scale_block(hidden: int) -> int:
    """Values that share a scale: 64, or fewer where the hidden size does not divide by 64."""
    return math.gcd(hidden, SCALE_BLOCK)


def bytes_per_token(boundaries: int, hidden: int, dtype: str) -> int:
    """Storage of one token: a residual stream for each boundary and the last hidden state, with scales where they have any.

    Args:
        boundaries: how many; hidden: the target's hidden size; dtype: "float32", "bfloat16" or "float8_e4m3fn".
    """
    values = (boundaries + 1) * hidden
    scales = 4 * values // scale_block(hidden) if dtype == "float8_e4m3fn" else 0
    return values * VALUE_BYTES[dtype] + scales + OTHER_BYTES


def plan(tokens: int, boundaries: int, hidden: int, dtype: str, folder: Path) -> dict:
    """Bytes that a feature store of so many tokens takes, and what is free where it goes.

    Returns:
        {"tokens", "bytes_per_token", "bytes", "free_bytes", "fits", "fitting_dtypes": the storage types that fit, "advice":
        what to do, in words}.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    need = {kind: tokens * bytes_per_token(boundaries, hidden, kind) for kind in VALUE_BYTES}
    fitting = [kind for kind in VALUE_BYTES if need[kind] < free * (1 - RESERVE)]
    return {
        "tokens": tokens,
        "bytes_per_token": bytes_per_token(boundaries, hidden, dtype),
        "bytes": need[dtype],
        "free_bytes": free,
        "fits": dtype in fitting,
        "fitting_dtypes": fitting,
        "advice": _advice(need, free, dtype, fitting),
    }


def _advice(need: dict[str, int], free: int, dtype: str, fitting: list[str]) -> str:
    said = f"{need[dtype] / 1e9:.2f} GB of features in {dtype}, {free / 1e9:.2f} GB are free"
    if dtype in fitting:
        return f"fits: {said}"
    if fitting:
        return f"does not fit: {said}; {fitting[0]} takes {need[fitting[0]] / 1e9:.2f} GB and fits"
    return f"does not fit: {said}; storage: online computes the features anew where they are read, and stores none"
