"""Is the audit right? Serve checkpoints that it calls wrong, and ask the engine's own rounds.

Each case makes one fault in the base drafter's folder that the audit finds for the installed vLLM. The engine's rounds
are compared with two replays: of the drafter as the audit says that it is served, and of the drafter as it was trained.
Cases that the audit says are refused are started too. Writes results/audit_on_engine.json.

    python benchmarks/audit_on_engine.py [FINDING ...]      all, or some anew beside the rows of the others
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from eagle3_lib.compat import audit, export, rules
from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter
from eagle3_lib.engines import offline
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import replay

IDS = checkpoint.IDS
STEPS, MAX_TOKENS, PROMPTS = 4, 32, 5
RESULT = ROOT / "benchmarks/results/audit_on_engine.json"


@dataclass
class Case:
    """finding: the audit's rule. ``trained`` is saved, then ``config`` and ``tensors`` are set (None removes)."""

    finding: str
    trained: Drafter
    served: Drafter | None  # as the audit says; None: refused
    config: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    write: Callable = checkpoint.save


def cases(base: Drafter, target) -> list[Case]:
    """Faults that the audit finds for vLLM 0.32 with the V1 runner."""
    config, hidden = base.config, base.config.hidden_size
    nested = {"use_aux_hidden_state": True, IDS: [b - 1 for b in config.boundaries]}
    turned = torch.cat([base.fc.weight.unflatten(-1, (3, -1))[:, i] for i in (1, 0, 2)], -1)
    scales = feature_scales(target, config.boundaries)
    ones = {f"fc_norm.{i}.weight": torch.ones(hidden) for i in range(3)}
    norm_before_fc = base.adapted(config.with_(norm_before_fc=True), {"input_norm.weight": scales})
    first_rows = {"lm_head.weight": target.get_output_embeddings().weight[: config.draft_vocab_size]}
    rope = config.rope_parameters
    sketch = base.adapted(config)
    sketch.set_vocabulary(torch.arange(config.draft_vocab_size))
    wrong = [
        Case("boundaries", base, base.adapted(config.with_(boundaries=(1, 14, 26))), {IDS: None}),
        Case(
            "boundaries_not_rising",
            base,
            base.adapted(config, {"fc.weight": turned}),
            {IDS: [15, 2, 27], "eagle_config": None},
            {"fc.weight": turned},
        ),
        Case("d2t_missing", base, sketch, tensors={"d2t": None, "t2d": None}),
        Case("lm_head_missing", base, base.adapted(config, first_rows), tensors={"lm_head.weight": None}),
        Case(
            "norm_output_nested_not_read",
            base.adapted(config.with_(norm_output=True)),
            base,
            {"norm_output": None, "eagle_config": nested | {"norm_output": True}},
        ),
        Case(
            "norm_before_residual_nested_not_read",
            base.adapted(config.with_(norm_before_residual=True)),
            base,
            {"norm_before_residual": None, "eagle_config": nested | {"norm_before_residual": True}},
        ),
        Case("input_norm_dropped", norm_before_fc, base, {"norm_before_fc": False}),
        Case("fc_norm_weights_missing", base, base.adapted(config.with_(fc_norm=True), ones), {"fc_norm": True}),
        Case(
            "norm_weight_missing",
            base,
            base.adapted(config, {"layers.0.hidden_norm.weight": torch.ones(hidden)}),
            tensors={"midlayer.hidden_norm.weight": None},
        ),
        Case(
            "rope_theta_missing",
            base,
            base.adapted(config.with_(rope_parameters=rope | {"rope_theta": 10000.0})),
            {"rope_theta": None},
        ),
        Case(
            "speculators_residual_default",
            base,
            base.adapted(config.with_(norm_before_residual=True)),
            {"norm_before_residual": None},
            write=as_speculators,
        ),
    ]
    one = base.adapted(config.with_(boundaries=(15,)), {"fc.weight": base.fc.weight[:, hidden : 2 * hidden]})
    fc_norm = base.adapted(config.with_(fc_norm=True), ones)
    refused = [
        Case("fc_norm_nested_not_read", fc_norm, None, {"fc_norm": None, "eagle_config": nested | {"fc_norm": True}}),
        Case("boundary_count_not_found", one, None, {"eagle_config": None, "num_aux_hidden_states": None}),
        Case("weights_unknown", base, None, tensors={"midlayer.extra.weight": torch.ones(2)}),
        Case("multi_token_prediction_rewrite", base, None, {"model_type": "deepseek_v3"}),
    ]
    return wrong + refused


def feature_scales(target, boundaries: tuple[int, ...]) -> torch.Tensor:
    """A norm weight under which normed features have about the size of plain ones: [boundaries x Ht]."""
    text = reference()[0]["prompt_ids"]
    features = next(iter(capture.capture(target, [text], boundaries))).fused
    return features.square().mean(-1).sqrt().median().repeat(features.shape[-1])


def as_speculators(drafter: Drafter, folder: Path, dtype: torch.dtype) -> Path:
    return export.export(drafter, folder, "speculators", "", checkpoint.read_config(target_folder()), dtype)


def reference() -> list[dict]:
    return json.loads((ROOT / "tests/data/vllm_cpu_replay.json").read_text())["requests"]


def target_folder() -> Path:
    return targets.resolve(targets.SMOLLM2)


def write_case(case: Case, folder: Path) -> None:
    """The folder of a case: ``trained``, saved in float32, with its fault."""
    case.write(case.trained, folder, torch.float32)
    raw = {name: value for name, value in (checkpoint.read_config(folder) | case.config).items() if value is not None}
    write_json(folder / "config.json", raw)
    tensors = load_file(folder / "model.safetensors") | case.tensors
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def agreement(drafter: Drafter, target, answers: list[offline.Answer]) -> tuple[int, int]:
    """Rounds that are not cut by the end of a text, and how many of them a replay of ``drafter`` gives alike."""
    rounds = equal = 0
    texts = [answer.prompt_ids + answer.output_ids for answer in answers]
    for answer, text, features in zip(
        answers, texts, capture.capture(target, texts, drafter.config.boundaries), strict=True
    ):
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), STEPS)[0]
        counts = replay.accepted_at(proposed, text)
        rows = [row for row in rounds.compare(answer.accepted, counts, len(answer.prompt_ids), STEPS) if not row["cut"]]
        rounds, equal = rounds + len(rows), equal + sum(row["engine"] == row["replay"] for row in rows)
    return rounds, equal


def row_of(case: Case, severity: str, target, served: list[offline.Answer] | str) -> dict:
    if isinstance(served, str):
        reason = [line.strip() for line in served.splitlines() if "Error" in line]
        row = {"rounds": 0, "accepted": 0, "agreement_as_audited": None, "agreement_healthy": None}
        return {"finding": case.finding, "severity": severity, "refused": True, **row, "reason": (reason or [""])[-1]}
    embedding = target.get_input_embeddings().weight
    shares = {}
    for name, drafter in (("as_audited", case.served), ("healthy", case.trained)):
        if drafter is None:
            shares[f"agreement_{name}"] = None
            continue
        drafter.share_embedding(embedding)
        rounds, equal = agreement(drafter, target, served)
        shares[f"agreement_{name}"] = round(equal / rounds, 4)
    accepted = sum(sum(answer.accepted) for answer in served)
    return {
        "finding": case.finding,
        "severity": severity,
        "refused": False,
        "rounds": rounds,
        "accepted": accepted,
        **shares,
    }


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    started, folder = time.time(), target_folder()
    target, target_config = targets.load(folder), checkpoint.read_config(folder)
    base = checkpoint.load("drafters/smollm2-135m-eagle3", target_config["num_hidden_layers"]).drafter
    prompts, version = [r["prompt_ids"] for r in reference()[1 : PROMPTS + 1]], rules.installed_version("vllm")
    todo = [case for case in cases(base, target) if not wanted or case.finding in wanted]
    with TemporaryDirectory() as work, torch.no_grad():
        folders = [Path(work) / f"{i:02d}-{case.finding}" for i, case in enumerate(todo)]
        for case, path in zip(todo, folders, strict=True):
            write_case(case, path)
        found = [{f.rule: f.severity for f in audit.check(path, target_config, "vllm", version)} for path in folders]
        served = offline.rounds(folder, folders, prompts, STEPS, MAX_TOKENS, timeout_s=240 * len(todo))
        rows = [
            row_of(case, severities.get(case.finding, "not found"), target, answers)
            for case, severities, answers in zip(todo, found, served, strict=True)
        ]
    kept = json.loads(RESULT.read_text())["rows"] if wanted and RESULT.is_file() else []
    rows = [row for row in kept if row["finding"] not in {case.finding for case in todo}] + rows
    result = {
        "command": "python benchmarks/audit_on_engine.py",
        "engine": f"vllm {version}",
        "settings": {"dtype": "float32", "temperature": 0, "num_speculative_tokens": STEPS, "max_tokens": MAX_TOKENS},
        "prompts": PROMPTS,
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "versions": versions(),
        "hardware": hardware(),
        "rows": rows,
    }
    write_json(RESULT, result)
    print(json.dumps(rows[-len(todo) :], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
