"""A vLLM plugin that lets vLLM 0.16 run EAGLE-3 on DeepSeek-V3 and Kimi targets, without an edited file.

vLLM loads it in each of its processes (entry point vllm.general_plugins). It does nothing unless EAGLE3_LIFT_GATES is 1.
Then it reads the installed vLLM's source (:mod:`eagle3_lib.compat.gates`): a release that runs such targets by itself is left
as it is, and the log says so; stock 0.16 has three gates lifted; anything else is refused. What was run and what was not
is in docs/kimi.md.

It imports nothing beside the standard library until it lifts a gate, and no package that vLLM does not bring, so that it
can be installed beside vLLM 0.16 with ``pip install --no-deps``.
"""

import functools
import logging
import os
from types import FunctionType

from ..errors import Eagle3Error
from ..targets.known_configs import known_config
from . import gates

SWITCH = "EAGLE3_LIFT_GATES"
STOCK = "0.16."  # the releases that the lifts were written for
STOCK_GATES = {"gate_whitelist", "gate_interface", "gate_image_token"}
MODEL_TYPES = ("deepseek_v3", "kimi_k2")
MODELS = {  # architecture -> its class in eagle3_lib/engines/inside/vllm_capture.py; Kimi-K2.5 asks for DeepseekV2ForCausalLM as its text model
    "DeepseekV2ForCausalLM": "CapturingDeepseek",
    "DeepseekV3ForCausalLM": "CapturingDeepseek",
    "KimiK25ForConditionalGeneration": "CapturingKimiK25",
}
# Below "vllm", for its handlers; as warnings, since vLLM 0.32 loads plugins before it sets them up.
logger = logging.getLogger("vllm.eagle3_lib")


def register() -> None:
    """What vLLM calls in each process.

    Raises:
        Eagle3Error: asked for, and this vLLM is neither stock 0.16 nor one that needs nothing.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise Eagle3Error(f"{SWITCH}: found {switch!r}, expected 1 or 0")
    if switch == "1":
        lift()


@functools.cache
def lift() -> None:
    """Lift the gates that the installed vLLM has, once in a process."""
    import vllm

    tree, version = gates.source_tree("vllm"), vllm.__version__
    assert tree is not None
    found = {f.rule for f in gates.check(tree, known_config("Kimi-K2.5"), version) if f.severity == "fails"}
    if not found:
        logger.warning(
            "%s: vLLM %s runs EAGLE-3 on DeepSeek-V3 and Kimi targets by itself; nothing lifted", SWITCH, version
        )
        return
    if not version.startswith(STOCK) or found != STOCK_GATES:
        raise Eagle3Error(
            f"{SWITCH}: found vLLM {version} with {', '.join(sorted(found))}; expected stock {STOCK}x with "
            f"{', '.join(sorted(STOCK_GATES))}, or a vLLM that has no gates"
        )
    from vllm import ModelRegistry
    from vllm.config.speculative import SpeculativeConfig

    extend_whitelist(SpeculativeConfig._verify_args, MODEL_TYPES)
    for architecture, name in MODELS.items():
        ModelRegistry.register_model(architecture, f"eagle3_lib.engines.inside.vllm_capture:{name}")
    logger.warning("%s: vLLM %s: lifted %s", SWITCH, version, ", ".join(sorted(found)))


def extend_whitelist(function: FunctionType, names: tuple[str, ...]) -> None:
    """Add model types to the list of EAGLE-3 targets inside a function of vLLM 0.16 (config/speculative.py).

    The list is a constant of the function's code, and pydantic has compiled the function into its schema already: only the
    code of that very function can be changed.

    Raises:
        Eagle3Error: the function has no such list.
    """
    code = function.__code__
    lists = [c for c in code.co_consts if isinstance(c, tuple) and {"llama", "qwen"} <= set(c)]
    if len(lists) != 1:
        raise Eagle3Error(f"{function.__qualname__}: found {len(lists)} lists of EAGLE-3 targets, expected one")
    longer = lists[0] + tuple(name for name in names if name not in lists[0])
    function.__code__ = code.replace(co_consts=tuple(longer if c is lists[0] else c for c in code.co_consts))
