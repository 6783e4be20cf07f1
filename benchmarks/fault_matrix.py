"""The fault matrix: break the real vLLM on purpose, one fault at a time, and see whether diagnose names the fault.

    python benchmarks/fault_matrix.py            record what is missing, then judge
    python benchmarks/fault_matrix.py --record   record only
    python benchmarks/fault_matrix.py --judge    judge the records that exist, start no engine

Three pairs of drafter and texts show the faults of eagle3_lib/engines/shims.py: the base drafter on its own text, the same, weak,
on Python, and a drafter with latent attention. Their records are those of benchmarks/engine_runs.py. The judgement of all
is benchmarks/results/fault_matrix.json.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import engine_runs
import verdicts
from engine_runs import BASE_PYTHON, ENVIRONMENT, FINETUNED, HEALTHY, LATENT, OWN_TEXT, Pair, Run

from eagle3_lib.engines import shims
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path, short_path
from eagle3_lib.verdict.changes import HEALTHY as CORRECT

TARGET, DRAFTER = engine_runs.SMOLLM2, engine_runs.BASE
PROMPTS = "tests/data/vllm_cpu_replay.json"
RUNS = "runs/fault_matrix"  # of single runs: run_engine
POSITIONS, MAX_TOKENS, MODEL_LENGTH = 4, 100, 1024
HEALTHY_REPLAYS = {  # stage 08 of `make demo`: the HTTP server, other prompts
    "none, base drafter on Python": "runs/quickstart/replay/vllm/base",
    "none, finetuned drafter on Python": "runs/quickstart/replay/vllm/finetuned",
}
OWN_BFLOAT16 = replace(OWN_TEXT, name="base on its own text in bfloat16", dtype="bfloat16")
OWN_FINETUNED = replace(OWN_TEXT, name="finetuned on the base's own text", drafter=FINETUNED)
SHOWN = (OWN_TEXT, BASE_PYTHON, LATENT)  # pairs that show faults
MATRIX = {pair.name: pair for pair in (*SHOWN, OWN_BFLOAT16, OWN_FINETUNED)}
NOT_IN_LATENT = {  # what the MLA drafter or vLLM's class of it does not have
    "d2t dropped",  # its draft vocabulary is the target's
    "head of the target's first rows",  # broken.py takes the embedding for the head, which this target does not
    "last hidden only",
    "norm_before_fc wrongly on",
    "rope theta 10000",  # that is its own
    "float8 features",
}


def run_file(name: str) -> Path:
    return project_path(RUNS) / f"{name.replace(' ', '_')}.json"


def run_engine(name: str, fault: str, drafter: str = DRAFTER, **settings) -> Path:
    """One engine run in a process of its own; its record is kept and not made twice."""
    out = run_file(name)
    if out.is_file():
        return out
    folder = shims.shim(drafter, fault, project_path(RUNS) / "drafters" / out.stem, TARGET)
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


def runs_of(pair: Pair) -> list[Run]:
    """What the matrix records of a pair: the healthy engine, and every fault that can show."""
    if pair not in SHOWN:
        return [HEALTHY]
    left_out = {"none"} | (NOT_IN_LATENT if pair is LATENT else set())
    faults = {name: injection for name, injection in shims.INJECTIONS.items() if name not in left_out}
    return [HEALTHY, *(Run(name, name, injection) for name, injection in faults.items())]


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
        worker_extension_cls=shims.extension(job["fault"]),
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


def target(folder: str = TARGET):
    return engine_runs.loaded_target(folder)


@functools.cache
def everywhere(folder: str, drafter: str, tokens: str, steps: int):
    """Every hypothesis at every slot of some texts: greedy runs of all faults emit the same ones, and share this."""
    from eagle3_lib.drafter import checkpoint
    from eagle3_lib.verdict import changes, hypotheses, replay

    model = target(folder)
    setups = hypotheses.hypotheses(
        checkpoint.load_for(drafter, folder, model), changes.TargetParts.of(model), names=None
    )
    features, texts = hypotheses.forward(model, setups, json.loads(tokens))
    slots = replay.all_slots(texts)
    counts = {name: replay.counts_at(s, texts, slots, steps) for name, s in setups.items() if not s.stale}
    return setups, features, texts, counts


def examine(out: Path) -> dict:
    """The replay of one engine run under every hypothesis; kept beside the run."""
    kept = out.with_suffix(".replay.json")
    if not kept.is_file():
        from eagle3_lib.verdict import emitted, hypotheses, lossless, rounds

        record = json.loads(out.read_text())
        steps, requests, folder = record["num_speculative_tokens"], record["requests"], record.get("target", TARGET)
        accepted = [request["per_step_accepted"] for request in requests]
        tokens = json.dumps([{key: request[key] for key in ("id", "prompt_ids", "output_ids")} for request in requests])
        setups, features, texts, counts = everywhere(folder, record["drafter"], tokens, steps)
        starts = texts.prompt_lengths
        slots = [rounds.round_slots(some, start) for some, start in zip(accepted, starts, strict=True)]
        at_rounds = {
            name: [[c[s - p + 1] for s in some] for c, some, p in zip(by_request, slots, starts, strict=True)]
            for name, by_request in counts.items()
            if name != CORRECT
        }
        stale = {name: setup for name, setup in setups.items() if setup.stale}
        at_rounds |= hypotheses.replay_all(stale, texts, accepted, steps)
        drafted = [[steps] * len(some) for some in accepted]
        requests = [
            request | {"accepted": some, "drafted": drafts}
            for request, some, drafts in zip(requests, accepted, drafted, strict=True)
        ]
        laid = hypotheses.lay_all(requests, steps)
        examined = []
        for index, request in enumerate(requests):
            of_request = {name: by_request[index] for name, by_request in at_rounds.items()}
            row = hypotheses.tell(request, laid[index], counts[CORRECT][index], of_request, steps)
            drafter = setups[CORRECT].drafter
            tokens = emitted.compare(target(folder), drafter, request, features[index], None, steps, emitted.Told())
            examined.append(row | {"greedy": tokens.greedy, "lossless": lossless.wrong(tokens.greedy)})
        name = Path(record["drafter"]).name
        write_json(kept, {"drafter": name, "positions": steps, "dtype": record["dtype"], "requests": examined})
    return json.loads(kept.read_text())


def judged(record: dict, replay: dict) -> dict:
    """One row of the matrix."""
    from eagle3_lib.verdict import diagnose

    verdict = diagnose.judge(replay)
    agreement = {row["hypothesis"]: row["value"] for row in verdict.evidence["ranking"]}
    fault = record["fault"]
    named = [name for name in (verdict.fault, *verdict.ties) if name]
    row = {
        "run": record["name"],
        "pair": record.get("pair"),
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
        "departing": verdict.evidence["departing"],
        "tie_of": named,
        "tie_with": [name for name in named if name != fault],
    }


def write_matrix() -> dict:
    """Judge every run that exists, print the table, and write benchmarks/results/fault_matrix.json."""
    files = [run.file(pair) for pair in MATRIX.values() for run in runs_of(pair)]
    files = [path for path in files if path.is_file()]
    rows = [judged(json.loads(path.read_text()), verdicts.replay_of(path)) for path in files]
    for name, folder in HEALTHY_REPLAYS.items():
        if (path := project_path(folder) / "replay.json").is_file():
            record = {"name": name, "fault": "none", "dtype": "float32", "drafter": folder}
            rows.append(judged(record, json.loads(path.read_text())))
    faults, healthy = ([row for row in rows if (row["fault"] == "none") == none] for none in (False, True))
    result = {
        "command": "python benchmarks/fault_matrix.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "targets": sorted({pair.target for pair in MATRIX.values()}),
        "positions": POSITIONS,
        "rows": faults,
        "healthy": healthy,
        "first_or_tied": sum(row["rank_of_true"] == 1 for row in faults),
        "named": sum(row["fault"] in row["tie_of"] for row in faults),
        "wrong_names": sum(
            row["named"] not in (None, row["fault"]) and row["fault"] not in row["tie_of"] for row in faults
        ),
        "healthy_false_alarms": sum(row["verdict"] not in ("healthy", "weak drafter") for row in healthy),
    }
    write_json(project_path("benchmarks/results/fault_matrix.json"), result)
    print(table(result))
    return result


def table(result: dict) -> str:
    """The matrix in Markdown, for docs/faults.md."""
    lines = [
        "| fault in the engine | drafter and texts | rounds | mean length | reproduced by it | by a correct engine | by the next | told from all but |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['fault']} | {row['pair']} | {row['rounds']} | {row['mean_length']:.2f} | {row['agreement_true']:.1%} | "
            f"{row['agreement_correct_engine']:.1%} | {row['agreement_runner_up']:.1%} ({row['runner_up']}) | "
            f"{', '.join(row['tie_with']) or '-'} |"
        )
    for row in result["healthy"]:
        lines.append(
            f"| none ({row['run']}) | {row['pair'] or '-'} | {row['rounds']} | {row['mean_length']:.2f} | | "
            f"{row['agreement_correct_engine']:.1%} | | verdict: {row['verdict']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record what is missing, judge nothing")
    parser.add_argument("--judge", action="store_true", help="judge the records that exist, start no engine")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return engine_runs.serve(MATRIX[arguments.serve], runs_of(MATRIX[arguments.serve]))
    if arguments.engine:
        return engine(json.loads(arguments.engine))
    if not arguments.judge:
        for pair in MATRIX.values():
            engine_runs.process(__file__, pair.name)
    if not arguments.record:
        write_matrix()


if __name__ == "__main__":
    main()
