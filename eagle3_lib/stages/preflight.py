"""Stage 01: the machine, what is installed, whether drafter, target and GPU fit together, and what the run will write."""

from dataclasses import asdict

from ..compat import fit
from ..compat.disk_plan import plan
from ..compat.findings import worst
from ..drafter import checkpoint
from ..engines import base
from ..engines.registry import ENGINES
from ..engines.spec import Engine
from ..errors import Eagle3Error
from ..files import write_json
from ..manifest import hardware, stage, versions
from ..params import PreflightParams
from ..paths import project_path, short_path
from ..targets import targets


def run(params: PreflightParams) -> dict:
    """Look before a long run starts; builds or downloads the target where it is missing.

    Returns:
        {"hardware", "versions", "engines", "target", "drafter", "disk", "fit"}, also in preflight.json. fit: findings on the
        engine and the GPUs (:mod:`eagle3_lib.compat.fit`), none without a GPU.
    """
    with stage("preflight", params) as notes:
        folder = targets.resolve(params.target)
        config = targets.load_config(folder)
        loaded = checkpoint.load(params.drafter, config.num_hidden_layers)
        drafter = loaded.drafter.config
        checkpoint.check_fits(drafter, config, params.drafter, params.target)
        tokens = params.samples * params.tokens_per_sample
        result: dict = {
            "hardware": hardware(),
            "versions": versions(),
            "engines": {name: _installed(engine) for name, engine in ENGINES.items()},
            "target": {
                "folder": short_path(folder),
                "architecture": config.architectures[0] if config.architectures else type(config).__name__,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size,
            },
            "drafter": {
                "folder": params.drafter,
                "boundaries": list(drafter.boundaries),
                "draft_vocab_size": drafter.draft_vocab_size,
                "parameters": sum(
                    p.numel() for n, p in loaded.drafter.named_parameters() if not n.startswith("embed_tokens")
                ),
                "conversions": loaded.conversions,
            },
            "disk": plan(
                tokens, len(drafter.boundaries), config.hidden_size, params.feature_dtype, project_path(params.out)
            ),
        }
        found = fit.before_launch(params, folder, base.Speculation("drafter", params.drafter))
        result["fit"] = [asdict(finding) for finding in found]
        write_json(project_path(params.out) / "preflight.json", result)
        notes |= {"fits": result["disk"]["fits"], "engine_fits": worst(found) != "fails"}
    return result


def _installed(engine: Engine) -> str:
    try:
        return " ".join(engine.server.installed())
    except Eagle3Error:
        return "not in this interpreter"
