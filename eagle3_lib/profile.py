"""Stage 02: where one decode spends its time, from the engine's own torch profiler.

The share of communication decides whether speculation can pay: it is paid once a step, whatever the step's number of
tokens. On a single CPU process there is none, and the stage says so.
"""

from . import engines, targets, traces
from .params import ProfileParams
from .provenance import project_path, stage, write_json


def run(params: ProfileParams) -> dict:
    """Serve the target, plainly or with a drafter, trace one decode, and share its time out by kind of operation.

    Returns:
        What :func:`eagle3_lib.traces.summarise` returns, with "tokens", "seconds", "drafter", "engine", "version", "load_s".
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    speculation = engines.PLAIN
    if params.drafter:
        speculation = engines.Speculation("drafter", params.drafter, params.num_speculative_tokens)
    with stage("profile", params) as notes:
        where = out / "traces"
        for old in where.glob("*"):
            old.unlink()
        tokenizer = targets.load_tokenizer(folder)
        prompt = targets.render(tokenizer, [{"role": "user", "content": params.prompt}])
        with engines.serve(params, folder, out / "server.log", speculation, profile_dir=where) as server:
            engines.complete(server, prompt, params.decode_tokens)
            engines.start_profile(server, where)
            answer = engines.complete(server, prompt, params.decode_tokens)
            engines.stop_profile(server)
        result = traces.summarise(traces.read(where)) | {
            "tokens": len(answer.output_ids),
            "seconds": round(answer.seconds, 3),
            "drafter": params.drafter,
        }
        result |= {"engine": server.engine, "version": server.version, "load_s": server.load_s}
        write_json(out / "profile.json", result)
        notes |= {"communication_share": result["communication_share"]}
    return result
