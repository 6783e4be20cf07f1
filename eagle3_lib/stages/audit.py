"""Stage 06: what an engine version will make of a checkpoint, and whether its config.json fits its weights."""

from dataclasses import asdict

from ..compat import gates
from ..compat.audit import check, matrix, strict, target_side
from ..compat.config_value import config_findings, try_config
from ..compat.config_value import config_sentence as config_sentence  # for the notebook
from ..compat.findings import SEVERITIES, worst
from ..compat.rules import Target, captured, default_runner, installed_version, is_installed
from ..drafter import checkpoint
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import stage
from ..paths import project_path, short_path
from ..targets import targets
from ..targets.answers import samples_file


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


def require_servable(report: dict) -> None:
    """Stop when the audited engine version would serve the checkpoint wrongly or not at all.

    Raises:
        Eagle3Error: with every finding of severity "wrong" or "fails".
    """
    faults = [finding for finding in report["findings"] if finding["severity"] in ("wrong", "fails")]
    if faults:
        lines = [f"  {fault['severity']}: {fault['what']}; {fault['remedy']} ({fault['source']})" for fault in faults]
        raise Eagle3Error("\n".join([f"{report['drafter']} in {report['engine']} {report['version']}:", *lines]))
