"""Recordings of the real vLLM with faults in it: one process for each pair of drafter and texts, one fault after another.

    python benchmarks/engine_runs.py              record drafters with a changed config.json, which the engine obeys
    python benchmarks/engine_runs.py --rounds     comparable rounds of every record, and how many depart from a healthy engine

A process loads vLLM once. A fault of the drafter's files is a copy of its folder that vLLM loads in the drafter's place, as
at its start; a fault of vLLM's code is a patch of its classes, undone afterwards. The first run of a process is the healthy
engine, and so is the last, which must repeat the first. Records are runs/engine_runs/PAIR/NAME.json; what exists is kept.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_lib.engines import shims
from eagle3_lib.files import write_json
from eagle3_lib.paths import project_path, short_path

RUNS = "runs/engine_runs"
POSITIONS, MODEL_LENGTH, SEQUENCES = 4, 1024, 48
LONG = 120  # tokens of an answer in which a fault may begin late
LONG_ANSWERS = 14  # such answers of a run, at most
SMOLLM2, MLA = "models/SmolLM2-135M-Instruct", "targets/tiny-mla"
BASE, FINETUNED = "drafters/smollm2-135m-eagle3", "runs/quickstart/train/drafter"  # the latter of `make demo`
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: none of them spins while another works
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


# ------------------------------------------------------------------------------------------------- drafters and texts


def recorded_prompts() -> list[list[int]]:
    recorded = json.loads(project_path("tests/data/vllm_cpu_replay.json").read_text())
    return [request["prompt_ids"] for request in recorded["requests"]]


def python_prompts() -> list[list[int]]:
    from healthy_zoo import prompts_of

    return [answer.prompt_ids for answer in prompts_of("quickstart")]


def mla_prompts() -> list[list[int]]:
    from healthy_zoo import prompts_of

    return [answer.prompt_ids for answer in prompts_of("mla")]


@dataclass(frozen=True)
class Pair:
    """A drafter and the texts that it drafts. max_tokens: of each answer."""

    name: str
    drafter: str
    prompts: Callable[[], list[list[int]]]
    max_tokens: int
    target: str = SMOLLM2
    dtype: str = "float32"

    @property
    def folder(self) -> Path:
        return project_path(RUNS) / self.name.replace(" ", "_")


OWN_TEXT, BASE_PYTHON, FINETUNED_PYTHON, LATENT = (
    Pair("base on its own text", BASE, recorded_prompts, 100),
    Pair("base on Python", BASE, python_prompts, 32),
    Pair("finetuned on Python", FINETUNED, python_prompts, 48),
    Pair("MLA", "drafters/tiny-mla-public", mla_prompts, 48, MLA),
)
PAIRS = {pair.name: pair for pair in (OWN_TEXT, BASE_PYTHON, FINETUNED_PYTHON, LATENT)}


@dataclass(frozen=True)
class Run:
    """One recording. fault: its name; the key of ``injection`` in the table that has it.

    live: a patch that needs the engine, for faults in some places only. where: these places. every: the fault is in every
    request (1) or in every second one (2). config: the fields of config.json that are changed.
    """

    name: str
    fault: str = "none"
    injection: shims.Injection = shims.Injection()
    live: Callable[["Engine"], None] | None = None
    where: str = "everywhere"
    every: int = 1
    config: dict | None = None
    max_tokens: int | None = None
    out: Path | None = None

    def file(self, pair: Pair) -> Path:
        return self.out or pair.folder / f"{self.name.replace(' ', '_')}.json"


HEALTHY = Run("none")
LONG_HEALTHY = Run(f"none, {LONG} tokens", max_tokens=LONG)


# --------------------------------------------------------------------------------------------------------- the engine


class Engine:
    """vLLM in this process, with the means to change its drafter and to undo that."""

    def __init__(self, pair: Pair):
        import vllm

        self.pair, self.prompts = pair, pair.prompts()
        self.version = f"vllm {vllm.__version__}"
        self.llm = vllm.LLM(
            str(project_path(pair.target)),
            dtype=pair.dtype,
            enforce_eager=True,
            max_model_len=MODEL_LENGTH,
            max_num_seqs=SEQUENCES,
            enable_prefix_caching=False,
            disable_log_stats=False,
            per_request_spec_decode_metrics="detailed",
            speculative_config=self._speculation(pair.drafter),
        )
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.index_of = {tuple(prompt): index for index, prompt in enumerate(self.prompts)}

    @staticmethod
    def _speculation(folder: str | Path) -> dict:
        return {"method": "eagle3", "model": str(project_path(folder)), "num_speculative_tokens": POSITIONS}

    def load_drafter(self, folder: str | Path) -> None:
        """Have vLLM load the drafter from another folder, its config included, into the engine that runs."""
        from vllm.config import SpeculativeConfig, set_current_vllm_config

        config, runner, proposer = self.runner.vllm_config, self.runner, self.runner.drafter
        speculation = SpeculativeConfig(
            **self._speculation(folder),
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        for owner in (config, runner, proposer):
            owner.speculative_config = speculation
        proposer.draft_model_config = speculation.draft_model_config
        layers = config.compilation_config.static_forward_context
        before = {name: layers.pop(name) for name in proposer._draft_attn_layer_names}
        proposer.eagle3_use_aux_hidden_state = proposer._get_eagle3_use_aux_hidden_state_from_config()
        runner.use_aux_hidden_state_outputs = proposer.eagle3_use_aux_hidden_state
        with set_current_vllm_config(config):
            proposer.load_model(runner.model)
        for name, layer in before.items():
            layers[name].kv_cache = layer.kv_cache
            set_later = vars(layer).keys() - vars(layers[name]).keys()  # by the attention backend, at its start
            vars(layers[name]).update({attribute: vars(layer)[attribute] for attribute in set_later})
        self.capture_as_configured()

    def capture_as_configured(self) -> None:
        self.runner.model.set_aux_hidden_state_layers(())
        self.runner._setup_eagle3_aux_hidden_state_outputs()

    @contextmanager
    def broken_by(self, run: Run) -> Iterator[None]:
        """The fault of ``run`` in the engine, and gone afterwards."""
        before = {cls: dict(vars(cls)) for cls in patched_classes()}
        edited = run.injection.config or run.injection.tensors
        if edited:
            self.load_drafter(self._served(run))
        if run.injection.patch:
            run.injection.patch()
        if run.live:
            run.live(self)
        try:
            yield
        finally:
            for cls, attributes in before.items():
                put_back(cls, attributes)
            self.capture_as_configured()
            if edited:
                self.load_drafter(self.pair.drafter)

    def _served(self, run: Run) -> Path:
        folder = run.file(self.pair).with_suffix("")
        if not folder.is_dir():
            shims.write_shim(self.pair.drafter, run.injection, folder, self.pair.target)
        return folder

    def requests(self, max_tokens: int) -> list[dict]:
        """What the engine answers to every prompt, and the accepted drafts of each round."""
        import vllm

        for layer in self.runner.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "kv_cache"):  # not the experts
                layer.kv_cache.zero_()
        sampling = vllm.SamplingParams(temperature=0, max_tokens=max_tokens)
        asked = self.prompts[:LONG_ANSWERS] if max_tokens == LONG else self.prompts
        prompts = [{"prompt_token_ids": ids} for ids in asked]
        answers = [output.outputs[0] for output in self.llm.generate(prompts, sampling, use_tqdm=False)]
        return [
            {
                "id": str(index),
                "prompt_ids": self.prompts[index],
                "output_ids": list(answer.token_ids),
                "per_step_accepted": answer.spec_decode_metrics.per_step_accepted,
            }
            for index, answer in enumerate(answers)
        ]

    def record(self, run: Run) -> dict:
        max_tokens = run.max_tokens or self.pair.max_tokens
        with self.broken_by(run):
            requests = self.requests(max_tokens)
        record = {"name": run.name, "fault": run.fault, "pair": self.pair.name, "where": run.where}
        if run.where != "everywhere":
            record["ids"] = [request["id"] for request in requests][run.every - 1 :: run.every]
        record |= {"target": self.pair.target, "drafter": self.pair.drafter, "dtype": self.pair.dtype, "temperature": 0}
        if run.config is not None:
            record |= {"config": run.config, "served": short_path(run.file(self.pair).with_suffix(""))}
        record |= {"engine": self.version, "num_speculative_tokens": POSITIONS, "max_tokens": max_tokens}
        return record | {"requests": requests}

    # ---------------------------------------------------------------------------------------- for faults in some places

    def rows(self, metadata) -> tuple[list[int], list[int]]:
        """For each request of a batch, its index among the prompts and the length of its prompt."""
        ids = self.runner.input_batch.req_ids[: metadata.num_reqs]
        prompts = [self.runner.requests[request].prompt_token_ids for request in ids]
        return [self.index_of[tuple(prompt)] for prompt in prompts], [len(prompt) for prompt in prompts]

    def tokens(self, metadata, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For each token of a batch, the index of its request, and its place in the answer, negative in the prompt."""
        indices, lengths = (torch.tensor(some) for some in self.rows(metadata))
        each = metadata.query_start_loc.diff().long()
        return indices.repeat_interleave(each), positions - lengths.repeat_interleave(each)


def patched_classes() -> list[type]:
    """The classes of vLLM that patches change."""
    from vllm.model_executor.models.deepseek_eagle3 import Eagle3DeepseekV2ForCausalLM
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
    from vllm.model_executor.models.interfaces import EagleModelMixin
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return [
        SpecDecodeBaseProposer,
        EagleModelMixin,
        DeepseekV2Model,
        Eagle3LlamaForCausalLM,
        Eagle3DeepseekV2ForCausalLM,
    ]


def put_back(cls: type, attributes: dict) -> None:
    """Undo what was set on a class since ``attributes`` were its own."""
    for name in set(vars(cls)) - set(attributes):
        delattr(cls, name)
    for name, value in attributes.items():
        if vars(cls)[name] is not value:
            setattr(cls, name, value)


# ---------------------------------------------------------------------------------------------------------- recording


def serve(pair: Pair, runs: list[Run]) -> None:
    """Record, in this process, the runs of one pair that do not exist yet, between two runs of the healthy engine."""
    missing = [run for run in runs if not run.file(pair).is_file()]
    if not missing:
        return
    engine = Engine(pair)
    lengths = {run.max_tokens for run in missing}
    healthy = {length: HEALTHY if length is None else LONG_HEALTHY for length in lengths}
    expected = {length: made(engine, run) for length, run in healthy.items()}
    for run in missing:
        record = made(engine, run)
        emitted = [request["output_ids"] for request in record["requests"]]
        if emitted != [request["output_ids"] for request in expected[run.max_tokens]["requests"]]:
            print(f"WARNING: {pair.name}: {run.name}: emits other tokens than the healthy engine", flush=True)
    for length, run in healthy.items():
        if engine.record(run) != expected[length]:
            sys.exit(f"{pair.name}: the last healthy run is not the first: a fault was not undone")
    print(f"{pair.name}: the last healthy run repeats the first", flush=True)


def made(engine: Engine, run: Run) -> dict:
    """The record of a run, which is made where there is none."""
    out = run.file(engine.pair)
    if not out.is_file():
        started = time.monotonic()
        record = engine.record(run)
        write_json(out, record)
        if run.config is None:
            shutil.rmtree(out.with_suffix(""), ignore_errors=True)
        rounds = sum(len(request["per_step_accepted"]) for request in record["requests"])
        print(f"{engine.pair.name}: {run.name}: {rounds} rounds, {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(out.read_text())


def process(script: str, pair: str, *arguments: str) -> None:
    """``python SCRIPT --serve PAIR``: a process that records the runs of one pair."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(project_path("."))}
    log = project_path(RUNS) / f"{Path(script).stem}, {pair}.log".replace(" ", "_")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as errors:
        done = subprocess.run([sys.executable, script, "--serve", pair, *arguments], env=environment, stderr=errors)
    if done.returncode:
        sys.exit(f"{pair}: the engine ended with status {done.returncode}:\n{log.read_text()[-3000:]}")


# -------------------------------------------------------------------------------- comparable rounds and those that depart


@functools.cache
def loaded_target(folder: str):
    from eagle3_lib.targets import targets

    return targets.load(targets.resolve(folder), torch.float32)


@functools.cache
def correct_counts(target: str, drafter: str, tokens: str, steps: int) -> list[list[int]]:
    """What a correct engine accepts of a round at every slot of some texts."""
    from eagle3_lib.drafter import checkpoint
    from eagle3_lib.verdict import changes, hypotheses, replay

    model = loaded_target(target)
    setups = hypotheses.hypotheses(checkpoint.load_for(drafter, target, model), changes.TargetParts.of(model), names=())
    _, texts = hypotheses.forward(model, setups, json.loads(tokens))
    counts = replay.counts_at(setups[changes.HEALTHY], texts, replay.all_slots(texts), steps)
    return [[0] * (start - 1) + some for start, some in zip(texts.prompt_lengths, counts, strict=True)]


def rounds_of(record: dict) -> dict:
    """Comparable rounds of a record, and how many of them depart from what a correct engine accepts.

    Correct is an engine with the drafter as it is, also where the record's config.json was changed.
    """
    from eagle3_lib.verdict import rounds

    steps, requests = record["num_speculative_tokens"], record["requests"]
    tokens = json.dumps([{key: request[key] for key in ("id", "prompt_ids", "output_ids")} for request in requests])
    everywhere = correct_counts(record["target"], record["drafter"], tokens, steps)
    rows = [
        row
        for request, counts in zip(requests, everywhere, strict=True)
        for row in rounds.compare(request["per_step_accepted"], counts, len(request["prompt_ids"]), steps)
        if rounds.comparable(row)
    ]
    return {"comparable": len(rows), "departing": sum(row["engine"] != row["replay"] for row in rows)}


def records() -> list[Path]:
    return sorted(path for path in project_path(RUNS).rglob("*.json") if "pair" in json.loads(path.read_text()))


# ---------------------------------------------------------------------------------------- config.json changed and obeyed


def _boundaries(by: int) -> shims.Injection:
    return shims.Injection(config=shims.shifted_boundaries(by))


def _fields(**fields) -> shims.Injection:
    return shims.Injection(config=lambda *_: fields)


CONFIGS: dict[str, shims.Injection] = {
    "boundaries each -1": _boundaries(-1),
    "boundaries each +1": _boundaries(1),
    "boundaries each +2": _boundaries(2),
    "rope_theta 100": _fields(rope_theta=100.0),
    "rope_theta 1000": _fields(rope_theta=1000.0),
    "rope_theta 5000000": _fields(rope_theta=5000000.0),
    "rope_scaling linear 8": _fields(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "norm_before_residual flipped": shims.INJECTIONS["norm_before_residual flipped"],
    "norm_output flipped": shims.INJECTIONS["norm_output flipped"],
    "fc_norm true": _fields(fc_norm=True),
    "norm_before_fc true": _fields(norm_before_fc=True),
}
CONFIG_PAIRS = (OWN_TEXT, FINETUNED_PYTHON)
LONGER = {  # tokens of an answer, where a wrong value costs so little that more rounds are needed to tell it
    (OWN_TEXT.name, "boundaries each -1"): 240,
    (FINETUNED_PYTHON.name, "boundaries each -1"): 110,
    (FINETUNED_PYTHON.name, "boundaries each +1"): 110,
    (FINETUNED_PYTHON.name, "rope_scaling linear 8"): 110,
}


def config_runs(pair: Pair) -> list[Run]:
    from eagle3_lib.drafter.checkpoint import read_config

    config = read_config(project_path(pair.drafter))
    layers = read_config(project_path(pair.target))["num_hidden_layers"]
    folder = project_path(RUNS) / "config" / pair.folder.name
    return [
        Run(
            name,
            injection=injection,
            config=injection.config(config, layers),
            max_tokens=LONGER.get((pair.name, name)),
            out=folder / f"{name.replace(' ', '_')}.json",
        )
        for name, injection in CONFIGS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", action="store_true", help="tell the comparable rounds of every record, start no engine"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(PAIRS[options.serve], config_runs(PAIRS[options.serve]))
    if not options.rounds:
        for pair in CONFIG_PAIRS:
            process(__file__, pair.name)
    for path in records() if options.rounds else []:
        found = rounds_of(json.loads(path.read_text()))
        print(f"{short_path(path)}: {found['comparable']} comparable, {found['departing']} depart", flush=True)


if __name__ == "__main__":
    main()
