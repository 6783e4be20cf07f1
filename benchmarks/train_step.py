"""One optimiser step of training-time test: tokens/s, peak memory and MFU, beside SpecForge and speculators.

    python benchmarks/train_step.py                          # every shape, every trainer that is installed
    python benchmarks/train_step.py --shapes tiny --who ours --dry   # proves the script on a CPU; writes nothing

Random features, one text of the shape's length, 7 steps, bfloat16 with float32 master weights, AdamW, gradients clipped.
Each trainer runs in a process of its own, with what it would take by default for this: SpecForge 0.2.0 flex attention,
its compact teacher and BF16Optimizer; speculators 0.9.0 its flex attention, fused loss and autocast; both from PyPI. A
trainer that fails has a row that says why. Median of the repeats after warm-up; peak: torch's, weights and optimiser
included. MFU: floating-point operations that the computation needs (nothing computed twice, the target's head for the
draft vocabulary once) a second, over the measured rate of a bfloat16 product of two 8192 x 8192 matrices.
Writes benchmarks/results/train_step.json.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.features.store import Sample
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import TrainParams
from eagle3_lib.paths import project_path
from eagle3_lib.targets.capture import Features
from eagle3_lib.training.packing import pack
from eagle3_lib.training.trainer import TrainingTimeTest

STEPS, DECAY = 7, 0.8


@dataclass(frozen=True)
class Shape:
    config: DrafterConfig
    tokens: int


def sizes(hidden, intermediate, heads, kv_heads, vocabulary, draft, **more) -> DrafterConfig:
    base = dict(head_dim=128, target_hidden_size=hidden, boundaries=(2, 16, 29), max_position_embeddings=131072)
    return DrafterConfig(
        hidden, intermediate, heads, kv_heads, vocab_size=vocabulary, draft_vocab_size=draft, **base | more
    )


YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
    "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MLA = {"latent": LatentSizes(1536, 512, 128, 64, 128), "head_dim": 64, "rope_parameters": YARN}
SHAPES = {
    "llama-3.1-8b": Shape(sizes(4096, 14336, 32, 8, 128256, 32000), 4096),
    "kimi-k2.5, llama drafter": Shape(sizes(7168, 18432, 56, 8, 163840, 32000), 4096),
    "kimi-k2.5, mla drafter": Shape(sizes(7168, 18432, 64, 64, 163840, 32000, **MLA), 4096),
    "tiny": Shape(sizes(256, 512, 2, 1, 1000, 500), 192),
}
PEERS = {"llama-3.1-8b": ("specforge", "speculators"), "tiny": ("specforge", "speculators")}


def floating_point_operations(config: DrafterConfig, tokens: int) -> float:
    """Of one step, forward and backward: 6 for each weight and token, 12 for each pair of a query and a value it sees."""
    drafter = Drafter(config) if tokens < 1000 else _on_meta(config)
    layers = sum(p.numel() for p in drafter.layers.parameters() if p.dim() > 1)
    head, fc = drafter.lm_head.weight.numel(), drafter.fc.weight.numel()
    width = config.num_attention_heads * (
        (config.latent.qk_head_dim + config.latent.v_head_dim) / 2 if config.latent else config.head_dim
    )
    attention = 12 * width * (tokens / 2)
    target = 2 * config.draft_vocab_size * config.target_hidden_size
    return tokens * (STEPS * (6 * (layers + head) + attention) + 4 * fc + target)  # features need no gradient


def _on_meta(config: DrafterConfig) -> Drafter:
    with torch.device("meta"):
        return Drafter(config)


def random_text(config: DrafterConfig, tokens: int) -> tuple[torch.Tensor, ...]:
    """Features [T, 3 Ht], last hidden states [T, Ht] and tokens [T], whose likeliest next ones are in the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    some = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    ids = torch.randint(config.draft_vocab_size, (tokens,), generator=generator)
    return some(tokens, config.feature_size), some(tokens, config.target_hidden_size), ids


def ours(config: DrafterConfig, tokens: int, device: str):
    """A function that makes one optimiser step."""
    drafter = Drafter(config)
    drafter.initialise()
    drafter.set_vocabulary(torch.arange(config.draft_vocab_size))
    drafter.share_embedding(0.02 * torch.randn(config.vocab_size, config.hidden_size))
    drafter.embed_tokens.bfloat16()
    drafter.to(device)
    head = 0.02 * torch.randn(config.draft_vocab_size, config.target_hidden_size, device=device, dtype=torch.bfloat16)
    params = TrainParams(ttt_steps=STEPS, compile=device == "cuda")
    if params.compile:
        for layer in drafter.layers:
            layer.mlp.compile()
    model = TrainingTimeTest(drafter, head, params)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    fused, last_hidden, ids = random_text(config, tokens)
    sample = Sample("0", "train", 1, ids.tolist(), Features(fused, last_hidden, ids))
    batch = pack([sample], torch.arange(config.draft_vocab_size), STEPS, pin=device == "cuda")

    def step():
        moved = batch.to(device)
        by_step = DECAY ** torch.arange(STEPS, device=device) / moved.labels.taught.to(device)
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            losses = model(moved, by_step)
        losses.total.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimiser.step()
        return losses.total.item()

    return step


def llama_json(config: DrafterConfig):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
    )


def specforge(config: DrafterConfig, tokens: int, device: str):
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer

    json_config = llama_json(config)
    json_config.draft_vocab_size = config.draft_vocab_size
    attention = "flex_attention" if device == "cuda" else "sdpa"
    drafter = LlamaForCausalLMEagle3(json_config, attention_backend=attention).to(device, torch.bfloat16)
    drafter.embed_tokens.requires_grad_(False)
    drafter.t2d[config.draft_vocab_size :] = False
    model = OnlineEagle3Model(drafter, length=STEPS, attention_backend=attention)
    optimiser = BF16Optimizer(drafter, lr=1e-4)
    head = 0.02 * torch.randn(config.vocab_size, config.target_hidden_size, device=device, dtype=torch.bfloat16)
    fused, last_hidden, ids = (part[None] for part in random_text(config, tokens))

    def step():
        losses = model(
            input_ids=ids.to(device),
            attention_mask=torch.ones_like(ids).to(device),
            target=None,
            loss_mask=torch.ones(1, tokens, 1, device=device),
            hidden_states=fused.to(device),
            target_hidden_for_compact=last_hidden.to(device),
            target_head_weight=head,
        )[0]
        loss = sum(DECAY**k * some for k, some in enumerate(losses))
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def speculators(config: DrafterConfig, tokens: int, device: str):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_json(config)
    layer._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    served = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config.draft_vocab_size,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=list(config.boundaries),
            speculators_config=served,
        )
    ).to(device)
    for linear in (model.lm_head, model.verifier_lm_head, model.embed_tokens):
        nn.init.normal_(linear.weight, 0, 0.02)
    model.lm_head.requires_grad_(True)
    model.t2d[: config.draft_vocab_size] = True
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.0)
    loss_config = resolve_loss_config("kl_div", "fused" if device == "cuda" else "eager")
    fused, last_hidden, ids = (part[None] for part in random_text(config, tokens))

    def step():
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            _, loss, _ = model(
                hidden_states=fused.to(device),
                input_ids=ids.to(device),
                document_ids=torch.zeros_like(ids).to(device),
                loss_mask=torch.ones_like(ids, dtype=torch.bool).to(device),
                verifier_last_hidden_states=last_hidden.to(device),
                ttt_steps=STEPS,
                ttt_step_loss_decay=DECAY,
                loss_config=loss_config,
            )
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimiser.step()
        return loss.item()

    return step


def measure(who: str, name: str, device: str, repeats: int) -> dict:
    """One row, in this process."""
    shape = SHAPES[name]
    step = {"ours": ours, "specforge": specforge, "speculators": speculators}[who](shape.config, shape.tokens, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    losses, seconds = [step() for _ in range(3)], []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        losses.append(step())
        wait()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    rate = matrix_rate(device)
    operations = floating_point_operations(shape.config, shape.tokens)
    return {
        "who": who,
        "shape": name,
        "tokens_per_s": round(shape.tokens / median, 1),
        "peak_gib": peak and round(peak, 2),
        "mfu": round(operations / median / rate, 3),
        "step_s": [round(value, 4) for value in seconds],
        "matrix_tflops": round(rate / 1e12, 2),
        "first_loss": round(losses[0], 3),
        "last_loss": round(losses[-1], 3),
    }


def matrix_rate(device: str) -> float:
    """Floating-point operations a second of a bfloat16 matrix product, the best of five."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 10 * 2 * size**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[name for name in SHAPES if name != "tiny"], choices=SHAPES)
    parser.add_argument("--who", nargs="+", default=["ours", "specforge", "speculators"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dry", action="store_true", help="write no results file")
    parser.add_argument("--one", nargs=2, metavar=("WHO", "SHAPE"), help="measure in this process and print the row")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.one:
        print(json.dumps(measure(*arguments.one, device, arguments.repeats)))
        return
    rows = []
    for name in arguments.shapes:
        for who in ("ours", *PEERS.get(name, ())):
            if who in arguments.who and (who == "ours" or importlib.util.find_spec(who)):
                rows.append(_in_own_process(who, name, arguments.repeats))
                print(rows[-1])
    if not arguments.dry:
        result = {
            "command": "python benchmarks/train_step.py",
            "date": datetime.date.today().isoformat(),
            "hardware": hardware(),
            "versions": versions()
            | {who: importlib.metadata.version(who) for who in {r["who"] for r in rows} - {"ours"}},
            "steps": STEPS,
            "rows": rows,
        }
        write_json(project_path("benchmarks/results/train_step.json"), result)


def _in_own_process(who: str, name: str, repeats: int) -> dict:
    command = [sys.executable, __file__, "--one", who, name, "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"who": who, "shape": name, "error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
