"""vLLM: arguments by version, environment, and the server as a context manager.

Read in vLLM 0.32.0 (CPU build): entrypoints/openai/api_server.py, config/speculative.py, config/observability.py.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client import Metric

from ...params import NEUTRAL_SAMPLING, Serving
from ...results import Counters
from .. import versions
from ..base import (
    PLAIN,
    Server,
    Speculation,
    complete,
    find_distribution,
    interpreter,
    launch,
    metrics_of,
    pick_port,
)
from ..spec import version_tuple
from .spec import SPEC

# The default entry point, `vllm serve`, asks for a distribution named vllm, which the CPU build is not. Started by -c,
# not -m: children that Python spawns would otherwise import the whole API server once more each.
ENTRY = "import runpy; runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"
# On a CPU the worker runs inside the engine's process: as a process of its own it waits beside an engine core that spins
# on another core, and starts a third interpreter (0.32 platforms/cpu.py allows "uni" only with this variable at 0).
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
CPU_ARGUMENTS = ("--distributed-executor-backend", "uni")
NGRAM_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
DETAILED_METRICS, DETAILED_METRICS_SINCE = "--per-request-spec-decode-metrics", (0, 29)


def installed(python: str = "") -> tuple[str, str]:
    """(version, "cpu" or "cuda") of the vLLM that an interpreter has ("" is this one).

    Raises:
        Eagle3Error: there is none.
    """
    name, version = find_distribution(python, SPEC.distributions)
    return version, "cpu" if name == SPEC.cpu_build or "cpu" in version else "cuda"


def speculative_config(speculation: Speculation) -> dict[str, Any] | None:
    """The --speculative-config of a mode: None for "plain"."""
    if speculation.mode == "plain":
        return None
    common = {"num_speculative_tokens": speculation.tokens, **speculation.options}
    if speculation.mode == "ngram":
        return {"method": "ngram", **NGRAM_LOOKUP, **common}
    return {"method": "eagle3", "model": str(speculation.folder()), **common}


def speculative_arguments(speculation: Speculation) -> list[str]:
    """The command-line words of a mode: one JSON; [] for "plain"."""
    config = speculative_config(speculation)
    return ["--speculative-config", json.dumps(config)] if config else []


def arguments(
    params: Serving,
    folder: Path,
    version: str,
    port: int,
    speculation: Speculation,
    profile_dir: Path | None = None,
) -> list[str]:
    """Command-line arguments after the entry point."""
    speculative = speculative_arguments(speculation)
    words = [
        *("--model", str(folder), "--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", params.dtype, "--max-model-len", str(params.max_model_len), "--disable-uvicorn-access-log"),
        # The server would apply the sampling defaults of the target's generation_config.json to what a request leaves out, at
        # temperature 0 too (config/model.py, get_diff_sampling_param). Its end tokens, from the same file, stay in force.
        *("--override-generation-config", json.dumps(NEUTRAL_SAMPLING)),
        *(["--enforce-eager"] if params.eager else []),
        *params.engine_args,
        *speculative,
    ]
    if speculative and version_tuple(version) >= DETAILED_METRICS_SINCE:
        words += [DETAILED_METRICS, "detailed"]
    if profile_dir:
        profiler = {"profiler": "torch", "torch_profiler_dir": str(profile_dir), "torch_profiler_with_stack": False}
        words += ["--profiler-config", json.dumps(profiler)]
    return words


@contextlib.contextmanager
def serve(
    params: Serving,
    folder: Path,
    log: Path,
    speculation: Speculation = PLAIN,
    profile_dir: Path | None = None,
) -> Iterator[Server]:
    """Serve the target in ``folder`` on the loopback interface for the length of a ``with`` block.

    Args:
        log: where the server's output goes (kept).
        profile_dir: makes /start_profile and /stop_profile write torch traces there.
    Raises:
        Eagle3Error: see :func:`eagle3_lib.engines.base.launch`.
    """
    version, build = installed(params.engine_python)
    port = pick_port(params.port)
    command = [interpreter(params.engine_python), "-c", ENTRY]
    words = arguments(params, folder, version, port, speculation, profile_dir)
    known, left_out = versions.for_version(words, SPEC, version, command)
    command += known
    if build == "cpu" and not set(SPEC.tensor_parallel_options) & set(params.engine_args):
        command += CPU_ARGUMENTS
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} | (CPU_ENV if build == "cpu" else {})
    if profile_dir:
        env |= {"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}  # marks the drafter's part, see eagle3_lib/engines/traces.py
    server = Server(
        f"http://127.0.0.1:{port}",
        "target",
        SPEC.name,
        version,
        definitions=SPEC.definitions_in(version),
        tells_rounds=DETAILED_METRICS in known,
        stall_s=params.stall_timeout_s,
        left_out=left_out,
    )
    with launch(command, env, log, server, params.start_timeout_s) as running:
        yield running


def decode(server: Server, prompt_ids: list[int], tokens: int, batch: int) -> int:
    """A list of prompts in one completion; see :func:`eagle3_lib.engines.serving.decode`."""
    try:
        reply = server.client().completions.create(
            model=server.model,
            prompt=[prompt_ids] * batch,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    except (openai.APIError, httpx.HTTPError) as error:
        raise server.failed(error) from server.reached.cause(error)
    completed: int = reply.usage.completion_tokens
    return completed


def counters(server: Server) -> Counters | None:
    """Speculation counters since the server's start; None where it has none."""
    return counters_in(metrics_of(server))


def counters_in(families: Iterable[Metric]) -> Counters | None:
    """The speculation counters of a scrape of /metrics. Read in v1/spec_decode/metrics.py."""
    rounds, drafted = 0, 0
    accepted: dict[int, int] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_drafts_total":
                rounds += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_draft_tokens_total":
                drafted += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                accepted[position] = accepted.get(position, 0) + int(sample.value)
    if not accepted:
        return None
    return {"rounds": rounds, "drafted": drafted, "accepted": [accepted[i] for i in sorted(accepted)]}


def start_profile(server: Server, folder: Path) -> None:
    """The folder was given at the start (--profiler-config)."""
    server.http().post("/start_profile", timeout=60).raise_for_status()


__all__ = [
    "arguments",
    "complete",
    "counters",
    "decode",
    "installed",
    "serve",
    "speculative_arguments",
    "start_profile",
]
