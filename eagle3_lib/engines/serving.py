"""A running engine asked by what it is: each function hands over to the engine's own module, see ``protocol.py``."""

from pathlib import Path

from ..params import GREEDY, SamplingSettings, Serving
from ..results import Counters
from .base import Completion, Server, Speculation
from .registry import ENGINES


def speculative_words(params: Serving, speculation: Speculation) -> list[str]:
    """The command-line words by which an engine is asked to speculate; [] for mode "plain"."""
    return ENGINES[params.engine].server.speculative_arguments(speculation)


def complete(
    server: Server,
    prompt_ids: list[int],
    max_tokens: int,
    sampling: SamplingSettings = GREEDY,
    stream: bool = True,
    salt: str = "",
) -> Completion:
    """One completion of token ids, with what the engine tells of its rounds; see :func:`eagle3_lib.engines.base.complete`."""
    return ENGINES[server.engine].server.complete(server, prompt_ids, max_tokens, sampling, stream, salt)


def decode(server: Server, prompt_ids: list[int], tokens: int, batch: int) -> int:
    """Decode ``batch`` requests with the same prompt at once, greedily, each exactly ``tokens`` long; returns tokens in all.

    They are sent as one, so that the engine has them all from the start.

    Raises:
        Eagle3Error: an error of the server.
    """
    return ENGINES[server.engine].server.decode(server, prompt_ids, tokens, batch)


def counters(server: Server) -> Counters | None:
    """The engine's own speculation counters since its start; None if it has none."""
    return ENGINES[server.engine].server.counters(server)


def start_profile(server: Server, folder: Path) -> None:
    """Start the engine's torch profiler; its traces go to ``folder`` when :func:`stop_profile` is called."""
    ENGINES[server.engine].server.start_profile(server, folder)


def stop_profile(server: Server) -> None:
    """End a profile; when this returns its traces are written."""
    server.http().post("/stop_profile", timeout=300).raise_for_status()
