"""Stage 03: the tokens/s of vLLM's own bench client beside ours, and 10,000 requests to servers that fail.

    python benchmarks/generate.py [failing] [bench_client] [--prompts 24] [--max-tokens 48] [--concurrency 16] [--requests 10000]

Without a name both parts. One server, the real vLLM on a CPU: the same prompts, concurrency and limit by `vllm bench serve` (which streams) and by
generate.run, in turns, after a warm-up of both. Then stub servers (tests/stub_server.py) that fail 5 % of the requests in
six ways; the run is killed (SIGKILL) three times and goes on; memory is the whole process's at its largest, with 1,000
and with all answers. Writes benchmarks/results/generate.json.
"""

import argparse
import collections
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from stub_server import running  # noqa: E402

from eagle3_lib.compat import launch
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import GenerateParams
from eagle3_lib.paths import ROOT, project_path
from eagle3_lib.stages import generate
from eagle3_lib.targets import prompts, targets
from eagle3_lib.targets.answers import iter_answers

BENCH_CLIENT = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
CHILD = """
import json, resource, sys
from eagle3_lib.stages import generate
from eagle3_lib.params import GenerateParams
generate.run(GenerateParams(**json.loads(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
PROMPTS = "params/prompts/python_functions.jsonl"


def bench_client(url: str, folder: Path, work: Path, arguments) -> float:
    """Output tokens/s that vLLM's bench client reports."""
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    words += ["--model", str(folder), "--served-model-name", "target", "--temperature", "0"]
    words += ["--dataset-name", "custom", "--dataset-path", str(work / "prompts.jsonl"), "--skip-chat-template"]
    words += ["--custom-output-len", str(arguments.max_tokens), "--num-prompts", str(arguments.prompts)]
    words += ["--max-concurrency", str(arguments.concurrency), "--disable-tqdm"]
    words += ["--save-result", "--result-dir", str(work), "--result-filename", "bench.json"]
    done = subprocess.run([sys.executable, "-c", BENCH_CLIENT, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the bench client ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result = json.loads((work / "bench.json").read_text())
    assert result["completed"] == arguments.prompts, result
    return result["total_output_tokens"] / result["duration"], result["total_output_tokens"]


def ours(url: str, work: Path, number: int, arguments) -> tuple[float, int]:
    params = GenerateParams(
        out=str(work / f"ours{number}"),
        prompts=str(work / "prompts.jsonl"),
        servers=[url],
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
    )
    summary = generate.run(params)
    return summary["tokens_per_s"], summary["output_tokens"]


def beside_the_bench_client(arguments) -> dict:
    folder = targets.resolve(targets.SMOLLM2)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        asked = [c.first_prompt for c in prompts.read(PROMPTS)][: arguments.prompts]
        (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in asked))
        serving = GenerateParams(engine_args=["--max-num-seqs", str(arguments.concurrency)])
        with launch.serve(serving, folder, work / "server.log") as server:
            ours(server.url, work, 0, argparse.Namespace(**vars(arguments) | {"max_tokens": 4}))  # warm-up
            rates = {"bench_client": [], "ours": []}
            for repeat in range(arguments.repeats):
                rate, tokens = bench_client(server.url, folder, work, arguments)
                rates["bench_client"].append(round(rate, 2))
                rate, own_tokens = ours(server.url, work, repeat + 1, arguments)
                rates["ours"].append(round(rate, 2))
    return {
        "engine": f"vllm {server.version}",
        "prompts": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "concurrency": arguments.concurrency,
        "output_tokens": {"bench_client": tokens, "ours": own_tokens},
        "tokens_per_s": rates,
        "ours_over_bench_client": round(sum(rates["ours"]) / sum(rates["bench_client"]), 3),
    }


def failing_servers(many: int, stream: bool) -> dict:
    fail = ("--fail", 0.05, "--seed")
    with tempfile.TemporaryDirectory() as name, running(*fail, 0) as one, running(*fail, 1) as two:
        work = Path(name)
        rows = [json.dumps({"prompt": f"prompt number {n}"}) + "\n" for n in range(many)]
        (work / "prompts.jsonl").write_text("".join(rows))
        fixed = {"prompts": str(work / "prompts.jsonl"), "servers": [one, two], "target": targets.SMOLLM2_FOLDER}
        fixed |= {"out": str(work / "out"), "stall_timeout_s": 1, "stream": stream}

        def child(**more) -> subprocess.Popen:
            text = GenerateParams(**fixed, **more).model_dump_json()
            return subprocess.Popen(
                [sys.executable, "-c", CHILD, text],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

        few_mib = float(child(max_prompts=many // 10).communicate()[0])
        log, kills, started = work / "out" / "log.jsonl", [], time.monotonic()
        for share in (0.3, 0.5, 0.75):
            process = child()
            while log.read_bytes().count(b"\n") < share * many:
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills.append(log.read_bytes().count(b"\n"))
        all_mib = float(child().communicate()[0])
        seconds = time.monotonic() - started
        written = collections.Counter(json.loads(line)["id"] for line in log.open())
        samples = [answer.prompt for answer in iter_answers(work / "out")]
        summary = json.loads((work / "out" / "summary.json").read_text())
    return {
        "stream": stream,
        "requests": many,
        "killed_at": kills,
        "samples": len(samples),
        "missing": many - len(set(samples)),
        "twice": sum(count > 1 for count in written.values()),
        "failed_tries": summary["failed_tries"],
        "largest_mib": {"with a tenth": round(few_mib, 1), "with all": round(all_mib, 1)},
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=10_000)
    work = {
        "failing": lambda: {
            "failing_servers": [
                failing_servers(arguments.requests, stream=False),
                failing_servers(arguments.requests // 5, stream=True),
            ]
        },
        "bench_client": lambda: beside_the_bench_client(arguments),
    }
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(work)}")
    arguments = parser.parse_args()
    path = project_path("benchmarks/results/generate.json")
    result = json.loads(path.read_text()) if path.is_file() and arguments.parts else {}
    result |= {
        "command": "python benchmarks/generate.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
    }
    for name in arguments.parts or work:
        result |= work[name]()
        write_json(path, result)
    print(f"ours over vLLM's bench client: {result.get('ours_over_bench_client')} (at least 0.95)")
    for run in result.get("failing_servers", []):
        print(f"of {run['requests']} requests: {run['missing']} lost, {run['twice']} twice, {run['largest_mib']} MiB")


if __name__ == "__main__":
    main()
