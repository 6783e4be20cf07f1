"""vLLM without a server: one process that serves a few prompts with each of several drafters, and gives every round.

Settings as measured on the CPU build 0.32.0; ``per_request_spec_decode_metrics`` needs vLLM 0.29 or later. vLLM is
imported once and forked for each drafter, so that an engine that ends with an error takes no other down. Each has one
thread, and ``at_once`` of them run side by side.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import Eagle3Error
from ..process import end_group

ENV = {
    "OMP_NUM_THREADS": "1",  # a second thread spins away the time of any other process on its core
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CHILD = """
import json, os, sys
case = json.load(open(sys.argv[1]))
from vllm import LLM, SamplingParams


def serve(drafter, answers):
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": case["num_speculative_tokens"]}
    llm = LLM(model=case["target"], dtype=case["dtype"], max_model_len=case["max_model_len"], max_num_seqs=8,
              max_num_batched_tokens=case["max_model_len"],
              enforce_eager=True, disable_log_stats=False, per_request_spec_decode_metrics="detailed", seed=0,
              skip_tokenizer_init=case["no_tokenizer"], speculative_config=speculative)
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True, detokenize=False)
    served = [(request.prompt_token_ids, request.outputs[0]) for request in llm.generate(prompts, sampling)]
    rows = [{"prompt_ids": ids, "output_ids": list(output.token_ids),
             "accepted": list(output.spec_decode_metrics.per_step_accepted)} for ids, output in served]
    json.dump(rows, open(answers, "w"))


for number, (drafter, answers, log) in enumerate(case["runs"]):
    if number >= case["at_once"]:
        os.wait()
    if os.fork() == 0:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(sink, 1), os.dup2(sink, 2)
        try:
            serve(drafter, answers)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush(), os._exit(0)
for _ in case["runs"][-case["at_once"]:]:
    os.wait()
"""


@dataclass(frozen=True)
class Answer:
    """One request: its token ids, and the accepted drafts of each round."""

    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]


def rounds(
    target: Path,
    drafters: list[Path],
    prompts: list[list[int]],
    num_speculative_tokens: int = 4,
    max_tokens: int = 48,
    max_model_len: int = 256,
    dtype: str = "float32",
    timeout_s: int = 240,
    at_once: int = 1,
) -> list[list[Answer] | str]:
    """Serve prompts greedily to ``max_tokens`` each, once with each drafter.

    Returns:
        for each drafter the answers in the order of the prompts, or the end of the engine's log when it failed.
    Raises:
        Eagle3Error: vLLM could not be imported, or it all took longer than ``timeout_s`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        runs = [(str(path), str(work / f"{i}.json"), str(work / f"{i}.log")) for i, path in enumerate(drafters)]
        case = {"target": str(target), "prompts": prompts, "dtype": dtype, "runs": runs, "max_tokens": max_tokens}
        case["no_tokenizer"] = not (target / "tokenizer.json").is_file()
        case |= {"num_speculative_tokens": num_speculative_tokens, "max_model_len": max_model_len, "at_once": at_once}
        (work / "case.json").write_text(json.dumps(case))
        with (work / "log").open("wb") as sink:
            command = [sys.executable, "-c", CHILD, str(work / "case.json")]
            child = subprocess.Popen(command, env=os.environ | ENV, stdout=sink, stderr=sink, start_new_session=True)
            try:
                failed: int | str = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                failed = f"not done in {timeout_s} s"
            finally:
                end_group(child)
        if failed:
            raise Eagle3Error(f"vLLM: {failed}\n{(work / 'log').read_text(errors='replace')[-3000:]}")
        return [_answers(Path(answers), Path(log)) for _, answers, log in runs]


def _answers(answers: Path, log: Path) -> list[Answer] | str:
    if answers.is_file():
        return [Answer(**row) for row in json.loads(answers.read_text())]
    return log.read_text(errors="replace")[-3000:]
