"""What vLLM's CPU build makes of latent attention: tokens against transformers, by rope and by kind of drafter.

Targets with random weights in the sizes of notebooks/recipes/tiny_mla_target, four layers, float32. Writes
results/mla_on_cpu.json.

    python benchmarks/mla_on_cpu.py
"""

import datetime
import tempfile
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import offline
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import capture
from eagle3_lib.verdict import replay, rounds
from recipes import tiny_mla

STEPS, TOKENS = 4, 32
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def main() -> None:
    prompts = torch.randint(300, 1500, (8, 12), generator=torch.Generator().manual_seed(4)).tolist()
    rows = [
        case(prompts, attention, rope)
        for attention, rope in (("latent", "yarn"), ("latent", "default"), ("llama", "yarn"))
    ]
    result = {
        "command": "python benchmarks/mla_on_cpu.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "rows": rows,
    }
    write_json(project_path("benchmarks/results/mla_on_cpu.json"), result)
    for row in rows:
        print(row)


def case(prompts: list[list[int]], attention: str, rope: str) -> dict:
    """One target and drafter on the engine: {"drafter", "rope", "tokens", "as_transformers", "rounds", "as_replay"} or "error"."""
    with tempfile.TemporaryDirectory() as work:
        params = tiny_mla.TinyMlaParams(
            out=f"{work}/target", layers=4, boundaries=[1, 2, 3], drafter_attention=attention
        )
        config = tiny_mla.target_config(params)
        config.initializer_range = 0.1
        if rope == "default":
            config.rope_parameters = PLAIN_ROPE
        torch.manual_seed(0)
        target = DeepseekV3ForCausalLM(config).float().eval().requires_grad_(False)
        target.save_pretrained(f"{work}/target")
        drafter = checkpoint.load_for(tiny_mla.fresh_drafter(params, f"{work}/fresh"), "target", target)
        drafter.lm_head.weight.data.copy_(target.lm_head.weight)  # so that some drafts are right
        if rope == "default":
            drafter = drafter.adapted(drafter.config.with_(rope_parameters=PLAIN_ROPE))
        folder = checkpoint.save(drafter, f"{work}/drafter", torch.float32)
        row = {"drafter": attention, "rope": rope}
        try:
            (answers,) = offline.rounds(Path(work) / "target", [folder], prompts, STEPS, TOKENS)
        except Eagle3Error as error:
            answers = str(error)
        if isinstance(answers, str):
            return row | {"error": next((x for x in answers.splitlines()[::-1] if "Error" in x), answers[-300:])}
        return row | _compared(answers, target, drafter)


def _compared(answers: list[offline.Answer], target, drafter) -> dict:
    same, rows = 0, []
    for answer in answers:
        text, start = answer.prompt_ids + answer.output_ids, len(answer.prompt_ids)
        (features,) = capture.capture(target, [text], drafter.config.boundaries)
        same += int((features.argmax[start - 1 : -1] == torch.tensor(answer.output_ids)).sum())
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), STEPS)[0]
        rows += rounds.compare(answer.accepted, replay.accepted_at(proposed, text), start, STEPS)
    return {
        "tokens": sum(len(answer.output_ids) for answer in answers),
        "as_transformers": same,
        "rounds": len(rows),
        "as_replay": sum(row["engine"] == row["replay"] or row["cut"] for row in rows),
        "accepted": sum(row["engine"] for row in rows),
    }


if __name__ == "__main__":
    main()
