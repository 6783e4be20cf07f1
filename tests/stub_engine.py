"""A server with vLLM's completion endpoint that fails on purpose after a number of answers; for tests of engines and stage 07.

    python tests/stub_engine.py PORT {hang,die,load} ANSWERS

hang: accepts the next completion and never answers, while /health stays at 200. die: ends at the next completion. load:
never becomes healthy. An answer echoes ten token ids, one a chunk.
"""

import asyncio
import itertools
import json
import os
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PORT, FAULT, ANSWERS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
asked = itertools.count(1)


def reply(token_ids: list[int]) -> dict:
    """A completion, or a chunk of one, with these ids."""
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": token_ids}
    return {"id": "1", "object": "text_completion", "created": 0, "model": "target", "choices": [choice]}


async def health(_: Request) -> Response:
    return Response(status_code=503 if FAULT == "load" else 200)


async def completions(request: Request) -> Response:
    body = await request.json()
    number = next(asked)
    if number > ANSWERS:
        print(f"answer {number}: {FAULT}", flush=True)
        if FAULT == "die":
            os._exit(7)
        await asyncio.sleep(600)
    if not body.get("stream"):
        return JSONResponse(reply(list(range(10))))
    events = [f"data: {json.dumps(reply([token]))}\n\n" for token in range(10)]
    return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")


app = Starlette(routes=[Route("/health", health), Route("/v1/completions", completions, methods=["POST"])])
# SIGTERM ends it at once, whatever hangs.
uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
