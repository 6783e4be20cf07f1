"""What holds the GPUs before, while and after an engine runs, as NVML tells it.

A measurement beside another process on its GPU is none, and an engine that has ended has to give its memory back. Processes
of this project's servers are known by a mark in their environment: those that outlive their server are ended. Others are
listed, never ended.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import psutil

MARK = "EAGLE3_SERVER"
GIB = 2**30
GIVEN_BACK_GIB = 0.5  # a driver keeps some of a context for a while
WAIT_S = 15.0


class Used(TypedDict):
    """The memory of one GPU that is in use."""

    index: int
    used_gib: float


class Holder(TypedDict):
    """A process that holds memory of a GPU; gib is None where NVML does not tell it, as in some containers."""

    gpu: int
    pid: int
    name: str
    gib: float | None


class Look(TypedDict):
    """What holds the GPUs at one time."""

    gpus: list[Used]
    processes: list[Holder]


class Ended(TypedDict):
    """A process that outlived its server and was ended."""

    pid: int
    name: str


class Record(TypedDict, total=False):
    """A server's time on the GPUs; empty without a GPU and before the server has ended.

    others: what held a GPU before the start. given_back: whether each GPU's memory is as it was.
    """

    before: Look
    after: Look
    others: list[Holder]
    ended: list[Ended]
    given_back: bool


@contextlib.contextmanager
def watched(mark: str, nvml: Any = None, wait_s: float = WAIT_S) -> Iterator[Record]:
    """Look before and after a server that starts and ends inside, and end what of it is left.

    Args:
        mark: the value of ``MARK`` in the environment of the server's processes, used for no other.
        nvml: the module to ask; pynvml by default.
        wait_s: how long memory may take to come back.
    Yields:
        a record, filled at the end.
    """
    record: Record = {}
    before = look(nvml)
    try:
        yield record
    finally:
        if before is not None:
            record.update(_leave(before, mark, nvml, wait_s))


def look(nvml: Any = None) -> Look | None:
    """Memory of each GPU and the processes that hold it, now.

    Returns:
        None without a GPU. Processes of other containers are unseen.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    gpus: list[Used] = []
    processes: list[Holder] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append({"index": index, "used_gib": round(nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, 2)})
        for held in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            memory = round(held.usedGpuMemory / GIB, 2) if held.usedGpuMemory else None
            processes.append({"gpu": index, "pid": held.pid, "name": _name(held.pid), "gib": memory})
    nvml.nvmlShutdown()
    return {"gpus": gpus, "processes": processes}


def _leave(before: Look, mark: str, nvml: Any, wait_s: float) -> Record:
    ended = _end_marked(mark)
    deadline = time.monotonic() + wait_s
    while True:
        after = look(nvml) or before
        pairs = zip(before["gpus"], after["gpus"], strict=True)
        given_back = all(now["used_gib"] <= then["used_gib"] + GIVEN_BACK_GIB for then, now in pairs)
        if given_back or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    others = [process for process in before["processes"] if process["pid"] != os.getpid()]
    return {"before": before, "after": after, "others": others, "ended": ended, "given_back": given_back}


def _end_marked(mark: str) -> list[Ended]:
    """End the processes that carry a mark, by their id, and say which they were."""
    left = [process for process in psutil.process_iter() if _carries(process, mark)]
    ended: list[Ended] = [{"pid": process.pid, "name": _name(process.pid)} for process in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return ended


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.pid != os.getpid() and process.environ().get(MARK) == mark)
    except (psutil.Error, OSError):
        return False  # of another user, or gone


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "of another user or container"


def told(record: Mapping[str, Any]) -> list[str]:
    """What a report says of a record: nothing without a GPU, and one line for each thing to know."""
    if not record:
        return []
    lines = [
        f"GPU {process['gpu']}: process {process['pid']} ({process['name']}) held {process['gib']} GiB before the start"
        for process in record["others"]
    ]
    lines += [
        f"process {process['pid']} ({process['name']}) outlived the server and was ended" for process in record["ended"]
    ]
    used = ", ".join(
        f"GPU {then['index']}: {then['used_gib']} before, {now['used_gib']} after"
        for then, now in zip(record["before"]["gpus"], record["after"]["gpus"], strict=True)
    )
    verdict = "given back" if record["given_back"] else "not given back"
    return [*lines, f"memory {verdict} (GiB used: {used})"]
