"""Serving with a look at the GPUs first: what does not fit is told, with its remedy, before the engine starts."""

from ..engines.base import PLAIN, Speculation
from ..engines.serving import MODULES
from . import fit


def serve(params, folder, log, speculation: Speculation = PLAIN, profile_dir=None):
    """Serve a target for the length of a ``with`` block, by the engine that ``params.engine`` names.

    What does not fit the GPUs is printed first, with its remedy; the engine itself has the last word.
    """
    if findings := fit.before_launch(params, folder, speculation):
        print(fit.told(findings), flush=True)
    return MODULES[params.engine].serve(params, folder, log, speculation, profile_dir)
