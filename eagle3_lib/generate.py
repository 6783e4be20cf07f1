"""Stage 03: the target's own answers to prompts, as token ids from the server.

A drafter learns what the target says, so its training text must come from the served target, and as the ids that it
emitted: text put through a tokenizer again gives other ids at some places, and a drafter trained there is wrong there.

While it runs, each finished conversation is one line of log.jsonl, so that a killed run loses only what was under way; at
the end they are put in the order of the prompts into samples.parquet. Memory holds the requests under way, not the answers.
"""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from tqdm import tqdm

from . import engines, prompts, reasoning
from .answers import Answer, write_parquet
from .errors import Eagle3Error
from .params import GenerateParams
from .prompts import TURN, Conversation
from .provenance import project_path, short_path, stage, write_json

TRANSIENT_STATUS = (408, 409, 425, 429)
LONGEST_WAIT_S = 60
REFUSED_AT_LEAST, REFUSED_SHARE = 10, 0.05  # more refusals than both: the run is wrong, not some prompts
NOT_THE_ANSWERS = {  # parameters that do not change what a conversation is answered
    *("out", "prompts", "max_prompts", "held_out_share", "drop", "concurrency", "stream", "tries", "stall_timeout_s"),
    *("port", "servers", "api_key_env", "engine_python", "start_timeout_s"),
}
LOOP_PERIODS, LOOP_REPEATS, LOOP_TOKENS = 64, 4, 48


class BrokenReply(Exception):
    """A reply that ended before the server said why it ended."""


FAILURES = (httpx.HTTPError, json.JSONDecodeError, BrokenReply)


@dataclass(frozen=True)
class Endpoint:
    """A server as this stage asks it. ``gives_ids``: it takes return_token_ids (others may refuse what they do not know)."""

    client: httpx.Client
    model: str
    name: str
    gives_ids: bool = True


def transient(error: BaseException) -> bool:
    """What may go well when asked again: too many requests, a server's own fault, time-outs, connections that break."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in TRANSIENT_STATUS or error.response.status_code >= 500
    return isinstance(error, FAILURES)


def failure_kind(error: BaseException) -> str:
    """A failed try by the name under which it is counted."""
    if isinstance(error, httpx.HTTPStatusError):
        return str(error.response.status_code)
    if isinstance(error, httpx.TransportError):
        return "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
    return "broken reply"


def _wait_s(state) -> float:
    """Exponential with jitter, and never less than the server asks for."""
    error = state.outcome.exception()
    asked = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    asked_s = float(asked) if asked.replace(".", "", 1).isdigit() else 0.0
    return max(wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S)(state), min(asked_s, LONGEST_WAIT_S))


def _retrying(tries: int) -> Retrying:
    return Retrying(retry=retry_if_exception(transient), wait=_wait_s, stop=stop_after_attempt(tries), reraise=True)


# --- one conversation -------------------------------------------------------------------------------------------------


def settings_for(conversation: Conversation, params: GenerateParams) -> dict:
    """The sampling settings of a conversation: its hash decides which share of the data it belongs to."""
    settings, place = {"temperature": params.temperature}, prompts.share_of(f"{conversation.id} sampling")
    for option in params.sampling:
        if place < option["share"]:
            settings |= {name: value for name, value in option.items() if name != "share"}
            break
        place -= option["share"]
    return {"max_tokens": params.max_tokens, "seed": params.seed, **settings}


def ask(
    endpoints: list[Endpoint],
    conversation: Conversation,
    params: GenerateParams,
    ids_of: "IdSource",
    first: int = 0,
) -> dict:
    """All turns of one conversation, each given the target's own earlier ones; what every try ended with is counted.

    Args:
        first: number of the endpoint to ask first; each further try goes to the next one.
    Returns:
        a line of the log: {"id", "answers": [...], "failures": {kind: tries}, "refused": the server's words or ""}. A
        conversation ends early where a turn was cut by its length or called tools.
    Raises:
        httpx.HTTPError, BrokenReply or json.JSONDecodeError: the last of ``params.tries`` failures.
    """
    settings, failures, answers = settings_for(conversation, params), Counter(), []
    messages, prompt, turns = [], "", iter(count())
    for message in conversation.messages:
        if message != TURN:
            messages.append(message)
            prompt = prompts.content_text(message) if message["role"] == "user" else prompt
            continue
        turn, started, before = next(turns), time.time(), failures.total()
        try:
            endpoint, reply = _reply(endpoints, messages, conversation.tools, settings, params, failures, first)
        except httpx.HTTPStatusError as error:
            if transient(error):
                raise
            return _line(conversation, answers, failures, _words(error))
        said = reply["message"]
        answer = Answer(
            id=conversation.id if turn == 0 else f"{conversation.id}-{turn}",
            split="",  # by params.held_out_share when the samples are put together
            prompt=prompt,
            prompt_ids=[],
            output_ids=[],
            text=said.get("content") or "",
            finish_reason=reply["finish_reason"],
            seconds=round(time.time() - started, 3),
            turn=turn,
            tool_calls=json.dumps(said["tool_calls"]) if said.get("tool_calls") else "",
            server=endpoint.name,
            sampling=json.dumps(settings),
            started=round(started, 3),
            tries=1 + failures.total() - before,
        )
        options = settings.get("chat_template_kwargs", {})
        answers.append(ids_of(answer, reply, messages, conversation.tools, options))
        if answer.finish_reason == "length" or answer.tool_calls:
            break
        messages = [*messages, TURN | {"content": answers[-1].text}]
    return _line(conversation, answers, failures)


def _line(conversation: Conversation, answers: list[Answer], failures: Counter, refused: str = "") -> dict:
    rows = [asdict(answer) for answer in answers]
    return {"id": conversation.id, "answers": rows, "failures": dict(failures), "refused": refused}


def _words(error: Exception) -> str:
    """What the server said of a failure."""
    said = f": {error.response.text[:300]}" if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{failure_kind(error)}{said or f': {error}'}"


def _reply(endpoints, messages, tools, settings, params, failures: Counter, first: int) -> tuple[Endpoint, dict]:
    body = {"messages": messages, "stream": params.stream, **settings}
    body |= {"tools": tools} if tools else {}
    for attempt in _retrying(params.tries):
        endpoint = endpoints[(first + attempt.retry_state.attempt_number - 1) % len(endpoints)]
        with attempt:
            try:
                return endpoint, _chat(endpoint, body)
            except FAILURES as error:
                failures[failure_kind(error)] += transient(error)
                raise
    raise AssertionError("the last try has returned or raised")


def _chat(endpoint: Endpoint, body: dict) -> dict:
    """One chat completion: {"message", "finish_reason", "output_ids", "prompt_ids"}; ids are None where not given."""
    body = body | {"model": endpoint.model} | ({"return_token_ids": True} if endpoint.gives_ids else {})
    if not body.get("stream"):
        return _whole(_posted(endpoint.client, body))
    with endpoint.client.stream("POST", "/chat/completions", json=body) as reply:
        if reply.is_error:
            reply.read()
        reply.raise_for_status()
        return _joined(reply.iter_lines())


def _posted(client: httpx.Client, body: dict) -> dict:
    reply = client.post("/chat/completions", json=body)
    reply.raise_for_status()
    return reply.json()


def _whole(reply: dict) -> dict:
    choice = next(iter(reply.get("choices") or []), {})
    if not choice.get("finish_reason"):
        raise BrokenReply("a reply without a choice or its end")
    ids = {"output_ids": choice.get("token_ids"), "prompt_ids": reply.get("prompt_token_ids")}
    return {"message": choice["message"], "finish_reason": choice["finish_reason"], **ids}


def _joined(lines: Iterable[str]) -> dict:
    """A streamed reply put together."""
    message: dict = {"tool_calls": []}
    prompt_ids, output_ids, reason = None, [], None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise BrokenReply(f"an error inside the stream: {event['error']}")
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        for choice in event.get("choices") or []:
            output_ids += choice.get("token_ids") or []
            reason = choice.get("finish_reason") or reason
            delta = choice.get("delta") or {}
            _add_calls(message["tool_calls"], delta.pop("tool_calls", None) or [])
            for name, value in delta.items():
                if isinstance(value, str) and name != "role":
                    message[name] = message.get(name, "") + value
    if not reason:
        raise BrokenReply("a stream that ended before its answer")
    return {"message": message, "finish_reason": reason, "output_ids": output_ids, "prompt_ids": prompt_ids}


def _add_calls(calls: list[dict], pieces: list[dict]) -> None:
    """Pieces of tool calls: the first of a call has its id and name, the others go on with its arguments."""
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append(piece)
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments") or ""


class IdSource:
    """Completes an answer with token ids and reasoning: the server's ids checked, or the target's tokenizer's.

    Args:
        target: as in params; its tokenizer is loaded at the first need.
    """

    def __init__(self, target: str):
        self.target, self.folder = target, _tokenizer_folder(target)
        self.tokens = reasoning.Tokens(self.folder) if (self.folder / "tokenizer.json").is_file() else None
        self.tokenizer, self.loading = None, threading.Lock()
        if self.tokens is None:
            print(f"{target}: no tokenizer.json: what the server says is not checked against its ids")

    def __call__(
        self, answer: Answer, reply: dict, messages: list[dict], tools: list[dict], options: dict | None = None
    ) -> Answer:
        said = reasoning.spoken(reply["message"])
        prompt_ids, output_ids = reply["prompt_ids"], reply["output_ids"]
        if not prompt_ids or not output_ids:
            return self._from_template(answer, said, messages, tools, options or {})
        if self.tokens is None:
            parts = (
                reasoning.Parts("", said.reasoning, "", said.content) if said.field else reasoning.parse(said.content)
            )
            found = reasoning.Captured(parts.reasoning, parts.content, [], "unchecked")
        else:
            found = reasoning.capture(said, prompt_ids, output_ids, self.tokens)
        return replace(
            answer,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            text=found.content,
            reasoning=found.reasoning,
            reasoning_span=found.span,
            rendered=found.rendered,
        )

    def _from_template(self, answer: Answer, said, messages: list[dict], tools: list[dict], options: dict) -> Answer:
        if answer.tool_calls:
            raise Eagle3Error(f"{answer.server}: an answer that calls tools came without token ids; expected them")
        with self.loading:
            if self.tokenizer is None:
                from . import targets

                print(f"{answer.server}: no token ids in its answers: they are made by the tokenizer of {self.target}")
                self.tokenizer = targets.load_tokenizer(self.folder)
        stopped = answer.finish_reason != "length"
        ids = reasoning.from_template(self.tokenizer, messages, tools, said, stopped, **options)
        found = reasoning.capture(said, ids[0], ids[1], self.tokens) if self.tokens else None
        return replace(
            answer,
            prompt_ids=ids[0],
            output_ids=ids[1],
            text=found.content if found else said.content,
            reasoning=found.reasoning if found else said.reasoning,
            reasoning_span=found.span if found else [],
            ids_from="tokenizer",
        )


def _tokenizer_folder(target: str) -> Path:
    """Where the target's tokenizer lies; of a target on the model hub only the tokenizer is fetched."""
    folder = project_path(target)
    if folder.is_dir():
        return folder
    from . import targets

    if target == targets.SMOLLM2 or target.count("/") != 1:
        return targets.resolve(target)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, allow_patterns=["*token*", "*.jinja", "config.json", "*.tiktoken"]))
    except Exception as error:
        raise Eagle3Error(f"target: {target!r} is no folder and the model hub did not give it: {error}") from error


# --- the stage --------------------------------------------------------------------------------------------------------


def run(params: GenerateParams) -> dict:
    """Ask every conversation once; a run that was killed goes on with those that are missing.

    Returns:
        the summary, also in summary.json: samples, splits, tokens, finish reasons, tokens/s, what was dropped and why,
        failed tries by kind, the share with reasoning, how many answers render as the target produced them, and a
        histogram of lengths.
    Raises:
        Eagle3Error: wrong prompts, a server that fails ``tries`` times in a row, or one that refuses more than some
            prompts; what is finished is kept.
    """
    out = project_path(params.out)
    conversations = prompts.read(params.prompts, params.max_prompts)
    source = {} if params.prompts.startswith(prompts.DATASETS) else {"prompts": project_path(params.prompts)}
    with stage("generate", params, source) as notes:
        log = out / "log.jsonl"
        _start_over_if_changed(log, params)
        done = _finished(log)
        todo = [conversation for conversation in conversations if conversation.id not in done]
        started, tokens = time.monotonic(), 0
        if todo:
            with _servers(params, out) as endpoints, log.open("a") as sink:
                started = time.monotonic()
                for line in _ask_all(endpoints, todo, params):
                    sink.write(json.dumps(line, separators=(",", ":")) + "\n")
                    sink.flush()
                    tokens += sum(len(answer["output_ids"]) for answer in line["answers"])
        seconds = time.monotonic() - started
        summary = Summary()
        write_parquet(summary.counted(_samples(log, conversations, params), params.drop), out / "samples.parquet")
        notes |= summary.result() | {
            "asked_now": len(todo),
            "tokens_per_s": round(tokens / seconds, 1) if todo else None,
        }
        write_json(out / "summary.json", notes)
    return notes


@contextlib.contextmanager
def _servers(params: GenerateParams, out: Path) -> Iterator[list[Endpoint]]:
    if params.servers:
        yield [_endpoint(url, params) for url in params.servers]
        return
    from . import targets

    with engines.serve(params, targets.resolve(params.target), out / "server.log") as server:
        name = f"{server.engine} {server.version}"
        if server.engine == "vllm":
            yield [Endpoint(_client(server.url, params), server.model, name)]
        else:  # whether it knows return_token_ids must be asked
            yield [replace(_endpoint(server.url, params), name=name)]


def _client(url: str, params: GenerateParams) -> httpx.Client:
    if params.api_key_env and params.api_key_env not in os.environ:
        raise Eagle3Error(f"api_key_env: found no environment variable {params.api_key_env}, expected the server's key")
    return httpx.Client(
        base_url=f"{url}/v1",
        headers={"Authorization": f"Bearer {os.environ[params.api_key_env]}"} if params.api_key_env else {},
        timeout=params.stall_timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=params.concurrency),
    )


def _endpoint(url: str, params: GenerateParams) -> Endpoint:
    """A running server: the first model that it lists, and whether it gives token ids."""
    client = _client(url.rstrip("/").removesuffix("/v1"), params)

    def first_model() -> str:
        reply = client.get("/models")
        reply.raise_for_status()
        return reply.json()["data"][0]["id"]

    try:
        model = _retrying(params.tries)(first_model)
        probe = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            reply = _retrying(params.tries)(_posted, client, probe | {"return_token_ids": True})
        except httpx.HTTPStatusError as error:
            if transient(error):
                raise
            reply = {}  # it refuses what it does not know
    except (*FAILURES, httpx.InvalidURL, LookupError, TypeError) as error:
        raise Eagle3Error(f"servers: {url} does not answer as an OpenAI-compatible server: {error}") from error
    return Endpoint(client, model, url, bool(reply.get("prompt_token_ids")))


def _ask_all(endpoints: list[Endpoint], todo: list[Conversation], params: GenerateParams) -> Iterator[dict]:
    """Lines of the log as they come, ``concurrency`` conversations at a time, servers in turn."""
    ids_of, numbered, under_way, refused, finished = (
        IdSource(params.target),
        enumerate(todo),
        set(),
        0,
        0,
    )
    with ThreadPoolExecutor(params.concurrency) as pool, tqdm(total=len(todo), desc="generate", mininterval=2) as bar:

        def submit(most: int) -> None:
            for number, conversation in islice(numbered, most):
                under_way.add(pool.submit(ask, endpoints, conversation, params, ids_of, number))

        submit(params.concurrency)
        try:
            while under_way:
                ready, _ = wait(under_way, return_when=FIRST_COMPLETED)
                under_way -= ready
                submit(len(ready))
                for job in ready:
                    line = job.result()
                    finished, refused = finished + 1, refused + bool(line["refused"])
                    yield line
                    if refused > max(REFUSED_AT_LEAST, REFUSED_SHARE * finished):
                        raise Eagle3Error(
                            f"generate: {refused} of {finished} prompts refused; the last: {line['refused']}"
                        )
                bar.update(len(ready))
        except FAILURES as error:
            raise Eagle3Error(
                f"generate: a server failed {params.tries} times: {_words(error)}; what is finished is kept"
            ) from error
        finally:
            for job in under_way:
                job.cancel()


# --- the log ----------------------------------------------------------------------------------------------------------


def _start_over_if_changed(log: Path, params: GenerateParams) -> None:
    """Answers made with other settings are moved away, not mixed."""
    settings = {name: value for name, value in params.model_dump().items() if name not in NOT_THE_ANSWERS}
    known = log.with_name("settings.json")
    if log.is_file() and (not known.is_file() or json.loads(known.read_text()) != settings):
        aside = log.with_name(f"log.{int(log.stat().st_mtime)}.jsonl")
        print(f"the settings changed: earlier answers are kept as {short_path(aside)}")
        log.rename(aside)
    write_json(known, settings)


def _log_lines(log: Path) -> Iterator[tuple[int, dict]]:
    """(offset, line) of the log.

    Raises:
        Eagle3Error: a line that is damaged, by its number.
    """
    with log.open("rb") as file:
        offset = 0
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                line["id"], line["answers"], line["refused"], line["failures"]
            except (ValueError, TypeError, KeyError) as error:
                raise Eagle3Error(
                    f"{short_path(log)}, line {number}: damaged ({type(error).__name__}: {error}): found {text[:60]!r}; "
                    "delete the line and run the stage again: its prompt is asked anew"
                ) from error
            yield offset, line
            offset += len(text)


def _finished(log: Path) -> set[str]:
    """Ids of the conversations in the log; a last line that a kill cut off is dropped, refused ones are asked again."""
    if not log.is_file():
        return set()
    with log.open("rb+") as file:
        file.truncate(sum(len(text) for text in file if text.endswith(b"\n")))
    return {line["id"] for _, line in _log_lines(log) if not line["refused"]}


def _samples(
    log: Path, conversations: list[Conversation], params: GenerateParams
) -> Iterator[tuple[dict, list[Answer]]]:
    """(log line, its answers) in the order of the prompts: the same data whatever the timing or the number of runs."""
    places = {line["id"]: offset for offset, line in _log_lines(log)}
    with log.open("rb") as file:
        for conversation in conversations:
            file.seek(places[conversation.id])
            line = json.loads(file.readline())
            split = prompts.split_of(conversation.first_prompt, params.held_out_share)
            yield line, [Answer(**row | {"split": split}) for row in line["answers"]]


# --- what came of it --------------------------------------------------------------------------------------------------


def loops(ids: list[int]) -> bool:
    """The answer ends in a loop: some tokens, at most 64, said at least four times over and for 48 tokens or more."""
    for period in range(1, LOOP_PERIODS + 1):
        tail = ids[-max(LOOP_REPEATS * period, LOOP_TOKENS) :]
        if len(tail) >= max(LOOP_REPEATS * period, LOOP_TOKENS) and tail[period:] == tail[:-period]:
            return True
    return False


FLAWS: dict[str, Callable[[Answer], bool]] = {
    "cut": lambda answer: answer.finish_reason == "length",
    "empty": lambda answer: not (answer.text.strip() or answer.reasoning.strip() or answer.tool_calls),
    "loop": lambda answer: loops(answer.output_ids),
    "unrendered": lambda answer: answer.rendered == "no",
}


class Summary:
    """Counts over the samples as they pass."""

    def __init__(self):
        self.counts, self.flaws, self.dropped, self.failures = Counter(), Counter(), Counter(), Counter()
        self.splits, self.reasons, self.rendered, self.lengths = Counter(), Counter(), Counter(), Counter()
        self.ids_from, self.servers = Counter(), Counter()

    def counted(self, lines: Iterable[tuple[dict, list[Answer]]], drop: Collection[str]) -> Iterator[Answer]:
        """The answers that are kept; every flaw is counted, whether it drops the answer or not."""
        for line, answers in lines:
            self.failures.update(line["failures"])
            self.counts["refused"] += bool(line["refused"])
            for answer in answers:
                flaws = [name for name, has in FLAWS.items() if has(answer)]
                self.flaws.update(flaws)
                if dropping := [name for name in flaws if name in drop]:
                    self.dropped[dropping[0]] += 1
                    continue
                self._count(answer)
                yield answer

    def _count(self, answer: Answer) -> None:
        tokens = len(answer.output_ids)
        self.counts.update(samples=1, prompt_tokens=len(answer.prompt_ids), output_tokens=tokens)
        self.counts["with_reasoning"] += bool(answer.reasoning)
        if answer.reasoning_span:
            self.counts["reasoning_tokens"] += answer.reasoning_span[1] - answer.reasoning_span[0]
        self.splits[answer.split] += 1
        self.reasons[answer.finish_reason] += 1
        self.rendered[answer.rendered] += 1
        self.ids_from[answer.ids_from] += 1
        self.servers[answer.server] += 1
        self.lengths[1 << max(tokens - 1, 0).bit_length()] += 1  # up to the next power of two

    def result(self) -> dict:
        samples = self.counts["samples"]
        return {
            "samples": samples,
            "splits": dict(self.splits),
            "finish_reasons": dict(self.reasons),
            "prompt_tokens": self.counts["prompt_tokens"],
            "output_tokens": self.counts["output_tokens"],
            "reasoning_share": round(self.counts["with_reasoning"] / samples, 4) if samples else 0.0,
            "reasoning_tokens": self.counts["reasoning_tokens"],
            "rendered": dict(self.rendered),
            "ids_from": dict(self.ids_from),
            "flaws": {name: self.flaws[name] for name in FLAWS},
            "dropped": dict(self.dropped),
            "refused": self.counts["refused"],
            "failed_tries": dict(self.failures),
            "servers": dict(self.servers),
            "tokens_at_most": {str(most): self.lengths[most] for most in sorted(self.lengths)},
        }
