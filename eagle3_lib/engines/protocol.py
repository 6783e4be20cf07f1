"""What the module of an engine offers: how the engine is started and spoken to."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..params import SamplingSettings, Serving
from ..results import Counters
from .base import Completion, Server, Speculation
from .told import Busy, Card, Told


class EngineServer(Protocol):
    """The functions of ``engines/NAME/server.py``.

    All that speak to a server raise Eagle3Error, with the end of the server's log, where it fails.
    """

    def installed(self, python: str = "") -> tuple[str, str]:
        """(version, build: "cpu" or "cuda") of the engine that an interpreter has ("" is this one).

        Raises:
            Eagle3Error: there is none.
        """

    def speculative_arguments(self, speculation: Speculation) -> list[str]:
        """The command-line words by which it is asked to speculate; [] for mode "plain"."""

    def arguments(
        self,
        params: Serving,
        folder: Path,
        version: str,
        port: int,
        speculation: Speculation,
        profile_dir: Path | None = None,
    ) -> list[str]:
        """All command-line words after the entry point."""

    def serve(
        self,
        params: Serving,
        folder: Path,
        log: Path,
        speculation: Speculation = ...,
        profile_dir: Path | None = None,
    ) -> AbstractContextManager[Server]:
        """Serve the target in ``folder`` on the loopback interface for the length of a ``with`` block.

        Args:
            log: where the server's output goes (kept).
            profile_dir: where a profile's traces go.
        """

    def complete(
        self,
        server: Server,
        prompt_ids: list[int],
        max_tokens: int,
        sampling: SamplingSettings = ...,
        stream: bool = True,
        salt: str = "",
    ) -> Completion:
        """One completion of token ids, with what the engine tells of its rounds.

        Args:
            salt: the prefix cache is shared with requests of the same salt only.
        """

    def decode(self, server: Server, prompt_ids: list[int], tokens: int, batch: int) -> int:
        """Decode ``batch`` requests with one prompt, sent as one, each exactly ``tokens`` long; returns tokens in all."""

    def counters(self, server: Server) -> Counters | None:
        """Its speculation counters since its start; None where it has none."""

    def start_profile(self, server: Server, folder: Path) -> None:
        """Start its torch profiler; the traces go to ``folder`` when the profile is stopped (/stop_profile)."""


class EngineRunning(Protocol):
    """The functions of ``engines/NAME/told.py``: a server that runs already, on which nothing is changed."""

    def recognised(self, server: Server, owner: str) -> str | None:
        """The engine's version if the server is one, "" where it hides it; None if it is something else.

        Args:
            server: of which no more is known than its address and a model.
            owner: "owned_by" of that model in /v1/models.
        """

    def told(self, server: Server, card: Card, models: list[str]) -> Told:
        """What it tells of its configuration.

        Args:
            card: the entry of the model in /v1/models. models: the names of all that it serves.
        Raises:
            Eagle3Error: it gives no token ids, or refuses a completion.
        """

    def busy(self, server: Server) -> Busy | None:
        """What it does now, and has done since its start; None where it does not tell."""
