"""An SGLang that serves the recorded run of the real vLLM (tests/data/vllm_cpu_replay.json), for stage 00 end to end.

Its answers, and the rounds in which they are emitted, are those of a correct engine with the base drafter (float32, greedy, K = 4). What
/generate and /server_info look like is read in SGLang 0.5.16, as in tests/stub_running.py. The fields of :class:`Recorded` make it odd.
"""

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from stub_running import in_thread

DATA = Path(__file__).parent / "data"
RECORD = json.loads((DATA / "vllm_cpu_replay.json").read_text())
K = RECORD["num_speculative_tokens"]
QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a short story about volcanoes.",
    "List five facts about bridges.",
    "Why is sleep important?",
    "Write a poem about tides.",
    "What would happen without salt?",
    "Give me a step by step guide to learning about chess openings.",
    "Write a Python function that reverses a string.",
    "Describe how to make tea.",
    "Compare ships with something similar.",
    "What are common mistakes people make about inflation?",
]


def prompts(folder: Path) -> Path:
    """A prompts file of the recorded questions."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    return path


def cut(accepted: list[int], most: int) -> list[int]:
    """Rounds of the same answer whose drafts were accepted as far as ``most`` alone; the last one's stay open."""
    rounds: list[int] = []
    for count in accepted:
        left = count + 1
        while left:
            rounds.append(min(left - 1, most))
            left -= rounds[-1] + 1
    return rounds


@dataclass
class Recorded:
    """One server.

    info: fields of /server_info; None: it is hidden. joined: rounds in one chunk. drafted: drafts of a round that meta_info counts;
    positions: entries of its histogram less one. rounds: from the recorded rounds of an answer to those that are told. ids: from recorded
    tokens to those given. tells: whether meta_info tells speculation. fails: from that request on it answers 500; 0: never.
    asked, chats: requests to /generate and /v1/chat/completions so far; a chat is answered with a short text.
    """

    info: dict[str, Any] | None = field(default_factory=dict)
    joined: int = 1
    drafted: int = K
    positions: int = K
    rounds: Callable[[list[int]], list[int]] = list
    ids: Callable[[list[int]], list[int]] = list
    tells: bool = True
    fails: int = 0
    asked: int = 0
    chats: int = 0

    def paths(self) -> dict[str, Any]:
        told = copy.deepcopy(json.loads((DATA / "servers/sglang/0.5.16_ngram.json").read_text())["paths"])
        chain = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": K, "speculative_num_draft_tokens": K + 1}
        chain |= {"speculative_draft_model_path": "drafters/smollm2-135m-eagle3", "dtype": "float32"}
        for path in ("/server_info", "/get_server_info"):
            if self.info is None:
                told.pop(path, None)
            else:
                told[path] |= chain | self.info
        for load in told["/v1/loads"]["loads"]:
            load |= {"num_running_reqs": 0, "num_waiting_reqs": 0}
        return told

    def answer(self, prompt_ids: list[int], most: int) -> tuple[list[int], list[int]]:
        """Tokens and rounds of an answer: the recorded one as far as ``most`` tokens, or something for another prompt."""
        for request in RECORD["requests"]:
            if request["prompt_ids"] == prompt_ids:
                return self.ids(request["output_ids"][:most]), self.rounds(request["per_step_accepted"])
        return list(range(100, 100 + most)), [0] * most

    def generate(self, body: dict[str, Any]) -> Response:
        self.asked += 1
        if self.fails and self.asked >= self.fails:
            return JSONResponse({"error": {"message": "out of memory"}}, 500)
        most = body["sampling_params"]["max_new_tokens"]
        ids, rounds = self.answer(body["input_ids"], most)
        ends, kept = [1], []
        for count in rounds:
            if ends[-1] >= len(ids):
                break
            kept.append(count)
            ends.append(min(ends[-1] + count + 1, len(ids)))
        meta: dict[str, Any] = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "finish_reason": None}
        last = meta | {"finish_reason": {"type": "length", "length": most}}
        if self.tells and kept:
            last |= {"spec_verify_ct": len(kept), "spec_num_correct_drafts": sum(kept)}
            last |= {"spec_num_proposed_drafts": len(kept) * self.drafted}
            last |= {"spec_correct_drafts_histogram": [kept.count(count) for count in range(self.positions + 1)]}
        steps = [ends[0], *ends[1 :: self.joined], *ends[-1:]]
        shown = sorted(set(steps))
        events = [{"text": "", "output_ids": ids[:end], "meta_info": meta} for end in shown[:-1]]
        events.append({"text": "", "output_ids": ids, "meta_info": last})
        if not body.get("stream"):
            return JSONResponse(events[-1])
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


@contextlib.contextmanager
def serving(recorded: Recorded):
    """The address of such a server in a thread, for a ``with`` block."""
    told = recorded.paths()

    async def answer(request: Request) -> Response:
        if request.url.path == "/v1/chat/completions":
            recorded.chats += 1
            message = {"role": "assistant", "content": "A short answer."}
            return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        if request.method == "POST":
            return (
                recorded.generate(await request.json())
                if request.url.path == "/generate"
                else Response(status_code=404)
            )
        query = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        found = told.get(query, told.get(request.url.path))
        return JSONResponse({"detail": "Not Found"}, 404) if found is None else JSONResponse(found)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with in_thread(app) as place:
        yield f"http://{place}"
