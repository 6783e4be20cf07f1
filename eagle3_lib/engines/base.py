"""What all engines share: launch in an own process group, readiness by a real completion, clean end, completions.

Servers are context managers that live inside one notebook cell: they end with the cell, whether it ends well, fails or
is interrupted, and with the kernel, however that dies.
"""

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..errors import Eagle3Error
from ..params import GREEDY, SamplingSettings
from ..paths import project_path, short_path
from ..process import end_group
from ..results import Totals
from . import clean_room
from .access import Access as Access
from .definitions import NOTHING_TOLD, Definitions

LOG_LINES_SHOWN = 25
ERROR_LINE = re.compile(r"(?:^|\])\s*[\w.]+(?:Error|Exception): ")


@dataclass(frozen=True)
class Server:
    """A running engine.

    model: the name to ask for; load_s: from launch to the first completion; tells_rounds: each answer carries the accepted
    count of every round. Otherwise rounds are read off the streamed chunks, which holds for one request at a time. stall_s:
    a request that gets no token for so long has met a hang. log, group: of a server that :func:`launch` started. room: what
    held the GPUs before and after it (:mod:`eagle3_lib.engines.clean_room`), known when it has ended; empty without a GPU. left_out:
    options that this version does not know (:mod:`eagle3_lib.engines.versions`). definitions: what this version tells of
    speculation. access: key, headers and TLS of a server that runs already (:mod:`eagle3_lib.engines.running`).
    """

    url: str
    model: str
    engine: str
    version: str
    load_s: float = 0.0
    tells_rounds: bool = False
    stall_s: float = 300
    log: Path | None = None
    group: int = 0
    room: clean_room.Record = field(default_factory=clean_room.Record)
    left_out: tuple[str, ...] = ()
    definitions: Definitions = NOTHING_TOLD
    access: Access | None = None

    @property
    def reached(self) -> Access:
        """How it is reached: as given, or without a key at its address."""
        return self.access or Access(self.url)

    def http(self) -> httpx.Client:
        """Its pool of connections; requests take paths ("/metrics"), and a timeout where the usual one is too short."""
        return self.reached.http()

    def client(self, timeout_s: float = 0) -> openai.OpenAI:
        """The OpenAI client, which waits ``timeout_s`` (0: ``stall_s``) for the next bytes of an answer."""
        return self.reached.openai(timeout_s or self.stall_s)

    def failed(self, error: Exception) -> Eagle3Error:
        """The error to raise from ``reached.cause(error)`` where a completion failed; see :func:`failure`."""
        return Eagle3Error(failure(self, error))


@dataclass(frozen=True)
class Speculation:
    """How an engine is asked to speculate.

    mode: "plain", "ngram", or any drafter's name with its folder in ``drafter``. tokens: drafted in each round (K). options:
    further fields of vLLM's --speculative-config.
    """

    mode: str = "plain"
    drafter: str = ""
    tokens: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    def folder(self) -> Path:
        """The drafter's folder.

        Raises:
            Eagle3Error: it holds no config.json.
        """
        folder = project_path(self.drafter)
        if not self.drafter or not (folder / "config.json").is_file():
            raise Eagle3Error(f"drafter: found no config.json in {folder}; expected a drafter's folder")
        return folder


PLAIN = Speculation()


@dataclass
class Completion:
    """One answer, as token ids from the server.

    accepted, drafted: counts of each speculation round (None where this answer does not tell them: [] is an answer without
    a round). chunks: tokens in each streamed chunk: prefill's one, then one chunk a step, or several steps joined.
    histogram: rounds by accepted count, and totals, {"rounds", "accepted", "drafted"}, where the server tells them. seconds:
    from sending the request to the last chunk; first_token_s: to the first token. cached_tokens: prompt tokens that came from
    the prefix cache, None where the server does not tell it (vLLM: --enable-prompt-tokens-details).
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seconds: float = 0.0
    first_token_s: float = 0.0
    accepted: list[int] | None = None
    drafted: list[int] | None = None
    chunks: list[int] = field(default_factory=list)
    histogram: list[int] | None = None
    totals: Totals | None = None
    cached_tokens: int | None = None

    def rounds_from_chunks(self) -> list[int]:
        """Accepted counts of the rounds, when no other request was under way: a step emits its accepted drafts and one."""
        return [tokens - 1 for tokens in self.chunks[1:]]

    def add_chunk(self, token_ids: list[int], seconds: float) -> None:
        if token_ids:
            self.first_token_s = self.first_token_s or seconds
            self.output_ids += token_ids
            self.chunks.append(len(token_ids))
            self.seconds = seconds


def _take_rounds(server: Server, told: dict[str, Any], result: Completion) -> None:
    """What vLLM tells of one answer's rounds: without a round, and in level "summary", the lists are null or left out."""
    result.histogram = server.definitions.histogram_in(told)
    result.totals = server.definitions.totals_in(told)
    result.accepted = told.get("per_step_accepted")
    result.drafted = told.get("per_step_drafted")
    if result.accepted is None and result.totals and result.totals["rounds"] == 0:
        result.accepted, result.drafted = [], []


DISTRIBUTION_PROBE = """
import importlib.metadata as m, sys
names = [n for n in sys.argv[1:] if any(True for _ in m.distributions(name=n))]
print(names[0], m.version(names[0])) if names else print("none none")
"""


def interpreter(engine_python: str) -> str:
    """The interpreter to start: this one for "", a path relative to the project root where it is a path."""
    if not engine_python:
        return sys.executable
    return str(project_path(engine_python)) if "/" in engine_python else engine_python


@functools.cache
def find_distribution(python: str, names: tuple[str, ...]) -> tuple[str, str]:
    """(name, version) of the first of some distributions that an interpreter has ("" is this one), without importing it.

    Raises:
        Eagle3Error: it has none of them, or does not run.
    """
    python = interpreter(python)
    try:
        done = subprocess.run([python, "-c", DISTRIBUTION_PROBE, *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Eagle3Error(f"engine_python: {python!r} does not run: {error}") from error
    name, version = done.stdout.split()
    if name == "none":
        raise Eagle3Error(
            f"engine_python: found no {' or '.join(names)} in {python!r}; expected one of them installed there"
        )
    return name, version


def pick_port(port: int) -> int:
    """``port`` if it is free, or any free one for 0.

    Raises:
        Eagle3Error: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise Eagle3Error(
                f"port: found {port} in use ({error.strerror}), expected a free port, or 0 to pick one"
            ) from error
        free: int = probe.getsockname()[1]
        return free


@contextlib.contextmanager
def launch(command: list[str], env: dict[str, str], log: Path, server: Server, timeout_s: int) -> Iterator[Server]:
    """Start a server, yield it when it has answered a real completion, end it and all its processes afterwards.

    Raises:
        Eagle3Error: it died or did not answer in time; the last lines of its log are in the message.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    supervised = [sys.executable, "-m", "eagle3_lib.process", "--group", *command]
    mark = uuid.uuid4().hex
    env = os.environ | env | {clean_room.MARK: mark}
    with clean_room.watched(mark) as room:
        started = time.monotonic()
        with log.open("w") as sink:
            process = subprocess.Popen(
                supervised, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
        try:
            _wait_ready(process, server, log, started + timeout_s)
            load_s = round(time.monotonic() - started, 1)
            yield replace(server, load_s=load_s, log=log, group=process.pid, room=room)
        finally:
            end_group(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)


def _wait_ready(process: subprocess.Popen[bytes], server: Server, log: Path, deadline: float) -> None:
    print(f"starting {server.engine} {server.version} (log: {short_path(log)})", flush=True)
    told = time.monotonic()
    while True:
        if process.poll() is not None:
            raise Eagle3Error(f"{server.engine} ended with code {process.returncode} while loading.\n{log_tail(log)}")
        if time.monotonic() > deadline:
            raise Eagle3Error(f"{server.engine} has not answered in start_timeout_s.\n{log_tail(log)}")
        if time.monotonic() - told > 15:
            told = time.monotonic()
            print("  still loading", flush=True)
        try:
            if server.http().get("/health", timeout=2).status_code == 200:
                patient = server.client(timeout_s=max(5, round(deadline - time.monotonic())))
                patient.completions.create(model=server.model, prompt="Hello", max_tokens=1)
                return
        except (httpx.HTTPError, openai.APIConnectionError):
            pass
        except openai.APIStatusError as error:
            raise Eagle3Error(f"{server.engine} refused a first completion: {error}.\n{log_tail(log)}") from error
        time.sleep(0.25)


def log_tail(log: Path) -> str:
    """The last lines of a log, and the first error before them: an engine's own last words may only refer to it."""
    lines = log.read_text(errors="replace").splitlines()
    before, last = lines[:-LOG_LINES_SHOWN], lines[-LOG_LINES_SHOWN:]
    first = next((line for line in before if ERROR_LINE.search(line)), None)
    told = [f"First error in {short_path(log)}:", f"  {first}"] if first else []
    return "\n".join([*told, f"Last lines of {short_path(log)}:", *(f"  {line}" for line in last)])


ASKED_FIELDS = ("return_token_ids", "cache_salt", "extra_key")  # fields beside OpenAI's that a server may refuse


def said(error: Exception) -> str:
    """What a server said of a request that it refused, beside the status."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error)
    words = error.response.text.strip() if error.response.is_closed else ""
    return f"{error.response.status_code} {error.response.reason_phrase}: {words[:300]}" if words else str(error)


def refused_field(error: Exception) -> str:
    """The field beside OpenAI's that a server refused by name; "" where it refused something else."""
    refused = isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError)
    if isinstance(error, httpx.HTTPStatusError):
        refused = error.response.status_code in (400, 422)
    return next((name for name in ASKED_FIELDS if name in said(error)), "") if refused else ""


def failure(server: Server, error: Exception) -> str:
    """What a failed completion tells of the engine: it hangs, it has ended, or it refused the request; without the key."""
    name = f"{server.engine} {server.version}"
    if isinstance(error, openai.APITimeoutError | httpx.TimeoutException):
        message = f"{name} hangs: a request got no token for {server.stall_s:g} s (stall_timeout_s) while /health {_health(server)}"
        message += _dump_stacks(server)
    elif server.group and _ended(server.group):
        message = f"{name} ended while it answered: {said(error)}"
    elif field_name := refused_field(error):
        message = f"{name} refuses the field {field_name} ({said(error)}); expected a server that takes it"
    else:
        message = f"{name} failed a completion: {said(error)}"
    message = server.reached.hide(message)
    return f"{message}.\n{log_tail(server.log)}" if server.log else message


def _health(server: Server) -> str:
    try:
        return f"answers {server.http().get('/health', timeout=5).status_code}"
    except httpx.HTTPError as error:
        return f"does not answer ({error})"


def _ended(group: int) -> bool:
    """Whether a launched server's supervisor is gone, or goes within a second."""
    try:
        psutil.Process(group).wait(1)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        pass
    return True


def _dump_stacks(server: Server) -> str:
    """Stacks of the engine's Python processes, beside its log, where py-spy is installed; says where."""
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if not (py_spy and server.group and server.log):
        return "; py-spy is not installed, so no stacks were taken" if server.group else ""
    stacks = []
    for process in psutil.Process(server.group).children(recursive=True):
        done = subprocess.run([py_spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=60)
        stacks.append(done.stdout or done.stderr)
    path = server.log.with_name("stacks.txt")
    path.write_text("\n".join(stacks))
    return f"; the stacks of its processes are in {short_path(path)}"


def complete(
    server: Server,
    prompt_ids: list[int],
    max_tokens: int,
    sampling: SamplingSettings = GREEDY,
    stream: bool = True,
    salt: str = "",
) -> Completion:
    """One completion of token ids from an OpenAI-compatible server that returns them (vLLM: return_token_ids).

    Args:
        sampling: every setting is sent, since a server fills what is left out from the target's generation_config.json.
        stream: chunk by chunk, with the time of the first token and a chunk for each step; else whole, which costs the
            client less and keeps it out of the way when many requests are timed together.
        salt: the prefix cache is shared with requests of the same salt only, so the first with a new one is cold (vLLM:
            cache_salt, at most 128 characters without "@", "/" and a backslash). A release that does not know the field ignores it.
    Raises:
        Eagle3Error: the server gave no token ids, or an error.
    """
    started, result = time.monotonic(), Completion(prompt_ids)
    try:
        replies = server.client().completions.create(
            model=server.model,
            prompt=prompt_ids,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            stop=sampling.stop or None,
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            extra_body={
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "min_tokens": sampling.min_tokens,
                "return_token_ids": True,
                **({"cache_salt": salt} if salt else {}),
            },
        )
        for reply in replies if stream else [replies]:
            now = time.monotonic() - started
            for choice in reply.choices:
                result.add_chunk((choice.model_extra or {}).get("token_ids") or [], now)
                result.finish_reason = choice.finish_reason or result.finish_reason
            if told := ((reply.model_extra or {}).get("metrics") or {}).get("speculative_decoding"):
                _take_rounds(server, told, result)
            result.cached_tokens = _cached_tokens(reply.usage, result.cached_tokens)
    except (openai.APIError, httpx.HTTPError) as error:
        raise server.failed(error) from server.reached.cause(error)
    if not result.output_ids:
        raise Eagle3Error(f"{server.engine} {server.version} returned no token ids; expected them (return_token_ids)")
    return result


def _cached_tokens(usage: Any, known: int | None) -> int | None:
    """Prompt tokens from the prefix cache by the usage of an answer or chunk, or what is known already."""
    details = getattr(usage, "prompt_tokens_details", None)
    told: int | None = getattr(details, "cached_tokens", None)
    return known if told is None else told


def metrics_of(server: Server) -> list[Metric]:
    """The families of /metrics; [] where the server has none there.

    Raises:
        Eagle3Error: it does not answer.
    """
    try:
        reply = server.http().get("/metrics")
    except httpx.HTTPError as error:
        raise server.failed(error) from server.reached.cause(error)
    try:
        return list(text_string_to_metric_families(reply.text)) if reply.status_code == 200 else []
    except ValueError:  # a page of a proxy
        return []
