"""What an interpreter's engine is built for. Runs below that interpreter, so it imports nothing of this project:

    ENGINE_PYTHON eagle3_lib/engines/inside/fit_probe.py PACKAGE ...     prints JSON: {"torch", "kernels"}

torch: {"version", "cuda", "architectures"}, or None. kernels: of each of the packages that is installed there:
{"package", "version", "files": {name: {"sm": [...], "ptx": [...]}}}, compute capabilities such as "9.0". They are
read from the libraries' fat binaries: the header of each one, and of each image in it (layout as in CUDA's fatbinary.h and
as seen in cuobjdump's listing: kind 1 is PTX, 2 is machine code; the architecture is a number such as 90 or 120).
"""

import importlib.metadata
import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = b"\x50\xed\x55\xba"
HEADER, IMAGE = struct.Struct("<4sHHQ"), struct.Struct("<HHIQIIHHI")
KINDS = {1: "ptx", 2: "sm"}


def capability(number: int) -> str:
    """90 -> "9.0", 120 -> "12.0"."""
    return f"{number // 10}.{number % 10}"


def images(path: Path) -> dict[str, list[str]]:
    """The architectures of a library's GPU code: machine code ("sm") and PTX."""
    found: dict[str, set[int]] = {"sm": set(), "ptx": set()}
    if path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            at = library.find(MAGIC)
            while at >= 0:
                for kind, number in _images_at(library, at):
                    found[kind].add(number)
                at = library.find(MAGIC, at + len(MAGIC))
    return {kind: [capability(number) for number in sorted(numbers)] for kind, numbers in found.items()}


def _images_at(library: mmap.mmap, at: int) -> Iterator[tuple[str, int]]:
    """(kind, architecture) of the images of the fat binary whose header may stand at ``at``."""
    if at + HEADER.size > len(library):
        return
    _, version, header_size, size = HEADER.unpack_from(library, at)
    place, end = at + header_size, at + header_size + size
    if version != 1 or header_size != HEADER.size or end > len(library):
        return  # the four bytes stand there by chance
    while place + IMAGE.size <= end:
        kind, _, image_header, image_size, _, _, _, _, number = IMAGE.unpack_from(library, place)
        if kind in KINDS:
            yield KINDS[kind], number
        place += max(image_header + image_size, IMAGE.size)


def kernels(package: str) -> dict[str, Any] | None:
    """A package's libraries that hold GPU code; None where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = {}
    for file in distribution.files or []:
        if file.suffix == ".so":
            found = images(Path(str(distribution.locate_file(file))))
            if found["sm"] or found["ptx"]:
                files[str(file)] = found
    return {"package": package, "version": distribution.version, "files": files}


def torch_build() -> dict[str, Any] | None:
    """torch's CUDA version (None: a build without CUDA) and the architectures that it was compiled for."""
    try:
        import torch
    except ImportError:
        return None
    flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
    return {"version": torch.__version__, "cuda": torch.version.cuda, "architectures": (flags or "").split()}


if __name__ == "__main__":
    json.dump({"torch": torch_build(), "kernels": [k for k in map(kernels, sys.argv[1:]) if k]}, sys.stdout)
