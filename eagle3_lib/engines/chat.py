"""Chat completions of OpenAI-compatible servers that may fail: retries, streamed replies, and the answer's token ids."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypedDict

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from tqdm import tqdm

from ..errors import Eagle3Error
from ..params import GenerateParams
from ..paths import project_path
from ..targets import prompts, reasoning, targets
from ..targets.answers import Answer
from ..targets.prompts import TURN, Conversation
from .access import Access

TRANSIENT_STATUS = (408, 409, 425, 429)
LONGEST_WAIT_S = 60
CHAT = "/v1/chat/completions"
REFUSED_AT_LEAST, REFUSED_SHARE = 10, 0.05  # more refusals than both: the run is wrong, not some prompts


class BrokenReply(Exception):
    """A reply that ended before the server said why it ended."""


Message = dict[str, Any]  # of a chat, as OpenAI's protocol has it: {"role", "content", "tool_calls", ...}
Body = dict[str, Any]  # JSON to or from a server


class Reply(TypedDict):
    """One chat completion; ids are None where the server does not give them."""

    message: Message
    finish_reason: str
    output_ids: list[int] | None
    prompt_ids: list[int] | None


class Line(TypedDict):
    """A line of the log: one conversation. answers: fields of Answer; failures: tries by what they ended with; refused: the
    server's words, or ""."""

    id: str
    answers: list[dict[str, Any]]
    failures: dict[str, int]
    refused: str


FAILURES = (httpx.HTTPError, json.JSONDecodeError, BrokenReply)


@dataclass(frozen=True)
class Endpoint:
    """A server as this stage asks it.

    stall_s: a request waits so long for the next bytes of its answer. gives_ids: it takes return_token_ids (others may refuse
    what they do not know).
    """

    access: Access
    model: str
    name: str
    stall_s: float
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


def _wait_s(state: RetryCallState) -> float:
    """Exponential with jitter, and never less than the server asks for."""
    error = state.outcome.exception()
    asked = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    asked_s = float(asked) if asked.replace(".", "", 1).isdigit() else 0.0
    wait_s: float = max(
        wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S)(state), min(asked_s, LONGEST_WAIT_S)
    )
    return wait_s


def _retrying(tries: int) -> Retrying:
    return Retrying(retry=retry_if_exception(transient), wait=_wait_s, stop=stop_after_attempt(tries), reraise=True)


# --- one conversation -------------------------------------------------------------------------------------------------


def settings_for(conversation: Conversation, params: GenerateParams) -> dict[str, Any]:
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
) -> Line:
    """All turns of one conversation, each given the target's own earlier ones; what every try ended with is counted.

    Args:
        first: number of the endpoint to ask first; each further try goes to the next one.
    Returns:
        a line of the log. A conversation ends early where a turn was cut by its length or called tools.
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
            return _line(conversation, answers, failures, _words(error, endpoints[0].access))
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


def _line(conversation: Conversation, answers: list[Answer], failures: Counter[str], refused: str = "") -> Line:
    rows = [asdict(answer) for answer in answers]
    return {"id": conversation.id, "answers": rows, "failures": dict(failures), "refused": refused}


def _words(error: Exception, reached: Access) -> str:
    """What the server said of a failure, without the key."""
    said = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
    hidden = reached.hide(said)[:300] or reached.hide(str(error))
    return f"{failure_kind(error)}: {hidden}"


def _reply(
    endpoints: list[Endpoint],
    messages: list[Message],
    tools: list[Body],
    settings: dict[str, Any],
    params: GenerateParams,
    failures: Counter[str],
    first: int,
) -> tuple[Endpoint, Reply]:
    body: Body = {"messages": messages, "stream": params.stream, **settings}
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


def _chat(endpoint: Endpoint, body: Body) -> Reply:
    body = body | {"model": endpoint.model} | ({"return_token_ids": True} if endpoint.gives_ids else {})
    if not body.get("stream"):
        return _whole(_posted(endpoint, body))
    with endpoint.access.http().stream("POST", CHAT, json=body, timeout=endpoint.stall_s) as reply:
        if reply.is_error:
            reply.read()
        reply.raise_for_status()
        return _joined(reply.iter_lines())


def _posted(endpoint: Endpoint, body: Body) -> Body:
    reply = endpoint.access.http().post(CHAT, json=body, timeout=endpoint.stall_s)
    reply.raise_for_status()
    answer: Body = reply.json()
    return answer


def _whole(reply: Body) -> Reply:
    choice = next(iter(reply.get("choices") or []), {})
    if not choice.get("finish_reason"):
        raise BrokenReply("a reply without a choice or its end")
    return {
        "message": choice["message"],
        "finish_reason": choice["finish_reason"],
        "output_ids": choice.get("token_ids"),
        "prompt_ids": reply.get("prompt_token_ids"),
    }


def _joined(lines: Iterable[str]) -> Reply:
    """A streamed reply put together."""
    message: Message = {"tool_calls": []}
    output_ids: list[int] = []
    prompt_ids, reason = None, None
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


def _add_calls(calls: list[Body], pieces: list[Body]) -> None:
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
        self,
        answer: Answer,
        reply: Reply,
        messages: list[Message],
        tools: list[Body],
        options: dict[str, Any] | None = None,
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

    def _from_template(
        self,
        answer: Answer,
        said: reasoning.Spoken,
        messages: list[Message],
        tools: list[Body],
        options: dict[str, Any],
    ) -> Answer:
        if answer.tool_calls:
            raise Eagle3Error(f"{answer.server}: an answer that calls tools came without token ids; expected them")
        with self.loading:
            if self.tokenizer is None:
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
    if target == targets.SMOLLM2 or target.count("/") != 1:
        return targets.resolve(target)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, allow_patterns=["*token*", "*.jinja", "config.json", "*.tiktoken"]))
    except Exception as error:
        raise Eagle3Error(f"target: {target!r} is no folder and the model hub did not give it: {error}") from error


def endpoint_of(reached: Access, params: GenerateParams) -> Endpoint:
    """A running server: the first model that it lists, and whether it gives token ids.

    Raises:
        Eagle3Error: it does not answer.
    """
    unknown = Endpoint(reached, "", reached.url, params.stall_timeout_s)

    def first_model() -> str:
        reply = reached.http().get("/v1/models", timeout=params.stall_timeout_s)
        reply.raise_for_status()
        model: str = reply.json()["data"][0]["id"]
        return model

    try:
        model = _retrying(params.tries)(first_model)
        probe = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            reply = _retrying(params.tries)(_posted, unknown, probe | {"return_token_ids": True})
        except httpx.HTTPStatusError as error:
            if transient(error):
                raise
            reply = {}  # it refuses what it does not know
    except (*FAILURES, LookupError, TypeError) as error:
        said = _words(error, reached) if isinstance(error, httpx.HTTPStatusError) else reached.hide(str(error))
        raise Eagle3Error(
            f"servers: {reached.url} does not answer as an OpenAI-compatible server: {said}"
        ) from reached.cause(error)
    return replace(unknown, model=model, gives_ids=bool(reply.get("prompt_token_ids")))


def ask_all(endpoints: list[Endpoint], todo: list[Conversation], params: GenerateParams) -> Iterator[Line]:
    """Lines of the log as they come, ``concurrency`` conversations at a time, servers in turn."""
    ids_of, numbered, under_way, refused, finished = (
        IdSource(params.target),
        enumerate(todo),
        set(),
        0,
        0,
    )
    reached = endpoints[0].access  # all servers have the same key and headers
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
                f"generate: a server failed {params.tries} times: {_words(error, reached)}; what is finished is kept"
            ) from reached.cause(error)
        finally:
            for job in under_way:
                job.cancel()
