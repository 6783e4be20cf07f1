"""Answers of a vLLM server: JSON, JSON lines, or saved event streams, with ``metrics.speculative_decoding``.

Any JSON that holds such a record is read. Which answers have none was read in vLLM 0.32.0 (see
:mod:`eagle3_lib.engines.vllm.spec`): those of a server without --per-request-spec-decode-metrics, with n > 1, ended by a stop
string, or streamed without stream_options.include_usage. Where no answer has one, saved streams with token ids still show
the steps as chunks, cut at the end of the answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import Eagle3Error
from ...results import RequestId
from .document import Document
from .recorded import Recorded, RecordedRequest, add_up, counters_of_histogram, counts, histogram_of, mean_length
from .vllm_record import read_record, together

TOOL = "vllm answer"
RECORD = "speculative_decoding"
MISSING = (
    "found none in {answers} answers, expected vLLM's record: start the server with --per-request-spec-decode-metrics detailed, "
    "stream with stream_options.include_usage, ask for n = 1, and without stop strings"
)


@dataclass
class Answer:
    """chunks: token ids of each streamed chunk that has any. record: None where the answer has none. server: its
    system_fingerprint."""

    name: RequestId
    where: str
    record: Any = None
    output_tokens: Any = None
    chunks: list[int] = field(default_factory=list)
    streamed: bool = False
    server: str = ""


def recognise(document: Document) -> bool:
    return any(True for _ in _answers(document))


def read(document: Document, of: str = "") -> Recorded:
    """All answers of the file.

    Raises:
        Eagle3Error: none of them tells its rounds, or a record contradicts itself.
    """
    answers = list(_answers(document))
    told = [answer for answer in answers if answer.record is not None]
    if not told:
        return _from_chunks(answers, document.where)
    records = [
        read_record(answer.record, answer.name, answer.output_tokens, f"{answer.where}: {RECORD}") for answer in told
    ]
    notes = []
    if len(told) < len(answers):
        notes.append(
            f"{len(answers) - len(told)} of {len(answers)} answers hold no record (n > 1, a stop string, a stream without its usage)"
            f" and are left out."
        )
    return together(TOOL, "vllm", records, document.where, notes)


def _answers(document: Document) -> Iterator[Answer]:
    streamed: dict[RequestId, Answer] = {}
    for value, where in zip(document.values, document.places, strict=True):
        for holder, place in _holders(value, where):
            answer = _answer(holder, place, document.is_stream)
            if not answer.streamed:
                yield answer
                continue
            known = streamed.setdefault(answer.name, answer)
            if known is not answer:
                _add(known, answer)
    yield from streamed.values()


def _holders(value: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in a JSON value that is an answer, or holds a record, in the order of the file."""
    todo = [(value, where)]
    while todo:
        part, place = todo.pop()
        if isinstance(part, list):
            todo += [(inner, f"{place}: [{number}]") for number, inner in enumerate(part)][::-1]
        elif isinstance(part, dict) and _is_holder(part):
            yield part, place
        elif isinstance(part, dict):
            todo += [(inner, f"{place}: {name}") for name, inner in part.items()][::-1]


def _is_holder(value: dict[str, Any]) -> bool:
    metrics = value.get("metrics")
    is_answer = isinstance(value.get("choices"), list) and ("object" in value or "usage" in value)
    return is_answer or RECORD in value or (isinstance(metrics, dict) and RECORD in metrics)


def _answer(holder: dict[str, Any], where: str, is_stream: bool) -> Answer:
    metrics = holder.get("metrics")
    record = metrics.get(RECORD) if isinstance(metrics, dict) else None
    usage = holder.get("usage")
    answer = Answer(
        holder.get("id") or holder.get("request_id") or where,
        where,
        holder.get(RECORD) if record is None else record,
        usage.get("completion_tokens") if isinstance(usage, dict) else None,
    )
    choices = holder.get("choices") or []
    answer.server = str(holder.get("system_fingerprint") or "")
    kind = str(holder.get("object"))
    # The chunks of a completion are named as the whole answer is, which has choices and usage together.
    in_parts = kind == "text_completion" and not (choices and usage)
    answer.streamed = is_stream or in_parts or kind.endswith(".chunk")
    if choices and isinstance(choices[0], dict) and choices[0].get("token_ids"):
        answer.chunks = [len(counts(choices[0]["token_ids"], f"{where}: token_ids"))]
    return answer


def _add(known: Answer, later: Answer) -> None:
    """A later chunk of the same answer."""
    known.chunks += later.chunks
    known.server = known.server or later.server
    if later.output_tokens is not None:
        known.output_tokens = later.output_tokens
    if later.record is not None:
        known.record, known.where = later.record, later.where


def _from_chunks(answers: list[Answer], where: str) -> Recorded:
    """Steps read off the chunks of streams: each chunk after the first is one step, cut at the end of the answer."""
    shown = [answer for answer in answers if answer.streamed and answer.chunks]
    if not shown or max(max(answer.chunks) for answer in shown) < 2:  # plain decoding looks like this too
        raise Eagle3Error(f"{where}: {RECORD}: {MISSING.format(answers=len(answers))}")
    requests: list[RecordedRequest] = [
        {
            "id": answer.name,
            "accepted": [tokens - 1 for tokens in answer.chunks[1:]],
            "drafted": None,
            "output_tokens": sum(answer.chunks),
        }
        for answer in shown
    ]
    histograms = [histogram_of(request["accepted"], None) for request in requests]
    told = counters_of_histogram(add_up(histograms), None, None)
    joined = sum(answer.chunks[0] > 1 for answer in shown)
    warnings = []
    if joined:
        warnings.append(
            f"{joined} answers begin with several tokens in one chunk: rounds beside prefill's token are lost there."
        )
    is_vllm = all(answer.server.startswith("vllm-") for answer in shown)
    return Recorded(
        TOOL,
        "vllm" if is_vllm else "",
        requests=requests,
        histograms=histograms,
        counters=told,
        mean_length=mean_length(told),
        exact=False,
        notes=[
            f"No answer holds {RECORD}: rounds are read off the streamed chunks, the first of which is prefill's token.",
            "They are cut at the end of the answer, so that its last round may have accepted more.",
            "A step without drafts (end of the context, a grammar) looks like a round that accepted nothing.",
            "Two steps in one chunk, which happens when the client lags, look like one round, in plain decoding too; the "
            "difference of two scrapes of /metrics on a quiet server shows it.",
            "K is not told, nor whether the drafts are a chain or a tree.",
        ],
        warnings=warnings,
    )
