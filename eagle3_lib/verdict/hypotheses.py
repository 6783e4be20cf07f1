"""Replay of a correct engine and of every fault of the catalogue on an engine's tokens, in one forward pass of the target."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..drafter.model import Drafter
from ..results import MeasuredRequest, ReplayedRequest, Text
from ..targets.capture import Features, Stream, capture
from . import conditions
from .changes import HEALTHY, TargetParts
from .emitted import Compared, Told
from .emitted import compare as compare_tokens
from .faults import FAULTS
from .lossless import Emission, wrong
from .replay import From, Setup, Texts, all_slots, captured_for, correct, counts_at, own_rounds
from .rounds import (
    NOT_TOLD,
    Laid,
    capped,
    compare,
    contradiction,
    drafts_by_slot,
    lay,
    round_slots,
    walk,
    walk_as_drafted,
)

# ------------------------------------------------------------------------------------------------- all of them at once


def hypotheses(drafter: Drafter, parts: TargetParts, names: Iterable[str] | None = None) -> dict[str, Setup]:
    """A correct engine and every fault that can show with this drafter, by name."""
    healthy = correct(drafter)
    setups = {HEALTHY: healthy}
    for name in FAULTS if names is None else names:
        if (setup := FAULTS[name].change(healthy, parts)) is not None:
            setups[name] = setup
    return setups


def extra_streams(setups: dict[str, Setup]) -> set[Stream]:
    """What one pass of the target must capture for all of them: ``capture(..., also=...)``."""
    return captured_for(setups.values())


def texts_of(requests: list[tuple[list[int], list[int]]], features: Iterable[Features]) -> Texts:
    """Requests (prompt ids, output ids) with the features of their texts."""
    texts = [prompt + output for prompt, output in requests]
    return Texts(texts, [len(prompt) for prompt, _ in requests], [f.streams for f in features])


def replay_all(
    setups: dict[str, Setup], texts: Texts, rounds: list[list[int]] | None, steps: int
) -> dict[str, list[list[int]]]:
    """For each hypothesis and request: the accepted counts at the engine's rounds, or its own rounds without them.

    Args:
        rounds: the engine's accepted counts by request; None where the engine tells only histograms or counters.
        steps: K.
    """
    if rounds is None:
        slots = all_slots(texts)
        return {name: own_rounds(counts_at(setup, texts, slots, steps), texts) for name, setup in setups.items()}
    slots = [round_slots(counts, length) for counts, length in zip(rounds, texts.prompt_lengths, strict=True)]
    return {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in setups.items()}


TOKENS_AT_ONCE = 8192  # of the texts whose streams are held together: about 40 tensors [tokens, Ht]


def examine(
    target: Any,
    drafter: Drafter,
    requests: Sequence[MeasuredRequest],
    steps: int,
    names: Iterable[str] | None = None,
    told: Told | None = None,
    ranks: int = 1,
    suspects: dict[str, Setup] | None = None,
) -> list[ReplayedRequest]:
    """Replay a correct engine and the catalogue on an engine's tokens: the ``requests`` of replay.json.

    Args:
        requests: [{"id", "prompt_ids", "output_ids", "accepted": the engine's accepted counts, and where they are known
            "drafted", "chunks", "totals", "histogram"}].
        steps: K.
        names: faults to try; all of them by default.
        told: how the tokens were chosen; greedily in float32 by default.
        ranks: tensor parallel size of the engine.
        suspects: engines that obey another config.json, by name (:mod:`eagle3_lib.verdict.suspects`).
    Returns:
        for each request {"id", "prompt_length", "output_length", "engine_rounds", "drafted", "unjudged": why its rounds are
        not compared, or None, "without_drafts": steps that drafted nothing, "in_vocabulary": tokens of the answer that are in
        the draft vocabulary, "replay_rounds", "replay_drafted", "rows", "hypotheses" and "suspects": {name: accepted counts
        at the engine's rounds}, and how its tokens compare with the target's: "greedy" and "lossless" (tokens that are not
        the target's first choice), where they were not sampled}.
    """
    examined = examining(target, drafter, requests, steps, names, told or Told(), ranks, suspects or {})
    return [request for request, _ in examined]


def examining(
    target: Any,
    drafter: Drafter,
    requests: Sequence[MeasuredRequest],
    steps: int,
    names: Iterable[str] | None,
    told: Told,
    ranks: int = 1,
    suspects: dict[str, Setup] | None = None,
    own: bool = False,
) -> Iterator[tuple[ReplayedRequest, Emission | None]]:
    """The requests of :func:`examine`, one after the other, a few texts at a time in memory.

    Beside each what its sampled tokens must have been drawn from; None where they were greedy.

    Args:
        own: the engine tells no rounds of any request: each hypothesis makes its own ("own_rounds"), and the suspects are
            counted at the rounds of a correct engine.
    """
    setups = hypotheses(drafter, TargetParts.of(target, ranks), names)
    laid, references = lay_all(requests, steps), conditions.references(requests)
    examine_some = _examine_own if own else _examine
    for group in _groups(requests):
        some, their_laid = [requests[i] for i in group], [laid[i] for i in group]
        examined = examine_some(target, setups, suspects or {}, some, their_laid, steps, told)
        for index, (request, emission) in zip(group, examined, strict=True):
            if reference := references[index]:
                request["reference"] = reference
            yield request, emission


def counts_from(
    target: Any,
    drafter: Drafter,
    requests: Sequence[MeasuredRequest],
    steps: int,
    names: Iterable[str],
    since: int,
    ranks: int = 1,
) -> Iterator[dict[str, list[int]]]:
    """For each request, each fault's accepted counts at the engine's rounds where the fault begins inside the answers.

    Args:
        since: the slot of an answer from which on the engine has the fault; see :class:`eagle3_lib.verdict.replay.From`.
    """
    setups = hypotheses(drafter, TargetParts.of(target, ranks), names)
    laid = lay_all(requests, steps)
    for group in _groups(requests):
        some, placed = [requests[i] for i in group], [_placed(laid[i]) for i in group]
        _, texts = forward(target, setups, some)
        slots = [laid.slots(length) for laid, length in zip(placed, texts.prompt_lengths, strict=True)]
        counts = {
            name: counts_at(From(setup, setups[HEALTHY], since), texts, slots, steps)
            for name, setup in setups.items()
            if name != HEALTHY and not setup.stale
        }
        for index, request in enumerate(some):
            drafted = (
                request.get("drafted") if placed[index].firsts else None
            )  # a request that is not compared has no counts
            yield {name: capped(of[index], drafted) for name, of in counts.items()}


def _groups(requests: Sequence[Text]) -> Iterator[list[int]]:
    """Indices of requests whose texts are held together."""
    group: list[int] = []
    for index, request in enumerate(requests):
        tokens = sum(_tokens(requests[other]) for other in group)
        if group and tokens + _tokens(request) > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(index)
    yield group


def _placed(laid: Laid | str) -> Laid:
    return laid if isinstance(laid, Laid) else Laid()


def _tokens(request: Text) -> int:
    return len(request["prompt_ids"]) + len(request["output_ids"])


def lay_all(requests: Sequence[MeasuredRequest], steps: int) -> list[Laid | str]:
    """Each request's rounds on its text, or why they are not compared."""
    found = [_lay(request, steps) for request in requests]
    idle = any(isinstance(laid, Laid) and laid.idle for laid in found)
    if idle or any(0 in (request.get("drafted") or ()) for request in requests):
        found = [_lay(request, steps, may_idle=True) for request in requests]
    return found


def _lay(request: MeasuredRequest, steps: int, may_idle: bool = False) -> Laid | str:
    if request["accepted"] is None:
        return NOT_TOLD
    if said := contradiction(request, steps):
        return said
    return lay(len(request["output_ids"]), request["accepted"], request.get("chunks") or (), may_idle)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _examine(
    target: Any,
    setups: dict[str, Setup],
    suspects: dict[str, Setup],
    requests: Sequence[MeasuredRequest],
    laid: list[Laid | str],
    steps: int,
    told: Told,
) -> Iterator[tuple[ReplayedRequest, Emission | None]]:
    features, texts = forward(target, {**suspects, **setups}, requests)
    everywhere = counts_at(setups[HEALTHY], texts, all_slots(texts), steps)
    faulty = {name: setup for name, setup in setups.items() if name != HEALTHY}
    placed = [_placed(some) for some in laid]
    slots = [some.slots(length) for some, length in zip(placed, texts.prompt_lengths, strict=True)]
    rounds = [request["accepted"] or [] if some.firsts else [] for request, some in zip(requests, placed, strict=True)]
    counts = {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in faulty.items()}
    of_suspects = {name: counts_at(setup, texts, slots, steps, rounds) for name, setup in suspects.items()}
    vocabulary = frozenset(setups[HEALTHY].drafter.target_ids.tolist())
    for index, request in enumerate(requests):
        of_request = {name: by_request[index] for name, by_request in counts.items()}
        examined = tell(request, laid[index], everywhere[index], of_request, steps, vocabulary)
        if suspects and examined["rows"]:
            drafted = request.get("drafted")
            examined["suspects"] = {name: capped(of[index], drafted) for name, of in of_suspects.items()}
        known = placed[index] if isinstance(laid[index], Laid) else None
        tokens = compare_tokens(target, setups[HEALTHY].drafter, request, features[index], known, steps, told)
        yield _with_tokens(examined, tokens)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _examine_own(
    target: Any,
    setups: dict[str, Setup],
    suspects: dict[str, Setup],
    requests: Sequence[MeasuredRequest],
    laid: list[Laid | str],
    steps: int,
    told: Told,
) -> Iterator[tuple[ReplayedRequest, Emission | None]]:
    features, texts = forward(target, {**suspects, **setups}, requests)
    everywhere = counts_at(setups[HEALTHY], texts, all_slots(texts), steps)
    own = replay_all(setups, texts, None, steps)
    slots = [round_slots(some, length) for some, length in zip(own[HEALTHY], texts.prompt_lengths, strict=True)]
    of_suspects = {name: counts_at(setup, texts, slots, steps) for name, setup in suspects.items()}
    vocabulary = frozenset(setups[HEALTHY].drafter.target_ids.tolist())
    for index, request in enumerate(requests):
        examined = tell(request, laid[index], everywhere[index], {}, steps, vocabulary)
        examined["histogram"], examined["totals"] = request.get("histogram"), request.get("totals")
        examined["own_rounds"] = {name: rounds[index] for name, rounds in own.items()}
        examined["suspects"] = {name: counts[index] for name, counts in of_suspects.items()}
        tokens = compare_tokens(target, setups[HEALTHY].drafter, request, features[index], None, steps, told)
        yield _with_tokens(examined, tokens)


def _with_tokens(examined: ReplayedRequest, tokens: Compared) -> tuple[ReplayedRequest, Emission | None]:
    """A request with what its tokens are beside the target's."""
    if tokens.greedy is not None:
        examined["greedy"], examined["lossless"] = tokens.greedy, wrong(tokens.greedy)
    return examined, tokens.emission


def forward(target: Any, setups: dict[str, Setup], requests: Sequence[Text]) -> tuple[list[Features], Texts]:
    """One forward pass of the target over the requests' texts, for all setups."""
    texts = [request["prompt_ids"] + request["output_ids"] for request in requests]
    boundaries = setups[HEALTHY].drafter.config.boundaries
    features = list(capture(target, texts, boundaries, also=extra_streams(setups)))
    return features, texts_of([(request["prompt_ids"], request["output_ids"]) for request in requests], features)


def tell(
    request: MeasuredRequest,
    laid: Laid | str,
    everywhere: list[int],
    counts: dict[str, list[int]],
    steps: int,
    vocabulary: frozenset[int] | None = None,
) -> ReplayedRequest:
    """A request of replay.json, from a correct engine's counts at all slots and each fault's at the engine's rounds.

    Args:
        vocabulary: the target ids that the drafter can draft; None: all of them.
    """
    start, drafted = len(request["prompt_ids"]), request.get("drafted")
    accepted = [0] * (start - 1) + everywhere
    told: ReplayedRequest = {
        "id": request["id"],
        "prompt_length": start,
        "output_length": len(request["output_ids"]),
        "in_vocabulary": sum(_drafts_it(token, vocabulary) for token in request["output_ids"]),
        "engine_rounds": request["accepted"] or [],
        "drafted": drafted,
        "replay_rounds": walk(accepted, start),
        "replay_drafted": None,
        "rows": [],
        "unjudged": None,
        "without_drafts": 0,
        "hypotheses": {},
    }
    if "cached_tokens" in request:
        told["cached_tokens"] = request["cached_tokens"]
    if "condition" in request:
        told["condition"] = request["condition"]
    if "started_s" in request:
        told["started_s"] = request["started_s"]
    if "seconds" in request:
        told["seconds"] = request["seconds"]
    if "first_token_s" in request:
        told["first_token_s"] = request["first_token_s"]
    if isinstance(laid, str):
        told["unjudged"], told["drafted"] = laid, None
        return told
    rounds = request["accepted"] or []
    drafts_at = drafts_by_slot(laid, rounds, drafted, start)
    told["replay_rounds"], told["replay_drafted"] = walk_as_drafted(accepted, start, drafts_at, steps)
    told["rows"] = compare(rounds, accepted, start, steps, drafted, laid)
    for row in told["rows"]:
        stops_at = row["slot"] + 2 + row["replay"] - start
        ends_there = row["replay"] < row["drafted"] and stops_at < len(request["output_ids"])
        row["outside"] = ends_there and not _drafts_it(request["output_ids"][stops_at], vocabulary)
    told["without_drafts"] = len(laid.idle)
    told["hypotheses"] = {name: capped(some, drafted) for name, some in counts.items()}
    return told


def _drafts_it(token: int, vocabulary: frozenset[int] | None) -> bool:
    return vocabulary is None or token in vocabulary
