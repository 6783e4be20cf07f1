"""SpecForge's results: ``specforge benchmark --output-json``, and the matrix of benchmarks/bench_eagle3.py.

Read in specforge 0.2.0 (benchmarks/sglang.py: BenchmarkResult, run) and sgl-project/SpecForge at
a6b6b0230009d15ec2a97a57384e6f53f0f96946 (benchmarks/bench_eagle3.py: main; benchmarks/benchmarker/utils.py: compute_metrics).
Both divide SGLang's completion tokens, prefill's token among them, by spec_verify_ct, the rounds; the first as a mean over
requests. The matrix writes its rounds only as tokens / accept_length, and 1.0 where the server did not speculate. Counts by
position are in neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Eagle3Error
from .document import Document
from .recorded import Recorded, amount, choose, count, fields, get, shown

TOOL = "specforge"
SAMPLES, TOKENS, ROUNDS, LENGTH = "samples", "output_tokens", "spec_verify_count", "average_acceptance_length"
ANSWERS = {"mtbench": 2}  # answers of one question, where there are several turns
CUT = "Tokens are cut at the end of an answer, so that the last round may have accepted more."
NO_POSITIONS = "No count by position is told."


@dataclass(frozen=True)
class Measured:
    """One entry of the matrix."""

    name: str
    setting: tuple[int | None, int | None, int | None]  # steps, topk, draft tokens
    tokens: float
    rounds: float
    answers: int


def recognise(document: Document) -> bool:
    return any({LENGTH, ROUNDS} <= values.keys() or _is_matrix(values) for values in document.objects)


def _is_matrix(values: Mapping[str, Any]) -> bool:
    entries = [part for value in values.values() if isinstance(value, list) for part in value]
    return bool(entries) and all(
        isinstance(part, dict) and {"metrics", "steps", "topk", "num_draft_tokens"} <= part.keys() for part in entries
    )


def read(document: Document, of: str = "") -> Recorded:
    """The mean length, prefill taken off.

    Args:
        of: "batch_size,steps,topk,num_draft_tokens" where a matrix has several that speculate.
    Raises:
        Eagle3Error: the server did not speculate, a value is none, or several configurations are in it and none is named.
    """
    values = document.objects[0]
    if LENGTH in values:
        return _benchmark(values, document.where)
    return _matrix(values, document.where, of)


def _benchmark(values: Mapping[str, Any], where: str) -> Recorded:
    samples, tokens = (count(get(values, name, where), f"{where}: {name}") for name in (SAMPLES, TOKENS))
    if values.get(ROUNDS) is None:
        raise Eagle3Error(
            f"{where}: {ROUNDS}: found {shown(values.get(ROUNDS))}, expected rounds; the server did not speculate"
        )
    rounds = count(values[ROUNDS], f"{where}: {ROUNDS}")
    notes = [
        f"{samples} tokens of prefill, one a request, are taken off; {LENGTH} holds them and is a mean over requests.",
        CUT,
        NO_POSITIONS,
        "It is not told whether the drafts are a chain or a tree (--speculative-eagle-topk of the server).",
    ]
    return _length(tokens, samples, rounds, None, notes, where)


def _length(
    tokens: float, answers: int, rounds: float, positions: int | None, notes: list[str], where: str
) -> Recorded:
    if rounds <= 0:
        raise Eagle3Error(f"{where}: rounds: found {rounds:g}, expected some; the server did not speculate")
    if tokens - answers < rounds:
        raise Eagle3Error(
            f"{where}: {TOKENS}: found {tokens:g}, expected at least one token for each of {answers} answers and {rounds:g} "
            f"rounds"
        )
    length = (tokens - answers) / rounds
    return Recorded(TOOL, "sglang", positions, mean_length=length, exact=False, notes=notes)


def _matrix(values: Mapping[str, Any], where: str, of: str) -> Recorded:
    by_configuration: dict[str, list[Measured]] = {}
    for name, entries in values.items():
        for place, entry in enumerate(entries if isinstance(entries, list) else []):
            found = _entry(name, entry, f"{where}: {name}: [{place}]")
            if found.rounds:
                words = (entry.get("batch_size"), *found.setting)
                by_configuration.setdefault(",".join(str(word) for word in words), []).append(found)
    if not by_configuration:
        raise Eagle3Error(f"{where}: accept_length: found 1.0 everywhere, expected a configuration that speculates")
    chosen = by_configuration[choose(list(by_configuration), of, where, "batch_size,steps,topk,num_draft_tokens")]
    steps, topk, draft_tokens = chosen[0].setting
    tokens, rounds = sum(part.tokens for part in chosen), sum(part.rounds for part in chosen)
    answers = sum(part.answers for part in chosen)
    notes = [
        f"{answers} tokens of prefill, one an answer, are taken off accept_length, which holds them.",
        "Rounds are not told; they are tokens / accept_length.",
        CUT,
        NO_POSITIONS,
        f"Over {', '.join(part.name for part in chosen)}.",
    ]
    if steps is None:
        notes.append(
            "The run used a server that was there (--skip-launch-server): K, and whether it drafts a tree, are not told."
        )
    if topk is not None and topk > 1:
        length = (tokens - answers) / rounds
        return Recorded(
            TOOL,
            "sglang",
            exact=False,
            notes=[*notes, f"The drafts are a tree: steps {steps}, topk {topk}, {draft_tokens} draft tokens."],
            warnings=[f"A tree's mean length, {length:.3f}, is not a chain's and is not given."],
        )
    return _length(tokens, answers, rounds, steps, notes, where)


def _entry(name: str, entry: Any, where: str) -> Measured:
    """An entry's tokens and rounds, over its runs; no rounds where nothing was verified."""
    entry = fields(entry, where)
    setting = tuple(
        None if entry[field] is None else count(entry[field], f"{where}: {field}")
        for field in ("steps", "topk", "num_draft_tokens")
    )
    runs = entry["metrics"]
    if not isinstance(runs, list):
        raise Eagle3Error(f"{where}: metrics: found {shown(runs)}, expected a list")
    tokens, rounds, answers = 0.0, 0.0, 0
    for run in runs:
        run = fields(run, f"{where}: metrics")
        latency, throughput, length = (
            amount(get(run, field, where), f"{where}: {field}", least)
            for field, least in (("latency", 0), ("output_throughput", 0), ("accept_length", 1))
        )
        questions = count(get(run, "num_questions", where), f"{where}: num_questions")
        if length == 1:  # what it writes where spec_verify_ct is missing
            continue
        tokens += latency * throughput
        rounds += latency * throughput / length
        answers += questions * ANSWERS.get(name, 1)
    return Measured(name, (setting[0], setting[1], setting[2]), tokens, rounds, answers)
