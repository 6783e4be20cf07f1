"""Serving engines: each runs in a subprocess under its own interpreter and is spoken to over HTTP.

One module an engine, all with ``installed``, ``serve``, ``complete``, ``decode``, ``counters`` and ``start_profile``.
"""

import httpx

from . import sglang, vllm
from .base import Completion, Server, Speculation

MODULES = {"vllm": vllm, "sglang": sglang}


def speculative_words(params, speculation: Speculation) -> list[str]:
    """The command-line words by which an engine is asked to speculate; [] where they stand in one JSON (vLLM)."""
    return sglang.speculative_arguments(speculation) if params.engine == "sglang" else []


def complete(server: Server, prompt_ids: list[int], max_tokens: int, **options) -> Completion:
    """One completion of token ids, with what the engine tells of its rounds.

    Options: sampling, stream, as :func:`eagle3_lib.engines.base.complete` has them.
    """
    return MODULES[server.engine].complete(server, prompt_ids, max_tokens, **options)


def decode(server: Server, prompt_ids: list[int], tokens: int, batch: int) -> int:
    """Decode ``batch`` requests with the same prompt at once, greedily, each exactly ``tokens`` long; returns tokens in all.

    They are sent as one, so that the engine has them all from the start.

    Raises:
        Eagle3Error: an error of the server.
    """
    return MODULES[server.engine].decode(server, prompt_ids, tokens, batch)


def counters(server: Server) -> dict | None:
    """The engine's own speculation counters since its start, {"rounds", "accepted": by position}; None if it has none."""
    return MODULES[server.engine].counters(server)


def start_profile(server: Server, folder) -> None:
    """Start the engine's torch profiler; its traces go to ``folder`` when :func:`stop_profile` is called."""
    MODULES[server.engine].start_profile(server, folder)


def stop_profile(server: Server) -> None:
    """End a profile; when this returns its traces are written."""
    httpx.post(f"{server.url}/stop_profile", timeout=300).raise_for_status()
