"""Reading what stage 07 measured, apart from measuring it, so that the stages after it need no HTTP client."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import results
from ..errors import Eagle3Error
from ..params import SamplingSettings
from ..paths import project_path, short_path
from ..results import Benchmark, Grade, MeasuredRequest
from . import meaning
from .options import prefill_chunk


@dataclass(frozen=True)
class Rounds:
    """A benchmark whose rounds can be judged. sampling: how its tokens were chosen; told: the settings that it says; grade: what
    tells its rounds."""

    bench: Benchmark
    sampling: SamplingSettings
    told: tuple[str, ...]
    grade: Grade = "told"

    @property
    def without_rounds(self) -> bool:
        """Whether only counts of the rounds are known, not the rounds themselves."""
        return self.grade in ("histograms", "counters")


def read(folder: str | Path) -> Benchmark:
    """A benchmark.json: stage 07's, or one written from another run.

    Raises:
        Eagle3Error: there is none, or its fields are not those of :class:`eagle3_lib.results.Benchmark`.
    """
    path = project_path(folder) / "benchmark.json"
    if not path.is_file():
        raise Eagle3Error(f"{short_path(path)}: no such file; run stage benchmark first")
    values = results.read_json(path)
    return results.check(Benchmark, values, short_path(path), results.BENCHMARK_SCHEMA, needs_schema=False)


def read_rounds(folder: str | Path) -> Rounds:
    """A benchmark.json whose rounds can be judged, by whatever tells them (:data:`eagle3_lib.results.Grade`).

    "evidence" may be left out: it is what the requests have. "sampling" (fields of SamplingSettings), or "temperature" alone, says how the tokens were chosen; a setting that is
    missing is taken as that of greedy decoding.

    Raises:
        Eagle3Error: a field is missing or of a wrong kind, nothing tells rounds, rounds cannot be those of the answers or
            of K, or the engine was set to accept otherwise than by the target.
    """
    bench = read(folder)
    where = short_path(project_path(folder) / "benchmark.json")
    positions, requests = bench["positions"], bench["requests"]
    others = bench["mode"] in ("plain", "ngram")
    grade = _grade(bench)
    if others or not positions or grade is None:
        raise Eagle3Error(f"{where}: mode {bench['mode']!r} has no rounds; expected a drafter's run")
    _refuse_twice([request["id"] for request in requests], where)
    if grade in ("histograms", "counters"):
        _refuse_counts(bench, grade, where)
    elif grade != "chunks":
        for request in requests:
            _refuse_above(request, positions, f"{where}: requests: {request['id']}")
    if "cross_check" not in bench:  # stage 07 holds its rounds against the engine's own counts
        _refuse_other_counts(requests, positions, f"{where}: requests")
    told: dict[str, object] = {"temperature": bench["temperature"]} if "temperature" in bench else {}
    told |= bench.get("sampling", {})
    sampling = SamplingSettings.check(told, f"{where}: sampling")
    options, arguments = bench.get("speculative_options", {}), bench.get("engine_args", [])
    if options or arguments:
        meaning.refuse(bench.get("engine", "vllm"), options, arguments, {}, sampling.temperature)
    return Rounds(bench, sampling, tuple(sorted(told)), grade)


def _grade(bench: Benchmark) -> Grade | None:
    """What tells the rounds of a benchmark; None where nothing does."""
    requests = bench["requests"]
    if any(request["accepted"] is not None for request in requests):
        return bench.get("evidence", "told")
    said = bench.get("evidence")
    if said in ("histograms", "counters"):
        return said
    if said is None and any(request.get("histogram") for request in requests):
        return "histograms"
    return "counters" if said is None and (bench.get("cross_check") or {}).get("counters") else None


def _refuse_counts(bench: Benchmark, grade: Grade, where: str) -> None:
    """Refuse a run without rounds that does not have what its grade needs."""
    positions = bench["positions"]
    for request in bench["requests"]:
        at = f"{where}: requests: {request['id']}"
        if request["accepted"] is not None:
            raise Eagle3Error(
                f"{at}: accepted: found rounds, expected null in every request of a run whose evidence is {grade}"
            )
        histogram = request.get("histogram") or []
        if grade == "histograms" and not histogram and len(request["output_ids"]) > 1:
            raise Eagle3Error(f"{at}: histogram: found none, expected the engine's rounds by accepted count")
        if len(histogram) > positions + 1:
            raise Eagle3Error(
                f"{at}: histogram: found {len(histogram)} entries, expected at most positions + 1 = {positions + 1}"
            )
    if grade != "counters":
        return
    counters = (bench.get("cross_check") or {}).get("counters")
    if not counters:
        raise Eagle3Error(
            f"{where}: cross_check: counters: found none, expected the engine's counters over all requests"
        )
    if len(counters["accepted"]) != positions:
        raise Eagle3Error(
            f"{where}: cross_check: counters: accepted: found {len(counters['accepted'])} positions, expected positions = "
            f"{positions}"
        )


def _refuse_twice(ids: Sequence[str | int], where: str) -> None:
    seen: set[str | int] = set()
    for name in ids:
        if name in seen:
            raise Eagle3Error(f"{where}: requests: id: found {name!r} twice, expected a name for each")
        seen.add(name)


def _refuse_above(request: MeasuredRequest, positions: int, where: str) -> None:
    """Refuse counts above K."""
    for name, counts in (("accepted", request["accepted"]), ("drafted", request.get("drafted"))):
        most = max(counts or [], default=0)
        if most == positions + 1 and name == "accepted":
            raise Eagle3Error(
                f"{where}: accepted: found a round of {most}, expected at most positions = {positions}; is the bonus token "
                f"counted in? accepted is without it"
            )
        if most > positions:
            raise Eagle3Error(f"{where}: {name}: found a round of {most}, expected at most positions = {positions}")


def _refuse_other_counts(requests: Sequence[MeasuredRequest], positions: int, where: str) -> None:
    """Refuse counts that are those of no engine because of how they were written down.

    Prefill emits one token, each round its accepted drafts and one more. A histogram can have no entry above K.
    """
    told = [request for request in requests if request["accepted"] and len(request["output_ids"]) > 1]
    for request in told:
        if len(request.get("histogram") or []) > positions + 1:
            raise Eagle3Error(
                f"{where}: {request['id']}: histogram: found {len(request['histogram'] or [])} entries, expected at most "
                f"positions + 1 = {positions + 1}"
            )
    if not told:
        return
    if any(_too_many(request) for request in told) and all(_fits_with_bonus(request) for request in told):
        raise Eagle3Error(
            f"{where}: accepted: found counts that sum to the emitted tokens in every request, expected accepted drafts "
            f"without the bonus token (one less in each round)"
        )
    shown = any(request.get("chunks") or 0 in (request.get("drafted") or []) for request in told)
    missing = [_missing(request) for request in told]
    if not shown and len(told) > 1 and min(missing) > 0 and max(missing) > 1 and max(missing) <= positions + 1:
        raise Eagle3Error(
            f"{where}: accepted: found rounds that emit {min(missing)} to {max(missing)} tokens less than the answer has, in "
            f"every request; is the first round left out? Prefill emits the first token, and every round after it counts. An "
            f"engine that took steps without drafts needs the tokens of each streamed chunk beside them (chunks)"
        )


def _missing(request: MeasuredRequest) -> int:
    """Tokens of an answer that its rounds do not emit; negative where they emit more."""
    accepted = request["accepted"] or []
    return len(request["output_ids"]) - 1 - sum(accepted) - len(accepted)


def _too_many(request: MeasuredRequest) -> bool:
    """Whether the rounds emit more tokens than the end of the answer can hide."""
    return -_missing(request) > (request["accepted"] or [0])[-1]


def _fits_with_bonus(request: MeasuredRequest) -> bool:
    """Whether the counts fit the answer if each holds its round's bonus token too."""
    accepted = request["accepted"] or []
    past_end = 1 + sum(accepted) - len(request["output_ids"])
    return min(accepted, default=0) > 0 and 0 <= past_end < accepted[-1]


def prompts_in_chunks(bench: Benchmark) -> int:
    """How many prompts the engine may have prefilled in several chunks, by the budget in its command-line words."""
    budget = prefill_chunk(bench.get("engine_args", []))
    lengths = [len(request["prompt_ids"]) for request in bench["requests"]]
    if budget is None:
        return 0
    if bench.get("evidence") == "told" and sum(lengths) > budget:  # asked together, prompts share the budget
        return len(lengths)
    return sum(length > budget for length in lengths)


VARYING = ("num_speculative_tokens_per_batch_size", "--speculative-adaptive")  # vLLM's dynamic K, SGLang's


def drafts_vary(bench: Benchmark) -> bool:
    """Whether the engine was set to draft fewer than K at times."""
    said = [*bench.get("speculative_options", {}), *bench.get("engine_args", [])]
    return any(name in word for word in said for name in VARYING)


def refuse_unknown_ids(bench: Benchmark, vocabulary: int, where: str) -> None:
    """Refuse token ids that the target does not have.

    Args:
        vocabulary: size of the target's vocabulary.
    Raises:
        Eagle3Error: naming the request and the id.
    """
    for request in bench["requests"]:
        for name, ids in (("prompt_ids", request["prompt_ids"]), ("output_ids", request["output_ids"])):
            most = max(ids, default=0)
            if most >= vocabulary:
                raise Eagle3Error(
                    f"{where}: requests: {request['id']}: {name}: found the token id {most}, expected ids below "
                    f"{vocabulary}, the size of the target's vocabulary"
                )
