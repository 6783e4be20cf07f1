"""What a running vLLM tells of itself.

Read in vLLM 0.32.0 (in 0.16.0 where noted): entrypoints/openai/models (cards: root is the path of the target, parent that of
a LoRA adapter), entrypoints/serve/middleware/authenticate.py (a key guards /v1 alone), entrypoints/serve/dev/server_info
(only with VLLM_SERVER_DEV_MODE=1; 0.16 has it too), v1/spec_decode/metrics.py (the labels of all K positions are made at the
start, before the first round), v1/metrics/loggers.py. /metrics holds the families only without --disable-log-stats.

- cache_salt on /v1/completions: not in 0.8.5 and 0.9.2, where an unknown field is ignored; in 0.10.0, 0.16.0 and 0.32.0.
- usage.prompt_tokens_details.cached_tokens: with --enable-prompt-tokens-details; 0.16 leaves it out where it is 0.
"""

import re
import time
from typing import Any

import openai
from prometheus_client import Metric

from ...results import Counters
from ..base import Completion, Server, complete, metrics_of
from ..spec import version_tuple
from ..told import PLAIN, Busy, Card, Told, look_at_object, sums_of, total_of, words_of
from .server import counters, counters_in
from .spec import SPEC

SALT_SINCE = (0, 10)
COUNTERS_SINCE = (0, 10)  # an older one may speculate without counters
PROMPTS = ([9, 10, 11, 12], [20, 21, 22, 23])  # the second where the answer to the first has one token
ASKED_TOKENS = 8
COUNTERS_LAG_S = 1.0  # counters may follow an answer by a moment
FINGERPRINT = re.compile(r"vllm-(\d[\w.+]*)")
SPECULATION_IN_TEXT = re.compile(r"SpeculativeConfig\(method='([^']*)', model='?([^',)]*)'?, num_spec_tokens=(\d+)\)")
DEV_MODE = "the server started with VLLM_SERVER_DEV_MODE=1 would tell it (/server_info)"


def recognised(server: Server, owner: str) -> str | None:
    """The version if the server is a vLLM, "" where it hides it; None if it is something else."""
    if owner != SPEC.name and not any(family.name.startswith("vllm:") for family in metrics_of(server)):
        return None
    version = look_at_object(server, "/version").get("version")
    if isinstance(version, str):
        return version
    try:
        reply = server.client().completions.create(model=server.model, prompt=PROMPTS[0], max_tokens=1)
    except openai.OpenAIError:
        return ""
    found = FINGERPRINT.match(reply.system_fingerprint or "")
    return found[1] if found else ""


def told(server: Server, card: Card, models: list[str]) -> Told:
    """Its configuration, by /metrics, by one or two short answers and, where it has it, by /server_info.

    Raises:
        Eagle3Error: it gives no token ids, or refuses a completion.
    """
    before = counters(server)
    answer = complete(server, PROMPTS[0], ASKED_TOKENS)
    if len(answer.output_ids) < 2:
        before = counters(server)
        answer = complete(server, PROMPTS[1], ASKED_TOKENS)
    steps = len(answer.chunks) - 1
    rounds = answer.totals["rounds"] if answer.totals else _counted_rounds(server, before, steps)
    families = metrics_of(server)
    config = look_at_object(server, "/server_info?config_format=json").get("vllm_config")
    method, drafter, positions, positions_from = _speculation(config)
    counted = counters_in(families)
    if positions is None and counted:
        positions, positions_from = len(counted["accepted"]), "position labels of /metrics"
    if positions is None and answer.histogram:
        positions, positions_from = len(answer.histogram) - 1, "acceptance_histogram of an answer"
    logs = any(family.name.startswith("vllm:") for family in families)
    known = server.version[:1].isdecimal()
    if positions is None and logs and known and version_tuple(server.version) >= COUNTERS_SINCE:
        method, positions, positions_from = PLAIN, 0, "no speculation counters in /metrics"
    values = config if isinstance(config, dict) else {}
    model_config, scheduler = values.get("model_config") or {}, values.get("scheduler_config") or {}
    parallel, speculative = values.get("parallel_config") or {}, values.get("speculative_config") or {}
    tensor_parallel, chunk = parallel.get("tensor_parallel_size"), scheduler.get("max_num_batched_tokens")
    return Told(
        engine=SPEC.name,
        version=server.version,
        models=models,
        model=server.model,
        parent=card.parent,
        target=model_config.get("model") or card.root,
        drafter=drafter,
        method=method,
        positions=positions,
        positions_from=positions_from,
        options=_options(speculative),
        engine_args=words_of({"--max-num-batched-tokens": chunk, "--tensor-parallel-size": tensor_parallel}),
        dtype=str(model_config.get("dtype") or "").removeprefix("torch."),
        max_model_len=card.max_model_len or model_config.get("max_model_len"),
        prefix_caching=_prefix_caching(families, values.get("cache_config") or {}),
        quantization=(model_config["quantization"] or "") if "quantization" in model_config else None,
        data_parallel=parallel.get("data_parallel_size") or _engines(families),
        tensor_parallel=tensor_parallel,
        prefill_chunk=chunk,
        stream_interval=scheduler.get("stream_interval"),
        tells_rounds=_tells_rounds(values, answer, positions),
        tells_cached=answer.cached_tokens is not None or None,
        takes_salt=version_tuple(server.version) >= SALT_SINCE if known else None,
        has_counters=counted is not None,
        asked_steps=steps,
        asked_rounds=rounds,
        untold=[
            *_untold(server, values, method, positions, logs, answer.cached_tokens),
            *_skipped(method, positions, steps, rounds, bool(answer.totals)),
        ],
    )


def busy(server: Server) -> Busy | None:
    """By the gauges and counters of /metrics; None without them (--disable-log-stats)."""
    families = metrics_of(server)
    sums = sums_of(families)
    if "vllm:num_requests_running" not in sums:
        return None
    return Busy(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
        answered=total_of(sums, "vllm:request_success_total"),
        prompt_tokens=total_of(sums, "vllm:prompt_tokens_total"),
        generated_tokens=total_of(sums, "vllm:generation_tokens_total"),
        counters=counters_in(families),
    )


def _speculation(config: object) -> tuple[str, str, int | None, str]:
    """(method, drafter, K, where K was read) of /server_info's configuration, an object or, in older versions, a text."""
    if isinstance(config, dict):
        speculative = config.get("speculative_config")
        if not speculative:
            return PLAIN, "", 0, "/server_info"
        method, drafter = speculative.get("method") or "", speculative.get("model") or ""
        return method, drafter, speculative.get("num_speculative_tokens"), "/server_info"
    if isinstance(config, str) and "speculative_config=None" in config:
        return PLAIN, "", 0, "/server_info"
    found = SPECULATION_IN_TEXT.search(config) if isinstance(config, str) else None
    return (found[1], found[2], int(found[3]), "/server_info") if found else ("", "", None, "")


def _options(speculative: dict[str, Any]) -> dict[str, Any]:
    """The fields that the project knows to change what a count means, or to say of."""
    names = {setting.name for setting in SPEC.settings} | {name for name, _ in SPEC.remarks}
    return {name: speculative[name] for name in sorted(names) if speculative.get(name) is not None}


def _prefix_caching(families: list[Metric], cache_config: dict[str, Any]) -> bool | None:
    if "enable_prefix_caching" in cache_config:
        return bool(cache_config["enable_prefix_caching"])
    labels = [sample.labels for family in families for sample in family.samples if "cache_config" in sample.name]
    said = [row["enable_prefix_caching"] for row in labels if "enable_prefix_caching" in row]
    return said[0] == "True" if said else None


def _engines(families: list[Metric]) -> int | None:
    """How many engine cores are labelled: the data-parallel size as one API server sees it."""
    samples = [sample for family in families for sample in family.samples if sample.name == "vllm:num_requests_running"]
    engines = {sample.labels["engine"] for sample in samples if "engine" in sample.labels}
    return len(engines) or None


def _tells_rounds(values: dict[str, Any], answer: Completion, positions: int | None) -> bool | None:
    """Whether answers carry each round's count; None where the short answer came to no round."""
    level = (values.get("observability_config") or {}).get("per_request_spec_decode_metrics")
    if level is not None:
        return bool(level == "detailed")
    if answer.accepted:
        return True
    came_to_none = answer.accepted is not None or (positions and len(answer.chunks) < 2)
    return None if came_to_none else False


def _counted_rounds(server: Server, before: Counters | None, steps: int) -> int | None:
    """Rounds that the counters grew by; read again where they lie below the steps, since they may be late."""
    if before is None:
        return None
    after = counters(server)
    if after and after["rounds"] - before["rounds"] < steps:
        time.sleep(COUNTERS_LAG_S)
        after = counters(server)
    return after["rounds"] - before["rounds"] if after else None


def _skipped(method: str, positions: int | None, steps: int, rounds: int | None, from_answer: bool) -> list[str]:
    """What it means that a short answer had steps without a round, where the method is not told."""
    if method or not positions or rounds is None or rounds >= steps:
        return []
    also = "" if from_answer else ", or /metrics is that of another replica"
    source = "It tells" if from_answer else "/metrics counted"
    return [
        f"{source} {rounds} rounds for a short answer of {steps} steps: its drafter skips steps, as n-gram and suffix decoding "
        f"do and EAGLE-3 does not{also}."
    ]


def _untold(
    server: Server, values: dict[str, Any], method: str, positions: int | None, logs: bool, cached: int | None
) -> list[str]:
    sentences = []
    if not server.version:
        sentences.append("The version is not told: /version has none, and no answer names it.")
    if not logs:
        sentences.append("There are no counters: /metrics has none (--disable-log-stats, or a proxy that hides it).")
    if positions is None:
        sentences.append(f"K is not told; {DEV_MODE}, or counters.")
    if not method:
        sentences.append(f"The method of speculation and the drafter are not told; {DEV_MODE}.")
    if not values and method != PLAIN:
        sentences.append(
            f"Whether acceptance is synthetic, lossy or joint (rejection_sample_method) is not told; {DEV_MODE}."
        )
    if not values:
        sentences.append(f"dtype, quantization, tensor parallelism and the chunk of prefill are not told; {DEV_MODE}.")
    if cached is None:
        sentences.append(
            "Prompt tokens from the prefix cache are not told; --enable-prompt-tokens-details would tell them."
        )
    return sentences
