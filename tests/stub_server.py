"""A server that answers as vLLM does, quickly, and fails as servers fail; for tests and benchmarks of stage 03.

    python tests/stub_server.py [--fail 0.05] [--seed 0] [--replies FILE] [--no-ids]

It takes a free port and prints its address. Answers are ids that the prompt's hash decides, or what --replies says of a
prompt: its content, reasoning, token_ids, prompt_token_ids and finish_reason, or an error's status and message. --no-ids:
as a server that refuses return_token_ids. A share of the requests ends in turn with 429, 500, 503, no answer at all, a
connection closed inside the reply, and a stream that ends before its answer.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FAILURES = ("429", "500", "503", "silence", "closed", "short stream")
SILENCE_S = 30


@contextlib.contextmanager
def running(*options):
    """The address of a stub server in a process of its own, for a ``with`` block; options as on the command line."""
    process = subprocess.Popen([sys.executable, __file__, *map(str, options)], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def answer_ids(prompt: str) -> list[int]:
    """20 to 51 ids below 40,000 that the prompt alone decides."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return [100 + 256 * (place % 7) + digest[place % 32] for place in range(20 + digest[0] % 32)]


def reply_of(said: dict, ids: bool) -> dict:
    """The whole reply to a request, from what is said of its prompt; with token ids or without."""
    fields = ("content", "reasoning", "reasoning_content", "tool_calls")
    message = {"role": "assistant"} | {name: said[name] for name in fields if name in said}
    choice = {"index": 0, "message": message, "finish_reason": said.get("finish_reason", "stop")}
    reply = {"id": "chatcmpl-1", "object": "chat.completion", "model": "stub", "choices": [choice]}
    if ids:
        choice["token_ids"] = said["token_ids"]
        reply["prompt_token_ids"] = said.get("prompt_token_ids", [1, 2, 3])
    return reply


def chunks_of(reply: dict) -> list[dict]:
    """The same reply as the chunks of a stream: each text in two halves, the first nine ids in the first half."""
    choice = reply["choices"][0]
    ids, message = choice["token_ids"], choice["message"]
    said = [(name, message[name]) for name in ("reasoning", "reasoning_content", "content") if message.get(name)]
    halves = [{name: half} for name, text in said for half in (text[:5], text[5:])]
    pieces = [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    pieces += [{"delta": half, "finish_reason": None, "token_ids": []} for half in halves]
    pieces[1]["token_ids"], pieces[-1]["token_ids"] = ids[:9], ids[9:]
    pieces[-1]["finish_reason"] = choice["finish_reason"]
    chunks = [reply | {"object": "chat.completion.chunk", "choices": [{"index": 0} | piece]} for piece in pieces]
    for chunk in chunks[1:]:
        chunk["prompt_token_ids"] = None
    return chunks


async def sent(parts: Iterable[str], closed: bool = False) -> AsyncIterator[str]:
    """The parts of a body. ``closed``: then the server closes the connection, as it does when an application raises."""
    for part in parts:
        yield part
    if closed:
        raise RuntimeError("closed inside the reply, on purpose")


def application(fail: float, seed: int, replies: dict, ids: bool) -> Starlette:
    """The server's application; the arguments are those of the command line."""
    chance, failures = random.Random(seed), itertools.cycle(FAILURES)

    def error(status: int, message: str) -> Response:
        headers = {"retry-after": "0"} if status == 429 else {}
        return JSONResponse({"error": {"message": message}}, status, headers)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        prompt = body["messages"][-1]["content"]
        if body.get("return_token_ids") and not ids:
            return error(400, "unknown field return_token_ids")
        said = replies.get(prompt) or {"content": f"answer to {prompt}", "token_ids": answer_ids(prompt)}
        if "status" in said:
            return error(said["status"], said["message"])
        failure = next(failures) if chance.random() < fail else ""
        if failure in ("429", "500", "503"):
            return error(int(failure), failure)
        reply = reply_of(said, ids)
        if failure == "silence":
            await asyncio.sleep(SILENCE_S)
            return StreamingResponse(sent([], closed=True))
        if body.get("stream"):
            return stream(reply, failure)
        whole = JSONResponse(reply)
        if not failure:
            return whole
        half = whole.body[: len(whole.body) // 2]
        return StreamingResponse(sent([half], closed=True), headers=whole.headers)

    def stream(reply: dict, failure: str) -> Response:
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks_of(reply)]
        if failure:
            events.pop()
        closed = failure == "closed"
        if not closed:
            events.append("data: [DONE]\n\n")
        body = sent(events, closed)
        return StreamingResponse(body, media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replies", type=Path)
    parser.add_argument("--no-ids", action="store_true")
    arguments = parser.parse_args()
    replies = json.loads(arguments.replies.read_text()) if arguments.replies else {}
    app = application(arguments.fail, arguments.seed, replies, ids=not arguments.no_ids)
    # "critical": the connections that are closed on purpose would be told as errors. The address is printed when the
    # socket listens already.
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_keep_alive=600)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
