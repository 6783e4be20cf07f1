"""What a run will need and what of it would fail, told without a GPU and without weights.

    eagle3 plan kimi_k25        params/kimi_k25.yaml
    eagle3 plan path/to/mine.yaml

A target or drafter that is not on this machine is taken from eagle3_lib/targets/configs, by the last part of its name. Hours
follow from the rates of the params file's section ``expect``; without it none are told.
"""

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafter import checkpoint
from ..drafter.model import DrafterConfig
from ..engines import options, sglang, vllm
from ..engines.base import Speculation
from ..errors import Eagle3Error
from ..params import STAGES, BenchmarkParams, Run
from ..paths import ROOT, project_path, short_path
from ..targets import targets
from ..targets.known_configs import known_config
from . import audit, disk_plan, fit, memory_plan, rules
from .findings import SEVERITIES

GPU_GIB = (80, 96, 141, 180, 288)  # memory of data-centre GPUs; a GPU of each size is held against the need
USED_SHARE = fit.SHARE["vllm"]  # of it
PORT = 8000  # shown where a run picks a free one
GATES = "benchmarks/results/gates_of_wheels.json"
GATES_READ_FOR = {
    "KimiK25ForConditionalGeneration": "Kimi-K2.5",
    "LlamaForCausalLM": "Llama",
    "Qwen3ForCausalLM": "Qwen3",
}
ANCHOR = "51.78 % of the public drafter's tokens, 4 a round, on GSM8K in another patched vLLM (vllm#35966)"

FIGURES = {  # of section expect: the words in which each is told
    ("profile", "gpus"): "GPUs",
    ("profile", "allreduce_share"): "of decode time in AllReduce",
    ("profile", "ngram"): "n-gram speculation",
    ("generate", "samples"): "samples from the server",
    ("generate", "hours"): "hours for them",
    ("generate", "errors"): "errors",
    ("generate", "traces_lost"): "reasoning traces lost",
    ("extract", "layers"): "layers whose hidden states were taken",
    ("extract", "tokens"): "tokens",
    ("extract", "tokens_per_second"): "tokens/s",
    ("extract", "gigabytes"): "GB of hidden states",
    ("train", "epochs"): "epochs",
    ("train", "hours"): "hours for them",
    ("train", "start"): "where training started",
    ("train", "checkpoint_gigabytes"): "GB of checkpoint",
    ("train", "architecture"): "its architecture",
    ("benchmark", "first_engine"): "the first engine",
    ("benchmark", "patches"): "places patched in it",
    ("benchmark", "drafters"): "drafters, trained and public",
    ("benchmark", "acceptance_rate"): "of drafted tokens accepted, each drafter",
    ("benchmark", "speedup"): "of the plain throughput",
    ("benchmark", "pivot"): "the second engine",
    ("benchmark", "load_gigabytes"): "GB of weights loaded",
    ("benchmark", "load_seconds"): "seconds to load them, second engine",
    ("benchmark", "load_seconds_before"): "seconds to load them, first engine",
}


class Planned(Speculation):
    """Speculation with a drafter that may not be there yet."""

    def folder(self) -> Path:
        return Path(self.drafter)


# --- configs ----------------------------------------------------------------------------------------------------------


def config_of(model: str) -> tuple[dict, str]:
    """The config.json of a folder or hub id, and where it was found.

    Raises:
        Eagle3Error: neither the folder nor eagle3_lib/targets/configs has one.
    """
    folder = project_path(targets.SMOLLM2_FOLDER if model == targets.SMOLLM2 else model)
    if (folder / "config.json").is_file():
        return checkpoint.read_config(folder), short_path(folder)
    return known_config(folder.name), f"eagle3_lib/targets/configs/{folder.name}.json"


def drafter_of(run: Run, folder: str, target: dict) -> dict:
    """A drafter as far as it is known: {"raw": config.json, "config": DrafterConfig, "where", "weights": is it here}.

    One that the run has yet to train has the sizes of the drafter that training starts from, as stage 05 exports it.
    """
    has_config = (project_path(folder) / "config.json").is_file()
    trained = not has_config and folder == f"{run.flat('train')['out']}/drafter"
    source = run.flat("train")["drafter"] if trained else folder
    raw, where = config_of(source)
    weights = any(project_path(source).glob("*.safetensors")) or any(project_path(source).glob("*.bin"))
    own = (
        "embed_tokens.weight" in checkpoint.survey(source).shapes if weights else raw.get("has_own_embed_tokens", False)
    )
    config = memory_plan.drafter_config(raw, where, target, own)
    if trained:
        raw, where = checkpoint.to_config_json(config, torch.bfloat16), f"{where}, as stage 05 will export it"
    return {"raw": raw, "config": config, "where": where, "weights": weights and not trained}


@contextmanager
def stand_in(raw: dict, config: DrafterConfig) -> Iterator[Path]:
    """A drafter folder for the audit, which reads names and not values: each tensor that the config names, as one number.

    The embedding is left out, as if it were the copy of the target's that EAGLE-3 trainers make.
    """
    with tempfile.TemporaryDirectory() as work:
        names = audit.expected_tensors(config) - {"embed_tokens.weight"}
        if config.draft_vocab_size == config.vocab_size:
            names -= {"d2t", "t2d"}
        tensors = {name.replace("layers.0.", "midlayer.", 1): torch.zeros(1) for name in names - {"d2t"}}
        if "d2t" in names:
            tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        save_file(tensors, Path(work) / "model.safetensors")
        (Path(work) / "config.json").write_text(json.dumps(raw))
        yield Path(work)


# --- the parts of a plan ----------------------------------------------------------------------------------------------


def expected(run: Run) -> dict[str, dict]:
    """Section ``expect``: stage -> figure -> value.

    Raises:
        Eagle3Error: a figure that :data:`FIGURES` does not have.
    """
    section = run.raw.get("expect") or {}
    if not isinstance(section, dict) or not all(isinstance(figures, dict) for figures in section.values()):
        raise Eagle3Error(f"{run.where}: expect: found {section!r}, expected stages with figures")
    for stage, figures in section.items():
        for name in figures:
            if (stage, name) not in FIGURES:
                known = ", ".join(".".join(key) for key in FIGURES)
                raise Eagle3Error(f"{run.where}: expect: unknown figure {stage}.{name}; expected some of {known}")
    return section


def gpus_of(settings: dict, where: str) -> int:
    """Over how many GPUs an engine's arguments divide the target: 1 where they do not say.

    Raises:
        Eagle3Error: they say something that is no number.
    """
    try:
        return options.tensor_parallel(settings.get("engine_args") or [])
    except ValueError as error:
        raise Eagle3Error(f"{where}: engine_args: expected a number of GPUs: {error}") from None


def disk(run: Run, target: dict, drafter: DrafterConfig, expect: dict) -> dict:
    """The feature store of stage 04, and how far the source's own figure lies from it."""
    preflight, extract = run.flat("preflight"), run.flat("extract")
    boundaries = extract["boundaries"] or list(drafter.boundaries)
    hidden = memory_plan.text_config(target)["hidden_size"]
    tokens = preflight["samples"] * preflight["tokens_per_sample"]
    folder, dtype = project_path(extract["out"]), extract["feature_dtype"]
    found = disk_plan.plan(tokens, len(boundaries), hidden, dtype, folder) | {"boundaries": boundaries, "dtype": dtype}
    found["stream_bytes"] = found["bytes_per_token"] - disk_plan.OTHER_BYTES
    told = expect.get("extract", {}).get("gigabytes")
    if told:
        need = found["stream_bytes"] * tokens / 1e9
        found["told"] = {
            "gigabytes": told,
            "computed_gigabytes": need,
            "share": told / need - 1,
            "share_if_gib": told * 2**30 / 1e9 / need - 1,
            "tokens_that_fit": told * 1e9 / found["stream_bytes"],
        }
    return found


def memory(run: Run, target: dict, drafters: dict[str, dict], gpus: int) -> dict:
    """Bytes on each GPU: weights, each drafter, the KV cache of a token, and tokens that fit GPUs of some sizes."""
    serving = BenchmarkParams.check(run.flat("benchmark"), run.where)
    text = memory_plan.text_config(target)
    weights = memory_plan.target_weights(target, gpus, serving.dtype)
    each = {n: memory_plan.drafter_weights(d["config"], gpus, serving.dtype) for n, d in drafters.items()}
    target_kv = memory_plan.kv_bytes_per_token(text, gpus, serving.dtype)
    layer = next(iter(drafters.values()))["raw"] if drafters else None
    drafter_kv = memory_plan.kv_bytes_per_token(_layer(layer), gpus, serving.dtype) if layer else 0
    fixed = weights["gpu_bytes"] + max((d["gpu_bytes"] for d in each.values()), default=0)
    room = {gib: USED_SHARE * gib * 2**30 - fixed for gib in GPU_GIB}
    return {
        "gpus": gpus,
        "dtype": serving.dtype,
        "target": weights,
        "drafters": each,
        "kv_bytes_per_token": target_kv,
        "drafter_kv_bytes_per_token": drafter_kv,
        "fixed_bytes": fixed,
        "kv_tokens": {gib: max(0, int(free / (target_kv + drafter_kv))) for gib, free in room.items()},
        "vision_left_out": "text_config" in target,
    }


def _layer(raw: dict) -> dict:
    return raw.get("transformer_layer_config") or raw


def hours(run: Run, expect: dict) -> dict[str, tuple[float, str]]:
    """What takes how long: (hours, the rate they follow from); only where the section ``expect`` tells a rate."""
    preflight, epochs = run.flat("preflight"), run.flat("train")["epochs"]
    samples, tokens, found = preflight["samples"], preflight["samples"] * preflight["tokens_per_sample"], {}
    generate, extract, train, load = (expect.get(name, {}) for name in ("generate", "extract", "train", "benchmark"))
    if generate.keys() >= {"samples", "hours"}:
        rate = generate["samples"] / generate["hours"]
        found["generate"] = (samples / rate, f"{rate:,.0f} samples/h")
    if "tokens_per_second" in extract:
        rate = extract["tokens_per_second"]
        found["extract"] = (tokens / rate / 3600, f"{rate:,} tokens/s")
    if "tokens" in extract and train.keys() >= {"epochs", "hours"}:
        rate = train["epochs"] * extract["tokens"] / train["hours"] / 3600
        found["train"] = (epochs * tokens / rate / 3600, f"{rate:,.0f} tokens/s")
    for which, seconds in (("first", "load_seconds_before"), ("second", "load_seconds")):
        if load.keys() >= {"load_gigabytes", seconds}:
            rate = load["load_gigabytes"] / load[seconds]
            found[f"each start of the {which} engine"] = (load[seconds] / 3600, f"{rate:,.2f} GB/s")
    return found


def arguments(run: Run) -> list[dict]:
    """Command-line arguments of each engine setup in each mode; versions with equal ones share a row.

    Returns:
        rows of {"setup", "engine", "mode", "versions", "words"}.
    """
    rows: list[dict] = []
    for setup, settings in run.engines.items():
        for mode in run.modes:
            params = BenchmarkParams.check(run.flat("benchmark", **run.benchmark(setup, mode)), run.where)
            speculation = Planned(mode, params.drafter, params.num_speculative_tokens, params.speculative_options)
            target, port, same = Path(params.target), params.port or PORT, {}
            for version in rules.rules()["versions"][settings["engine"]]:
                if settings["engine"] == "vllm":
                    speculative = vllm.speculative_config(speculation)
                    words = vllm.arguments(params, target, version, port, speculative, None)
                else:
                    words = sglang.arguments(params, target, port, speculation)
                same.setdefault(tuple(words), []).append(version)
            for words, versions in same.items():
                row = {"setup": setup, "engine": settings["engine"], "mode": mode}
                rows.append(row | {"versions": versions, "words": list(words)})
    return rows


def audits(run: Run, target: dict, drafters: dict[str, dict]) -> dict[str, list[dict]]:
    """Drafter -> the rows of :func:`eagle3_lib.compat.audit.matrix` of the engines that the run has."""
    kinds = {settings["engine"] for settings in run.engines.values()}
    served, found = run.flat("benchmark")["max_model_len"], {}
    for name, drafter in drafters.items():
        if drafter["weights"]:
            rows = audit.matrix(run.drafters[name], target, served)
        else:
            with stand_in(drafter["raw"], drafter["config"]) as folder:
                rows = audit.matrix(folder, target, served)
        found[name] = [row for row in rows if row["engine"] in kinds]
    return found


def gates(run: Run, target: dict) -> list[dict] | None:
    """What keeps the target from EAGLE-3 in each release that was read; None for a target that was not read for."""
    name = GATES_READ_FOR.get((target.get("architectures") or [""])[0])
    kinds = {settings["engine"] for settings in run.engines.values()}
    rows = json.loads((ROOT / GATES).read_text())["rows"]
    found = [row for row in rows if row["target"] == name and row["engine"] in kinds]
    return found or None


def missing(run: Run, drafters: dict[str, dict]) -> list[str]:
    """What has to be fetched or made before the run can start."""
    found, target = [], run.flat("benchmark")["target"]
    if target != targets.SMOLLM2 and not (project_path(target) / "config.json").is_file():
        found.append(f"target {target}: not in this folder; stage 01 asks the model hub for it")
    for name, folder in run.drafters.items():
        if not drafters[name]["weights"] and folder != f"{run.flat('train')['out']}/drafter":
            found.append(f"drafter {name}: no weights in {folder}")
    prompts = run.flat("generate")["prompts"]
    if not prompts.startswith("datasets:") and not project_path(prompts).is_file():
        found.append(f"prompts: no file {prompts}")
    return found


def compute(run: Run) -> dict:
    """The whole plan of a run, as data.

    Raises:
        Eagle3Error: a config that is neither here nor kept, or an unknown figure in ``expect``.
    """
    expect, (target, where) = expected(run), config_of(run.flat("benchmark")["target"])
    drafters = {name: drafter_of(run, folder, target) for name, folder in run.drafters.items()}
    first = next(iter(drafters.values()))["config"] if drafters else None
    if first is None:
        raise Eagle3Error(f"{run.where}: drafters: found none, expected one at least")
    gpus = max(gpus_of(settings, f"{run.where}: {name}") for name, settings in run.engines.items())
    return {
        "run": run.name,
        "target": {"name": run.flat("benchmark")["target"], "config": where, "sizes": rules.Target.from_config(target)},
        "drafters": {name: {"where": d["where"], "weights": d["weights"]} for name, d in drafters.items()},
        "expect": expect,
        "missing": missing(run, drafters),
        "disk": disk(run, target, first, expect),
        "memory": memory(run, target, drafters, gpus),
        "hours": hours(run, expect),
        "arguments": arguments(run),
        "audits": audits(run, target, drafters),
        "gates": gates(run, target),
        "round": round_cost(run, expect),
    }


def round_cost(run: Run, expect: dict) -> dict | None:
    """What an acceptance rate and a speedup say of one round: tokens, and its cost in plain steps."""
    told, steps = expect.get("benchmark", {}), run.flat("benchmark")["num_speculative_tokens"]
    if not {"acceptance_rate", "speedup"} <= told.keys():
        return None
    length = 1 + steps * told["acceptance_rate"]
    return {"steps": steps, "mean_acceptance_length": length, "plain_steps": length / told["speedup"]}


# --- in words ---------------------------------------------------------------------------------------------------------


def text(plan: dict) -> str:
    """A plan in words, section by section."""
    sections = {
        "Before it can start": plan["missing"] or ["everything is here"],
        "Disk": _disk_lines(plan["disk"]),
        f"Memory of each of {plan['memory']['gpus']} GPUs": _memory_lines(plan),
        "Time": [f"{what}: {_span(h)} at {rate}" for what, (h, rate) in plan["hours"].items()]
        or ["no rates are told (section expect of the params file)"],
        "Engine arguments": _argument_lines(plan["arguments"]),
        "Audit of each drafter, by engine version (*: the version's default runner)": _audit_lines(plan),
        "What would fail": _failure_lines(plan),
        "Figures to expect": _figure_lines(plan["expect"]),
    }
    sizes = plan["target"]["sizes"]
    lines = [
        f"{plan['run']}: {plan['target']['name']} ({sizes.architecture}, {sizes.layers} layers of {sizes.hidden_size}), "
        f"config from {plan['target']['config']}",
        *(f"  drafter {name}: config from {d['where']}" for name, d in plan["drafters"].items()),
    ]
    for title, told in sections.items():
        if told:
            lines += ["", title, *(f"  {line}" for line in told)]
    return "\n".join(lines)


def _disk_lines(found: dict) -> list[str]:
    streams = len(found["boundaries"]) + 1
    lines = [
        f"features at boundaries {found['boundaries']} and the last hidden state, {found['dtype']}: "
        f"{streams} streams, {found['stream_bytes']:,} bytes a token (and {disk_plan.OTHER_BYTES} of ids)",
        f"{found['tokens']:,} tokens: {found['bytes'] / 1e9:,.1f} GB; here it {found['advice']}",
    ]
    if told := found.get("told"):
        lines.append(
            f"the source told {told['gigabytes']} GB; its tokens x bytes are {told['computed_gigabytes']:,.0f} GB: "
            f"{100 * told['share']:+.1f} % (read as GiB {100 * told['share_if_gib']:+.1f} %); its figure holds "
            f"{told['tokens_that_fit'] / 1e6:.1f} million tokens. It does not say why"
        )
    return lines


def _memory_lines(plan: dict) -> list[str]:
    found, told = plan["memory"], plan["expect"].get("benchmark", {}).get("load_gigabytes")
    target = found["target"]
    lines = [
        f"target: {target['parameters'] / 1e9:,.3f} billion parameters, {target['bytes'] / 1e9:,.1f} GB "
        f"({target['bytes'] / 2**30:,.1f} GiB) in all, {target['gpu_bytes'] / 1e9:,.2f} GB each",
        *(
            f"drafter {name}: {d['parameters'] / 1e6:,.1f} million parameters, {d['bytes'] / 1e9:,.2f} GB in all, "
            f"{d['gpu_bytes'] / 1e9:,.2f} GB each; to train it {d['training_bytes'] / 1e9:,.1f} GB and activations"
            for name, d in found["drafters"].items()
        ),
        f"KV cache of a token: {found['kv_bytes_per_token']:,} bytes each of the target, "
        f"{found['drafter_kv_bytes_per_token']:,} of a drafter",
        f"tokens of KV cache in {USED_SHARE:.0%} of a GPU, before activations: "
        + ", ".join(
            f"{n:,} ({gib} GiB)" if n else f"does not fit ({gib} GiB)" for gib, n in found["kv_tokens"].items()
        ),
    ]
    if found["vision_left_out"]:
        lines.append("not counted: the target's vision tower")
    if told:
        apart = [told * unit / target["bytes"] - 1 for unit in (1e9, 2**30)]
        lines.append(f"the source told {told} GB loaded: {100 * apart[0]:+.1f} % (read as GiB {100 * apart[1]:+.1f} %)")
    return lines


def _span(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours > 1 / 60 else f"{3600 * hours:.0f} s"


def _argument_lines(rows: list[dict]) -> list[str]:
    """The plain mode in full; of the others what they add to it."""
    plain = {row["setup"]: row["words"] for row in rows if row["mode"] == "plain"}
    lines = []
    for row in rows:
        words = row["words"] if row["mode"] == "plain" else ["...", *_added(row["words"], plain[row["setup"]])]
        lines.append(
            f"{row['setup']}, {row['mode']} ({row['engine']} {', '.join(row['versions'])}): {shlex.join(words)}"
        )
    return lines


def _added(words: list[str], plain: list[str]) -> list[str]:
    """``words`` without what they have in common with ``plain`` from the start on."""
    same = next((i for i, pair in enumerate(zip(words, plain, strict=False)) if pair[0] != pair[1]), len(plain))
    end = len(words) - (len(plain) - same)
    return words[same:end] if words[end:] == plain[same:] else words[same:]


def _audit_lines(plan: dict) -> list[str]:
    lines = []
    for name, rows in plan["audits"].items():
        lines.append(f"{name}{'' if plan['drafters'][name]['weights'] else ' (its config alone)'}")
        for row in rows:
            runner = f" {row['runner']}{'*' if row['default_runner'] else ''}" if row["runner"] else ""
            lines.append(f"  {row['engine']} {row['version']}{runner}: captures {row['boundaries']}, {row['worst']}")
    return lines


def _failure_lines(plan: dict) -> list[str]:
    lines, read = [], plan["gates"]
    if read is None:
        lines.append("gates: no release was read for this architecture (benchmarks/gates_of_wheels.py)")
    for row in read or []:
        faults = [f for f in row["findings"] if f["severity"] == "fails"]
        if faults:
            lines.append(f"{row['engine']} {row['version']} refuses the target, each of these by itself: {len(faults)}")
            lines += [f"  {fault['what']} ({fault['source']})" for fault in faults]
    if any(row["engine"] == "vllm" and row["version"] == "0.16.0" and len(row["findings"]) == 3 for row in read or []):
        lines.append(
            "so vLLM 0.16 needs three patches: one lets the target's type pass, one captures its boundaries, one gives "
            "the drafter an image token. EAGLE3_LIFT_GATES=1 makes them at run time (docs/kimi.md)"
        )
    bad, where = SEVERITIES[SEVERITIES.index("wrong") :], {}
    for name, rows in plan["audits"].items():
        for row in rows:
            for fault in row["findings"]:
                if fault["severity"] in bad:
                    said = f"{fault['severity']}: {fault['what']}; {fault['remedy']}"
                    version = f"{row['engine']} {row['version']} {row['runner']}".strip()
                    where.setdefault((name, said), []).append(version)
    lines += [f"{name} in {', '.join(versions)}: {said}" for (name, said), versions in where.items()]
    return lines + _equal_lines(plan)


def _equal_lines(plan: dict) -> list[str]:
    told, cost = plan["expect"].get("benchmark", {}), plan["round"]
    if "acceptance_rate" not in told or len(plan["drafters"]) < 2 or cost is None:
        return []
    return [
        f"{len(plan['drafters'])} drafters at one low rate ({told['acceptance_rate']:.0%}) mean the engine: where "
        "training on the target's own answers moves nothing, the drafter is not what limits; what all of them share is the "
        f"target, the prompts and the engine. The target accepted {ANCHOR}. Stage 08 proves it: rounds far below the replay",
        f"{told['speedup']}x is a second fault: {told['acceptance_rate']:.0%} of {cost['steps']} tokens make "
        f"{cost['mean_acceptance_length']:.1f} tokens a round, so a round cost {cost['plain_steps']:.1f} plain steps",
    ]


def _figure_lines(expect: dict) -> list[str]:
    return [
        f"{stage}: {value:,} {FIGURES[stage, name]}"
        if isinstance(value, int | float)
        else f"{stage}: {FIGURES[stage, name]}: {value}"
        for stage in STAGES
        for name, value in expect.get(stage, {}).items()
    ]
