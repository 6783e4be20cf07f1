"""Stage 06: what an engine version will make of a checkpoint, and whether its config.json fits its weights."""

from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from ..compat import gates
from ..compat.audit import check, matrix, strict, target_side
from ..compat.config_value import config_findings, try_config
from ..compat.config_value import config_sentence as config_sentence  # for the notebook
from ..compat.findings import SEVERITIES, worst
from ..compat.rules import PACKAGES, Target, captured, default_runner, rules
from ..drafter import checkpoint
from ..engines.base import find_distribution, interpreter
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..params import AuditParams
from ..paths import project_path, short_path
from ..targets import targets
from ..targets.answers import samples_file


def run(params: AuditParams) -> dict:
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
        version = params.engine_version or installed_version(engine, params.engine_python)
        survey, runner = checkpoint.survey(folder), default_runner(engine, version, target)
        where, own = short_path(folder / "config.json"), "embed_tokens.weight" in survey.shapes
        config, conversions = checkpoint.parse_config(survey.raw, where, target.layers, own)
        findings = check(folder, target_config, engine, version, params.max_model_len, runner, target_folder)
        findings += target_side(folder, target_folder, config)
        findings += strict(folder, target, findings)
        if tree := audited_tree(params, version):
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


def installed_version(engine: str, engine_python: str = "") -> str:
    """The version of an engine that an interpreter has; "" is this one.

    Raises:
        Eagle3Error: it has none, or does not run.
    """
    try:
        return find_distribution(engine_python, PACKAGES[engine])[1]
    except Eagle3Error as error:
        newest = rules()["versions"][engine][-1]
        raise Eagle3Error(f"{error}; or name the version to audit in engine_version, such as {newest!r}") from None


def audited_tree(params: AuditParams, version: str) -> Path | None:
    """The source tree of the audited version; None where the interpreter has another version, none, or no readable one."""
    try:
        found = installed_version(params.engine, params.engine_python)
    except Eagle3Error:
        return None
    if Version(found) != Version(version):
        return None
    return gates.source_tree(params.engine, interpreter(params.engine_python) if params.engine_python else "")


def require_servable(report: dict) -> None:
    """Stop when the audited engine version would serve the checkpoint wrongly or not at all.

    Raises:
        Eagle3Error: with every finding of severity "wrong" or "fails".
    """
    faults = [finding for finding in report["findings"] if finding["severity"] in ("wrong", "fails")]
    if faults:
        lines = [f"  {fault['severity']}: {fault['what']}; {fault['remedy']} ({fault['source']})" for fault in faults]
        raise Eagle3Error("\n".join([f"{report['drafter']} in {report['engine']} {report['version']}:", *lines]))
