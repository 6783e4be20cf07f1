"""The engines by name. Whoever needs something of an engine asks here: ``ENGINES[name].spec``, ``ENGINES[name].server``."""

from typing import TYPE_CHECKING

from .sglang.spec import SPEC as SGLANG
from .spec import Engine
from .vllm.spec import SPEC as VLLM

if TYPE_CHECKING:  # mypy holds the modules against the protocol here: they are imported when they are first needed
    from .protocol import EngineRunning, EngineServer
    from .sglang import server as sglang_server
    from .sglang import told as sglang_told
    from .vllm import server as vllm_server
    from .vllm import told as vllm_told

    OFFERED: tuple[EngineServer, ...] = (vllm_server, sglang_server)
    TOLD: tuple[EngineRunning, ...] = (vllm_told, sglang_told)

ENGINES: dict[str, Engine] = {
    spec.name: Engine(spec, f"eagle3_lib.engines.{spec.name}.server") for spec in (VLLM, SGLANG)
}
