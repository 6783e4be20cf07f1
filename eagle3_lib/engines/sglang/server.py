"""SGLang: arguments, the server as a context manager, and rounds from its streamed chunks.

Read in SGLang 0.5.16: srt/server_args.py, srt/managers/tokenizer_manager.py (meta_info), srt/entrypoints/http_server.py.
SGLang tells no count for each round, only each request's histogram (``spec_correct_drafts_histogram``, from 0.5.16 on).
At one request at a time a streamed chunk is a step, so the rounds are read off the stream; the histogram checks them.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from ...errors import Eagle3Error
from ...params import GREEDY, SamplingSettings, Serving
from ...results import Counters
from .. import versions
from ..base import (
    PLAIN,
    Completion,
    Server,
    Speculation,
    find_distribution,
    interpreter,
    launch,
    pick_port,
)
from ..definitions import Definitions
from .spec import DEFINITIONS, SPEC


def installed(python: str = "") -> tuple[str, str]:
    """(version, "cuda") of the SGLang that an interpreter has ("" is this one).

    Raises:
        Eagle3Error: there is none.
    """
    return find_distribution(python, SPEC.distributions)[1], "cuda"


def speculative_arguments(speculation: Speculation) -> list[str]:
    """Arguments of a mode. Steps, topk and draft tokens are always explicit: left out, some targets get a tree."""
    if speculation.mode == "plain":
        return []
    draft_tokens = DEFINITIONS[-1].draft_tokens(speculation.tokens)  # every version counts the root
    if speculation.mode == "ngram":
        words = {"algorithm": "NGRAM", "num-draft-tokens": draft_tokens, "ngram-max-bfs-breadth": 1}
    else:
        words = {
            "algorithm": "EAGLE3",
            "draft-model-path": speculation.folder(),
            "num-steps": speculation.tokens,
            "eagle-topk": 1,
            "num-draft-tokens": draft_tokens,
        }
    return [word for name, value in words.items() for word in (f"--speculative-{name}", str(value))]


def arguments(
    params: Serving,
    folder: Path,
    version: str,
    port: int,
    speculation: Speculation,
    profile_dir: Path | None = None,
) -> list[str]:
    """Command-line arguments after the entry point, the same in every version and with a profile."""
    return [
        *("--model-path", str(folder), "--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", params.dtype, "--context-length", str(params.max_model_len)),
        *("--sampling-defaults", "openai"),  # not those of the target's generation_config.json
        *(["--disable-cuda-graph"] if params.eager else []),
        *speculative_arguments(speculation),
        *params.engine_args,
    ]


@contextlib.contextmanager
def serve(
    params: Serving,
    folder: Path,
    log: Path,
    speculation: Speculation = PLAIN,
    profile_dir: Path | None = None,
) -> Iterator[Server]:
    """Serve the target in ``folder`` for the length of a ``with`` block; see :func:`eagle3_lib.engines.vllm.server.serve`."""
    version, _ = installed(params.engine_python)
    port = pick_port(params.port)
    command = [interpreter(params.engine_python), "-m", "sglang.launch_server"]
    words = arguments(params, folder, version, port, speculation, profile_dir)
    known, left_out = versions.for_version(words, SPEC, version, command)
    command += known
    server = Server(
        f"http://127.0.0.1:{port}",
        "target",
        SPEC.name,
        version,
        definitions=SPEC.definitions_in(version),
        stall_s=params.stall_timeout_s,
        left_out=left_out,
    )
    with launch(command, {"HF_HUB_OFFLINE": "1"}, log, server, params.start_timeout_s) as running:
        yield running


def complete(
    server: Server,
    prompt_ids: list[int],
    max_tokens: int,
    sampling: SamplingSettings = GREEDY,
    stream: bool = True,
    salt: str = "",
) -> Completion:
    """One completion by /generate; see :func:`eagle3_lib.engines.base.complete`. The salt is its extra_key.

    Raises:
        Eagle3Error: an error of the server.
    """
    started, result = time.monotonic(), Completion(prompt_ids)
    body = {"input_ids": prompt_ids, "sampling_params": sampling_parameters(sampling, max_tokens), "stream": stream}
    body |= {"extra_key": salt} if salt else {}
    try:
        with server.http().stream("POST", "/generate", json=body, timeout=server.stall_s) as reply:
            if reply.is_error:
                reply.read()  # the server's words, for the error
            reply.raise_for_status()
            lines = (line.removeprefix("data: ") for line in reply.iter_lines())
            for line in lines if stream else ["".join(lines)]:
                if line.startswith("{"):
                    _take(json.loads(line), result, time.monotonic() - started, server.definitions)
    except (httpx.HTTPError, ValueError) as error:
        raise server.failed(error) from server.reached.cause(error)
    if not result.output_ids:
        raise Eagle3Error(f"sglang {server.version} returned no token ids")
    return result


def sampling_parameters(sampling: SamplingSettings, max_tokens: int) -> dict[str, Any]:
    """SGLang's sampling_params (srt/sampling/sampling_params.py): -1 is all tokens, and a seed goes with sampling only."""
    parameters = sampling.model_dump(exclude={"seed", "top_k", "min_tokens"})
    parameters |= {"max_new_tokens": max_tokens, "min_new_tokens": sampling.min_tokens, "top_k": sampling.top_k or -1}
    if sampling.temperature > 0:
        parameters["sampling_seed"] = sampling.seed
    return parameters


def decode(server: Server, prompt_ids: list[int], tokens: int, batch: int) -> int:
    """A list of prompts in one request to /generate; see :func:`eagle3_lib.engines.serving.decode`."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [prompt_ids] * batch, "sampling_params": sampling}
    try:
        reply = server.http().post("/generate", json=body, timeout=server.stall_s)
        reply.raise_for_status()
        return sum(answer["meta_info"]["completion_tokens"] for answer in reply.json())
    except (httpx.HTTPError, ValueError) as error:
        raise server.failed(error) from server.reached.cause(error)


def _take(event: dict[str, Any], result: Completion, seconds: float, definitions: Definitions) -> None:
    """One event of the stream: ``output_ids`` holds all ids so far, or the new ones with incremental streaming."""
    if "error" in event:
        raise Eagle3Error(f"sglang failed a completion: {event['error']}")
    ids, meta, known = event.get("output_ids") or [], event.get("meta_info") or {}, len(result.output_ids)
    cumulative = len(ids) >= known and ids[:known] == result.output_ids
    result.add_chunk(ids[known:] if cumulative else ids, seconds)
    result.histogram = definitions.histogram_in(meta) or result.histogram
    result.totals = definitions.totals_in(meta) or result.totals
    result.cached_tokens = meta.get("cached_tokens", result.cached_tokens)
    reason = meta.get("finish_reason")
    result.finish_reason = (reason.get("type") if isinstance(reason, dict) else reason) or result.finish_reason


def counters(server: Server) -> Counters | None:
    """SGLang exports no counters by position."""
    return None


def start_profile(server: Server, folder: Path) -> None:
    body = {"output_dir": str(folder), "activities": ["CPU", "GPU"]}
    server.http().post("/start_profile", json=body, timeout=60).raise_for_status()
