"""Whether the values in config.json fit the weights: replays of held-out answers under every other value, without an engine."""

import itertools
from pathlib import Path

import psutil
import torch

from ..drafter import checkpoint
from ..errors import Eagle3Error
from ..paths import short_path
from ..targets import targets
from ..targets.answers import iter_answers, samples_file
from ..verdict import suspects
from .findings import Finding

ANSWER_TOKENS = 256  # of each answer that config.json is held against


# --- config.json against the weights ----------------------------------------------------------------------------------


def try_config(params, target_folder: Path, known: list[Finding]) -> dict:
    """Replay what other values of config.json would accept on held-out answers of the target, where no engine ran.

    Args:
        params: AuditParams.
        known: findings so far; a drafter that the strict loader refuses is not tried.
    Returns:
        {"answers", "slots": rounds that were compared, one from every place of an answer, "scores": as
        :func:`eagle3_lib.verdict.suspects.score`, "suspect": as :func:`eagle3_lib.verdict.suspects.told`, the one that clearly fits the
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
