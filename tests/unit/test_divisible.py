"""More heads of zero weights: a target and a drafter that two ranks can share compute what they did."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_lib.drafter import checkpoint
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.targets import targets
from eagle3_lib.verdict import replay
from recipes import divisible

DRAFTER = "drafters/smollm2-135m-eagle3"
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}
SIZES |= {"intermediate_size": 96, "vocab_size": 300, "attention_bias": True}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SIZES))
    for name, weight in target.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(weight)
    target.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    return tmp_path / "target"


def test_a_target_with_more_heads_is_the_same_function(folder):
    out = divisible.with_more_heads(folder, folder.with_name("more"), 4)
    assert (out / "tokenizer.json").is_file()
    before, after = targets.load(folder), targets.load(out)
    assert (after.config.num_attention_heads, after.config.num_key_value_heads) == (12, 4)
    ids = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))
    streams = [model(ids, output_hidden_states=True).hidden_states for model in (before, after)]
    for ours, theirs in zip(*streams, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_drafter_with_more_heads_drafts_the_same(tmp_path):
    out = divisible.with_more_heads(DRAFTER, tmp_path / "more", 4)
    before, after = (checkpoint.load(place, 30).drafter for place in (DRAFTER, out))
    assert after.config == before.config.with_(num_attention_heads=12, num_key_value_heads=4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(49152, (1, 40), generator=generator)
    embedding, fused = torch.randn(49152, 576, generator=generator), torch.randn(1, 40, 1728, generator=generator)
    for drafter in (before, after):
        drafter.share_embedding(embedding)
    with torch.no_grad():
        drafted = [replay.drafts(drafter, fused, ids, 3) for drafter in (before, after)]
    assert torch.equal(*drafted) and len(drafted[0].unique()) > 20


@pytest.mark.slow
def test_a_drafter_with_more_tokens_has_the_logits_it_had(tmp_path):
    before = checkpoint.load(DRAFTER, 30).drafter
    after = checkpoint.load(divisible.with_more_tokens(DRAFTER, tmp_path / "more", 8256, 30), 30).drafter
    kept = torch.isin(after.target_ids, before.target_ids)
    assert (len(kept), int(kept.sum())) == (8256, 8192) and torch.equal(after.target_ids[kept], before.target_ids)
    ours, theirs = before.state_dict(), after.state_dict()
    assert torch.equal(theirs["lm_head.weight"][kept], ours["lm_head.weight"])
    assert not theirs["lm_head.weight"][~kept].any()
    layers = [name for name in ours if name.startswith(("layers", "fc", "norm"))]
    assert len(layers) > 8 and all(torch.equal(ours[name], theirs[name]) for name in layers)
    with pytest.raises(Eagle3Error, match="draft_vocab_size: found 100, expected 8192 or more"):
        divisible.with_more_tokens(DRAFTER, tmp_path / "fewer", 100, 30)


def test_what_cannot_be_given_heads_is_named(folder):
    with pytest.raises(Eagle3Error, match="kv_heads: found 2, expected 3 or more"):
        divisible.with_more_heads(folder, folder.with_name("fewer"), 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": None}))
    with pytest.raises(Eagle3Error, match="head_dim: found none"):
        divisible.with_more_heads(folder, folder.with_name("more"), 4)
    with pytest.raises(Eagle3Error, match="found no model.safetensors"):
        divisible.with_more_heads(divisible.without_weights(folder, folder.with_name("bare"), {}), folder, 4)


def test_a_folder_without_weights_has_its_sizes(folder):
    out = divisible.without_weights(folder, folder.with_name("timed"), divisible.TIMED_SIZES)
    config = targets.load_config(out)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (2048, 24, 32)
    assert not list(out.glob("*.safetensors")) and (out / "tokenizer.json").is_file()
