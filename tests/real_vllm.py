"""A real vLLM on the CPU, started as a user starts it and not by the project."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx

from eagle3_lib.engines import base
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.params import ServerParams

DRAFTER = "drafters/smollm2-135m-eagle3"
K = 4


@contextlib.contextmanager
def started(folder, log, *options, **env):
    """The address of `python -m vllm.entrypoints.openai.api_server`, as soon as it is healthy.

    Args:
        options: further words of the command line.
        env: further environment variables.
    """
    port = base.pick_port(0)
    words = [
        "--model",
        str(folder),
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *vllm.CPU_ARGUMENTS, *options]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=os.environ | vllm.CPU_ENV | quiet | env, stdout=sink, stderr=sink, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert process.poll() is None, base.log_tail(log)
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def speculating(drafter) -> list[str]:
    """The words by which a user asks for a drafter."""
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
    return ["--speculative-config", json.dumps(config)]


def asked(url, out, **more) -> ServerParams:
    """Parameters of stage 00 for a short diagnosis."""
    values = {"url": url, "out": str(out), "name": "base", "max_prompts": 8, "max_tokens": 64, "states": False}
    return ServerParams.check(values | more, "test")
