"""Whether a running server serves the target: its token ids and a few greedy tokens, held against the target's folder.

Stages 00 and 03 ask servers that somebody else started. What another model says (another checkpoint, quantised, finetuned) is
no evidence about a drafter of the target and no text to train it on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from ..engines import running
from ..engines.base import Server
from ..errors import Eagle3Error
from ..params import GREEDY
from ..paths import project_path, usable_path
from ..results import MeasuredRequest
from ..targets import targets
from ..targets.identity import is_hub_id
from ..verdict import emitted

CHECKED_PROMPTS, CHECKED_TOKENS = 2, 24  # asked first, to see whether the served model is the target
OTHER_MODEL = 0.5  # share of those tokens that are not the target's choice, from which on the model is another one
WEIGHTS = ("*.safetensors", "*.bin")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Compared:
    """tokens: greedy tokens that the server gave; differ: those that are not the target's first choice, near ties left out."""

    tokens: int
    differ: int

    def words(self) -> str:
        """A sentence without its end, for remarks."""
        return f"{self.differ} of {self.tokens} greedy tokens of the served model are not the target's"


def ask(server: Server, prompts: Sequence[tuple[str, list[int]]]) -> list[MeasuredRequest]:
    """The server's greedy answers to the first few of some prompts, (id, token ids).

    Raises:
        Eagle3Error: it gives no token ids, or an error.
    """
    return [
        cast(
            MeasuredRequest, {"id": name, "prompt_ids": ids, "output_ids": running.greedy(server, ids, CHECKED_TOKENS)}
        )
        for name, ids in prompts[:CHECKED_PROMPTS]
    ]


@dataclass(frozen=True)
class Target:
    """The target's folder, loaded once for all servers that are held against it. name: as the user calls it."""

    name: str
    folder: Path
    model: Any

    @classmethod
    def load(cls, name: str, folder: Path, dtype: str, device: str) -> "Target":
        """Load the target's weights; dtype as in params.

        Raises:
            Eagle3Error: transformers cannot load them.
        """
        try:
            model = targets.load(folder, getattr(torch, dtype), device)
        except Exception as error:  # whatever a model's own code, a missing package or a damaged file raises
            reason = str(error).partition("\n")[0]
            raise Eagle3Error(
                f"target: {name}: its weights cannot be loaded: {type(error).__name__}: {reason}"
            ) from error
        return cls(name, folder, model)

    def words(self) -> str:
        """The target's name, with its folder where the name is another one."""
        return self.name if project_path(self.name) == self.folder else f"{self.name} ({usable_path(self.folder)})"

    def compare(self, server: Server, answers: Sequence[MeasuredRequest]) -> Compared:
        """How the server's greedy answers compare with the target's.

        Raises:
            Eagle3Error: the served model is another one: more than half of its tokens are not the target's, or it gives ids
                beyond the target's vocabulary.
        """
        where = f"model: {server.url} serves {server.model!r}"
        size = self.model.get_input_embeddings().weight.shape[0]
        most = max(max(answer["output_ids"]) for answer in answers)
        if most >= size:
            raise Eagle3Error(
                f"{where} and answers with the token id {most}, expected ids below {size}, the vocabulary of {self.words()}"
            )
        how = emitted.Told(GREEDY, "bfloat16", targets.end_ids(self.folder))
        layer = self.model.config.get_text_config().num_hidden_layers
        found = emitted.plain(self.model, layer, answers, how)
        compared = Compared(found["tokens"], found["not_greedy"] or 0)
        if compared.differ > OTHER_MODEL * compared.tokens:
            raise Eagle3Error(
                f"{where}: {compared.differ} of {compared.tokens} greedy tokens that the server gave are not those of "
                f"{self.words()}. Either it serves another model (another checkpoint, quantised, finetuned), or it computes this "
                f"one wrongly now.{_others(server)} Expected the folder that the server was started with"
            )
        return compared


def _others(server: Server) -> str:
    """A sentence about requests of others, which may be why a server computes wrongly; "" for none."""
    now = running.busy(server)
    if now is None or not now.running:
        return ""
    return f" {now.running} requests of others are under way: ask again when it is idle."


def local_folder(target: str, dtype: str) -> Path:
    """The target's folder where its weights lie on this machine and fit into its memory; nothing is downloaded from a model hub.

    Args:
        dtype: in which they would be loaded.
    Raises:
        Eagle3Error: they are not here, or take more memory than is free.
    """
    if is_hub_id(target) and not project_path(target).exists():
        folder = _downloaded(target)
    else:
        folder = targets.resolve(target)
    stored = sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))
    if not stored:
        raise Eagle3Error(f"the weights of {target} are not on this machine")
    config = json.loads((folder / "config.json").read_text())
    kept = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    need, free = stored * BYTES[dtype] / BYTES.get(kept, 2), psutil.virtual_memory().available
    if need > free:
        raise Eagle3Error(
            f"the weights of {target} take {need / 2**30:.1f} GiB in {dtype}, and {free / 2**30:.1f} GiB of memory are free"
        )
    return folder


def _downloaded(target: str) -> Path:
    """The folder of a target that was downloaded from the model hub earlier.

    Raises:
        Eagle3Error: it was not.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, local_files_only=True))
    except Exception as error:
        raise Eagle3Error(f"the weights of {target} are not on this machine") from error
