"""Stage 02: where a decode spends its time, from the engine's own torch profiler.

The share of communication decides whether speculation can pay: it is paid once a step, whatever the step's number of
tokens. On a single CPU process there is none, and the stage says so.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..compat import launch
from ..engines import base, options, serving, traces
from ..files import write_json
from ..manifest import stage
from ..params import ProfileParams
from ..paths import project_path
from ..targets import targets

SHARES = "busy_s", "idle_share", "communication_share", "communication_hidden", "share"
OF_DECODE = "setup", "tensor_parallel", "eager", "batch", "engine", "version", "device", "tokens", "seconds", *SHARES


def run(params: ProfileParams) -> dict:
    """Serve the target in each setup, trace a decode of each batch, and share its time out by kind of operation.

    Returns:
        Of the first decode what :func:`eagle3_lib.engines.traces.summarise` returns, with "setup", "tensor_parallel": over how
        many ranks the target is divided, "eager", "batch": requests at a time, "tokens", "seconds", "target", "drafter",
        "engine", "version", "load_s"; and "decodes": of each the fields in ``OF_DECODE``.
    """
    out = project_path(params.out)
    with stage("profile", params) as notes:
        shutil.rmtree(out / "traces", ignore_errors=True)
        found = [decode for name, setup in params.servers().items() for decode in _decodes(name, setup, out)]
        result = found[0] | {"decodes": [{key: decode[key] for key in OF_DECODE} for decode in found]}
        write_json(out / "profile.json", result)
        notes |= {"communication_share": result["communication_share"]}
    return result


def _decodes(name: str, params: ProfileParams, out: Path) -> Iterator[dict]:
    """One server, a trace of each batch."""
    folder, speculation = targets.resolve(params.target), base.PLAIN
    if params.drafter:
        speculation = base.Speculation("drafter", params.drafter, params.num_speculative_tokens)
    prompt = targets.render(targets.load_tokenizer(folder), [{"role": "user", "content": params.prompt}])
    where = out / "traces" / name
    where.mkdir(parents=True)
    with launch.serve(params, folder, out / f"server_{name}.log", speculation, profile_dir=where) as server:
        for batch in params.batches:
            serving.decode(server, prompt, params.decode_tokens, batch)
            serving.start_profile(server, where)
            started = time.monotonic()
            tokens = serving.decode(server, prompt, params.decode_tokens, batch)
            seconds = time.monotonic() - started
            serving.stop_profile(server)
            yield traces.summarise(traces.read(_set_apart(where, batch)), batch) | {
                "setup": name,
                "tensor_parallel": options.tensor_parallel(params.engine_args),
                "eager": params.eager,
                "batch": batch,
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "target": params.target,
                "drafter": params.drafter,
                "engine": server.engine,
                "version": server.version,
                "load_s": server.load_s,
            }


def _set_apart(folder: Path, batch: int) -> Path:
    """Move the traces just written, which lie in the one folder that the server was given, to one of their batch's own."""
    own = folder / f"batch-{batch}"
    own.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            path.rename(own / path.name)
    return own
