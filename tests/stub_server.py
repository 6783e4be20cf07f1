"""A server that answers as vLLM does, quickly, and fails as servers fail; for tests and benchmarks of stage 03.

    python tests/stub_server.py [--fail 0.05] [--seed 0] [--replies FILE] [--no-ids]

It takes a free port and prints its address. Answers are ids that the prompt's hash decides, or what --replies says of a prompt: its content, reasoning, token_ids,
prompt_token_ids and finish_reason, or an error's status and message. --no-ids: as a server that refuses return_token_ids. A share of the requests ends in turn with 429, 500, 503, no answer at all,
a connection closed inside the reply, and a stream that ends before its answer.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path


@contextlib.contextmanager
def running(*options):
    """The address of a stub server in a process of its own, for a ``with`` block; options as on the command line."""
    process = subprocess.Popen([sys.executable, __file__, *map(str, options)], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


FAILURES = ("429", "500", "503", "silence", "closed", "short stream")


def answer_ids(prompt: str) -> list[int]:
    """20 to 51 ids below 40,000 that the prompt alone decides."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return [100 + 256 * (place % 7) + digest[place % 32] for place in range(20 + digest[0] % 32)]


class Stub:
    def __init__(self, fail: float, seed: int, replies: dict, ids: bool):
        self.fail, self.random, self.failures = fail, random.Random(seed), itertools.cycle(FAILURES)
        self.replies, self.ids = replies, ids

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length:")
                    ),
                    0,
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not await self.answer(path, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def answer(self, path: str, body: dict, writer) -> bool:
        """Write one reply; False: the connection is over."""
        if path == "/v1/models":
            return await self.write(writer, {"object": "list", "data": [{"id": "stub", "object": "model"}]})
        prompt = body["messages"][-1]["content"]
        if body.get("return_token_ids") and not self.ids:
            return await self.write(writer, {"error": {"message": "unknown field return_token_ids"}}, status=400)
        said = self.replies.get(prompt) or {"content": f"answer to {prompt}", "token_ids": answer_ids(prompt)}
        if status := said.get("status"):
            return await self.write(writer, {"error": {"message": said["message"]}}, status=status)
        reply = self.reply(said)
        failure = next(self.failures) if self.random.random() < self.fail else ""
        if failure in ("429", "500", "503"):
            return await self.write(writer, {"error": {"message": failure}}, status=int(failure))
        if failure == "silence":
            await asyncio.sleep(30)
            return False
        text = json.dumps(reply)
        if body.get("stream"):
            await self.stream(writer, reply, cut=bool(failure), ended=failure != "closed")
            return not failure
        if failure:  # closed inside the reply
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            writer.write((head + text[: len(text) // 2]).encode())
            await writer.drain()
            return False
        return await self.write(writer, reply)

    def reply(self, said: dict) -> dict:
        fields = ("content", "reasoning", "reasoning_content", "tool_calls")
        message = {"role": "assistant"} | {name: said[name] for name in fields if name in said}
        choice = {"index": 0, "message": message, "finish_reason": said.get("finish_reason", "stop")}
        ids = {"prompt_token_ids": said.get("prompt_token_ids", [1, 2, 3])} if self.ids else {}
        choice |= {"token_ids": said["token_ids"]} if self.ids else {}
        return {"id": "chatcmpl-1", "object": "chat.completion", "model": "stub", "choices": [choice], **ids}

    async def stream(self, writer, reply: dict, cut: bool, ended: bool) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        choice = reply["choices"][0]
        ids, message = choice["token_ids"], choice["message"]
        said = [(name, message[name]) for name in ("reasoning", "reasoning_content", "content") if message.get(name)]
        halves = [{name: half} for name, text in said for half in (text[:5], text[5:])]
        pieces = [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        pieces += [{"delta": half, "finish_reason": None, "token_ids": []} for half in halves]
        pieces[1]["token_ids"], pieces[-1]["token_ids"] = ids[:9], ids[9:]
        pieces[-1]["finish_reason"] = choice["finish_reason"]
        for number, piece in enumerate(pieces[:-1] if cut else pieces):
            event = reply | {"object": "chat.completion.chunk", "choices": [{"index": 0} | piece]}
            if number:
                event["prompt_token_ids"] = None
            data = f"data: {json.dumps(event)}\n\n"
            writer.write(f"{len(data):x}\r\n{data}\r\n".encode())
        if ended:
            done = "data: [DONE]\n\n"
            writer.write(f"{len(done):x}\r\n{done}\r\n0\r\n\r\n".encode())
        await writer.drain()

    async def write(self, writer, value: dict, status: int = 200) -> bool:
        text = json.dumps(value)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
        writer.write(f"{head}{'retry-after: 0' + chr(13) + chr(10) if status == 429 else ''}\r\n{text}".encode())
        await writer.drain()
        return True


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replies", type=Path)
    parser.add_argument("--no-ids", action="store_true")
    arguments = parser.parse_args()
    replies = json.loads(arguments.replies.read_text()) if arguments.replies else {}
    stub = Stub(arguments.fail, arguments.seed, replies, ids=not arguments.no_ids)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
