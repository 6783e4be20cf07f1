"""Command-line options by engine version: an engine that was not read is asked by its own ``--help``.

Versions within ``READ`` take every option that this project gives them. Of another version the help tells: an option that
it does not know is left out where a run means the same without it, and refused where not.
"""

import functools
import re
import subprocess
from collections.abc import Collection, Sequence
from itertools import pairwise

from ..errors import Eagle3Error

# Sources read, first and last; engines' own modules say what changed between them.
READ = {"vllm": ((0, 16), (0, 33)), "sglang": ((0, 5, 8), (0, 5, 23))}
HELP = {"vllm": ("--help=all", "--help"), "sglang": ("--help",)}
# Without these a run measures the same, only less is known of it, or it is slower to look at.
OPTIONAL = {
    "--disable-uvicorn-access-log",
    "--per-request-spec-decode-metrics",  # rounds are then read off streamed chunks
    "--enforce-eager",
    "--disable-cuda-graph",
}
HELP_TIMEOUT_S = 180


def version_tuple(version: str) -> tuple[int, ...]:
    """The release numbers of a version: "0.5.16.post1+cu130" -> (0, 5, 16)."""
    release = re.match(r"[\d.]*\d", version)
    assert release is not None, version
    return tuple(int(number) for number in release[0].split("."))


def is_read(engine: str, version: str) -> bool:
    """Whether a version lies within those whose sources were read."""
    first, last = READ[engine]
    release = version_tuple(version)[: len(first)]
    return first <= release <= last


def in_help(text: str) -> frozenset[str]:
    """Names of the long options in a help text."""
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@functools.cache
def of_engine(engine: str, command: tuple[str, ...]) -> frozenset[str]:
    """The options that an engine's own help names.

    Args:
        command: what starts the engine, without arguments.
    Raises:
        Eagle3Error: it does not run, or names no model.
    """
    output = ""
    for words in HELP[engine]:
        try:
            done = subprocess.run([*command, words], capture_output=True, text=True, timeout=HELP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Eagle3Error(f"engine_python: {' '.join(command)} {words} does not run: {error}") from error
        output = done.stdout + done.stderr
        found = in_help(done.stdout)
        if found & {"--model", "--model-path"}:
            return found
    raise Eagle3Error(f"engine_python: {engine}'s help names no option for a model; its last lines:\n{output[-1000:]}")


def keep_known(
    words: Sequence[str], known: Collection[str], engine: str, version: str
) -> tuple[list[str], tuple[str, ...]]:
    """Arguments without the options that an engine does not know.

    Args:
        words: options, each followed by its values; short ones (-tp) are kept.
        known: the options that it knows.
    Returns:
        the arguments, and the names of what was left out.
    Raises:
        Eagle3Error: an option without which the run would mean something else is not known.
    """
    kept: list[str] = []
    left_out: list[str] = []
    keeps = True
    for word in words:
        if re.match(r"--?[a-z]", word):
            name = word.split("=", 1)[0]
            keeps = name in known or not name.startswith("--")
            if not keeps and name not in OPTIONAL:
                raise Eagle3Error(
                    f"{engine} {version} has no option {name}; expected a version from {_dotted(READ[engine][0])} to "
                    f"{_dotted(READ[engine][1])}, or one that has it"
                )
            if not keeps:
                left_out.append(name)
        if keeps:
            kept.append(word)
    if left_out:
        print(
            f"{engine} {version} is not a version that was read, and has no {', '.join(left_out)}: left out", flush=True
        )
    return kept, tuple(left_out)


def for_version(
    words: Sequence[str], engine: str, version: str, command: Sequence[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Arguments that a version knows, and what was left out: all of them for a version that was read."""
    if is_read(engine, version):
        return list(words), ()
    return keep_known(words, of_engine(engine, tuple(command)), engine, version)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def tensor_parallel(engine_args: Sequence[str]) -> int:
    """The tensor parallel size that an engine is started with, from its command-line words; 1 where they say none.

    Raises:
        ValueError: they say something that is no number.
    """
    found = _values_after(engine_args, "--tensor-parallel-size", "-tp", "--tp-size", "--tp")
    return int(found[-1]) if found else 1


def number_after(words: Sequence[str], *flags: str) -> int | None:
    """The number that the last of some options is given; None where there is none, or it turns something off (-1)."""
    found = [value for value in _values_after(words, *flags) if value.isdigit()]
    return int(found[-1]) if found else None


def _values_after(words: Sequence[str], *flags: str) -> list[str]:
    parted = [part for word in words for part in word.split("=", 1)]
    return [value for flag, value in pairwise(parted) if flag.replace("_", "-") in flags]
