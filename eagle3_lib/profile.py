"""Stage 02: where one plain decode spends its time, from the engine's own torch profiler.

The share of communication decides whether speculation can pay: it is paid once a step, whatever the step's number of
tokens. On a single CPU process there is none, and the stage says so.
"""

import gzip
import json
import re
from pathlib import Path

from . import engines, targets
from .errors import Eagle3Error
from .params import ProfileParams
from .provenance import project_path, stage, write_json

# First match wins. Kernel names: vLLM and SGLang custom all-reduce, NCCL, gloo; ATen and oneDNN operators on CPUs.
KINDS = {
    "communication": r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|nccl|gloo|c10d|one_?shot|two_?shot",
    "attention": r"attention|attn|flash|paged|mla|reshape_and_cache|slot_mapping",
    "mixture of experts": r"moe|expert|grouped_gemm|topk_softmax",
    "dense matmul": r"gemm|matmul|addmm|::mm$|::bmm|linear|onednn|cublas|cutlass|nvjet",
    "normalisation and rope": r"norm|rotary|rope",
    "sampling": r"sampl|argmax|softmax|topk|multinomial|sort",
    "elementwise and copies": r"copy|cat|add|mul|silu|index|fill|zero|to$|_to_|clone|embedding|gather|select|slice|where"
    r"|elementwise|memcpy|memset|stack|arange|resize|empty|sub|div|cumsum|eq|nonzero|pad|repeat",
}


def run(params: ProfileParams) -> dict:
    """Serve the target plainly, trace one decode, and share its time out by kind of operation.

    Returns:
        {"device", "tokens", "busy_s", "share": {kind: share}, "top": [[name, kind, seconds, calls]],
        "communication_share"}.
    """
    out, folder = project_path(params.out), targets.resolve(params.target)
    with stage("profile", params) as notes:
        traces = out / "traces"
        for old in traces.glob("*"):
            old.unlink()
        tokenizer = targets.load_tokenizer(folder)
        prompt = targets.render(tokenizer, [{"role": "user", "content": params.prompt}])
        with engines.serve(params, folder, out / "server.log", profile_dir=traces) as server:
            engines.complete(server, prompt, params.decode_tokens)
            engines.start_profile(server, traces)
            answer = engines.complete(server, prompt, params.decode_tokens)
            engines.stop_profile(server)
        result = summarise(_read_traces(traces)) | {
            "tokens": len(answer.output_ids),
            "seconds": round(answer.seconds, 3),
        }
        result |= {"engine": server.engine, "version": server.version, "load_s": server.load_s}
        write_json(out / "profile.json", result)
        notes |= {"communication_share": result["communication_share"]}
    return result


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _read_traces(folder: Path) -> list[dict]:
    """Complete events of the busiest trace file (one a process; the API server's has no operators)."""
    best: list[dict] = []
    for path in sorted(folder.rglob("*.json*")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            events = [
                e
                for e in json.load(file).get("traceEvents", [])
                if e.get("ph") == "X" and e.get("cat") in ("kernel", "cpu_op")
            ]
        best = max(best, events, key=len)
    if not best:
        raise Eagle3Error(
            f"{folder}: found no trace with operators in it; expected one from the engine's torch profiler"
        )
    return best


def summarise(events: list[dict]) -> dict:
    """Time by kind of operation: GPU kernels where there are any, else CPU operators by the time that is their own.

    Args:
        events: complete events ("ph": "X") of a Chrome trace, times in microseconds.
    """
    kernels = [event for event in events if event["cat"] == "kernel"]
    rows = [(event["name"], event["dur"]) for event in kernels] if kernels else own_times(events)
    total = sum(duration for _, duration in rows)
    by_name: dict[str, list[float]] = {}
    for name, duration in rows:
        entry = by_name.setdefault(name, [0.0, 0])
        entry[0] += duration
        entry[1] += 1
    share = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, (duration, _) in by_name.items():
        share[kind_of(name)] += duration / total
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:15]
    return {
        "device": "gpu" if kernels else "cpu",
        "busy_s": round(total / 1e6, 4),
        "share": {kind: round(value, 4) for kind, value in share.items()},
        "communication_share": round(share["communication"], 4),
        "top": [[name, kind_of(name), round(duration / 1e6, 4), calls] for name, (duration, calls) in top],
    }


def own_times(events: list[dict]) -> list[tuple[str, float]]:
    """Each operator's duration without the operators nested in it, thread by thread."""
    own: list[list] = []
    threads: dict[tuple, list] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack = threads.setdefault((event["pid"], event["tid"]), [])
        while stack and event["ts"] >= stack[-1][1]:
            stack.pop()
        if stack:
            own[stack[-1][0]][1] -= event["dur"]
        stack.append((len(own), event["ts"] + event["dur"]))
        own.append([event["name"], event["dur"]])
    return [(name, max(duration, 0.0)) for name, duration in own]
