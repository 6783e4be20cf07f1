"""Traces of torch's profiler (Chrome format): what each rank was busy with, as unions of intervals.

GPU kernels of several streams overlap, so durations are not summed: the time of a kind is the union of the intervals in
which such an operation ran, over all streams, and a rank's busy time the union of all. On a CPU operators nest, and each
counts only where no operator that it calls runs. Kinds that ran at the same time each count it: shares may sum to more
than 1, and what overlaps of communication is told.
"""

import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from ..errors import Eagle3Error

COMMUNICATION, DRAFTER = "communication", "drafter"
# First match wins. Kernel names: vLLM and SGLang custom all-reduce, NCCL, gloo; ATen and oneDNN operators on CPUs.
KINDS = {
    COMMUNICATION: r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|nccl|gloo|c10d|one_?shot|two_?shot|::shm_"
    r"|lamport|multimem",
    "attention": r"attention|attn|flash|paged|mla|reshape_and_cache|kv_cache|slot_mapping",
    "mixture of experts": r"moe|expert|grouped_gemm|topk_softmax",
    "dense matmul": r"gemm|matmul|addmm|::mm$|::bmm|linear|onednn|cublas|cutlass|nvjet",
    "normalisation and rope": r"norm|rotary|rope",
    "sampling": r"sampl|argmax|softmax|topk|multinomial|sort",
    "elementwise and copies": r"copy|cat|add|mul|silu|index|fill|zero|to$|_to_|clone|embedding|gather|select|slice|where"
    r"|elementwise|memcpy|memset|stack|arange|resize|empty|sub|div|cumsum|eq|nonzero|pad|repeat",
}
OPERATIONS = ("kernel", "cpu_op")
ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
# vLLM's first model runner marks its parts (VLLM_CUSTOM_SCOPES_FOR_PROFILING), and every runner each step with its
# numbers of requests: execute_context_<prefilling>(<tokens>)_generation_<decoding>(<tokens>). Read in vLLM 0.32.0.
DRAFTER_RANGE = re.compile(r"gpu_model_runner: draft|\bdraft_(model|forward|extend)", re.IGNORECASE)
STEP_RANGE = re.compile(r"execute_context_(?P<prefilling>\d+)\(.*?\)_generation_(?P<decoding>\d+)\(")
TOP = 15
Thread = tuple[int | str, int | str]  # process and thread, as the trace names them
Event = dict[str, Any]  # as torch's profiler writes it


class Segment(NamedTuple):
    """A stretch of time in which one operation ran, in microseconds; ``call``: which of the events it belongs to."""

    call: int
    name: str
    kind: str
    start: float
    end: float


class Trace(NamedTuple):
    """Complete events ("ph": "X") of one process, with its rank."""

    rank: int
    events: list[Event]


class Shares(TypedDict):
    """What a rank was busy with; share: of its busy time, by kind. communication_hidden: see :func:`summarise`."""

    window_s: float
    busy_s: float
    idle_share: float
    share: dict[str, float]
    communication_share: float
    communication_hidden: float | None


class RankShares(Shares):
    """The same with the rank's number."""

    rank: int


class Summary(TypedDict):
    """Busy time by kind, as a mean over ranks and of each.

    communication_hidden: the share of communication during which something else ran too. top: of the first rank [name, kind,
    seconds, calls] of the operations that took most time.
    """

    device: str
    busy_s: float
    idle_share: float
    communication_share: float
    communication_hidden: float | None
    share: dict[str, float]
    ranks: list[RankShares]
    top: list[list[str | float]]


def kind_of(name: str) -> str:
    """The kind of an operation, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def read(folder: Path) -> list[Trace]:
    """The traces of a folder by rank; files without operators (the API server's) are left out.

    Raises:
        Eagle3Error: there is none with operators.
    """
    found = []
    for path in sorted(folder.rglob("*.json*")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            content = json.load(file)
        events = [e for e in content.get("traceEvents", []) if e.get("ph") == "X"]
        events = [e for e in events if e.get("cat") in (*OPERATIONS, *ANNOTATIONS)]
        if any(event["cat"] in OPERATIONS for event in events):
            named = re.search(r"(?:rank|TP-)(\d+)", path.name)
            rank = content.get("distributedInfo", {}).get("rank", int(named[1]) if named else len(found))
            found.append(Trace(rank, events))
    if not found:
        raise Eagle3Error(
            f"{folder}: found no trace with operators in it; expected one from the engine's torch profiler"
        )
    return sorted(found, key=lambda trace: trace.rank)


def summarise(traces: Sequence[Trace], batch: int = 1) -> Summary:
    """Busy time by kind, of each rank and as a mean over ranks.

    Args:
        batch: how many requests the steps to count decode, where the engine marks them.
    """
    gpu = any(event["cat"] == "kernel" for trace in traces for event in trace.events)
    of_ranks = [segments(trace.events, "kernel" if gpu else "cpu_op", batch) for trace in traces]
    ranks: list[RankShares] = [
        {"rank": trace.rank, **_shares(found, batch)} for trace, found in zip(traces, of_ranks, strict=True)
    ]
    hidden = [rank["communication_hidden"] for rank in ranks if rank["communication_hidden"] is not None]
    kinds = ranks[0]["share"]
    return {
        "device": "gpu" if gpu else "cpu",
        "busy_s": _mean(rank["busy_s"] for rank in ranks),
        "idle_share": _mean(rank["idle_share"] for rank in ranks),
        "communication_share": _mean(rank["communication_share"] for rank in ranks),
        "communication_hidden": _mean(hidden) if hidden else None,
        "share": {kind: _mean(rank["share"][kind] for rank in ranks) for kind in kinds},
        "ranks": ranks,
        "top": _top(of_ranks[0]),
    }


def segments(events: list[Event], category: str, batch: int = 1) -> list[Segment]:
    """The operations of a category in the steps that decode ``batch`` requests, each with its kind.

    Where the engine marks its steps, those that prefill or decode another number are left out, each up to the next. What
    runs within a range of the drafter is the drafter's, but for its communication.
    """
    marks = [event for event in events if event["cat"] == ("gpu_" if category == "kernel" else "") + "user_annotation"]
    others = _union(_other_steps(marks, batch))
    drafter = _union((e["ts"], e["ts"] + e["dur"]) for e in marks if DRAFTER_RANGE.search(e["name"]))
    chosen = [event for event in events if event["cat"] == category]
    if category == "cpu_op":
        pieces = _own(chosen)
    else:
        pieces = [(call, event["ts"], event["ts"] + event["dur"]) for call, event in enumerate(chosen)]
    kinds = {name: kind_of(name) for name in {event["name"] for event in chosen}}
    starts = np.array([start for _, start, _ in pieces])
    result = []
    for (call, start, end), left_out, drafts in zip(
        pieces, _inside(others, starts), _inside(drafter, starts), strict=True
    ):
        if not left_out:
            name = chosen[call]["name"]
            kind = DRAFTER if drafts and kinds[name] != COMMUNICATION else kinds[name]
            result.append(Segment(call, name, kind, start, end))
    return result


def _other_steps(marks: list[Event], batch: int) -> Iterator[tuple[float, float]]:
    """From the start of each step that does anything but decode ``batch`` requests to the start of the next."""
    found = ((event["ts"], STEP_RANGE.search(event["name"])) for event in marks)
    steps = sorted((start, int(step["prefilling"]), int(step["decoding"])) for start, step in found if step)
    for (start, prefilling, decoding), (end, *_) in itertools.pairwise([*steps, (float("inf"),)]):
        if prefilling or decoding != batch:
            yield start, end


def own_times(events: list[Event]) -> list[tuple[str, float]]:
    """Time of each operator's name without the operators nested in it, thread by thread."""
    total: dict[str, float] = defaultdict(float)
    for call, start, end in _own(events):
        total[events[call]["name"]] += end - start
    return list(total.items())


def _own(events: list[Event]) -> list[tuple[int, float, float]]:
    """(index, start, end) of the stretches in which an operator runs itself and none that it calls."""
    found: list[tuple[int, float, float]] = []
    threads: dict[Thread, list[tuple[int, float]]] = defaultdict(
        list
    )  # open operators (index, end), the inner one last
    reached: dict[Thread, float] = defaultdict(float)

    def close(thread: Thread, until: float) -> None:
        """Give the time up to ``until`` to the operators that are open."""
        stack = threads[thread]
        while stack:
            call, end = stack[-1]
            stop = min(end, until)
            if stop > reached[thread]:
                found.append((call, reached[thread], stop))
                reached[thread] = stop
            if end > until:
                return
            stack.pop()

    for call, event in sorted(enumerate(events), key=lambda item: (item[1]["ts"], -item[1]["dur"])):
        thread = event["pid"], event["tid"]
        close(thread, event["ts"])
        reached[thread] = event["ts"]
        threads[thread].append((call, event["ts"] + event["dur"]))
    for thread in list(threads):
        close(thread, float("inf"))
    return found


def _shares(found: list[Segment], batch: int) -> Shares:
    """What one rank was busy with: unions of intervals over its streams or threads."""
    if not found:
        raise Eagle3Error(
            f"trace: found no operator in steps that decode {batch} requests and prefill none, expected some; decode more "
            "tokens, or fewer requests at a time"
        )
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (*KINDS, DRAFTER, "other")}
    for segment in found:
        spans[segment.kind].append((segment.start, segment.end))
    window = max(s.end for s in found) - min(s.start for s in found)
    busy = _length(_union(span for of_kind in spans.values() for span in of_kind))
    communication = _length(_union(spans[COMMUNICATION]))
    others = _length(_union(span for kind, of_kind in spans.items() if kind != COMMUNICATION for span in of_kind))
    alone = busy - others
    return {
        "window_s": round(window / 1e6, 4),
        "busy_s": round(busy / 1e6, 4),
        "idle_share": round(1 - busy / window, 4),
        "share": {kind: round(_length(_union(of_kind)) / busy, 4) for kind, of_kind in spans.items()},
        "communication_share": round(communication / busy, 4),
        "communication_hidden": round(1 - alone / communication, 4) if communication else None,
    }


def _top(found: list[Segment]) -> list[list[str | float]]:
    """[name, kind, seconds, calls] of the operations with the largest summed time."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], set[int]] = defaultdict(set)
    for segment in found:
        seconds[segment.name, segment.kind] += (segment.end - segment.start) / 1e6
        calls[segment.name, segment.kind].add(segment.call)
    largest = sorted(seconds, key=lambda operation: -seconds[operation])[:TOP]
    return [[*operation, round(seconds[operation], 4), len(calls[operation])] for operation in largest]


def _union(spans: Iterable[tuple[float, float]]) -> np.ndarray:
    """[n, 2] the disjoint intervals, in order, that some intervals cover together."""
    ordered = np.array(sorted(spans), dtype=float).reshape(-1, 2)
    if not len(ordered):
        return ordered
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([ordered[first, 0], reach[last]], axis=1)


def _length(union: np.ndarray) -> float:
    return float((union[:, 1] - union[:, 0]).sum())


def _inside(union: np.ndarray, times: np.ndarray) -> np.ndarray:
    """[len(times)] whether each time lies in one of the disjoint intervals."""
    if not len(union):
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(union[:, 0], times, side="right") - 1
    inside: np.ndarray = (place >= 0) & (times < union[place, 1])
    return inside


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)
