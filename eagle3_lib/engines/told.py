"""What a server that runs already tells of itself, and how it is asked for that: nothing on it is changed."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client import Metric

from ..results import Counters
from .base import Server

PLAIN = "plain"  # the method of a server that does not speculate


@dataclass(frozen=True)
class Told:
    """What a running server tells of itself. None and "" stand for what it does not tell, where nothing else is said.

    engine, version: version is "" where it is not told. models: the names that it serves, LoRA adapters among them. model:
    the one to ask for. parent: the model that this one is a LoRA adapter of, "" for none. target: path or id of the model.
    drafter: path or id of the drafter. method: how it speculates ("eagle3", "eagle", "mtp", "ngram", ...); "plain": it does
    not. positions: K; 0 where it does not speculate. positions_from: where K was read. options: its speculative settings,
    by the names of the engine's ``spec.settings``. engine_args: command-line words that mean what it tells of tensor
    parallelism and chunks of prefill. dtype: "bfloat16", ... . quantization: "" where it has none. prefill_chunk: most prompt
    tokens of one step. stream_interval: least tokens of a streamed chunk. tells_rounds: an answer carries the accepted count
    of each round. tells_cached: an answer tells the prompt tokens from the prefix cache. takes_salt: a request's salt
    separates its prefix cache. has_counters: it counts rounds by position. asked_steps, asked_rounds: decode steps of the
    short answer that it was asked for, and the rounds that it tells or counted of it: fewer where a drafter skips steps, as
    n-gram does and EAGLE-3 does not. untold: what could not be found out, and what
    would tell it, as sentences.
    """

    engine: str
    version: str
    models: list[str]
    model: str
    parent: str = ""
    target: str = ""
    drafter: str = ""
    method: str = ""
    positions: int | None = None
    positions_from: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    engine_args: list[str] = field(default_factory=list)
    dtype: str = ""
    max_model_len: int | None = None
    prefix_caching: bool | None = None
    quantization: str | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    prefill_chunk: int | None = None
    stream_interval: int | None = None
    tells_rounds: bool | None = None
    tells_cached: bool | None = None
    takes_salt: bool | None = None
    has_counters: bool = False
    asked_steps: int | None = None
    asked_rounds: int | None = None
    untold: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Busy:
    """What a server does now, and what it has done since its start; None where it does not tell.

    running, waiting: requests, as of the engine's last step or of one shortly before, so that a single look may still count
    some that have ended. answered: requests that ended. prompt_tokens, generated_tokens: of all requests. counters: of
    speculation. What these grow by between two looks, less what was asked in between, is the traffic of others.
    """

    running: int
    waiting: int
    answered: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    counters: Counters | None = None


@dataclass(frozen=True)
class Card:
    """An entry of /v1/models: a model and, for a LoRA adapter, the model that it was made for."""

    id: str
    root: str = ""
    parent: str = ""
    owner: str = ""
    max_model_len: int | None = None


def look(server: Server, path: str) -> tuple[int, Any]:
    """(status, JSON) of a path that a server may have; None for what is no JSON, status 0 where no answer came."""
    try:
        reply = server.http().get(path)
    except httpx.HTTPError:
        return 0, None
    try:
        return reply.status_code, reply.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return reply.status_code, None


def look_at_object(server: Server, path: str) -> dict[str, Any]:
    """The JSON object of a path; {} where the server has none there."""
    status, body = look(server, path)
    return body if status == 200 and isinstance(body, dict) else {}


def words_of(values: dict[str, int | None]) -> list[str]:
    """Command-line words of options that are told."""
    return [word for name, value in values.items() if value is not None for word in (name, str(value))]


def sums_of(families: Iterable[Metric]) -> dict[str, float]:
    """The samples of /metrics by name, summed over their labels."""
    sums: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def total_of(sums: dict[str, float], name: str) -> int | None:
    """A total as a whole number; None where it is not counted."""
    return int(sums[name]) if name in sums else None
