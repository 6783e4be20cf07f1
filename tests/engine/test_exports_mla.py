"""A drafter with latent attention: trained, exported, served by real vLLM on a CPU, and replayed round by round.

The target is a small DeepSeek-V3 with random weights, whose greedy text soon repeats; that much a drafter learns in
seconds. A Llama drafter cannot run beside it on a CPU (no common KV block size), one with latent attention can.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from eagle3_lib.compat import export, gates
from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.engines import offline
from eagle3_lib.targets import capture
from eagle3_lib.verdict import replay, rounds

pytestmark = pytest.mark.skipif(gates.source_tree("vllm") is None, reason="vLLM is not installed")
STEPS, VOCAB, LAYERS = 3, 96, 6
SIZES = LatentSizes(q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIG = DrafterConfig(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    target_hidden_size=64,
    boundaries=(2, 3, 5),
    rms_norm_eps=1e-6,
    rope_parameters=ROPE,
    max_position_embeddings=256,
    latent=SIZES,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A dense DeepSeek-V3 of 6 layers, and its folder."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = DeepseekV3Config(
        **vars(SIZES),
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=LAYERS,
        rope_parameters=ROPE,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    model = DeepseekV3ForCausalLM(config).float().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("mla") / "target"
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def texts(target):
    """Greedy texts of the target: 12 prompts of 6 random tokens, 32 tokens each."""
    prompts = torch.randint(3, VOCAB, (12, 6), generator=torch.Generator().manual_seed(4))
    return target[0].generate(prompts, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def drafter(target, texts):
    model, _ = target
    drafter = Drafter(CONFIG)
    drafter.initialise(seed=0)
    drafter.set_vocabulary(torch.arange(VOCAB))
    drafter.share_embedding(model.get_input_embeddings().weight)
    captured = capture.capture(model, texts.tolist(), CONFIG.boundaries)
    features = torch.stack([item.fused for item in captured])
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], 2e-3)
    for _ in range(40):
        logits = torch.stack(list(drafter.unroll(features, texts, STEPS)), 2)  # [B, T-1, steps, V]
        wanted = torch.stack(
            [torch.nn.functional.pad(texts[:, 2 + k :], (0, k + 1), value=-100) for k in range(STEPS)], 2
        )
        loss = cross_entropy(logits.flatten(0, 2), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@torch.no_grad()
def test_vllm_serves_the_latent_drafter_as_it_was_trained(target, texts, drafter, tmp_path):
    model, folder = target
    path = export.export(drafter, tmp_path / "drafter", "vllm", "", checkpoint.read_config(folder), torch.float32)
    prompts = texts[:4, :6].tolist()
    (answers,) = offline.rounds(folder, [path], prompts, STEPS, max_tokens=32, max_model_len=128)
    assert not isinstance(answers, str), answers
    loaded = checkpoint.load_for(path, "target", model)
    rows = []
    for answer in answers:
        text = answer.prompt_ids + answer.output_ids
        (features,) = capture.capture(model, [text], CONFIG.boundaries)
        proposed = replay.drafts(loaded, features.fused[None], torch.tensor([text]), STEPS)[0]
        rows += rounds.compare(answer.accepted, replay.accepted_at(proposed, text), len(answer.prompt_ids), STEPS)
    rows = [row for row in rows if not row["cut"]]
    differing, accepted = sum(r["engine"] != r["replay"] for r in rows), sum(r["engine"] for r in rows)
    print(f"latent attention: {len(rows)} rounds, {accepted} accepted, {differing} differ")
    assert len(rows) >= 30 and accepted >= 20 and differing <= 1
