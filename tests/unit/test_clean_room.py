"""The GPUs around a server: who holds them, what is ours and ended, whether memory comes back."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from eagle3_lib.engines import clean_room

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Driver:
    """pynvml's functions over one GPU whose memory and processes a test sets (NVML's fields, bytes)."""

    NVMLError = RuntimeError

    def __init__(self, used_gib, holders=()):
        self.used_gib, self.holders = used_gib, holders

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self.used_gib * clean_room.GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.holders]


@pytest.fixture
def started():
    processes = []

    def start(mark):
        processes.append(subprocess.Popen(SLEEP, env=os.environ | ({clean_room.MARK: mark} if mark else {})))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_ours_are_ended_and_others_only_listed(started):
    stranger, of_another_server = started(""), started("another")
    driver = Driver(70.25, [(stranger.pid, 70 * clean_room.GIB), (of_another_server.pid, None)])
    with clean_room.watched("ours", driver, wait_s=0) as record:
        assert record == {}
        left = started("ours")
    assert not psutil.pid_exists(left.pid) and stranger.poll() is None and of_another_server.poll() is None
    assert [process["pid"] for process in record["ended"]] == [left.pid] and record["given_back"]
    name = psutil.Process(stranger.pid).name()
    assert record["others"][0] == {"gpu": 0, "pid": stranger.pid, "name": name, "gib": 70.0}
    assert record["others"][1]["gib"] is None
    lines = clean_room.told(record)
    assert lines[0] == f"GPU 0: process {stranger.pid} ({name}) held 70.0 GiB before the start"
    assert "outlived the server and was ended" in lines[2]
    assert lines[3] == "memory given back (GiB used: GPU 0: 70.25 before, 70.25 after)"


def test_memory_that_does_not_come_back_is_told():
    driver = Driver(1.0)
    with clean_room.watched("ours", driver, wait_s=0) as record:
        driver.used_gib = 100.0
    assert not record["given_back"] and record["ended"] == []
    assert clean_room.told(record) == ["memory not given back (GiB used: GPU 0: 1.0 before, 100.0 after)"]


def test_a_failing_run_is_cleaned_up_too(started):
    with pytest.raises(ValueError), clean_room.watched("ours", Driver(1.0), wait_s=0) as record:
        left = started("ours")
        raise ValueError
    assert not psutil.pid_exists(left.pid) and record["given_back"]


def test_without_a_gpu_there_is_no_record():
    if clean_room.look() is not None:
        pytest.skip("this machine has a GPU")
    with clean_room.watched("ours") as record:
        pass
    assert record == {} and clean_room.told(record) == []
