"""Serving with a look at the GPUs first: what does not fit is told, with its remedy, before the engine starts."""

from contextlib import AbstractContextManager
from pathlib import Path

from ..engines.base import PLAIN, Server, Speculation
from ..engines.registry import ENGINES
from ..params import Serving
from . import fit


def serve(
    params: Serving,
    folder: Path,
    log: Path,
    speculation: Speculation = PLAIN,
    profile_dir: Path | None = None,
) -> AbstractContextManager[Server]:
    """Serve a target for the length of a ``with`` block, by the engine that ``params.engine`` names.

    What does not fit the GPUs is printed first, with its remedy; the engine itself has the last word.
    """
    if findings := fit.before_launch(params, folder, speculation):
        print(fit.told(findings), flush=True)
    return ENGINES[params.engine].server.serve(params, folder, log, speculation, profile_dir)
