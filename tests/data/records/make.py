"""The small files of speculators, SpecForge and SGLang, written by those projects' own code from the real runs beside it.

    python tests/data/records/make.py PERF_UTILS SPECFORGE BENCH_UTILS

PERF_UTILS: scripts/evaluate/perf_utils.py of vllm-project/speculators at c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b.
SPECFORGE: specforge/benchmarks/sglang.py of the wheel specforge 0.2.0.
BENCH_UTILS: benchmarks/benchmarker/utils.py of sgl-project/SpecForge at a6b6b0230009d15ec2a97a57384e6f53f0f96946.
"""

import argparse
import importlib.util
import json
import sys
import types
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from prometheus_client import CollectorRegistry, Gauge, generate_latest

HERE = Path(__file__).parent
TWO_RUNS = {"chat": "vllm-bench/chat_c1", "completions": "vllm-bench/completions_c4_ignore_eos"}


def load(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answers() -> list[dict]:
    """completion_tokens and vLLM's record of each answer of the real run."""
    lines = (HERE / "vllm-server/replay12/answers.sse.txt").read_text().splitlines()
    found = [json.loads(line[6:]) for line in lines if '"speculative_decoding"' in line]
    return [part["metrics"]["speculative_decoding"] | part["usage"] for part in found]


def meta_info(answer: dict) -> dict:
    """What SGLang tells of an answer with these rounds: its length is all tokens over rounds."""
    tokens, rounds = answer["completion_tokens"], answer["num_spec_steps"]
    return {"completion_tokens": tokens, "spec_verify_ct": rounds, "spec_accept_length": tokens / rounds}


def speculators(perf: types.ModuleType) -> None:
    """evaluate.py, _run_subset: two subsets; then a sweep of the first; then both runs as two engines of one server."""
    folder = HERE / "speculators"
    folder.mkdir(exist_ok=True)
    scrapes = {
        name: [(HERE / f"{run}.metrics_{when}.txt").read_text() for when in ("before", "after")]
        for name, run in TWO_RUNS.items()
    }
    specs = {}
    for name, (before, after) in scrapes.items():
        parsed = [perf.parse_prometheus_metrics(text) for text in (after, before)]
        specs[name] = perf.extract_spec_decode_metrics(parsed[0], baseline_metrics=parsed[1]) | {"subset": name}
    write(perf, folder / "acceptance.csv", ["subset"], list(specs.values()))
    rows = [{"strategy": "constant", "target_rate": rate} | specs["chat"] for rate in (0.1, 0.2)]
    write(perf, folder / "perf_results.csv", perf.BASE_CSV_COLUMNS, rows)
    both = [
        "\n".join(text.replace('engine="0"', f'engine="{i}"') for i, text in enumerate(texts))
        for texts in zip(*scrapes.values(), strict=True)
    ]
    parsed = [perf.parse_prometheus_metrics(text) for text in reversed(both)]
    spec = perf.extract_spec_decode_metrics(parsed[0], baseline_metrics=parsed[1]) | {"subset": "both"}
    write(perf, folder / "data_parallel.acceptance.csv", ["subset"], [spec])


def write(perf: types.ModuleType, path: Path, columns: list[str], rows: list[dict]) -> None:
    path.unlink(missing_ok=True)
    writer = perf.CsvWriter(path, columns + perf.acceptance_csv_columns(rows[0]))
    for row in rows:
        writer.append(row)


def specforge(module: types.ModuleType) -> None:
    """specforge benchmark --output-json, its server replaced by the real run's answers."""
    folder = HERE / "specforge"
    folder.mkdir(exist_ok=True)
    told = [meta_info(answer) for answer in answers()]
    replies = iter([told[0], *told])  # the first is its warm-up
    args = argparse.Namespace(
        concurrency=1, num_prompts=12, model="target", trust_remote_code=False, dataset="gsm8k", max_samples=None,
        enable_thinking=False, base_url="http://127.0.0.1:1", timeout_seconds=1, output_json=str(folder / "benchmark.json"),
    )  # fmt: skip
    with (
        mock.patch.object(module, "_load_prompts", lambda *_: [["question"]]),
        mock.patch.object(module, "_apply_chat_template", lambda *_: "question"),
        mock.patch.object(module, "_send_sglang", lambda *_: {"meta_info": next(replies)}),
        mock.patch("transformers.AutoTokenizer.from_pretrained"),
    ):
        module.run(args)


class State:
    """A state of SGLang's frontend, as compute_metrics asks it."""

    def __init__(self, told: dict):
        self.told = told

    def get_meta_info(self, _: str) -> dict:
        return self.told


def matrix(utils: types.ModuleType) -> None:
    """bench_eagle3.py, main: run_benchmarks and json.dump; plain, a chain, and a tree on the same answers."""
    told = [meta_info(answer) for answer in answers()]
    plain = [{"completion_tokens": part["completion_tokens"]} for part in told]
    results = {"model": "drafter", "gsm8k": []}
    for (batch_size, steps, topk, draft_tokens), given in (
        ((1, 0, 0, 0), plain),
        ((1, 4, 1, 5), told),
        ((1, 5, 4, 8), told),
    ):
        metrics = utils.compute_metrics([State(part) for part in given], latency=37.25)
        results["gsm8k"].append(
            dict(
                batch_size=batch_size,
                steps=steps,
                topk=topk,
                num_draft_tokens=draft_tokens,
                metrics=[asdict(metrics)],
                num_samples=12,
            )
        )
    (HERE / "specforge/results.jsonl").write_text(json.dumps(results, indent=4))


def sglang() -> None:
    """Gauges as SGLang 0.5.16 names them (srt/observability/metrics_collector.py)."""
    (HERE / "sglang").mkdir(exist_ok=True)
    registry = CollectorRegistry()
    for name, documentation, value in (
        ("spec_accept_length", "Mean acceptance length of speculative decoding (accepted drafts + bonus token per forward).", 2.85),
        ("spec_accept_rate", "Speculative acceptance rate (`accepted drafts / proposed drafts` in batch).", 0.62),
        ("spec_num_steps", "Currently active speculative_num_steps.", 3),
        ("spec_num_draft_tokens", "Currently active speculative_num_draft_tokens (decouples from steps under topk>1).", 4),
    ):  # fmt: skip
        gauge = Gauge(f"sglang:{name}", documentation, ["model_name", "tp_rank"], registry=registry)
        gauge.labels("target", "0").set(value)
    (HERE / "sglang/metrics.txt").write_bytes(generate_latest(registry))


if __name__ == "__main__":
    sys.modules["sglang"] = mock.MagicMock()  # BENCH_UTILS imports it, and compute_metrics does not use it
    speculators(load(sys.argv[1]))
    specforge(load(sys.argv[2]))
    matrix(load(sys.argv[3]))
    sglang()
