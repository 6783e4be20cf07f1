"""Servers that run already, for tests of eagle3_lib/engines/running.py: recorded answers behind real sockets.

    with serving(record("vllm/0.32.0_eagle3_detailed")) as url: ...

Paths answer what tests/data/servers has. /v1/completions of a vLLM gives the recorded answer; a cache salt and the prompt
decide prompt_tokens_details; /metrics counts "rounds" of the record for each. /generate of an SGLang follows the source of 0.5.16: meta_info of srt/managers/
tokenizer_manager.py (_add_spec_metrics and the fields around it), cached tokens as srt/managers/schedule_batch.py
(_compute_max_prefix_len) and the radix cache give them, by extra_key; api keys as srt/utils/auth.py and vLLM's
entrypoints/serve/middleware/authenticate.py guard them.
"""

import contextlib
import copy
import json
import re
import socket
import threading
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

FOLDER = Path(__file__).parent / "data/servers"


def record(name: str, without: tuple[str, ...] = (), **paths: object) -> dict:
    """A recorded server, without some of its paths, with others (written with _ for /) changed or added."""
    told = json.loads((FOLDER / f"{name}.json").read_text())
    told["paths"] = {path: body for path, body in told["paths"].items() if path not in without}
    told["paths"] |= {f"/{path.replace('__', '/')}": body for path, body in paths.items()}
    return told


@contextlib.contextmanager
def serving(told: dict, **options: object):
    """The address of a server in a thread, for a ``with`` block; options of :func:`application`, and of TLS of uvicorn."""
    tls = {name: options.pop(name) for name in ("ssl_keyfile", "ssl_certfile") if name in options}
    with in_thread(application(told, **options), **tls) as place:
        yield f"{'https' if tls else 'http'}://{place}"


@contextlib.contextmanager
def in_thread(app: Starlette, **options: str):
    """Serve an application by uvicorn in a thread; gives HOST:PORT."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", **options))
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True  # the thread closes the socket and ends by itself


def application(
    told: dict,
    key: str = "",
    prefix: str = "",
    refuses: str = "",
    page: bool = False,
    moved: str = "",
    seen: list | None = None,
) -> Starlette:
    """The application.

    Args:
        key: that requests need. prefix: the path below which it lies. refuses: a field of a completion that it does not
            take. page: it answers everything with a web page. moved: the address to which it sends on. seen: takes the
            (path, headers) of all requests.
    """
    sglang = "/model_info" in told["paths"]
    info = told["paths"].get("/server_info") or told["paths"].get("/get_server_info") or {}
    asked: list[str] = []
    cache: dict[str, list[list[int]]] = {}

    def cached(salt: str, ids: list[int]) -> int:
        """The longest prefix that an earlier request of this salt has, without the last token."""
        known = cache.setdefault(salt, [])
        shared = [sum(1 for _ in _same(ids, other)) for other in known]
        known.append(ids)
        return min(max(shared, default=0), len(ids) - 1)

    async def answer(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix) if request.url.path.startswith(prefix) else ""
        if seen is not None:
            seen.append((path, dict(request.headers)))
        if moved:
            return RedirectResponse(f"{moved}{path}", 308)
        if page:
            return HTMLResponse("<html>Welcome</html>")
        guarded = not path.startswith(("/health", "/metrics")) if sglang else path.startswith("/v1")
        if key and guarded and request.headers.get("authorization") != f"Bearer {key}":
            sent = request.headers.get("authorization", "")
            return JSONResponse({"error": f"Unauthorized: {sent}"}, 401)
        if request.method == "POST":
            body = await request.json()
            if refuses in body and refuses:
                return JSONResponse({"error": {"message": f"unknown field {refuses}"}}, 400)
            if path == "/v1/completions" and "whole" in told:
                asked.append(path)
                return completion(told, body, cached)
            return generation(info, body, cached) if path == "/generate" else Response(status_code=404)
        query = f"{path}?{request.url.query}" if request.url.query else path
        found = told["paths"].get(query, told["paths"].get(path))
        if found is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        if path == "/metrics":
            counted = told.get("rounds", 0) * len(asked)
            found = re.sub(r"(num_drafts_total{.*} )(\d+)", lambda line: f"{line[1]}{int(line[2]) + counted}", found)
        return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


def _same(ids: list[int], other: list[int]):
    for mine, theirs in zip(ids, other, strict=False):
        if mine != theirs:
            return
        yield mine


def completion(told: dict, body: dict, cached) -> Response:
    """The recorded completion; with "cached" in the record, its usage tells the prompt tokens from the prefix cache."""
    details = {"cached_tokens": cached(body.get("cache_salt", ""), body["prompt"])} if told.get("cached") else None
    if not body.get("stream"):
        whole = copy.deepcopy(told["whole"])
        whole["usage"]["prompt_tokens_details"] = details
        return JSONResponse(whole)
    events = [line.removeprefix("data: ") for line in told["streamed"].splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if chunks[-1].get("usage"):
        chunks[-1]["usage"]["prompt_tokens_details"] = details
    if not body.get("return_token_ids") or told.get("strips"):
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            choice.pop("token_ids", None)
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def generation(info: dict, body: dict, cached) -> Response:
    """An answer of /generate: rounds of one accepted draft each, until the tokens are full."""
    ids, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    hits = cached(body.get("extra_key", ""), ids)
    draft_tokens = info.get("speculative_num_draft_tokens") or 0
    step = 2 if draft_tokens else 1
    ends = [1, *range(1 + step, new, step), new] if new > 1 else [1]
    events = []
    for end in ends:
        meta = {"prompt_tokens": len(ids), "completion_tokens": end, "cached_tokens": hits, "finish_reason": None}
        if end == new:
            rounds = len(ends) - 1
            meta["finish_reason"] = {"type": "length", "length": new}
            if draft_tokens and rounds:
                meta |= {"spec_verify_ct": rounds, "spec_num_correct_drafts": rounds}
                meta |= {"spec_num_proposed_drafts": rounds * (draft_tokens - 1)}
                meta |= {"spec_correct_drafts_histogram": [0, rounds] + [0] * (draft_tokens - 2)}
        events.append({"text": "", "output_ids": list(range(100, 100 + end)), "meta_info": meta})
    if not body.get("stream"):
        return JSONResponse(events[-1])
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")
