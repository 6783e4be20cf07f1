"""What command-line words of any engine mean: how many ranks, how long a chunk of prefill."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from ..errors import Eagle3Error
from .registry import ENGINES


def tensor_parallel(engine_args: Sequence[str]) -> int:
    """The tensor parallel size that an engine was started with, from its command-line words; 1 where they say none.

    Raises:
        Eagle3Error: they say something that is no number.
    """
    flags = [flag for engine in ENGINES.values() for flag in engine.spec.tensor_parallel_options]
    found = _after(engine_args, flags)
    if found and (not found[-1].isdecimal() or int(found[-1]) == 0):
        raise Eagle3Error(f"engine_args: expected a number of GPUs: found {found[-1]!r}")
    return int(found[-1]) if found else 1


def prefill_chunk(engine_args: Sequence[str]) -> int | None:
    """The most prompt tokens of one step, from an engine's command-line words; None where they say none."""
    flags = [flag for engine in ENGINES.values() for flag in engine.spec.prefill_chunk_options]
    return number_after(engine_args, *flags)


def number_after(words: Sequence[str], *flags: str) -> int | None:
    """The number that the last of some options is given; None where there is none, or it turns something off (-1)."""
    numbers = [value for value in _after(words, flags) if value.isdecimal()]
    return int(numbers[-1]) if numbers else None


def _after(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """What some options are given, in the order of the words."""
    parted = [part for word in words for part in word.split("=", 1)]
    return [value for flag, value in pairwise(parted) if flag.replace("_", "-") in flags]
