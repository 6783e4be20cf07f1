"""Stage 03: the target's own answers to prompts, as token ids from the server.

A drafter learns what the target says, so its training text must come from the served target, and as the ids that it
emitted: text put through a tokenizer again gives other ids at some places, and a drafter trained there is wrong there.

While it runs, each finished conversation is one line of log.jsonl, so that a killed run loses only what was under way; at
the end they are put in the order of the prompts into samples.parquet. Memory holds the requests under way, not the answers.
"""

import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compat import launch
from ..engines import access, running
from ..engines.chat import Endpoint, ask_all, endpoint_of
from ..engines.registry import ENGINES
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..params import GenerateParams
from ..paths import project_path, short_path
from ..targets import prompts, targets
from ..targets.answers import Answer, write_parquet
from ..targets.answers import read_answers as read_answers  # for the notebook
from ..targets.identity import target_identity
from ..targets.prompts import Conversation
from . import served

NOT_THE_ANSWERS = {  # parameters that do not change what a conversation is answered
    *("out", "prompts", "max_prompts", "held_out_share", "drop", "concurrency", "stream", "tries", "stall_timeout_s"),
    *("port", "servers", "engine_python", "start_timeout_s"),
    *("api_key_env", "headers_env", "ca_file", "verify_tls"),
}
CHECK_TOKENS = 1024  # of a prompt of the check that a server serves the target; a longer one is cut
CHECKED = "servers.json"
LOOP_PERIODS, LOOP_REPEATS, LOOP_TOKENS = 64, 4, 48


# --- the stage --------------------------------------------------------------------------------------------------------


def run(params: GenerateParams) -> dict:
    """Ask every conversation once; a run that was killed goes on with those that are missing.

    Returns:
        the summary, also in summary.json: samples, splits, tokens, finish reasons, tokens/s, what was dropped and why,
        failed tries by kind, the share with reasoning, how many answers render as the target produced them, a histogram of
        lengths, what :func:`check_servers` found of running servers, and how many rows of the prompts were skipped.
    Raises:
        Eagle3Error: wrong prompts, a running server that serves another model than the target, a server that fails ``tries``
            times in a row, or one that refuses more than some prompts; what is finished is kept.
    """
    out = project_path(params.out)
    conversations, skipped = prompts.read_counted(params.prompts, params.max_prompts)
    if skipped:
        print(f"note: {prompts.skipped_words(params.prompts, skipped)}", file=sys.stderr)
    source = {} if params.prompts.startswith(prompts.DATASETS) else {"prompts": project_path(params.prompts)}
    with stage("generate", params, source) as notes:
        log = out / "log.jsonl"
        _start_over_if_changed(log, params)
        done = _finished(log)
        todo = [conversation for conversation in conversations if conversation.id not in done]
        started, tokens = time.monotonic(), 0
        if todo:
            with servers_for(params, out) as endpoints:
                if params.servers:
                    check_servers(endpoints, todo, params)
                with log.open("a") as sink:
                    started = time.monotonic()
                    for line in ask_all(endpoints, todo, params):
                        sink.write(json.dumps(line, separators=(",", ":")) + "\n")
                        sink.flush()
                        tokens += sum(len(answer["output_ids"]) for answer in line["answers"])
        seconds = time.monotonic() - started
        summary = Summary()
        write_parquet(summary.counted(_samples(log, conversations, params), params.drop), out / "samples.parquet")
        notes |= summary.result() | {
            "served_models": _checked(out) if params.servers else [],
            "skipped_rows": skipped,
            "asked_now": len(todo),
            "tokens_per_s": round(tokens / seconds, 1) if todo else None,
        }
        write_json(out / "summary.json", notes)
    return notes


# --- the servers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers_for(params: GenerateParams, out: Path) -> Iterator[list[Endpoint]]:
    """The running servers that the parameters name, or one that is started here."""
    if params.servers:
        yield [endpoint_of(access.of_params(params, url), params) for url in params.servers]
        return
    with launch.serve(params, targets.resolve(params.target), out / "server.log") as server:
        name = f"{server.engine} {server.version}"
        if ENGINES[server.engine].spec.chat_gives_ids:
            yield [Endpoint(server.reached, server.model, name, params.stall_timeout_s)]
        else:  # whether it knows return_token_ids must be asked
            yield [replace(endpoint_of(server.reached, params), name=name)]


def check_servers(endpoints: list[Endpoint], todo: list[Conversation], params: GenerateParams) -> None:
    """Hold the models of running servers against the target's folder (:mod:`eagle3_lib.stages.served`), each server once.

    What was found stays in servers.json, so that a stage that goes on does not check again. Where a check cannot be made (the
    target's weights are not here or do not fit, the server is no engine that the project knows, it gives no token ids), that is
    told, and the next start tries again.

    Raises:
        Eagle3Error: a server serves another model than the target.
    """
    out, identity = project_path(params.out), target_identity(params.target)
    known = [row for row in _checked(out) if row["tokens"]]
    check, rows = _Check(params, todo), []
    for endpoint in endpoints:
        key = {"server": endpoint.name, "model": endpoint.model, "target_identity": identity}
        row = next((row for row in known if row.items() >= key.items()), None)
        if row is None:
            row = key | check.of(endpoint)
            if row["remark"]:
                print(f"note: {row['remark']}", file=sys.stderr)
        rows.append(row)
    write_json(out / CHECKED, rows)


def _checked(out: Path) -> list[dict[str, Any]]:
    """What :func:`check_servers` found, a row for each server; [] where nothing was checked."""
    path = out / CHECKED
    return json.loads(path.read_text()) if path.is_file() else []


class _Check:
    """Holds servers against the target, whose prompts and weights are loaded at the first need and once for all servers."""

    def __init__(self, params: GenerateParams, todo: list[Conversation]):
        self.params, self.todo = params, todo

    @functools.cached_property
    def folder(self) -> Path:
        return served.local_folder(self.params.target, self.params.dtype)

    @functools.cached_property
    def texts(self) -> list[list[int]]:
        """Token ids of the first few prompts."""
        tokenizer = targets.load_tokenizer(self.folder)
        asked = [conversation.first_prompt for conversation in self.todo[: served.CHECKED_PROMPTS]]
        return [targets.prompt_ids(tokenizer, text, [{"role": "user", "content": text}]) for text in asked]

    @functools.cached_property
    def target(self) -> served.Target:
        return served.Target.load(self.params.target, self.folder, self.params.dtype, "cpu")

    def of(self, endpoint: Endpoint) -> dict[str, Any]:
        """{"tokens": greedy tokens that were held against the target's, 0 where none could be; "differ": those that are not the
        target's; "remark": a sentence, or ""}.

        Raises:
            Eagle3Error: it serves another model.
        """
        try:
            server, told = running.find(endpoint.access, endpoint.model, endpoint.stall_s)
            most = min(CHECK_TOKENS, told.max_model_len or CHECK_TOKENS) - served.CHECKED_TOKENS
            answers = served.ask(server, [(str(place), ids[:most]) for place, ids in enumerate(self.texts)])
            target = self.target
        except Eagle3Error as error:
            remark = f"{endpoint.name} was not checked to serve {self.params.target}: {error}"
            return {"tokens": 0, "differ": 0, "remark": remark}
        compared = target.compare(server, answers)
        remark = f"{endpoint.name}: {compared.words()}" if compared.differ else ""
        return {"tokens": compared.tokens, "differ": compared.differ, "remark": remark}


# --- the log ----------------------------------------------------------------------------------------------------------


def _start_over_if_changed(log: Path, params: GenerateParams) -> None:
    """Answers made with other settings, or of another target, are moved away, not mixed."""
    settings = {name: value for name, value in params.model_dump().items() if name not in NOT_THE_ANSWERS}
    settings["target_identity"] = target_identity(params.target)
    known = log.with_name("settings.json")
    if log.is_file() and (not known.is_file() or json.loads(known.read_text()) != settings):
        aside = log.with_name(f"log.{int(log.stat().st_mtime)}.jsonl")
        print(f"the settings changed: earlier answers are kept as {short_path(aside)}")
        log.rename(aside)
    if not log.is_file():
        log.with_name(CHECKED).unlink(missing_ok=True)
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
