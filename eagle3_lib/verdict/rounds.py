"""Rounds on the text: where each round of an engine stands, what it drafted, and what contradicts its counts.

A round is a step in which drafts were verified. Prefill emits the first token of an answer; a round that accepts a of its
drafts emits a + 1 tokens; a step without drafts emits one token and is no round (an engine that preempted the request, that
drafts nothing at this load, that reached the drafter's length limit, or that has just received the request's KV cache). So
the place of a round follows from what every step before it emitted, which streamed chunks tell: a chunk is one step, or
several steps that the engine joined. Where steps without drafts leave several places for a round, it is not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ..results import Benchmark, Counters, MeasuredRequest, Round

NOT_TOLD = "the engine tells no rounds of it"


@dataclass(frozen=True)
class Laid:
    """The rounds of one answer on its text.

    firsts: [rounds] index, among the emitted tokens, of the first token of each round. sure: [rounds] whether that is the
    only place that the chunks allow. idle: indices of the tokens of steps without drafts, prefill's left out. past_end: drafts
    that the last round accepted beyond the end of the answer.
    """

    firsts: list[int] = field(default_factory=list)
    sure: list[bool] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    past_end: int = 0

    def slots(self, prompt_length: int) -> list[int]:
        """The slot at which each round starts: the place in the text of the last token before it, less one."""
        return [prompt_length + first - 2 for first in self.firsts]


def lay(output_length: int, accepted: Sequence[int], chunks: Sequence[int] = (), may_idle: bool = False) -> Laid | str:
    """Find the place of each round in an answer.

    Args:
        output_length: emitted tokens.
        accepted: accepted drafts of each round, in order, as the engine tells them.
        chunks: tokens of each streamed chunk; () where the answer came whole.
        may_idle: whether other answers of the run show steps without drafts. One that the end of this answer may hide, in
            the tokens of its last round, then leaves no round a sure place, unless chunks tell.
    Returns:
        the places, or a sentence that says why these rounds cannot make up this answer.
    """
    if not accepted:
        return Laid(idle=list(range(1, output_length)))
    emitted = 1 + sum(accepted) + len(accepted)
    if emitted - output_length > accepted[-1]:
        return f"its rounds emit {emitted} tokens, the answer has {output_length}"
    fewest = max(0, output_length - emitted)
    if sum(chunks) != output_length:
        hidden = accepted[-1] - max(0, emitted - output_length)  # further steps that the end of the answer can hide
        return _without_chunks(output_length, accepted, fewest, unsure=fewest > 0 or (may_idle and hidden > 0))
    steps = len(chunks) - 1 - len(accepted)  # without drafts, if each chunk is one step
    one_each = None
    if chunks[0] == 1 and steps >= fewest:
        one_each = _Places(output_length, accepted, steps, chunks, joined=False).laid()
    if one_each and not steps and not may_idle:
        return one_each
    numbers = range(fewest, fewest + accepted[-1] + 1)  # of steps without drafts, as many as the answer's end can hide
    several = [_Places(output_length, accepted, idle, chunks, joined=True).laid() for idle in numbers]
    if not (may_idle or fewest or one_each):
        several = [
            next((laid for laid in several if laid), None)
        ]  # nothing shows a step without drafts: as few as possible
    ways = [laid for laid in (one_each, *several) if laid]
    if not ways:
        return f"its rounds do not fit into the {len(chunks)} streamed chunks of its {output_length} tokens"
    same = [len(set(firsts)) == 1 for firsts in zip(*(laid.firsts for laid in ways), strict=True)]
    sure = [all(laid.sure[index] for laid in ways) and same[index] for index in range(len(accepted))]
    return replace(ways[0], sure=sure)


def _without_chunks(length: int, accepted: Sequence[int], idle: int, unsure: bool) -> Laid:
    """The rounds one after the other; any of ``idle`` steps without drafts may stand anywhere, and so stand at the end."""
    ends = list(accumulate((count + 1 for count in accepted), initial=1))
    past_end = max(0, ends[-1] - length)
    return Laid(ends[:-1], [not unsure] * len(accepted), list(range(length - idle, length)), past_end)


class _Places:
    """All ways to place the rounds, in their order, and ``idle`` steps of one token each after prefill's token.

    A state is (rounds placed, idle steps placed); it stands at token 1 + ``before``[rounds] + idle steps.
    """

    def __init__(self, length: int, accepted: Sequence[int], idle: int, chunks: Sequence[int], joined: bool):
        self.length, self.accepted, self.idle, self.joined = length, accepted, idle, joined
        self.ends = set(accumulate(chunks)) | {length}
        self.before = [0, *accumulate(count + 1 for count in accepted)]  # tokens of the rounds before each
        self.completes = self._completes()

    def laid(self) -> Laid | None:
        """The places, each round as early as it can be; None where there is no way."""
        if not self.completes[0][0]:
            return None
        firsts, sure, reached, chosen = [], [], {0}, 0
        for index in range(len(self.accepted)):
            reached = {idle for idle in self._after_idle(index, reached) if self._round_leads_on(index, idle)}
            chosen = min(reached & self._after_idle(index, {chosen}))
            firsts.append(1 + self.before[index] + chosen)
            sure.append(len(reached) == 1)
        ends = [first + count + 1 for first, count in zip(firsts, self.accepted, strict=True)]
        starts = [*firsts, self.length]
        idle = [token for end, start in zip([1, *ends], starts, strict=True) for token in range(end, start)]
        return Laid(firsts, sure, idle, max(0, ends[-1] - self.length))

    def _completes(self) -> list[list[bool]]:
        """[rounds + 1][idle + 1] whether the steps that are left fit on the tokens that are left."""
        rounds = len(self.accepted)
        table = [[False] * (self.idle + 1) for _ in range(rounds + 1)]
        self.completes = table
        table[rounds][self.idle] = 1 + self.before[rounds] + self.idle >= self.length
        for index in range(rounds, -1, -1):
            for idle in range(self.idle, -1, -1):
                by_round = index < rounds and self._round_leads_on(index, idle)
                by_idle = idle < self.idle and table[index][idle + 1] and self._idle_fits(index, idle)
                table[index][idle] = table[index][idle] or by_round or by_idle
        return table

    def _after_idle(self, index: int, reached: set[int]) -> set[int]:
        """Idle steps that can stand before round ``index``, going on from those ``reached`` before the round."""
        every = set(reached)
        for idle in range(min(reached), self.idle):
            if idle in every and self._idle_fits(index, idle):
                every.add(idle + 1)
        return every

    def _round_leads_on(self, index: int, idle: int) -> bool:
        """Whether round ``index`` may stand after ``idle`` idle steps, and the rest then fits."""
        if not self.completes[index + 1][idle]:
            return False
        first = 1 + self.before[index] + idle
        end = first + self.accepted[index] + 1
        is_last_step = index == len(self.accepted) - 1 and idle == self.idle
        if first >= self.length or (end > self.length and not is_last_step):
            return False
        return self._step_fits(first, min(end, self.length))

    def _idle_fits(self, index: int, idle: int) -> bool:
        first = 1 + self.before[index] + idle
        return first < self.length and self._step_fits(first, first + 1)

    def _step_fits(self, first: int, end: int) -> bool:
        """Whether one step may emit tokens first .. end - 1: no chunk ends inside it and, unless joined, one ends with it."""
        if not self.joined and not {first, end} <= self.ends:
            return False
        return not any(inside in self.ends for inside in range(first + 1, end))


# --------------------------------------------------------------------------------------------- beside a correct engine


def capped(counts: Sequence[int], drafted: Sequence[int] | None) -> list[int]:
    """Accepted counts of a replay, each at most what the engine drafted in that round (None: K in every round)."""
    if drafted is None:
        return list(counts)
    return [min(count, drafts) for count, drafts in zip(counts, drafted, strict=True)]


def walk(accepted: list[int], prompt_length: int) -> list[int]:
    """The rounds of a correct engine, from the prompt's last slot on until the text is all emitted.

    Args:
        accepted: accepted count of a round that starts at each slot.
    """
    rounds, slot = [], prompt_length - 1
    while slot < len(accepted) - 1:  # the last slot has nothing left to emit
        rounds.append(accepted[slot])
        slot += accepted[slot] + 1
    return rounds


def walk_as_drafted(
    accepted: list[int], prompt_length: int, drafts_at: dict[int, int], steps: int
) -> tuple[list[int], list[int]]:
    """The rounds of a correct engine that drafts, at each slot, as many as the engine's step there did.

    Args:
        drafts_at: as :func:`drafts_by_slot`. A step without drafts emits one token and is no round.
        steps: K, for slots that are not among them.
    Returns:
        accepted and drafted counts of its rounds.
    """
    rounds, drafted, slot = [], [], prompt_length - 1
    while slot < len(accepted) - 1:
        drafts = drafts_at.get(slot, steps)
        count = min(accepted[slot], drafts)
        if drafts:
            rounds.append(count)
            drafted.append(drafts)
        slot += count + 1
    return rounds, drafted


def drafts_by_slot(
    laid: Laid, accepted: Sequence[int], drafted: Sequence[int] | None, prompt_length: int
) -> dict[int, int]:
    """{slot: drafts of the engine's step that emitted the token after it}; 0 at steps without drafts.

    Slots of rounds with unknown drafts are left out.
    """
    table = {prompt_length + token - 2: 0 for token in laid.idle}
    if drafted is not None:
        for first, count, drafts in zip(laid.firsts, accepted, drafted, strict=True):
            table |= {prompt_length + token - 2: drafts for token in range(first, first + count + 1)}
    return table


def compare(
    engine_rounds: list[int],
    accepted: list[int],
    prompt_length: int,
    steps: int,
    drafted: list[int] | None = None,
    laid: Laid | None = None,
) -> list[Round]:
    """Each of the engine's rounds beside what the replay says of a round at the same slot.

    Args:
        accepted: the replay's accepted count of a round that starts at each slot.
        steps: K.
        drafted: drafts of each round; None: K.
        laid: places of the rounds; None where every step after prefill is a round.
    Returns:
        for each round {"slot", "drafted", "engine", "replay", "cut", "sure"}. ``replay`` is at most ``drafted``. ``cut``: the
        text ends inside the round's drafts, so that the engine may have accepted tokens that it never emitted. ``sure``:
        the round has no other place.
    """
    if laid is None:
        slots, sure = round_slots(engine_rounds, prompt_length), [True] * len(engine_rounds)
    else:
        slots, sure = laid.slots(prompt_length), laid.sure
    rows: list[Round] = []
    for slot, count, drafts, placed in zip(slots, engine_rounds, drafted or [steps] * len(slots), sure, strict=True):
        replayed = min(accepted[slot], drafts) if slot < len(accepted) else 0
        cut = slot + 1 + drafts > len(accepted)
        rows.append({"slot": slot, "drafted": drafts, "engine": count, "replay": replayed, "cut": cut, "sure": placed})
    return rows


def comparable(row: Round) -> bool:
    """Whether a row of :func:`compare` can tell an engine from another: drafts, all inside the text, at one place."""
    return not row["cut"] and row.get("sure", True) and row.get("drafted") != 0


def round_slots(rounds: list[int], prompt_length: int) -> list[int]:
    """The slots at which an engine's rounds start where every step after prefill is a round."""
    slots, slot = [], prompt_length - 1
    for count in rounds:
        slots.append(slot)
        slot += count + 1
    return slots


# ------------------------------------------------------------------------------------------------------ contradictions


def at_context_limit(request: MeasuredRequest, bench: Benchmark) -> bool:
    """Whether an answer came so near to the end of the context that a round's drafts did not fit.

    vLLM then runs the drafter for no request of the batch, and hands token 0 on as every draft
    (v1/worker/gpu_model_runner.py, ``_input_fits_in_drafter``, 0.23 to 0.33): rounds of the answers beside this one too
    accept nothing, and find keys and values missing afterwards. The last rounds of such an answer draft fewer and fewer.

    Args:
        bench: benchmark.json; its "max_model_len", where it is known.
    """
    drafted = request.get("drafted") or []
    tokens = len(request["prompt_ids"]) + len(request["output_ids"])
    beyond = "max_model_len" in bench and tokens + bench["positions"] > bench["max_model_len"]
    return beyond or (bench["positions"] > 2 and list(drafted[-2:]) == [2, 1])


def contradiction(request: MeasuredRequest, positions: int) -> str | None:
    """What contradicts the rounds of one answer, as a sentence; None where nothing does.

    Args:
        request: of benchmark.json: "output_ids", "accepted", and where they are known "drafted", "chunks", "histogram" and
            "totals", both the engine's own.
        positions: K.
    """
    accepted, drafted = told_rounds(request), request.get("drafted")
    if accepted and max(accepted) > positions:
        return f"found a round with {max(accepted)} accepted drafts, expected at most K = {positions}"
    if drafted is not None and len(drafted) != len(accepted):
        return f"found {len(drafted)} counts of drafts, expected one for each of its {len(accepted)} rounds"
    if drafted and max(drafted) > positions:
        return f"found a round with {max(drafted)} drafts, expected at most K = {positions}"
    over = [(a, d) for a, d in zip(accepted, drafted or accepted, strict=True) if a > d]
    if over:
        return f"found a round that accepts {over[0][0]} of {over[0][1]} drafts"
    totals, histogram = request.get("totals"), request.get("histogram")
    if totals and not totals_fit(request, positions):
        return (
            f"its rounds are {len(accepted)} with {sum(accepted)} accepted drafts, the engine's own count is "
            f"{totals['rounds']} with {totals['accepted']}"
        )
    if histogram and not histogram_fits(request, positions):
        return f"its rounds by accepted count are {_histogram(accepted, positions)}, the engine's own {histogram}"
    laid = lay(len(request["output_ids"]), accepted, request.get("chunks") or ())
    return laid if isinstance(laid, str) else None


def totals_fit(request: MeasuredRequest, positions: int) -> bool:
    """Whether an engine's totals are those of the rounds: its last round may count drafts past the answer's end."""
    totals, accepted = request["totals"], told_rounds(request)
    assert totals is not None
    past_end = totals["accepted"] - sum(accepted)
    return totals["rounds"] == len(accepted) and 0 <= past_end <= _hidden(accepted, positions)


def histogram_fits(request: MeasuredRequest, positions: int) -> bool:
    """Whether an engine's rounds by accepted count are those of the rounds, the last round as in :func:`totals_fit`."""
    accepted, histogram = told_rounds(request), request["histogram"] or []
    told = [*histogram, *[0] * (positions + 1 - len(histogram))]
    lasts = range(accepted[-1], positions + 1) if accepted else []
    return told in [_histogram([*accepted[:-1], last], positions) for last in lasts] or told == _histogram(
        accepted, positions
    )


def counters_contradict(requests: Sequence[MeasuredRequest], counted: Counters, positions: int) -> str | None:
    """What an engine's counters over some requests contradict in their rounds; None where all fits."""
    rounds = [told_rounds(request) for request in requests]
    found = sum(len(accepted) for accepted in rounds)
    if found != counted["rounds"]:
        return f"the rounds of the requests are {found}, the engine's counters tell {counted['rounds']}"
    drafts = sum(sum(accepted) for accepted in rounds)
    past_end = sum(counted["accepted"]) - drafts
    if not 0 <= past_end <= sum(_hidden(accepted, positions) for accepted in rounds):
        return f"the requests accepted {drafts} drafts, the engine's counters tell {sum(counted['accepted'])}"
    return None


def told_rounds(request: MeasuredRequest) -> list[int]:
    """Accepted counts of the rounds of an answer whose rounds are told."""
    assert request["accepted"] is not None
    return request["accepted"]


def _hidden(accepted: Sequence[int], positions: int) -> int:
    """Drafts that a last round may have accepted beyond the end of its answer."""
    return positions - accepted[-1] if accepted else 0


def _histogram(accepted: Sequence[int], positions: int) -> list[int]:
    return [list(accepted).count(count) for count in range(positions + 1)]
