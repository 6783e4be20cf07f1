"""What a running SGLang tells of itself.

Read in SGLang 0.5.16: srt/entrypoints/http_server.py (/server_info: every server argument as it was resolved, the API key
among them, so that only named fields are taken from it; /v1/models, where root is the served name), v1_loads.py,
srt/utils/auth.py (a key guards all but /health and /metrics), srt/managers/schedule_batch.py and io_struct.py (extra_key
separates the prefix cache), srt/observability/metrics_collector.py (/metrics, only with --enable-metrics).
"""

from typing import Any

from ..base import Server, metrics_of
from ..told import PLAIN, Busy, Card, Told, look, look_at_object, sums_of, total_of, words_of
from .server import complete
from .spec import DEFINITIONS, SPEC

PROMPT = [9, 10, 11, 12, 9, 10, 11, 12]
ASKED_TOKENS = 8
METHODS = {"EAGLE3": "eagle3", "EAGLE": "eagle", "NEXTN": "mtp", "FROZEN_KV_MTP": "mtp", "STANDALONE": "draft_model"}


def _information(server: Server) -> dict[str, Any]:
    """/server_info, or the name that older versions have for it; {} where there is none."""
    for path in ("/server_info", "/get_server_info"):
        told = look_at_object(server, path)
        if "model_path" in told and "version" in told:
            return told
    return {}


def recognised(server: Server, owner: str) -> str | None:
    """The version if the server is an SGLang, "" where it hides it; None if it is something else."""
    version = _information(server).get("version")
    if version is None:
        return "" if owner == SPEC.name else None
    return str(version)


def told(server: Server, card: Card, models: list[str]) -> Told:
    """Its configuration, by /server_info, and by one short answer.

    Raises:
        Eagle3Error: it gives no token ids, or refuses a request.
    """
    answer = complete(server, PROMPT, ASKED_TOKENS, salt="eagle3")
    info = _information(server)
    algorithm = str(info.get("speculative_algorithm") or "").upper()
    chunk, tensor_parallel = info.get("chunked_prefill_size"), info.get("tp_size")
    dtype = str(info.get("dtype") or "")
    caching_off = info.get("disable_radix_cache")
    return Told(
        engine=SPEC.name,
        version=server.version,
        models=models,
        model=server.model,
        parent=card.parent,
        target=_target(server, info),
        drafter=info.get("speculative_draft_model_path") or "",
        method=METHODS.get(algorithm, algorithm.lower()) or (PLAIN if info else ""),
        positions=_positions(algorithm, info) if info else None,
        positions_from="/server_info" if info else "",
        options=_options(algorithm, info),
        engine_args=words_of({"--chunked-prefill-size": chunk, "--tp-size": tensor_parallel}),
        dtype="" if dtype == "auto" else dtype,
        max_model_len=card.max_model_len or info.get("context_length"),
        prefix_caching=None if caching_off is None else not caching_off,
        quantization=(info["quantization"] or "") if "quantization" in info else None,
        data_parallel=info.get("dp_size"),
        tensor_parallel=tensor_parallel,
        prefill_chunk=chunk if chunk and chunk > 0 else None,
        stream_interval=info.get("stream_interval"),
        tells_rounds=False,
        tells_cached=answer.cached_tokens is not None,
        takes_salt=True,
        has_counters=False,
        untold=_untold(info, algorithm, dtype),
    )


def busy(server: Server) -> Busy | None:
    """By /v1/loads, or /get_load of older versions, which may lie some steps back while it is busy; totals by /metrics."""
    status, body = look(server, "/v1/loads?include=core")
    loads = body.get("loads") if status == 200 and isinstance(body, dict) else None
    if isinstance(loads, list):
        running = sum(load["num_running_reqs"] for load in loads)
    else:
        status, loads = look(server, "/get_load")
        if status != 200 or not isinstance(loads, list):
            return None
        running = sum(load["num_reqs"] - load["num_waiting_reqs"] for load in loads)
    waiting = sum(load["num_waiting_reqs"] for load in loads)
    sums = sums_of(metrics_of(server))
    return Busy(
        running,
        waiting,
        answered=total_of(sums, "sglang:num_requests_total"),
        prompt_tokens=total_of(sums, "sglang:prompt_tokens_total"),
        generated_tokens=total_of(sums, "sglang:generation_tokens_total"),
    )


def _target(server: Server, info: dict[str, Any]) -> str:
    if info.get("model_path"):
        return str(info["model_path"])
    for path in ("/model_info", "/get_model_info"):
        if found := look_at_object(server, path).get("model_path"):
            return str(found)
    return ""


def _positions(algorithm: str, info: dict[str, Any]) -> int | None:
    """K: the depth of the drafts. N-gram has no steps of its own (/server_info then tells what nothing reads)."""
    if not algorithm:
        return 0
    steps, draft_tokens = info.get("speculative_num_steps"), info.get("speculative_num_draft_tokens")
    if algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP") and steps:
        return int(steps)
    return int(draft_tokens) - DEFINITIONS[-1].draft_tokens(0) if draft_tokens else None


def _options(algorithm: str, info: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the project knows to change what a count means; those of n-gram only where it is the method."""
    if not algorithm:
        return {}
    names = {setting.name.removeprefix("--").replace("-", "_") for setting in SPEC.settings}
    names = {name for name in names if algorithm == "NGRAM" or "ngram" not in name} | {"speculative_algorithm"}
    return {name: info[name] for name in sorted(names) if info.get(name) is not None}


def _untold(info: dict[str, Any], algorithm: str, dtype: str) -> list[str]:
    sentences = []
    if not info:
        sentences.append(
            "The configuration is not told: neither /server_info nor /get_server_info answers; is there a proxy that hides it?"
        )
    if algorithm or not info:
        variables = " or ".join(SPEC.made_up_by)
        sentences.append(f"Whether acceptance is simulated ({variables} in its environment) is not told by any answer.")
        sentences.append(
            "An answer tells no count for each round: rounds are read off the stream, one request at a time."
        )
    if dtype in ("", "auto"):
        sentences.append("dtype is not told: it was left to SGLang.")
    return sentences
