"""What each engine version does with a checkpoint, as it was read in the engine's source: audit_rules.yaml."""

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.version import Version

from ..drafter import checkpoint
from ..drafter.checkpoint import IDS
from ..engines.registry import ENGINES
from ..errors import Eagle3Error

MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
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
    for package in ENGINES[engine].spec.distributions:
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
    """The model runner that a version takes by itself for a target: "v1" or "v2"; "" for an engine that has one."""
    variable = ENGINES[engine].spec.runner_variable
    if not variable:
        return ""
    if (forced := os.environ.get(variable)) is not None:
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
    if not ENGINES[engine].spec.runner_variable:
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
