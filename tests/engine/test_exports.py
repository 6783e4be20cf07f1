"""Real vLLM on a CPU serves every export as it was trained: each round is the one that the replay gives.

Switches are set on the trained base drafter, and what they need beside it is made so that some drafts are still
accepted; equality of rounds is what counts here.
"""

import json

import pytest
import torch

from eagle3_lib.compat import export, gates
from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import offline
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import replay, rounds

pytestmark = pytest.mark.skipif(gates.source_tree("vllm") is None, reason="vLLM is not installed")
STEPS, MAX_TOKENS, PROMPTS = 4, 24, 4
# rounds that differ, at most: float32 sums of another order can turn a draft whose two best tokens tie
ALLOWED = 1


@pytest.fixture(scope="module")
def target():
    torch.set_num_threads(1)
    return targets.load(targets.resolve(targets.SMOLLM2))


@pytest.fixture(scope="module")
def variants(target):
    """name -> (export format, drafter)"""
    base = checkpoint.load("drafters/smollm2-135m-eagle3", target.config.num_hidden_layers).drafter
    config, fc, hidden = base.config, base.fc.weight.detach(), base.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    blocks = fc.unflatten(-1, (3, hidden)).unbind(1)
    scale = torch.full((3 * hidden,), feature_scale(target))
    norms = {f"fc_norm.{i}.weight": scale[:hidden] for i in range(3)}
    embedding = target.get_input_embeddings().weight.detach()
    head = torch.zeros(config.vocab_size, hidden).index_copy_(0, base.target_ids, base.lm_head.weight.detach())
    sizes = {"q_proj": 9 * 64, "k_proj": 3 * 64, "v_proj": 3 * 64, "o_proj": hidden}
    biases = {f"layers.0.self_attn.{name}.bias": 0.1 * noise(size) for name, size in sizes.items()}
    second = {k.replace("layers.0", "layers.1"): v for k, v in base.state_dict().items() if k.startswith("layers.0.")}
    second = {k: 0.1 * v if "o_proj" in k or "down_proj" in k else v for k, v in second.items()}
    second |= {k: v[:, hidden:] for k, v in second.items() if "self_attn" in k and "o_proj" not in k}
    heads = {f"layers.0.self_attn.{name}.weight": torch.full((64,), 2.0) for name in ("q_norm", "k_norm")}

    def adapted(tensors=None, **changes):
        return base.adapted(config.with_(**changes), tensors)

    speculators_default = adapted(
        {"input_norm.weight": scale}, norm_before_residual=True, norm_before_fc=True, norm_output=True
    )
    five = torch.cat([blocks[0], 0.01 * noise(hidden, hidden), blocks[1], 0.01 * noise(hidden, hidden), blocks[2]], -1)
    five = adapted({"fc.weight": five}, boundaries=(2, 8, 15, 21, 27))
    full = adapted({"lm_head.weight": head}, draft_vocab_size=config.vocab_size)
    full.set_vocabulary(torch.arange(config.vocab_size))
    return {
        "norm_before_residual": ("vllm", adapted(norm_before_residual=True)),
        "norm_output": ("vllm", adapted(norm_output=True)),
        "fc_norm": ("vllm", adapted(norms, fc_norm=True)),
        "norm_before_fc": ("vllm", adapted({"input_norm.weight": scale}, norm_before_fc=True)),
        "one_boundary": ("vllm", adapted({"fc.weight": 2 * blocks[1]}, boundaries=(15,))),
        "three_boundaries": ("vllm", base),
        "five_boundaries": ("vllm", five),
        "own_embedding": (
            "vllm",
            adapted({"embed_tokens.weight": embedding + 0.02 * noise(*embedding.shape)}, own_embedding=True),
        ),
        "full_vocabulary": ("vllm", full),
        "attention_bias": ("vllm", adapted(biases, attention_bias=True)),
        "two_layers": ("vllm", adapted(second, num_hidden_layers=2)),
        "head_norms": ("vllm", adapted(heads, qk_norm=True)),
        "speculators_default": ("speculators", speculators_default),
        "speculators_five_boundaries": ("speculators", five),
    }


def feature_scale(target) -> float:
    text = prompts()[0]
    return next(iter(capture.capture(target, [text], (2, 15, 27)))).fused.square().mean(-1).sqrt().median().item()


def prompts() -> list[list[int]]:
    requests = json.loads((ROOT / "tests/data/vllm_cpu_replay.json").read_text())["requests"]
    return [request["prompt_ids"] for request in requests[1 : PROMPTS + 1]]


GROUPS = {
    "norms": ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "head_norms"),
    "sizes": ("one_boundary", "three_boundaries", "five_boundaries", "two_layers", "attention_bias"),
    "files": ("own_embedding", "full_vocabulary", "speculators_default", "speculators_five_boundaries"),
}


@pytest.mark.parametrize("group", GROUPS)
@torch.no_grad()
def test_rounds_are_the_replay_s(group, variants, target, tmp_path):
    folder = targets.resolve(targets.SMOLLM2)
    config = checkpoint.read_config(folder)
    exported = [(*variants[name], tmp_path / name) for name in GROUPS[group]]
    paths = [export.export(drafter, path, engine, "", config, torch.float32) for engine, drafter, path in exported]
    served = offline.rounds(folder, paths, prompts(), STEPS, MAX_TOKENS, timeout_s=600, at_once=2)
    for name, path, answers in zip(GROUPS[group], paths, served, strict=True):
        assert not isinstance(answers, str), f"{name}: {answers}"
        rounds, accepted, differing = compared(checkpoint.load_for(path, "target", target), target, answers)
        print(f"{name}: {rounds} rounds, {accepted} accepted, {differing} differ")
        assert rounds >= 20 and differing <= ALLOWED, name


def compared(drafter, target, answers) -> tuple[int, int, int]:
    """Whole rounds, drafts that the engine accepted in them, and rounds in which the replay says otherwise."""
    rows, texts = [], [answer.prompt_ids + answer.output_ids for answer in answers]
    for answer, text, features in zip(
        answers, texts, capture.capture(target, texts, drafter.config.boundaries), strict=True
    ):
        proposed = replay.drafts(drafter, features.fused[None], torch.tensor([text]), STEPS)[0]
        rows += rounds.compare(answer.accepted, replay.accepted_at(proposed, text), len(answer.prompt_ids), STEPS)
    rows = [row for row in rows if not row["cut"]]
    return len(rows), sum(row["engine"] for row in rows), sum(row["engine"] != row["replay"] for row in rows)
