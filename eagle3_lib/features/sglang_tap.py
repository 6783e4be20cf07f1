"""What SGLang returns of token sequences: the residual stream at the boundaries, or the last hidden state.

A server returns one or the other, so features take two. Read in SGLang 0.5.23, and not yet run against it:

- srt/arg_groups/validation_hook.py, handle_aux_hidden_state_capture: EAGLE-3's layers without a drafter;
- srt/layers/logits_processor.py, _get_hidden_states_to_store: these layers side by side, in rising order, in place of what
  comes out of the final norm;
- srt/managers/scheduler_components/batch_result_processor.py, _append_prefill_hidden_states: the rows that a request's last
  prefill computes; those of cached tokens and of earlier chunks are not kept;
- output_streamer.py beside it: an entry for each new token, of which the first holds the prompt's rows. So one token is
  asked for; with none nothing is returned.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from torch import Tensor

from ..compat import launch, rules
from ..drafter.checkpoint import IDS
from ..engines import versions
from ..engines.base import failure, interpreter
from ..engines.registry import ENGINES
from ..errors import Eagle3Error
from ..params import Serving
from ..targets import targets
from ..targets.capture import Features, choices
from .wanted import Backend, Tail, Wanted

SGLANG = ENGINES["sglang"]
Tap = Callable[[list[int]], Tensor]
CAPTURE = "--enable-return-aux-hidden-states"
WHOLE_PROMPTS = ("--disable-radix-cache", "--chunked-prefill-size", "-1")
START_TIMEOUT_S = 3600


@contextlib.contextmanager
def backend(wanted: Wanted) -> Iterator[Backend]:
    """Features by SGLang for the length of a ``with`` block; the head is applied here, from the target's files.

    Where ``wanted.last_hidden`` is False its server is not started, and features have ``fused`` alone.

    Raises:
        Eagle3Error: this SGLang returns no boundaries, or not these, or it fails; the end of its log is in the message.
    """
    tail = Tail(wanted) if wanted.last_hidden else None
    with contextlib.ExitStack() as stack:
        taps = [stack.enter_context(boundaries(wanted))]
        if tail:
            taps.append(stack.enter_context(last_hidden(wanted)))
        pool = stack.enter_context(ThreadPoolExecutor(len(taps)))

        def features(texts: list[list[int]]) -> Iterator[Features]:
            for text in texts:
                fused, *rest = [done.result() for done in [pool.submit(tap, text) for tap in taps]]
                if not tail:
                    yield Features(fused, fused[:, :0], torch.empty(0, dtype=torch.long))
                    continue
                last = rest[0].to(tail.head.device)
                argmax, mass = choices(lambda hidden: hidden @ tail.head.T, last, tail.draft_ids)
                yield Features(fused, last, argmax, draft_mass=mass)

        yield features


@contextlib.contextmanager
def boundaries(wanted: Wanted) -> Iterator[Tap]:
    """A server that gives [T, boundaries x Ht] of a text, in the order of ``wanted.boundaries``."""
    version = SGLANG.server.installed(wanted.engine_python)[0]
    command = (interpreter(wanted.engine_python), "-m", "sglang.launch_server")
    if CAPTURE not in versions.of_engine(SGLANG.spec, command):
        raise Eagle3Error(
            f"sglang {version} returns the last hidden state alone; expected a version with {CAPTURE}, such as 0.5.23"
        )
    rising = sorted(set(wanted.boundaries))
    places = [rising.index(k) for k in wanted.boundaries]
    target = rules.Target.from_config(json.loads((wanted.folder / "config.json").read_text()))
    ids = layer_ids(rising, version, target)
    words = [CAPTURE, "--speculative-algorithm", "EAGLE3", "--return-aux-hidden-state-layer-ids", *map(str, ids)]
    with _serve(wanted, words, wanted.engine_options or {}, len(rising)) as tap:
        yield lambda text: tap(text).unflatten(-1, (len(rising), -1))[:, places].flatten(1)


@contextlib.contextmanager
def last_hidden(wanted: Wanted) -> Iterator[Tap]:
    """A server that gives [T, Ht] of a text, after the final norm; ``last_hidden`` in its options holds for it alone."""
    given = wanted.engine_options or {}
    with _serve(wanted, ["--enable-return-hidden-states"], given | given.get("last_hidden", {}), 1) as tap:
        yield tap


def layer_ids(rising: list[int], version: str, target: rules.Target) -> list[int]:
    """The ids that make an SGLang version capture these boundaries; most models take k - 1 for boundary k.

    Raises:
        Eagle3Error: no ids do, as for the embedding's output and the last layer's.
    """
    for ids in ([k - 1 for k in rising], rising, rising[::-1]):  # DeepSeek adds 1 where the first id is 1, else nothing
        found = rules.captured({"eagle_config": {IDS: ids}}, "sglang", version, target).boundaries
        if found == tuple(rising) and 0 < rising[0] and rising[-1] < target.layers:
            return ids
    raise Eagle3Error(
        f"boundaries: found {rising}, of which sglang {version} gives not all; expected 1 to {target.layers - 1}"
    )


@contextlib.contextmanager
def _serve(wanted: Wanted, words: list[str], given: dict, streams: int) -> Iterator[Tap]:
    """A server whose answers hold ``streams`` hidden states a token."""
    dtype, width = getattr(torch, wanted.dtype), streams * targets.load_config(wanted.folder).hidden_size
    settings = {
        "out": "",
        "engine": "sglang",
        "engine_python": wanted.engine_python,
        "engine_args": [*WHOLE_PROMPTS, *words, *_words(given)],
        "dtype": wanted.dtype,
        "max_model_len": max(16, wanted.max_model_len),
        "start_timeout_s": START_TIMEOUT_S,
    }
    with (
        tempfile.TemporaryDirectory(prefix="eagle3-") as folder,
        launch.serve(Serving.model_validate(settings), wanted.folder, Path(folder) / "sglang.log") as server,
    ):

        def tap(text: list[int]) -> Tensor:
            sampling = {"temperature": 0, "max_new_tokens": 1}
            body = {"input_ids": text, "sampling_params": sampling, "return_hidden_states": True}
            try:
                reply = httpx.post(f"{server.url}/generate", json=body, timeout=server.stall_s)
                reply.raise_for_status()
                found = reply.json().get("meta_info", {}).get("hidden_states") or [[]]
            except (httpx.HTTPError, ValueError) as error:
                raise Eagle3Error(failure(server, error)) from error
            states = torch.tensor(found[0], dtype=dtype)
            if states.shape != (len(text), width):
                raise Eagle3Error(
                    f"sglang {server.version}: found hidden states {list(states.shape)} of a text, "
                    f"expected {[len(text), width]}"
                )
            return states

        yield tap


def _words(given: dict) -> list[str]:
    """Command-line words of {"tp_size": 2, "trust_remote_code": True}."""
    words = []
    for name, value in given.items():
        if value is False or isinstance(value, dict):
            continue
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words
