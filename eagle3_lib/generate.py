"""Stage 03: the target's own answers to prompts, as token ids from the server.

A drafter learns what the target says, so its training text must come from the served target, and as the ids that it
emitted: text put through a tokenizer again gives other ids at some places, and a drafter trained there is wrong there.
"""

import contextlib
import hashlib
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import openai
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from tqdm import tqdm

from . import engines, targets
from .answers import Answer, read_answers, read_lines
from .errors import Eagle3Error
from .params import GenerateParams
from .provenance import project_path, short_path, stage, write_json, write_text

TRIES = 6
TRANSIENT = (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError)


def prompt_id(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def split_of(prompt: str, held_out_share: float) -> str:
    """Train or held out, by the prompt's hash: the same prompt never changes sides, whatever else is in the file."""
    return "held_out" if int(prompt_id(prompt), 16) / 16**16 < held_out_share else "train"


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON-lines file, each once, in the file's order."""
    return list(dict.fromkeys(row["prompt"] for row in read_lines(path, {"prompt": str})))


@retry(
    retry=retry_if_exception_type(TRANSIENT),
    wait=wait_random_exponential(multiplier=0.5, max=20),
    stop=stop_after_attempt(TRIES),
    reraise=True,
)
def ask(server: engines.Server, prompt: str, params: GenerateParams) -> Answer:
    """One chat completion; prompt and answer ids are the server's own."""
    started = time.monotonic()
    reply = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        extra_body={"return_token_ids": True},
    )
    choice, extra = reply.choices[0], reply.model_extra or {}
    output_ids = (choice.model_extra or {}).get("token_ids")
    if not output_ids or not extra.get("prompt_token_ids"):
        raise Eagle3Error(
            f"{server.engine} {server.version}: no token ids in its answer; expected them (return_token_ids)"
        )
    return Answer(
        prompt_id(prompt),
        split_of(prompt, params.held_out_share),
        prompt,
        extra["prompt_token_ids"],
        output_ids,
        choice.message.content or "",
        choice.finish_reason,
        round(time.monotonic() - started, 3),
    )


def run(params: GenerateParams) -> dict:
    """Ask every prompt once, in samples.jsonl; a run that was killed goes on with the prompts that are missing.

    Returns:
        the summary, also in summary.json.
    """
    out, prompts_path = project_path(params.out), project_path(params.prompts)
    prompts = read_prompts(prompts_path)
    with stage("generate", params, {"prompts": prompts_path}) as notes:
        path = out / "samples.jsonl"
        _start_over_if_changed(path, params)
        done = _finished(path)
        todo = [prompt for prompt in prompts if prompt_id(prompt) not in done]
        started = time.monotonic()
        if todo:
            with _servers(params, out) as servers, path.open("a") as sink:
                started = time.monotonic()
                for answer in _ask_all(servers, todo, params):
                    sink.write(json.dumps(asdict(answer)) + "\n")
                    sink.flush()
        seconds = time.monotonic() - started
        _sort(path, prompts)
        notes |= summarise(read_answers(out), asked=len(todo), seconds=seconds)
        write_json(out / "summary.json", notes)
    return notes


def summarise(answers: list[Answer], asked: int, seconds: float) -> dict:
    """Counts, and the rate of what this run asked for (earlier runs of a resumed stage are not in the rate)."""
    fresh = sum(len(answer.output_ids) for answer in answers[-asked:]) if asked else 0
    return {
        "samples": len(answers),
        "splits": dict(Counter(answer.split for answer in answers)),
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
        "output_tokens": sum(len(answer.output_ids) for answer in answers),
        "asked_now": asked,
        "tokens_per_s": round(fresh / seconds, 1) if asked else None,
    }


@contextlib.contextmanager
def _servers(params: GenerateParams, out: Path):
    if params.servers:
        yield [engines.Server(url.rstrip("/"), _model_of(url), "server", url) for url in params.servers]
        return
    with engines.serve(params, targets.resolve(params.target), out / "server.log") as server:
        yield [server]


def _model_of(url: str) -> str:
    try:
        return openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none").models.list().data[0].id
    except openai.APIError as error:
        raise Eagle3Error(f"servers: {url} does not answer as an OpenAI-compatible server: {error}") from error


def _ask_all(servers: list[engines.Server], prompts: list[str], params: GenerateParams):
    """Answers as they come, ``concurrency`` at a time, servers in turn."""
    with ThreadPoolExecutor(params.concurrency) as pool:
        jobs = [
            pool.submit(ask, server, prompt, params) for server, prompt in zip(cycle(servers), prompts, strict=False)
        ]
        try:
            for job in tqdm(as_completed(jobs), total=len(jobs), desc="generate", mininterval=2):
                try:
                    yield job.result()
                except openai.APIError as error:
                    raise Eagle3Error(
                        f"generate: a server failed {TRIES} times: {error}; what is finished is kept"
                    ) from error
        finally:
            for job in jobs:
                job.cancel()


def _start_over_if_changed(path: Path, params: GenerateParams) -> None:
    """Samples made with other settings are moved away, not mixed."""
    ignored = {"out", "concurrency", "port", "servers", "engine_python", "start_timeout_s"}
    settings = {name: value for name, value in params.model_dump().items() if name not in ignored}
    known = path.with_name("settings.json")
    if path.is_file() and (not known.is_file() or json.loads(known.read_text()) != settings):
        aside = path.with_name(f"samples.{int(path.stat().st_mtime)}.jsonl")
        print(f"the settings changed: earlier samples are kept as {short_path(aside)}")
        path.rename(aside)
    write_json(known, settings)


def _finished(path: Path) -> set[str]:
    """Ids in samples.jsonl; a last line that a kill cut off is dropped."""
    if not path.is_file():
        return set()
    text = path.read_text()
    if text and not text.endswith("\n"):
        write_text(path, text[: text.rfind("\n") + 1])
    return {row["id"] for row in read_lines(path, {"id": str})}


def _sort(path: Path, prompts: list[str]) -> None:
    """Rows in the order of the prompts: the same data whatever the timing or the number of runs."""
    order = {prompt_id(prompt): place for place, prompt in enumerate(prompts)}
    rows = [row for row in read_lines(path, {"id": str}) if row["id"] in order]
    rows.sort(key=lambda row: order[row["id"]])
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
