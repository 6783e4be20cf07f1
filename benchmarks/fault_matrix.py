"""The fault matrix: break the real vLLM on purpose, one fault at a time, and see whether diagnose names the fault.

    python benchmarks/fault_matrix.py                 all faults; runs that exist are kept
    python benchmarks/fault_matrix.py --only "d2t dropped" "token shift"
    python benchmarks/fault_matrix.py --judge         judge the runs that exist, start no engine

Each engine run is one process (about a minute on two cores) and leaves runs/fault_matrix/NAME.json. The judgement of
all runs is benchmarks/results/fault_matrix.json.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from eagle3_lib import broken
from eagle3_lib.faults import HEALTHY as CORRECT
from eagle3_lib.provenance import hardware, project_path, short_path, versions, write_json

TARGET = "models/SmolLM2-135M-Instruct"
DRAFTER = "drafters/smollm2-135m-eagle3"
PROMPTS = "tests/data/vllm_cpu_replay.json"
RUNS = "runs/fault_matrix"
POSITIONS, MAX_TOKENS, MODEL_LENGTH = 4, 100, 1024
HEALTHY_RUNS = {  # more healthy engines than the plain one
    "none, bfloat16": {"dtype": "bfloat16"},
    "none, finetuned drafter": {"drafter": "runs/quickstart/train/drafter"},  # of `make demo`
}
HEALTHY_REPLAYS = {  # stage 08 of `make demo`: the HTTP server, other prompts
    "none, base drafter on Python": "runs/quickstart/replay/vllm/base",
    "none, finetuned drafter on Python": "runs/quickstart/replay/vllm/finetuned",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: none of them spins while another works
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def run_file(name: str) -> Path:
    return project_path(RUNS) / f"{name.replace(' ', '_')}.json"


def run_engine(name: str, fault: str, drafter: str = DRAFTER, **settings) -> Path:
    """One engine run in a process of its own; its record is kept and not made twice."""
    out = run_file(name)
    if out.is_file():
        return out
    folder = broken.shim(drafter, fault, project_path(RUNS) / "drafters" / out.stem, TARGET)
    job = {"name": name, "fault": fault, "drafter": short_path(drafter), "served": str(folder), "out": str(out)}
    job |= {"dtype": "float32", "temperature": 0, "prompts": PROMPTS} | settings
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(project_path("."))}
    log = out.with_suffix(".log")
    with log.open("w") as sink:
        command = [sys.executable, __file__, "--engine", json.dumps(job)]
        done = subprocess.run(command, env=environment, stdout=sink, stderr=sink)
    if done.returncode:
        sys.exit(f"{name}: the engine ended with status {done.returncode}:\n{log.read_text()[-3000:]}")
    return out


def engine(job: dict) -> None:
    """Serve the recorded prompts with the (broken) engine and write what it did. Runs in its own process."""
    import vllm

    prompts = [request["prompt_ids"] for request in json.loads(project_path(job["prompts"]).read_text())["requests"]]
    speculation = {"method": "eagle3", "model": job["served"], "num_speculative_tokens": POSITIONS}
    llm = vllm.LLM(
        str(project_path(TARGET)),
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        max_num_seqs=16,
        disable_log_stats=False,
        per_request_spec_decode_metrics="none" if job.get("plain") else "detailed",
        worker_extension_cls=broken.extension(job["fault"]),
        speculative_config=None if job.get("plain") else speculation,
    )
    sampling = vllm.SamplingParams(temperature=job["temperature"], max_tokens=MAX_TOKENS, seed=job.get("seed"))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    requests = [
        {
            "id": str(index),
            "prompt_ids": prompts[index],
            "output_ids": list(output.outputs[0].token_ids),
            "per_step_accepted": [] if job.get("plain") else output.outputs[0].spec_decode_metrics.per_step_accepted,
        }
        for index, output in enumerate(outputs)
    ]
    record = {k: job[k] for k in ("name", "fault", "drafter", "dtype", "temperature")}
    record |= {"engine": f"vllm {vllm.__version__}", "num_speculative_tokens": POSITIONS, "max_tokens": MAX_TOKENS}
    write_json(Path(job["out"]), record | {"requests": requests})


@functools.cache
def target():
    import torch

    from eagle3_lib import targets

    return targets.load(targets.resolve(TARGET), torch.float32)


@functools.cache
def everywhere(drafter: str, tokens: str, steps: int):
    """Every hypothesis at every slot of some texts: greedy runs of all faults emit the same ones, and share this."""
    from eagle3_lib import checkpoint, faults, replay

    setups = faults.hypotheses(
        checkpoint.load_for(drafter, TARGET, target()), faults.TargetParts.of(target()), names=None
    )
    features, texts = faults.forward(target(), setups, json.loads(tokens))
    slots = replay.all_slots(texts)
    counts = {name: replay.counts_at(s, texts, slots, steps) for name, s in setups.items() if not s.stale}
    return setups, features, texts, counts


def examine(out: Path) -> dict:
    """The replay of one engine run under every hypothesis; kept beside the run."""
    kept = out.with_suffix(".replay.json")
    if not kept.is_file():
        from eagle3_lib import emitted, faults, replay

        record = json.loads(out.read_text())
        steps, requests = record["num_speculative_tokens"], record["requests"]
        rounds = [request["per_step_accepted"] for request in requests]
        tokens = json.dumps([{key: request[key] for key in ("id", "prompt_ids", "output_ids")} for request in requests])
        setups, features, texts, counts = everywhere(record["drafter"], tokens, steps)
        starts = texts.prompt_lengths
        slots = [replay.round_slots(some, start) for some, start in zip(rounds, starts, strict=True)]
        at_rounds = {
            name: [[c[s - p + 1] for s in some] for c, some, p in zip(by_request, slots, starts, strict=True)]
            for name, by_request in counts.items()
            if name != CORRECT
        }
        stale = {name: setup for name, setup in setups.items() if setup.stale}
        at_rounds |= faults.replay_all(stale, texts, rounds, steps)
        requests = [request | {"accepted": some} for request, some in zip(requests, rounds, strict=True)]
        laid = faults.lay_all(requests, steps)
        examined = []
        for index, request in enumerate(requests):
            of_request = {name: by_request[index] for name, by_request in at_rounds.items()}
            row = faults.tell(request, laid[index], counts[CORRECT][index], of_request, steps)
            drafter = setups[CORRECT].drafter
            tokens = emitted.compare(target(), drafter, request, features[index], None, steps, emitted.Told())
            examined.append(row | tokens)
        name = Path(record["drafter"]).name
        write_json(kept, {"drafter": name, "positions": steps, "requests": examined})
    return json.loads(kept.read_text())


def judged(record: dict, replay: dict) -> dict:
    """One row of the matrix."""
    from eagle3_lib import diagnose

    verdict = diagnose.judge(replay)
    agreement = {row["hypothesis"]: row["value"] for row in verdict.evidence["ranking"]}
    fault = record["fault"]
    named = [name for name in (verdict.fault, *verdict.ties) if name]
    row = {
        "run": record["name"],
        "fault": fault,
        "dtype": record["dtype"],
        "drafter": record["drafter"],
        "rounds": sum(len(request["engine_rounds"]) for request in replay["requests"]),
        "rounds_compared": verdict.evidence["rounds_compared"],
        "mean_length": verdict.evidence["engine"]["mean_length"]["value"],
        "verdict": verdict.kind,
        "named": verdict.fault,
        "agreement_correct_engine": agreement[CORRECT],
    }
    if fault == "none":
        return row
    others = {name: value for name, value in agreement.items() if name not in named and name != fault}
    runner_up = max(others, key=others.get)
    return row | {
        "rank_of_true": 1 if fault in named else 1 + sum(value > agreement[fault] for value in agreement.values()),
        "agreement_true": agreement[fault],
        "runner_up": runner_up,
        "agreement_runner_up": others[runner_up],
        "tie_with": [name for name in named if name != fault],
    }


def write_matrix() -> dict:
    """Judge every run that exists, print the table, and write benchmarks/results/fault_matrix.json."""
    files = [run_file(name) for name in (*broken.INJECTIONS, *HEALTHY_RUNS) if run_file(name).is_file()]
    rows = [judged(json.loads(path.read_text()), examine(path)) for path in files]
    for name, folder in HEALTHY_REPLAYS.items():
        if (path := project_path(folder) / "replay.json").is_file():
            record = {"name": name, "fault": "none", "dtype": "float32", "drafter": folder}
            rows.append(judged(record, json.loads(path.read_text())))
    faults, healthy = ([row for row in rows if (row["fault"] == "none") == none] for none in (False, True))
    order = list(broken.INJECTIONS)
    faults.sort(key=lambda row: order.index(row["fault"]))
    result = {
        "command": "python benchmarks/fault_matrix.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "target": TARGET,
        "positions": POSITIONS,
        "rows": faults,
        "healthy": healthy,
        "first_or_tied": sum(row["rank_of_true"] == 1 for row in faults),
        "healthy_false_alarms": sum(row["verdict"] not in ("healthy", "weak drafter") for row in healthy),
    }
    write_json(project_path("benchmarks/results/fault_matrix.json"), result)
    print(table(result))
    return result


def table(result: dict) -> str:
    """The matrix in Markdown, for docs/faults.md."""
    lines = [
        "| fault in the engine | rounds | mean length | reproduced by it | by a correct engine | by the next | told from all but |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['fault']} | {row['rounds']} | {row['mean_length']:.2f} | {row['agreement_true']:.1%} | "
            f"{row['agreement_correct_engine']:.1%} | {row['agreement_runner_up']:.1%} ({row['runner_up']}) | "
            f"{', '.join(row['tie_with']) or '-'} |"
        )
    for row in result["healthy"]:
        lines.append(
            f"| none ({row['run']}) | {row['rounds']} | {row['mean_length']:.2f} | | "
            f"{row['agreement_correct_engine']:.1%} | | verdict: {row['verdict']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*broken.INJECTIONS, *HEALTHY_RUNS], metavar="RUN")
    parser.add_argument("--judge", action="store_true", help="judge the runs that exist, start no engine")
    parser.add_argument("--no-judge", action="store_true", help="only run the engine")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return engine(json.loads(arguments.engine))
    if not arguments.judge:
        for name in arguments.only:
            settings = HEALTHY_RUNS.get(name, {})
            if project_path(settings.get("drafter", DRAFTER)).is_dir():
                print(run_engine(name, "none" if name in HEALTHY_RUNS else name, **settings), flush=True)
    if not arguments.no_judge:
        write_matrix()


if __name__ == "__main__":
    main()
