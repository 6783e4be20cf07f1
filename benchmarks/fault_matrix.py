"""The fault matrix: break the real vLLM on purpose, one fault at a time, and see whether diagnose names the fault.

    python benchmarks/fault_matrix.py                 all faults; runs that exist are kept
    python benchmarks/fault_matrix.py --only "d2t dropped" "token shift"
    python benchmarks/fault_matrix.py --judge         judge the runs that exist, start no engine

Each engine run is one process (about a minute on two cores) and leaves runs/fault_matrix/NAME.json. The judgement of
all runs is benchmarks/results/fault_matrix.json.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from eagle3_lib import broken
from eagle3_lib.provenance import project_path, write_json

TARGET = "models/SmolLM2-135M-Instruct"
DRAFTER = "drafters/smollm2-135m-eagle3"
PROMPTS = "tests/data/vllm_cpu_replay.json"
RUNS = "runs/fault_matrix"
POSITIONS, MAX_TOKENS, MODEL_LENGTH = 4, 100, 1024
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
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
    job = {
        "name": name,
        "fault": fault,
        "drafter": str(folder),
        "out": str(out),
        "dtype": "float32",
        "temperature": 0,
    } | settings
    environment = os.environ | ENVIRONMENT | {broken.VARIABLE: fault, "PYTHONPATH": str(project_path("."))}
    log = out.with_suffix(".log")
    with log.open("w") as sink:
        done = subprocess.run(
            [sys.executable, __file__, "--engine", json.dumps(job)], env=environment, stdout=sink, stderr=sink
        )
    if done.returncode:
        sys.exit(f"{name}: the engine ended with status {done.returncode}:\n{log.read_text()[-3000:]}")
    return out


def engine(job: dict) -> None:
    """Serve the recorded prompts with the (broken) engine and write what it did. Runs in its own process."""
    import vllm

    prompts = [request["prompt_ids"] for request in json.loads(project_path(PROMPTS).read_text())["requests"]]
    llm = vllm.LLM(
        str(project_path(TARGET)),
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        max_num_seqs=16,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        worker_extension_cls=broken.EXTENSION,
        speculative_config={"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": POSITIONS},
    )
    sampling = vllm.SamplingParams(temperature=job["temperature"], max_tokens=MAX_TOKENS, seed=job.get("seed"))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    requests = [
        {
            "id": str(index),
            "prompt_ids": prompts[index],
            "output_ids": list(output.outputs[0].token_ids),
            "per_step_accepted": list(output.outputs[0].spec_decode_metrics.per_step_accepted),
        }
        for index, output in enumerate(outputs)
    ]
    record = {k: job[k] for k in ("name", "fault", "dtype", "temperature")}
    record |= {"engine": f"vllm {vllm.__version__}", "num_speculative_tokens": POSITIONS, "max_tokens": MAX_TOKENS}
    write_json(Path(job["out"]), record | {"requests": requests})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(broken.INJECTIONS), metavar="FAULT")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return engine(json.loads(arguments.engine))
    for fault in [] if arguments.judge else arguments.only:
        print(fault, run_engine(fault, fault), flush=True)


if __name__ == "__main__":
    main()
