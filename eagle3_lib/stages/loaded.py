"""Whether the drafter that a running server says it has loaded is the one whose folder it is diagnosed with.

The server tells a path or a hub id of its own machine. Where that path, or a downloaded copy of that id, is on this machine too,
weights and config.json are compared; elsewhere only the last part of the path can be.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..drafter import checkpoint
from ..errors import Eagle3Error
from ..paths import project_path
from ..targets.identity import files_identity, is_hub_id

SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)/snapshots/")  # in the model hub's cache the last part is a commit
NOT_THE_DRAFTER = {"_name_or_path", "transformers_version"}  # fields of config.json that change nothing


@dataclass(frozen=True)
class Loaded:
    """What the server says beside what the user gave.

    same: weights and config.json are the same; None where that cannot be told. words: a sentence; "" where there is nothing to
    say. remark: whether the sentence is a doubt.
    """

    server: str
    given: str
    same: bool | None = None
    words: str = ""

    @property
    def remark(self) -> bool:
        return bool(self.words) and not self.same


def compare(server: str, given: str) -> Loaded:
    """Hold what a server says it has loaded against a drafter's folder.

    Args:
        server: a path or hub id of the server's machine; "" where it tells none.
        given: the folder, as in params.
    """
    ours, said = project_path(given), f"the server says it has loaded {server!r}"
    if not server:
        return Loaded(server, given)
    here = _on_this_machine(server)
    if here is not None and here.resolve() == ours.resolve():
        return Loaded(server, given, True, f"{said}: on this machine that is the folder that you gave")
    try:
        difference = _difference(here, ours) if here else None
    except Eagle3Error:  # a folder that cannot be read tells nothing
        difference = None
    if difference == "":
        return Loaded(
            server, given, True, f"{said}: its copy on this machine has the weights and the config.json of {given!r}"
        )
    if difference:
        return Loaded(server, given, False, f"{said}; you gave {given!r}: beside the copy on this machine {difference}")
    names = {_name(given), _name(str(ours.resolve()))}
    if _name(server) in names:
        return Loaded(server, given)
    doubt = "if these are not the same drafter, the verdict is about the wrong one"
    return Loaded(server, given, None, f"{said}; you gave {given!r}: {doubt}")


def _on_this_machine(server: str) -> Path | None:
    """The folder of the server's path, or a downloaded copy of its hub id; None where it is not here."""
    path = Path(server)
    if path.is_absolute():
        return path if path.is_dir() else None
    if not is_hub_id(server):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(server, "config.json")
    except ValueError:  # no id of the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def _difference(theirs: Path, ours: Path) -> str:
    """In what two drafters' folders differ, as the end of a sentence; "" where weights and config.json are the same.

    Raises:
        Eagle3Error: a folder without weights or config.json.
    """
    if files_identity(checkpoint.weight_files(theirs)) != files_identity(checkpoint.weight_files(ours)):
        return "its weight files are others"
    one, other = checkpoint.read_config(theirs), checkpoint.read_config(ours)
    fields = sorted(name for name in (one.keys() | other.keys()) - NOT_THE_DRAFTER if one.get(name) != other.get(name))
    return f"its weights are the same, and config.json differs in {', '.join(fields)}" if fields else ""


def _name(path: str) -> str:
    """The last part of a path or hub id, in lower case."""
    cached = SNAPSHOT.search(path)
    return (cached[1] if cached else PurePosixPath(path).name).casefold()
