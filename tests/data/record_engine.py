"""Records tests/data/vllm_answers.json: what the installed vLLM (CPU build) sends, as it comes over the wire.

    python tests/data/record_engine.py

A streamed and a whole completion of one prompt with the base drafter, K = 4 and detailed metrics; the lines of /metrics that
tell of speculation, before and after the two; and the names of the options in its --help=all.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from eagle3_lib.compat import launch
from eagle3_lib.engines import base
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.files import write_json
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets

DRAFTER = "drafters/smollm2-135m-eagle3"
QUESTION = "Name three animals that live in the sea."
TOKENS = 20


def speculation_metrics(url: str) -> str:
    lines = httpx.get(f"{url}/metrics").text.splitlines(keepends=True)
    return "".join(line for line in lines if "spec_decode" in line)


def main() -> None:
    params = BenchmarkParams(mode="base", drafter=DRAFTER, max_model_len=256)
    folder = targets.resolve(params.target)
    prompt = targets.render(targets.load_tokenizer(folder), [{"role": "user", "content": QUESTION}])
    body = {"model": "target", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "seed": 0, "return_token_ids": True}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as logs,
        launch.serve(params, folder, Path(logs) / "log", base.Speculation("base", DRAFTER, 4)) as server,
    ):
        before, url = speculation_metrics(server.url), f"{server.url}/v1/completions"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = httpx.post(url, json=body | options, timeout=60).text
        whole = httpx.post(url, json=body, timeout=60).json()
        after, version = speculation_metrics(server.url), server.version
    help_text = subprocess.run(
        [sys.executable, "-c", vllm.ENTRY, "--help=all"], capture_output=True, text=True, check=True
    ).stdout
    record = {
        "origin": f"tests/data/record_engine.py, vLLM {version} (CPU build), SmolLM2-135M-Instruct, {DRAFTER}, K = 4",
        "prompt_ids": prompt,
        "streamed": streamed,
        "whole": whole,
        "metrics_before": before,
        "metrics_after": after,
        "help_options": sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_text))),
    }
    write_json(project_path("tests/data/vllm_answers.json"), record)
    print(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
