"""The result files: benchmark.json, replay.json, verdict.json and report.json, their fields, and the check of what is read.

Every file carries ``schema``. A file of another schema, or with a field that is missing or of another kind, gives one
:class:`~eagle3_lib.errors.Eagle3Error` that names the file, the field, what was found and what is expected. A reader ignores
fields that it does not know, so that a file may hold more than is listed here.

benchmark.json may also come from another run (README.md, *Your own model*): without ``schema``, and with no more than
``mode``, ``target``, ``positions`` and ``requests``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from .errors import Eagle3Error
from .paths import short_path

BENCHMARK_SCHEMA, REPLAY_SCHEMA, VERDICT_SCHEMA, REPORT_SCHEMA, CARD_SCHEMA = 2, 2, 1, 3, 1
SHOWN = 60  # characters of a value that an error shows

Count = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Counts = list[Count]
Ids = Annotated[list[Count], Field(min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
RequestId = str | int
# What tells the rounds of a run, best first: the engine, for each request ("told"); streamed chunks, a round each ("chunks");
# each request's number of rounds by accepted count, without their order ("histograms"); the engine's counters over all
# requests together ("counters"). With the last two, ``accepted`` of every request is None.
Grade = Literal["told", "chunks", "histograms", "counters"]


# ------------------------------------------------------------------------------------------------------------- values


class Interval(TypedDict):
    """A value with its 95 % interval; all None where there was nothing to measure. n: what was resampled."""

    value: float | None
    low: float | None
    high: float | None
    n: int


class CurveInterval(TypedDict):
    """A curve [K] with its 95 % interval at each position."""

    value: list[float] | None
    low: list[float] | None
    high: list[float] | None
    n: int


class Acceptance(TypedDict):
    """As :func:`eagle3_lib.verdict.acceptance.summary`."""

    requests: int
    rounds: int
    positions: int
    drafted: int
    accepted: list[int]
    curve: CurveInterval
    conditional: list[float | None]
    acceptance_rate: Interval
    mean_length: Interval


# ----------------------------------------------------------------------------------------------------- benchmark.json


class Totals(TypedDict):
    """An engine's own count of one answer's rounds, accepted drafts and, where it tells them, drafts."""

    rounds: Count
    accepted: Count
    drafted: NotRequired[Count]


class Text(TypedDict):
    """What was asked, and what was answered, as token ids."""

    prompt_ids: Ids
    output_ids: Counts


class MeasuredRequest(Text):
    """One answer. accepted: drafts accepted in each round, without the bonus token; None where the engine tells no rounds.

    drafted: drafts of each round. chunks: tokens of each streamed chunk. histogram: the engine's rounds by accepted count.
    started_s, seconds, first_token_s: when it was asked, and after how long it ended and its first token came. tries: how
    often it was asked until its rounds fitted the engine's counts. cached_tokens: prompt tokens that came from the prefix
    cache. condition: the state of the server in which it was asked (:mod:`eagle3_lib.verdict.conditions`).
    """

    id: RequestId
    accepted: Counts | None
    drafted: NotRequired[Counts | None]
    chunks: NotRequired[Counts | None]
    histogram: NotRequired[Counts | None]
    totals: NotRequired[Totals | None]
    finish_reason: NotRequired[str | None]
    started_s: NotRequired[Seconds | None]
    seconds: NotRequired[Seconds | None]
    first_token_s: NotRequired[Seconds | None]
    tries: NotRequired[int]
    cached_tokens: NotRequired[int | None]
    condition: NotRequired[str]


class TimedRequest(TypedDict):
    """One timed answer; steps: its decode steps after prefill, rounds where the engine speculates."""

    concurrency: int
    repeat: int
    id: RequestId
    tokens: int
    steps: int
    seconds: float
    first_token_s: float


class Wave(TypedDict):
    """All timed prompts once, so many at a time."""

    concurrency: int
    repeat: int
    tokens: int
    wall_s: float


class Counters(TypedDict):
    """An engine's counters over some requests; accepted: by position."""

    rounds: int
    drafted: NotRequired[int]
    accepted: list[int]


class CrossCheck(TypedDict, total=False):
    """The rounds beside what the engine counted otherwise (:func:`eagle3_lib.stages.benchmark.cross_check`).

    other_rounds: rounds in the counters that are of other requests, where that is known.
    """

    counters: Counters | None
    histograms: int
    histograms_equal: int
    totals: int
    totals_equal: int
    contradictions: list[str]
    other_rounds: int


class Quantiles(TypedDict):
    median: float
    p90: float


class Speed(TypedDict):
    """Throughput and latency of one mode; by_concurrency: tokens/s of each repeat, by requests at a time."""

    tokens_per_s: Interval
    by_concurrency: dict[str, list[float]]
    latency_s: Quantiles
    first_token_s: float
    time_per_output_token_s: float
    acceptance: NotRequired[Acceptance]
    load_s: NotRequired[float]


class Benchmark(TypedDict):
    """benchmark.json. positions: K, 0 for plain decoding. evidence: what tells the rounds, see :data:`Grade`."""

    schema: NotRequired[int]
    mode: str
    target: str
    positions: Count
    requests: Annotated[list[MeasuredRequest], Field(min_length=1)]
    engine: NotRequired[str]
    version: NotRequired[str]
    dtype: NotRequired[Dtype]
    sampling: NotRequired[dict[str, Any]]
    temperature: NotRequired[float]
    speculative_options: NotRequired[dict[str, Any]]
    engine_args: NotRequired[list[str]]
    max_model_len: NotRequired[int]
    load_s: NotRequired[float]
    left_out: NotRequired[list[str]]
    clean_room: NotRequired[dict[str, Any]]
    evidence: NotRequired[Grade]
    cross_check: NotRequired[CrossCheck | None]
    timed: NotRequired[list[TimedRequest]]
    timed_differs: NotRequired[int]
    waves: NotRequired[list[Wave]]
    summary: NotRequired[Speed]


# -------------------------------------------------------------------------------------------------------- replay.json


class Round(TypedDict):
    """A round of the engine beside the replay at the same slot (:func:`eagle3_lib.verdict.rounds.compare`).

    outside: a correct engine stops there at a token outside the draft vocabulary.
    """

    slot: int
    drafted: NotRequired[int]
    engine: int
    replay: int
    cut: bool
    sure: NotRequired[bool]
    outside: NotRequired[bool]


class GreedyChoices(TypedDict, total=False):
    """How greedy tokens compare with the target's (:func:`eagle3_lib.verdict.lossless.greedy_of`).

    accepted, own: [tokens, not first choices] of accepted drafts, and of tokens that the target chose itself.
    """

    tokens: int
    not_first_choice: int
    near_ties: int
    largest_margin: float
    accepted: list[int]
    own: list[int]


class Reference(TypedDict):
    """The first answer to the same prompt that was asked cold. differs_at: the first token at which the two differ."""

    id: RequestId
    differs_at: int | None


class ReplayedRequest(TypedDict):
    """One answer of replay.json. hypotheses, suspects, since: accepted counts at the engine's rounds under each fault, each
    other config.json, and each fault that begins inside the answers. lossless: tokens that are not the target's first
    choice, near ties left out. Where the engine tells no rounds: histogram, its rounds by accepted count, totals, and own_rounds, the
    accepted counts of the rounds that each hypothesis would have made of the answer; suspects are then counts at the rounds of
    a correct engine. cached_tokens, condition: as :class:`MeasuredRequest`. reference: the answer that it is compared with."""

    id: RequestId
    prompt_length: NotRequired[int]
    output_length: NotRequired[int]
    engine_rounds: list[int]
    drafted: NotRequired[list[int] | None]
    replay_rounds: list[int]
    replay_drafted: NotRequired[list[int] | None]
    rows: list[Round]
    unjudged: NotRequired[str | None]
    without_drafts: NotRequired[int]
    in_vocabulary: NotRequired[int]
    hypotheses: NotRequired[dict[str, list[int]]]
    suspects: NotRequired[dict[str, list[int]]]
    since: NotRequired[dict[str, list[int]]]
    histogram: NotRequired[list[int] | None]
    totals: NotRequired[Totals | None]
    own_rounds: NotRequired[dict[str, list[int]]]
    greedy: NotRequired[GreedyChoices]
    lossless: NotRequired[int]
    cached_tokens: NotRequired[int | None]
    condition: NotRequired[str]
    reference: NotRequired[Reference | None]
    started_s: NotRequired[float | None]
    seconds: NotRequired[float | None]
    first_token_s: NotRequired[float | None]


class TokenTest(TypedDict, total=False):
    """One test of sampled tokens. sees: the difference that would fail it in 9 of 10 runs."""

    z: float | None
    p: float
    n: int
    failed: bool
    sees: float | None


class DraftsDiffer(TypedDict):
    """Accepted tokens that are not the replay's draft, of accepted tokens with a known draft."""

    tokens: int
    of: int


class SampledAcceptance(TypedDict):
    """Share of the replay's drafts that were accepted, and that the target's probabilities demand."""

    expected: float | None
    found: float | None


class CalibrationBin(TypedDict):
    """Drafts whose probability lies between low and high."""

    low: float
    high: float
    drafts: int
    expected: float | None
    found: float | None


class SampledTokens(TypedDict):
    """Whether sampled tokens are draws of the target (:func:`eagle3_lib.verdict.lossless.judge`)."""

    lossless: bool
    fault: str | None
    tokens: int
    unplaced: int
    tests: dict[str, TokenTest]
    drafts_differ: DraftsDiffer
    recovered_equal_to_draft: int
    acceptance: SampledAcceptance
    calibration: list[CalibrationBin]
    best_temperature: float
    cannot_tell: list[str]


class PlainTokens(TypedDict):
    """The tokens of plain decoding in the same engine (:func:`eagle3_lib.verdict.emitted.plain`)."""

    requests: int
    tokens: int
    not_greedy: int | None
    sampled: SampledTokens | None


class Agreement(TypedDict):
    """Rounds, and those in which engine and replay accept the same; cut, unsure: of those that differ."""

    rounds: int
    equal: int
    cut: int
    unsure: NotRequired[int]
    without_drafts: NotRequired[int]
    tokens_not_greedy: NotRequired[int]


class ToldSuspect(TypedDict):
    """Another value of config.json that engines obey silently. shim: the shell line that writes a copy which has it."""

    name: str
    field: str
    value: Any
    fault: str | None
    shim: str


class Score(TypedDict):
    """What one suspect accepts beside what config.json does (:func:`eagle3_lib.verdict.suspects.score`)."""

    name: str
    accepted: float
    of_config: float
    gain: Interval
    surely: float
    requests: int
    differ: int
    p: float
    ties: list[str]
    field: NotRequired[str]
    value: NotRequired[Any]
    fault: NotRequired[str | None]
    shim: NotRequired[str]


class Replay(TypedDict):
    """replay.json. requests are read one by one (:class:`eagle3_lib.verdict.replayed.Requests`).

    evidence: a :data:`Grade`. counters, other_rounds: of the run, where they are the evidence. drafts_vary: the engine was set to
    draft fewer than K at times.
    """

    schema: NotRequired[int]
    drafter: str
    engine: NotRequired[str]
    target: NotRequired[str]
    positions: int
    dtype: NotRequired[Dtype]
    sampling: NotRequired[dict[str, Any]]
    untold_defaults: NotRequired[dict[str, float]]
    evidence: NotRequired[str]
    prompts_in_chunks: NotRequired[int]
    at_limit: NotRequired[int]
    contradictions: NotRequired[list[str]]
    counters: NotRequired[Counters | None]
    other_rounds: NotRequired[int]
    drafts_vary: NotRequired[bool]
    suspects: NotRequired[list[ToldSuspect]]
    since: NotRequired[int]
    requests: Sequence[ReplayedRequest]
    agreement: NotRequired[Agreement]
    engine_acceptance: NotRequired[Acceptance]
    replay_acceptance: NotRequired[Acceptance]
    sampled: NotRequired[SampledTokens | None]
    plain: NotRequired[PlainTokens | None]


# ------------------------------------------------------------------------------------------------------- verdict.json


class Cost(TypedDict):
    """Cost apart from acceptance (:func:`eagle3_lib.verdict.break_even.speed`)."""

    step_ratio: float
    break_even_length: float
    mean_length: float
    throughput_ratio: float
    repeats: list[int]
    from_acceptance: NotRequired[float]
    from_cost: NotRequired[float]


class Ranked(TypedDict, total=False):
    """One hypothesis on the rounds: the share of those that can tell it that it reproduces, with its interval."""

    hypothesis: str
    value: float | None
    low: float | None
    high: float | None
    rounds: int
    unlike: int
    explained: int
    departing: int


class WrongTokens(TypedDict, total=False):
    """Tokens that are not the target's first choice, near ties left out; accepted, own as :class:`GreedyChoices`."""

    tokens: int
    not_greedy: int
    share: float
    accepted: list[int]
    own: list[int]
    requests: int


class ConditionTokens(TypedDict):
    """Answers of one condition (:mod:`eagle3_lib.verdict.conditions`).

    compared: answers that have a cold one to the same prompt. differ: those of them that differ from it; first: the first token
    at which any does. not_greedy: tokens that are not the target's first choice, near ties left out; wrong_answers: answers with
    a token that no rounding makes. own: [tokens that the target chose itself, not first choices]. pairs: wrong answers whose cold
    one is not wrong.
    """

    condition: str
    answers: int
    compared: int
    differ: int
    first: int | None
    tokens: int
    not_greedy: int
    wrong_answers: int
    own: list[int]
    pairs: int


class FittedHypothesis(TypedDict):
    """The hypothesis most like an unknown fault (:class:`eagle3_lib.verdict.diagnose.Fit`)."""

    name: str
    departing: int
    explained: int
    spoiled: int
    rounds: int
    unlike: int


class VerdictEvidence(TypedDict, total=False):
    """What a verdict rests on (:meth:`eagle3_lib.verdict.evidence.Evidence.as_dict`)."""

    engine: Acceptance
    replay: Acceptance
    gap: Interval
    losses: dict[str, float | None]
    rounds_compared: int
    can_tell: int
    departing: int
    agreement: Interval
    ranking: list[Ranked]
    left_out: dict[str, int]
    unjudged: dict[str, str]
    most_drafted: int | None
    tokens_not_greedy: WrongTokens
    conditions: list[ConditionTokens]
    slices: dict[str, list[dict[str, int]]]
    config: list[Score]
    rounds_needed: int
    first_drafts: float
    break_even_length: float | None
    most_like: FittedHypothesis | None
    cost: float


class Where(TypedDict):
    """The part of a run that has a fault (:class:`eagle3_lib.verdict.slices.Slice`). inside, outside: [departing, rounds]. at:
    since or until as seconds since the epoch, where they are times."""

    by: str
    since: int | None
    until: int | None
    p: float | None
    inside: list[int] | tuple[int, int]
    outside: list[int] | tuple[int, int]
    requests: list[int] | None
    at: NotRequired[float | None]


class NotExcluded(TypedDict):
    """A hypothesis that a verdict leaves open, and the experiment that would tell."""

    hypothesis: str
    rounds_that_differ: int
    experiment: str


class StoredVerdict(TypedDict):
    """The verdict on one drafter in one engine (:class:`eagle3_lib.verdict.diagnose.Verdict`)."""

    drafter: str
    kind: str
    sentence: str
    evidence: VerdictEvidence
    fault: str | None
    ties: list[str]
    where: Where | None
    suspect: Score | None
    not_excluded: list[NotExcluded]
    warnings: list[str]


class VerdictFile(TypedDict):
    """verdict.json of stage 08. cost: None where the engine's plain decoding was not timed beside it."""

    schema: int
    verdict: StoredVerdict
    cost: Cost | None


# ---------------------------------------------------------------------------------------------------------- card.json


class Yield(TypedDict):
    """What speculation yields; over_plain: throughput over plain decoding. None: not measured."""

    acceptance_rate: float | None
    mean_length: float | None
    over_plain: float | None


class Gate(TypedDict):
    """A mean acceptance length that a run must reach. found: what it reached; met: None where there was no round."""

    expect_length: float
    found: Interval
    met: bool | None


class StoredCard(TypedDict):
    """The decision card of one drafter in one engine (:class:`eagle3_lib.verdict.card.Card`)."""

    schema: NotRequired[int]
    drafter: str
    engine: str
    kind: str
    headline: str
    confidence: str
    cost: str
    next: str
    after: str
    evidence: str
    exit_code: int
    grade: str
    files: list[str]
    now: Yield | None
    mended: Yield | None
    gate: Gate | None
    warnings: list[str]


# -------------------------------------------------------------------------------------------------------- report.json


class Together(TypedDict):
    """What several drafters in one engine say together (:func:`eagle3_lib.verdict.diagnose.judge_together`)."""

    kind: str
    sentence: str
    faults: list[str]


class DrafterReport(TypedDict):
    """Of replay.json, without its requests."""

    positions: int
    engine_acceptance: Acceptance
    replay_acceptance: Acceptance
    agreement: Agreement
    dtype: Dtype | None
    sampling: dict[str, Any] | None
    sampled: SampledTokens | None
    plain: PlainTokens | None


class Latency(TypedDict):
    first_token_s: Interval
    later_token_s: Interval


class Predicted(TypedDict):
    """Predicted throughput over plain at one K. round: its time in plain steps, the break-even length."""

    K: int
    mean_length: float
    round: float
    speedup: float
    beyond_curve: bool


class BreakEven(TypedDict):
    """Throughput over plain by K (:func:`eagle3_lib.verdict.break_even.of_run`)."""

    measured_K: int
    recommended: int
    rows: list[Predicted]


class ModeEvidence(TypedDict):
    evidence: str
    cross_check: CrossCheck | None


class EmittedTokens(TypedDict):
    """Are the emitted tokens the same in every mode, and the target's own?"""

    requests: int
    tokens: int
    requests_differing_from_plain: dict[str, int]
    tokens_not_the_targets_choice: dict[str, int]


class Gain(Interval):
    """Mean acceptance length of one drafter minus another's, paired by request."""

    of: str
    over: str


class EngineReport(TypedDict):
    """One engine of a report, by mode or drafter; what was not measured is empty or None."""

    version: str | None
    drafters: dict[str, DrafterReport]
    ngram_acceptance: Acceptance | None
    evidence: dict[str, ModeEvidence]
    throughput: dict[str, Speed]
    speedup: dict[str, Interval]
    speedup_by_concurrency: dict[str, dict[str, Interval]]
    cost: dict[str, Cost]
    latency: dict[str, Latency]
    step_s: dict[str, Interval]
    tokens: EmittedTokens | None
    clean_room: dict[str, list[str]]
    break_even: dict[str, dict[str, BreakEven]]
    verdicts: list[StoredVerdict]
    together: Together
    length_gain: Gain | None


class StageRun(TypedDict):
    """One manifest: which stage wrote which folder, when, for how long, from which commit."""

    stage: str
    of: str
    seconds: float
    started: str
    git: dict[str, Any]


class Report(TypedDict):
    """report.json. Sections of stages that have not run are None, and ``missing`` names them."""

    schema: int
    run: str
    finding: str
    engines: dict[str, EngineReport]
    missing: list[str]
    training: dict[str, Any] | None
    generated: dict[str, Any] | None
    extracted: dict[str, Any] | None
    coverage: dict[str, Any] | None
    profile: dict[str, Any] | None
    preflight: dict[str, Any] | None
    audit: dict[str, dict[str, Any]]
    stages: list[StageRun]


# ------------------------------------------------------------------------------------------------------------ reading

T = TypeVar("T")


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        Eagle3Error: there is no such file, or it is not JSON.
    """
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run the stage that writes it first")
    try:
        return json.loads(path.read_text("utf-8-sig"))  # a byte order mark is no fault
    except (ValueError, RecursionError) as error:
        raise Eagle3Error(f"{short_path(path)}: not JSON: {error}") from error


def check(kind: type[T], values: Any, where: str, schema: int, needs_schema: bool = True) -> T:
    """``values``, if they are what a result file of this kind holds.

    Args:
        kind: one of the classes above.
        where: the file, for the error.
        schema: that this version writes.
        needs_schema: refuse a file that does not say its schema.
    Raises:
        Eagle3Error: another schema, or the first field that is missing or of another kind.
    """
    if not isinstance(values, Mapping):
        raise Eagle3Error(f"{where}: found {shown(values)}, expected the fields of a {kind.__name__}")
    found = values.get("schema")
    if found is None and needs_schema:
        raise Eagle3Error(f"{where}: schema: found none, expected {schema}; run the stage that writes it again")
    if found is not None and found != schema:
        raise Eagle3Error(f"{where}: schema: found {found!r}, expected {schema}; run the stage that writes it again")
    return check_part(kind, values, where)


def check_part(kind: type[T], values: Any, where: str) -> T:
    """As :func:`check`, of a part that has no schema of its own."""
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise Eagle3Error(_explain(error.errors(include_url=False), where, values)) from None


def check_line(kind: type[T], line: bytes, where: str) -> T:
    """As :func:`check_part`, of JSON."""
    try:
        return _adapter(kind).validate_json(line)
    except ValidationError as error:
        raise Eagle3Error(_explain(error.errors(include_url=False), where, {})) from None


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # they take long to make


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _explain(faults: Sequence[ErrorDetails], where: str, values: Any) -> str:
    """The first fault in words: field, found, expected; a request is named by its id."""
    fault = faults[0]
    parts = [part for part in fault["loc"] if not _is_branch(part)]
    if len(parts) > 1 and parts[0] == "requests":
        parts[1] = _id_of(values["requests"][parts[1]], parts[1])
    field = ": ".join(str(part) for part in parts[:3]) or "(the whole)"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "missing":
        return f"{where}: {field}: found none, expected this field{more}"
    expected = EXPECTED.get(fault["type"]) or fault["msg"].removeprefix("Input should be ")
    return f"{where}: {field}: found {shown(fault['input'])}, expected {expected}{more}"


# pydantic's names of faults, in words that fit counts and token ids.
EXPECTED = {
    "int_type": "a whole number from 0 on",
    "int_from_float": "a whole number from 0 on",
    "greater_than_equal": "a whole number from 0 on",
    "too_short": "at least one",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
}


def _id_of(request: Any, index: str | int) -> str | int:
    name = request.get("id") if isinstance(request, Mapping) else None
    return name if isinstance(name, str | int) else f"[{index}]"


def _is_branch(part: str | int) -> bool:
    """Whether a part of a fault's place is pydantic's name for a branch of a union, no field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "none"))


def shown(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
