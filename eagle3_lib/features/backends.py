"""Where features come from: the target in transformers, vLLM's own extract_hidden_states, or SGLang's hidden states.

All give, for each text, :class:`eagle3_lib.targets.capture.Features` of the same boundaries, so that a store does not
depend on the backend, and :mod:`eagle3_lib.features.parity` can hold one against the other.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..engines.base import interpreter, log_tail
from ..engines.registry import ENGINES
from ..errors import Eagle3Error
from ..paths import ROOT
from ..process import end_group
from ..targets import targets
from ..targets.capture import RESIDUAL, Features, capture
from . import sglang_tap
from .wanted import Backend, Tail, Wanted

CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextlib.contextmanager
def transformers_backend(wanted: Wanted) -> Iterator[Backend]:
    """The target in this process; it is loaded at the first text."""
    loaded = []

    def features(texts: list[list[int]]) -> Iterator[Features]:
        if not loaded:
            loaded.append(targets.load(wanted.folder, getattr(torch, wanted.dtype), wanted.device))
        ids = wanted.draft_ids if wanted.draft_ids is None else wanted.draft_ids.to(wanted.device)
        yield from capture(loaded[0], texts, wanted.boundaries, draft_ids=ids)

    yield features


@contextlib.contextmanager
def vllm_backend(wanted: Wanted) -> Iterator[Backend]:
    """vLLM in a process of its own, for the length of a ``with`` block; the final norm and the head are applied here.

    Raises:
        Eagle3Error: vLLM ends; the last lines of its log are in the message.
    """
    tail = Tail(wanted)
    layers = targets.load_config(wanted.folder).num_hidden_layers
    ids = sorted({*wanted.boundaries, layers})  # vLLM gives them in ascending order, whatever is asked for
    build = ENGINES["vllm"].server.installed(wanted.engine_python)[1]
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="eagle3-") as folder:
        case = {
            "model": str(wanted.folder),
            "dtype": wanted.dtype,
            "boundaries": ids,
            "max_model_len": wanted.max_model_len,
            "folder": folder,
            "engine_options": wanted.engine_options or {},
        }
        (Path(folder) / "case.json").write_text(json.dumps(case))
        log = wanted.log or Path(folder) / "log"
        env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        command = [interpreter(wanted.engine_python), "-m", "eagle3_lib.engines.inside.vllm_tap", f"{folder}/case.json"]
        with log.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "eagle3_lib.process", "--group", *command],
                env=os.environ | env | (CPU_ENV if build == "cpu" else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )

        def answer() -> list[str]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Eagle3Error(f"vLLM's extraction ended.\n{log_tail(log)}")
            return json.loads(line)

        def features(texts: list[list[int]]) -> Iterator[Features]:
            print(json.dumps(texts), file=process.stdin, flush=True)
            for path, text in zip(answer(), texts, strict=True):
                states = load_file(path)["hidden_states"]  # [tokens, boundaries, Ht]
                for leftover in (path, f"{path}.lock"):
                    Path(leftover).unlink(missing_ok=True)
                if len(states) != len(text):
                    raise Eagle3Error(f"vLLM's extraction: found {len(states)} hidden states, expected {len(text)}")
                streams = {(RESIDUAL, k): states[:, i] for i, k in enumerate(ids)}
                yield tail.features(streams, layers)

        try:
            answer()  # it is ready
            yield features
        finally:
            end_group(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)


BACKENDS = {"transformers": transformers_backend, "vllm": vllm_backend, "sglang": sglang_tap.backend}


def offered(backend: str, layers: int) -> tuple[int, ...]:
    """The boundaries that a backend can give: not every engine gives the embedding's output and the last layer's."""
    outer = backend not in ENGINES or ENGINES[backend].spec.outer_boundaries
    return tuple(range(layers + 1) if outer else range(1, layers))
