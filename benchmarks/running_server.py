"""How long `eagle3 diagnose --url` takes on a vLLM that a user started, and whether its verdict is right.

    OMP_NUM_THREADS=1 python benchmarks/running_server.py     about 20 minutes on 2 cores

A server is started for each row: `python -m vllm.entrypoints.openai.api_server` on the CPU, once without any flag that helps
the diagnosis and once with --per-request-spec-decode-metrics detailed. It is healthy; or its worker is broken (drafts after
the first are token 0); or its drafter's config.json has the other value of norm_output. Each is asked 20 prompts and the
states of eagle3_lib/stages/asking.py, target and drafter run beside it on the same cores, and the counters that it has
afterwards are judged alone. Rows that are there are kept. Writes benchmarks/results/running_server.json.
"""

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

from eagle3_lib.engines import shims
from eagle3_lib.engines.inside import broken
from eagle3_lib.engines.vllm.server import DETAILED_METRICS
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from real_vllm import DRAFTER, speculating, started  # noqa: E402

RESULTS = project_path("benchmarks/results/running_server.json")
WORK = project_path("runs/running_server")
PROMPTS = 20
FLAGS = {"none": [], "detailed": [DETAILED_METRICS, "detailed"]}
SERVERS = ("healthy", "broken", "wrong config")


def diagnose(*words: str) -> tuple[int, float]:
    """Exit code of `eagle3 diagnose` and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "eagle3_lib.cli", "diagnose", *words], capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:] if done.returncode == 4 else "", sep="\n", flush=True)
    return done.returncode, round(time.monotonic() - began, 1)


def measure(server: str, flags: str) -> dict:
    """One row: what the diagnosis of one server says."""
    target = targets.resolve(targets.SMOLLM2)
    drafter = project_path(DRAFTER)
    if server == "wrong config":
        drafter = shims.shim(drafter, "norm_output flipped", WORK / "wrong", target)
    options = [*speculating(drafter), *FLAGS[flags]]
    if server == "broken":
        options += ["--worker-extension-cls", f"{broken.__name__}.cliff_after_step_0"]
    out = WORK / f"{server} {flags}".replace(" ", "_")
    out.mkdir(parents=True, exist_ok=True)
    with started(target, out / "server.log", *options) as url:
        words = ["--url", url, "--drafter", str(drafter), "--target", targets.SMOLLM2, "--out", str(out)]
        code, seconds = diagnose(*words, "--max-prompts", str(PROMPTS))
        metrics = out / "metrics.txt"
        metrics.write_text(httpx.get(f"{url}/metrics").text)
    card = json.loads((out / "card.json").read_text())
    counters, _ = diagnose("--metrics", str(metrics))
    row = {"server": server, "flags": flags, "exit_code": code, "seconds": seconds}
    row |= {key: card[key] for key in ("kind", "headline", "grade", "now", "mended")}
    return row | {"exit_code_of_metrics": counters}


def main() -> None:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for server in SERVERS:
        for flags in FLAGS:
            if any((row["server"], row["flags"]) == (server, flags) for row in rows):
                continue
            rows.append(measure(server, flags))
            result = {
                "command": "OMP_NUM_THREADS=1 python benchmarks/running_server.py",
                "date": datetime.date.today().isoformat(),
                "prompts": PROMPTS,
                "hardware": hardware(),
                "versions": versions(),
                "rows": rows,
            }
            write_json(RESULTS, result)


if __name__ == "__main__":
    main()
