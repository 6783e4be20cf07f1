"""Command-line options by engine version: an engine that was not read is asked by its own ``--help``.

Versions within ``EngineSpec.read`` take every option that this project gives them. Of another version the help tells: an
option that it does not know is left out where a run means the same without it, and refused where not.
"""

import functools
import re
import subprocess
from collections.abc import Collection, Sequence

from ..errors import Eagle3Error
from .spec import EngineSpec, Release

MODEL_OPTIONS = {"--model", "--model-path"}  # a help text without one of them is not an engine's
HELP_TIMEOUT_S = 180


def in_help(text: str) -> frozenset[str]:
    """Names of the long options in a help text."""
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@functools.cache
def of_engine(spec: EngineSpec, command: tuple[str, ...]) -> frozenset[str]:
    """The options that an engine's own help names.

    Args:
        command: what starts the engine, without arguments.
    Raises:
        Eagle3Error: it does not run, or names no model.
    """
    output = ""
    for words in spec.help_words:
        try:
            done = subprocess.run([*command, words], capture_output=True, text=True, timeout=HELP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Eagle3Error(f"engine_python: {' '.join(command)} {words} does not run: {error}") from error
        output = done.stdout + done.stderr
        found = in_help(done.stdout)
        if found & MODEL_OPTIONS:
            return found
    raise Eagle3Error(
        f"engine_python: {spec.name}'s help names no option for a model; its last lines:\n{output[-1000:]}"
    )


def keep_known(
    words: Sequence[str], known: Collection[str], spec: EngineSpec, version: str
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
            if not keeps and name not in spec.optional:
                raise Eagle3Error(
                    f"{spec.name} {version} has no option {name}; expected a version from {_dotted(spec.read[0])} to "
                    f"{_dotted(spec.read[1])}, or one that has it"
                )
            if not keeps:
                left_out.append(name)
        if keeps:
            kept.append(word)
    if left_out:
        print(
            f"{spec.name} {version} is not a version that was read, and has no {', '.join(left_out)}: left out",
            flush=True,
        )
    return kept, tuple(left_out)


def for_version(
    words: Sequence[str], spec: EngineSpec, version: str, command: Sequence[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Arguments that a version knows, and what was left out: all of them for a version that was read."""
    if spec.is_read(version):
        return list(words), ()
    return keep_known(words, of_engine(spec, tuple(command)), spec, version)


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
