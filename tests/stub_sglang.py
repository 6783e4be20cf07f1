"""A server with SGLang's command line and /generate of 0.5.23, for hidden states; tests run it as sglang.launch_server.

Beside it lies ``states.npz``, recorded from the real target: for each text, named by its ids, [layers + 1, T, Ht] residual
streams and then, in the last place of the first axis, the last hidden state. What a request gets of them follows SGLang's
source: llama.py set_eagle3_layers_to_capture, logits_processor.py, batch_result_processor.py, output_streamer.py.
STUB_SHIFT=1 hands over each stream one layer late.
"""

import argparse
import json
import os
from pathlib import Path

import numpy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in (
    "--model-path",
    "--served-model-name",
    "--host",
    "--dtype",
    "--speculative-algorithm",
    "--sampling-defaults",
):
    parser.add_argument(name)
for name in ("--port", "--context-length", "--base-gpu-id"):
    parser.add_argument(name, type=int)
parser.add_argument("--chunked-prefill-size", type=int, default=8)
parser.add_argument("--return-aux-hidden-state-layer-ids", type=int, nargs="+")
for name in ("disable-cuda-graph", "disable-radix-cache", "enable-return-hidden-states"):
    parser.add_argument(f"--{name}", action="store_true")
parser.add_argument("--enable-return-aux-hidden-states", action="store_true")
ARGS = parser.parse_args()

STATES = numpy.load(Path(__file__).with_name("states.npz"))
LAYERS = json.loads((Path(ARGS.model_path) / "config.json").read_text())["num_hidden_layers"]
SHIFT = int(os.environ.get("STUB_SHIFT", 0))
seen = set()

if ids := ARGS.return_aux_hidden_state_layer_ids:
    if not ARGS.enable_return_aux_hidden_states:
        parser.error("--return-aux-hidden-state-layer-ids requires --enable-return-aux-hidden-states.")
    if any(i < 0 for i in ids) or len(set(ids)) != len(ids) or max(ids) >= LAYERS - 1:
        parser.error(f"layer ids {ids}")
if ARGS.enable_return_aux_hidden_states and (ARGS.speculative_algorithm or "").upper() != "EAGLE3":
    parser.error("--enable-return-aux-hidden-states needs --speculative-algorithm to name the capture convention")
LAYERS_TO_CAPTURE = [i + 1 for i in ids or []]


def hidden_states(ids: list[int], max_new_tokens: int) -> list:
    """An entry for each new token: the prompt's rows, then one row each (not recorded, so not asked for here)."""
    streams = STATES[",".join(map(str, ids))]
    if ARGS.enable_return_aux_hidden_states:
        captured = [streams[i + SHIFT] for i in range(LAYERS) if i in LAYERS_TO_CAPTURE]  # before layer i
        rows = numpy.concatenate(captured, -1)
    else:
        rows = streams[-1]
    start = 0
    if not ARGS.disable_radix_cache and tuple(ids) in seen:
        start = len(ids) - 1  # the prefix is cached
    if ARGS.chunked_prefill_size > 0:
        start = max(start, (len(ids) - 1) // ARGS.chunked_prefill_size * ARGS.chunked_prefill_size)
    seen.add(tuple(ids))
    return [rows[start:].tolist()][:max_new_tokens]


async def health(_: Request) -> Response:
    return JSONResponse({})


async def completions(_: Request) -> Response:
    choice = {"index": 0, "text": "", "finish_reason": "length"}
    return JSONResponse({"id": "1", "object": "text_completion", "created": 0, "model": "target", "choices": [choice]})


async def generate(request: Request) -> Response:
    body = await request.json()
    ids, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    meta = {"finish_reason": {"type": "length", "length": new}, "prompt_tokens": len(ids), "completion_tokens": new}
    if body.get("return_hidden_states"):
        if not (ARGS.enable_return_hidden_states or ARGS.enable_return_aux_hidden_states):
            return refusal("The server is not configured to return hidden states.")
        if len(ids) + new > ARGS.context_length:
            return refusal("longer than the model's context length")
        meta["hidden_states"] = hidden_states(ids, new)
    return JSONResponse({"text": "", "output_ids": [1] * new, "meta_info": meta})


def refusal(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, 400)


app = Starlette(
    routes=[
        Route("/health", health),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
    ]
)
uvicorn.run(app, host=ARGS.host, port=ARGS.port, log_level="warning", lifespan="off", timeout_graceful_shutdown=0)
