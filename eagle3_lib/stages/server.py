"""Stage 00: diagnose a server that runs already, from its address, the drafter's folder and the target's.

The server is found (:mod:`eagle3_lib.engines.running`), its model is held against the target's folder by a few greedy tokens,
it is asked a few prompts, one at a time, and stage 08 replays and judges its answers. Nothing on the server is changed, and
requests of others are told from ours by its own counters.

What tells the rounds decides what can be said (:data:`eagle3_lib.results.Grade`): the answers themselves ("told"); the streamed
chunks where each answer's own totals confirm them ("chunks"); else each answer's histogram ("histograms"). Where nothing of this
is there the card says so, and what would tell.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from .. import results
from ..engines import access, running, serving
from ..engines.base import Server
from ..engines.running import Busy, Told
from ..errors import Eagle3Error
from ..files import write_json
from ..journal import Journal
from ..manifest import stage
from ..params import GREEDY, ReplayParams, ServerParams
from ..paths import project_path, short_path, usable_path
from ..results import (
    BENCHMARK_SCHEMA,
    CARD_SCHEMA,
    Benchmark,
    ConditionTokens,
    Counters,
    CrossCheck,
    MeasuredRequest,
)
from ..targets import prompts, targets
from ..verdict import diagnose
from ..verdict.card import Asked, Card, check_gate
from ..verdict.rounds import contradiction
from . import asking, benchmark, loaded, replay, served
from .asking import Ask

CONTEXT_LEFT = 16  # tokens of the server's context that an answer leaves free


@dataclass(frozen=True)
class Traffic:
    """What others asked of the server meanwhile. running: requests under way when we began. answers, tokens, rounds: counted by
    the server beyond ours; None where it does not tell."""

    running: int = 0
    answers: int | None = None
    tokens: int | None = None
    rounds: int | None = None

    @property
    def seen(self) -> bool:
        """By what the server counts; by one look at it where it does not: a gauge may lag behind our own last answer."""
        if self.answers is None and self.tokens is None:
            return self.running > 0
        return bool(self.answers or self.tokens)

    def and_later(self, other: "Traffic") -> "Traffic":
        """Of this time and of a later one."""
        return Traffic(
            max(self.running, other.running),
            _sum(self.answers, other.answers),
            _sum(self.tokens, other.tokens),
            _sum(self.rounds, other.rounds),
        )

    def words(self) -> str:
        """A sentence for notes and reports."""
        counts = {"answers": self.answers, "tokens": self.tokens, "rounds": self.rounds}
        told = [f"{count} {name}" for name, count in counts.items() if count]
        more = f" and counted {', '.join(told)} beyond ours" if told else ""
        return f"others use this server: {self.running} requests were under way when we began{more}"


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def run(params: ServerParams) -> Card:
    """Find the server, ask it, replay its answers and judge them.

    Writes into ``params.out``: server.json (what the server told, and what was seen of other traffic), benchmark.json, and stage
    08's replay.json, verdict.json and card.json. While it waits to ask once more, first_answers.jsonl keeps what was answered, so
    that a killed run waits on.

    Raises:
        Eagle3Error: no server, another model than the target, rounds that no EAGLE-3 replay can be held against
            (:func:`eagle3_lib.engines.running.refuse`), K untold, no prompt short enough, a gate below 1, or a server that cannot
            be asked once more with a cold cache.
    """
    check_gate(params.expect_length or None)
    out, folder = project_path(params.out), targets.resolve(params.target)
    inputs = {"drafter": project_path(params.drafter)}
    benchmark.check_drafter(params.drafter, params.target, folder)
    server, told = running.find(access.of_params(params, params.url), params.model, params.stall_timeout_s)
    running.refuse(told, temperature=0)
    _check_repeat(params, told)
    positions = _positions(params, told)
    asked = _prompts(params, folder, told)
    with stage("server", params, inputs) as notes:
        drafter = loaded.compare(told.drafter, params.drafter)
        _show(told, positions)
        if drafter.same:
            print(drafter.words)
        of_model = _check_model(params, folder, server, asked)
        asker = _Asker(server, told, positions, asked, params)
        first_answers = out / "first_answers.jsonl"
        requests, traffic = asker.ask_again_later(first_answers) if params.repeat_after_s else asker.ask()
        graded = _grade(told, requests, positions, traffic)
        doubts = [drafter.words] if drafter.remark else []
        others = [traffic.words()] if traffic.seen else []
        remarks = [*told.untold, *doubts, *asked.remarks, *of_model, *others]
        _clear(out)
        write_json(
            out / "server.json",
            {"told": asdict(told), "positions": positions, "grade": graded.grade, "traffic": asdict(traffic)}
            | {"drafter": asdict(drafter), "remarks": remarks},
        )
        card = _judge(params, told, positions, graded, out, doubts)
        first_answers.unlink(missing_ok=True)
        notes |= {"verdict": card.kind, "grade": graded.grade, "remarks": remarks}
        for sentence in remarks:
            print(f"note: {sentence}")
    return card


def _clear(out: Path) -> None:
    """Remove what an earlier try, maybe of another server, left: where nothing is judged now, its verdict must not stay."""
    for name in ("server", "benchmark", "replay", "verdict", "card"):
        (out / f"{name}.json").unlink(missing_ok=True)


def read(params: ServerParams) -> dict[str, Any]:
    """server.json: what the server told, K, the grade of the evidence, the traffic of others, and remarks.

    Raises:
        Eagle3Error: the stage has not run.
    """
    found: dict[str, Any] = results.read_json(project_path(params.out) / "server.json")
    return found


def conditions(params: ServerParams) -> list[ConditionTokens]:
    """What the answers of each condition are beside the cold ones; [] where there is one condition, or nothing was judged."""
    if not (project_path(params.out) / "verdict.json").is_file():
        return []
    return replay.read_verdict(params.out)["verdict"]["evidence"].get("conditions", [])


def _check_repeat(params: ServerParams, told: Told) -> None:
    """Refuse to ask once more where the cache would be warm then: it would not be known what departing rounds come from.

    Raises:
        Eagle3Error
    """
    if not params.repeat_after_s:
        return
    if not params.states:
        raise Eagle3Error(
            f"repeat_after_s: found {params.repeat_after_s} without states, expected states = true: prompts are asked once more "
            f"with a cold prefix cache"
        )
    if not told.takes_salt:
        raise Eagle3Error(
            f"repeat_after_s: found {params.repeat_after_s} and a server that takes no cache salt, expected 0: the prompts that are "
            f"asked once more would come from the prefix cache"
        )


def _positions(params: ServerParams, told: Told) -> int:
    """K, from the server or the parameters.

    Raises:
        Eagle3Error: nobody tells it, or the two differ.
    """
    given = params.num_speculative_tokens
    if told.positions and given and told.positions != given:
        raise Eagle3Error(
            f"num_speculative_tokens: found {given}, expected {told.positions} as the server tells ({told.positions_from})"
        )
    if not told.positions and not given:
        raise Eagle3Error(
            "num_speculative_tokens: found 0 and a server that does not tell it, expected the K that it was started with"
        )
    return told.positions or given


@dataclass(frozen=True)
class _Prompts:
    """(id, token ids) of what is asked, and what was odd about the prompts, as sentences."""

    prompts: list[tuple[str, list[int]]]
    long_prompts: list[tuple[str, list[int]]]
    remarks: list[str]


def _prompts(params: ServerParams, folder: Path, told: Told) -> _Prompts:
    """The prompts that leave room for an answer.

    Raises:
        Eagle3Error: there is none.
    """
    tokenizer = targets.load_tokenizer(folder)
    # At the end of its context an engine drafts less, see eagle3_lib/verdict/rounds.py at_context_limit.
    most = (told.max_model_len or 2**31) - params.max_tokens - CONTEXT_LEFT
    conversations, skipped = prompts.read_counted(params.prompts)

    found: list[tuple[str, list[int]]] = []
    for conversation in conversations:
        messages = conversation.messages[: conversation.turns[0]]
        ids = targets.prompt_ids(tokenizer, conversation.first_prompt, messages, conversation.tools)
        if len(ids) <= most:
            found.append((conversation.id, ids))
        if len(found) == params.max_prompts:
            break
    if not found:
        raise Eagle3Error(
            f"prompts: {params.prompts}: found none that leaves room for max_tokens = {params.max_tokens} in the server's "
            f"context of {told.max_model_len} tokens"
        )

    def of_user(text: str) -> list[int]:
        return targets.prompt_ids(tokenizer, text, [{"role": "user", "content": text}])

    texts = [conversation.first_prompt for conversation in conversations]
    remarks = [prompts.skipped_words(params.prompts, skipped)] if skipped else []
    return _Prompts(found, asking.lengthened(texts, of_user, most) if params.states else [], remarks)


def _show(told: Told, positions: int) -> None:
    drafter = f", drafter {told.drafter}" if told.drafter else ""
    method = told.method or "speculation of an untold kind"
    print(f"{told.engine} {told.version} serves {told.model!r}: {method}, K = {positions}{drafter}")


def _check_model(params: ServerParams, folder: Path, server: Server, asked: _Prompts) -> list[str]:
    """What is odd about the served model beside the target's folder, as sentences.

    Raises:
        Eagle3Error: its greedy tokens are not the target's, or it gives ids beyond the target's vocabulary.
    """
    answers = served.ask(server, asked.prompts)
    target = served.Target.load(params.target, folder, params.dtype, params.device)
    compared = target.compare(server, answers)
    return [f"{compared.words()}; the replay looks at all of them"] if compared.differ else []


Answers = tuple[list[MeasuredRequest], Traffic]


@dataclass(frozen=True)
class _Asker:
    """One server, and what it is asked."""

    server: Server
    told: Told
    positions: int
    asked: "_Prompts"
    params: ServerParams

    def ask(self) -> Answers:
        """The answers, in the order of the plan. None is kept of an earlier try: the server may have been started anew since."""
        if self.params.states and self.told.takes_salt:
            alone, company = asking.plan(self.asked.prompts, self.asked.long_prompts, bool(self.told.tells_rounds))
        else:
            alone, company = [Ask(name, ids) for name, ids in self.asked.prompts], []
        return self._watched(lambda: self._in_turn(alone) + asking.together(company, self._one))

    def ask_again_later(self, path: Path) -> Answers:
        """As :meth:`ask`, and the short prompts once more ``repeat_after_s`` seconds later.

        Args:
            path: a journal of the first answers; a killed run goes on from it, unless the server was started anew since.
        """
        settings = self._settings()
        journal = Journal(path, settings)
        first = journal.rows[0] if journal.rows else None
        if first and self._started_anew(first):
            print(f"{short_path(path)}: the server was started anew since; it is asked again from the beginning")
            journal.delete()
            journal, first = Journal(path, settings), None
        if first is None:
            first = self._first()
            journal.add(first)
        asking.wait(first["ended_s"] + self.params.repeat_after_s)
        later, traffic_later = self._watched(lambda: self._in_turn(asking.again(self.asked.prompts)))
        return first["requests"] + later, Traffic(**first["traffic"]).and_later(traffic_later)

    def _first(self) -> dict[str, Any]:
        """The row of the first answers: with when they ended, and what the server had counted by then."""
        requests, traffic = self.ask()
        row = {"requests": requests, "traffic": asdict(traffic), "ended_s": time.time()}
        now = running.busy(self.server)
        return row | {"counted": asdict(now) if now else {}}

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a killed run to go on."""
        of_server = {name: getattr(self.told, name) for name in ("engine", "version", "model", "target", "drafter")}
        of_prompts = hashlib.sha256(json.dumps(self.asked.prompts).encode()).hexdigest()
        return {"params": self.params.model_dump(), "server": of_server, "prompts_sha256": of_prompts}

    def _started_anew(self, first: dict[str, Any]) -> bool:
        """Whether the server has counted less than when the first answers ended."""
        now = running.busy(self.server)
        counts = [(first["counted"].get(name), getattr(now, name, None)) for name in ("answered", "generated_tokens")]
        return any(then is not None and since is not None and since < then for then, since in counts)

    def _in_turn(self, asks: Sequence[Ask]) -> list[MeasuredRequest]:
        return [self._one(ask) for ask in tqdm(asks, desc="asking", mininterval=2)]

    def _watched(self, answers: Callable[[], list[MeasuredRequest]]) -> Answers:
        before = running.busy(self.server)
        requests = answers()
        return requests, _traffic(before, running.busy(self.server), requests)

    def _one(self, ask: Ask) -> MeasuredRequest:
        server, most = self.server, self.params.max_tokens
        started = {"started_s": round(time.time(), 3)}
        if self.told.tells_rounds:
            answer = serving.complete(server, ask.prompt_ids, most, GREEDY, salt=ask.salt)
            request = cast(MeasuredRequest, {"id": ask.id, **asdict(answer), "tries": 1})
        else:
            salts = ask.salts(benchmark.CHUNK_TRIES)
            request = benchmark.ask_alone(server, ask.id, ask.prompt_ids, self.positions, most, GREEDY, salts)
        condition = {"condition": ask.condition} if ask.condition else {}
        return cast(MeasuredRequest, {**request, **started, **condition})


def _traffic(before: Busy | None, after: Busy | None, requests: Sequence[MeasuredRequest]) -> Traffic:
    """What the server did beside our requests."""
    if before is None or after is None:
        return Traffic()
    ours = [request for request in requests for _ in range(request.get("tries", 1))]
    tokens = sum(len(request["output_ids"]) for request in ours)
    return Traffic(
        running=before.running,
        answers=_beyond(before.answered, after.answered, len(ours)),
        tokens=_beyond(before.generated_tokens, after.generated_tokens, tokens),
        rounds=_rounds_beyond(before.counters, after.counters, ours),
    )


def _beyond(before: int | None, after: int | None, ours: int) -> int | None:
    return None if before is None or after is None else max(after - before - ours, 0)


def _rounds_beyond(before: Counters | None, after: Counters | None, ours: Sequence[MeasuredRequest]) -> int | None:
    """Rounds counted beyond those that the answers' own totals or rounds have."""
    if before is None or after is None:
        return None
    known = [len(request["accepted"] or []) for request in ours if request["accepted"] is not None]
    return max(after["rounds"] - before["rounds"] - sum(known), 0)


# --------------------------------------------------------------------------------------------------------------- grade


@dataclass(frozen=True)
class Graded:
    """The answers as benchmark.json has them. grade: None where nothing tells rounds; then ``reason`` says why."""

    grade: results.Grade | None
    requests: list[MeasuredRequest]
    check: CrossCheck | None = None
    reason: str = ""


def _grade(told: Told, requests: list[MeasuredRequest], positions: int, traffic: Traffic) -> Graded:
    """The best evidence that these answers give."""
    if not told.method and told.asked_rounds is not None and told.asked_rounds < (told.asked_steps or 0):
        return Graded(
            None,
            requests,
            reason=f"the server does not tell how it speculates, and drafted in {told.asked_rounds} of {told.asked_steps} steps "
            f"of a first answer, where EAGLE-3 drafts in each; n-gram speculation would look so, or counters of another replica",
        )
    if told.tells_rounds:
        return Graded("told", requests, benchmark.cross_check(requests, None, None, positions))
    if reason := _other_k(requests, positions):
        return Graded(None, requests, reason=reason)
    checked = [request for request in requests if request.get("totals") or request.get("histogram")]
    if not checked:
        return Graded(
            None,
            requests,
            reason="nothing on this server confirms the rounds that its streamed chunks show: no answer tells them, and there "
            "are no counters",
        )
    wrong = [request for request in requests if contradiction(request, positions)]
    if len(wrong) <= diagnose.MOST_CONTRADICTED * len(requests):
        return Graded("chunks", requests, benchmark.cross_check(requests, None, None, positions))
    if all(request.get("histogram") or len(request["output_ids"]) < 2 for request in requests):
        without = [cast(MeasuredRequest, {**request, "accepted": None, "drafted": None}) for request in requests]
        return Graded("histograms", without)
    joined = f"{len(wrong)} of {len(requests)} answers have rounds that the server's own counters contradict"
    if traffic.seen:
        return Graded(None, requests, reason=f"{joined}, and {traffic.words()}, which the counters hold too")
    return Graded(None, requests, reason=f"{joined}: it joins several rounds in one chunk")


def _other_k(requests: Sequence[MeasuredRequest], positions: int) -> str:
    """Why the answers' own totals are not those of K drafts in each round; "" where they may be, or tell no drafts."""
    told = [request["totals"] for request in requests if request.get("totals")]
    totals = [some for some in told if some and some["rounds"] and "drafted" in some]
    other = [some for some in totals if some["drafted"] != positions * some["rounds"]]
    if len(other) <= diagnose.MOST_CONTRADICTED * len(totals):
        return ""
    rounds, drafted = sum(some["rounds"] for some in other), sum(some["drafted"] for some in other)
    return (
        f"the server counted {drafted} drafts in {rounds} rounds of {len(other)} answers, which is {drafted / rounds:.2f} in a round, "
        f"where K = {positions}: it was started with another K (--k), or drafts fewer at times"
    )


# --------------------------------------------------------------------------------------------------------------- judge


def _judge(params: ServerParams, told: Told, positions: int, graded: Graded, out: Path, doubts: Sequence[str]) -> Card:
    """The card; doubts: sentences that it shows as warnings."""
    of_server = Asked(
        told.engine,
        usable_path(params.drafter),
        told.target or params.target,
        usable_path(out),
        positions,
        replayed=params.target,
    )
    expected = params.expect_length or None
    if graded.grade is None:
        verdict = diagnose.Verdict(
            params.name, diagnose.CANNOT_TELL, f"{params.name}: cannot tell, because {graded.reason}."
        )
        found = Card.of(verdict.as_dict(), None, "chunks", of_server, [usable_path(out / "server.json")], expected)
        found = replace(
            found,
            next=of_server.diagnose_url(),
            after="remove the reason above, and ask the server again:",
            evidence="what the server tells of itself; which rounds its answers were made in is not known",
        )
        return _shown(out, found, told, doubts)
    write_json(out / "benchmark.json", _benchmark(params, told, positions, graded))
    values = {
        "name": params.name,
        "engine": told.engine,
        "out": str(out),
        "drafter": params.drafter,
        "target": params.target,
        "benchmark": str(out),
        "plain": "",
        "dtype": params.dtype,
        "device": params.device,
    }
    replayed = ReplayParams.check(values, "replay")
    replay.run(replayed, expected)
    judged = replay.verdict(replayed)
    files = [usable_path(out / f"{name}.json") for name in ("server", "benchmark", "replay", "verdict")]
    found = Card.of(judged["verdict"], judged["cost"], graded.grade, of_server, files, expected)
    return _shown(out, found, told, doubts)


def _shown(out: Path, card: Card, told: Told, doubts: Sequence[str]) -> Card:
    """The card under the server's name and with its doubts, kept as card.json."""
    engine = f"{told.engine} {told.version}".strip()
    card = replace(card, engine=engine, warnings=(*doubts, *card.warnings))
    write_json(out / "card.json", {"schema": CARD_SCHEMA, **card.as_dict()})
    return card


def _benchmark(params: ServerParams, told: Told, positions: int, graded: Graded) -> Benchmark:
    """benchmark.json of what the server answered."""
    bench: dict[str, Any] = {
        "schema": BENCHMARK_SCHEMA,
        "engine": told.engine,
        "version": told.version,
        "mode": params.name,
        "target": params.target,
        "sampling": GREEDY.model_dump(),
        "speculative_options": told.options,
        "engine_args": told.engine_args,
        "positions": positions,
        "evidence": graded.grade,
        "cross_check": graded.check,
        "requests": graded.requests,
    }
    if told.dtype in ("float32", "bfloat16", "float16"):
        bench["dtype"] = told.dtype
    if told.max_model_len:
        bench["max_model_len"] = told.max_model_len
    return cast(Benchmark, bench)
