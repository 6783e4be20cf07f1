"""What one engine version will make of a drafter's checkpoint, told without starting it.

Both engines load a checkpoint that they misread without a word: layers captured one off, a norm left out, a head that
keeps its random start. :mod:`eagle3_lib.compat.rules` knows what each version does; here the rules meet a checkpoint and
a target. A finding says how bad it is, where in the engine that stands, and what to do.
"""

from dataclasses import asdict
from pathlib import Path

import torch

from ..drafter import checkpoint
from ..drafter.checkpoint import IDS, Survey
from ..drafter.model import Drafter, DrafterConfig
from ..errors import Eagle3Error
from ..paths import project_path, short_path
from ..targets import targets
from .findings import SEVERITIES, Finding, worst
from .rules import (
    MTP_MODEL_TYPES,
    Target,
    _applying,
    _doubt,
    _source,
    captured,
    default_runner,
    installed_version,
    neighbours,
    rules,
    runners,
)

GUESSED = (
    "config.json names no layers: every engine guesses {guess}; a drafter trained on others accepts near nothing; "
    "write them"
)


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
        return [Finding("fails", "config", str(error), "eagle3_lib/drafter/checkpoint.py", "mend config.json")]
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
        return [Finding(severity, "strict", str(error), "eagle3_lib/drafter/checkpoint.py load", "mend the checkpoint")]
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
