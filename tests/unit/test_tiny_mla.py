"""The recipe of the small latent-attention target, at toy scale: vocabulary, training, what engines read, both drafters."""

import json
from pathlib import Path

import pytest
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines.inside import broken
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import hypotheses, replay
from recipes import tiny_mla

TEXTS = [
    (f"Tell of {who}.", f"{who} saw {what}. {who} was glad.")
    for who in ("a cat", "a dog", "an owl", "a hen")
    for what in ("the sun", "the sea", "a tree", "a star", "the snow", "a ball", "a boat", "a hill")
]
SIZES = {"vocab_size": 400, "hidden_size": 32, "layers": 4, "heads": 2, "experts": 3, "expert_size": 32}


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("target") / "target")
    few = {"epochs": 12, "batch_size": 8, "learning_rate": 1e-2, "boundaries": [1, 2, 3], "kv_lora_rank": 32}
    return tiny_mla.TinyMlaParams(run="test_tiny", out=out, **SIZES, **few)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The folder that has the training's runs/, instead of the project's own."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def trained(params, project):
    """The notes of a training on TEXTS."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3_lib.paths.ROOT", project)
        return tiny_mla.train_target(params, TEXTS)


def test_texts_are_kept_to_their_last_whole_sentence():
    assert tiny_mla.whole_sentences(' He ran. "Stop!" she said. Then he ') == 'He ran. "Stop!" she said.'
    assert tiny_mla.whole_sentences('It was 3.5 m high. "Why?" it') == 'It was 3.5 m high. "Why?"'
    assert tiny_mla.whole_sentences("no end") == ""


@pytest.mark.slow
def test_the_target_learns_and_its_folder_is_what_engines_read(params, trained):
    assert trained["texts"] == len(TEXTS) and trained["last_loss"] < 0.6 * trained["first_loss"]
    folder = Path(params.out)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["num_nextn_predict_layers"] == 0
    assert (config["topk_method"], config["scoring_func"], config["moe_layer_freq"]) == ("noaux_tc", "sigmoid", 1)
    names = checkpoint.read_tensors(folder).keys()
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in names, "experts one by one, as engines name them"
    assert not any("layers.4." in name for name in names), "no layer for multi-token prediction"


def test_a_training_that_goes_on_has_all_weights_of_its_checkpoint(params, trained, project, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_lib.paths.ROOT", project)
    again = params.model_copy(update={"out": str(tmp_path / "again")})
    assert tiny_mla.train_target(again, TEXTS)["last_loss"] == trained["last_loss"]
    before, after = (checkpoint.read_tensors(Path(folder)) for folder in (params.out, again.out))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_prompt_and_answer_are_tokenised_as_they_were_trained(params, trained):
    tokenizer = targets.load_tokenizer(Path(params.out))
    prompt = targets.render(tokenizer, [{"role": "user", "content": "Tell of a cat."}])
    both = [{"role": "user", "content": "Tell of a cat."}, {"role": "assistant", "content": "a cat saw the sun."}]
    whole = tokenizer.apply_chat_template(both, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] == prompt and whole[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(whole[len(prompt) : -1]) == "a cat saw the sun."


@pytest.mark.parametrize("attention", ["latent", "llama"])
def test_a_fresh_drafter_of_either_kind_fits_the_target_and_is_replayed(params, trained, attention, tmp_path):
    folder = tiny_mla.fresh_drafter(params.model_copy(update={"drafter_attention": attention}), tmp_path / "drafter")
    target = targets.load(Path(params.out))
    drafter = checkpoint.load_for(folder, params.out, target)
    assert bool(drafter.config.latent) == (attention == "latent")
    text = targets.render(targets.load_tokenizer(Path(params.out)), [{"role": "user", "content": TEXTS[0][0]}])
    (features,) = capture.capture(target, [text], drafter.config.boundaries)
    assert replay.drafts(drafter, features.fused[None], torch.tensor([text]), 3).shape == (1, len(text) - 1, 3)


def test_without_texts_and_with_wrong_boundaries_it_says_so(params):
    with pytest.raises(Eagle3Error, match="no answer with a whole sentence"):
        tiny_mla.train_target(params, [])
    with pytest.raises(Eagle3Error, match="boundaries: found 5, expected 0 to 4, the layers"):
        tiny_mla.TinyMlaParams.check(params.model_dump() | {"boundaries": [5]}, "here")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["healthy", "broken"])
def test_published_rounds_follow_from_the_weights_in_the_repository(engine):
    published = ROOT / "reports" / "tiny_mla" / "data" / "benchmark" / engine / "public" / "benchmark.json"
    requests = json.loads(published.read_text())["requests"][:6]
    target = targets.load(ROOT / "targets" / "tiny-mla")
    drafter = checkpoint.load_for("drafters/tiny-mla-public", "targets/tiny-mla", target)
    fault, equal, rounds, as_fault = "residual missing", 0, 0, 0
    for request in hypotheses.examine(target, drafter, requests, 4, [fault]):
        for row, count in zip(request["rows"], request["hypotheses"][fault], strict=True):
            if not row["cut"]:
                rounds += 1
                equal += row["engine"] == row["replay"]
                as_fault += row["engine"] == count
    assert rounds > 100 and (equal if engine == "healthy" else as_fault) == rounds
    assert (as_fault if engine == "healthy" else equal) < 0.9 * rounds


class Layer(torch.nn.Module):
    def forward(self, positions, hidden, residual, scaling):
        residual = hidden if residual is None else hidden + residual
        return torch.tanh(residual), residual


class Stack(torch.nn.Module):
    """A decoder stack as vLLM's DeepSeek model runs it: (update, residual) from layer to layer."""

    def __init__(self):
        super().__init__()
        self.layers, self.aux_hidden_state_layers = torch.nn.ModuleList(Layer() for _ in range(4)), (1, 3, 4)

    def forward(self, hidden):
        residual, captured = None, []
        for index, layer in enumerate(self.layers):
            if index in self.aux_hidden_state_layers:
                captured.append(hidden + residual)
            hidden, residual = layer(None, hidden, residual, None)
        if len(self.layers) in self.aux_hidden_state_layers:
            captured.append(hidden + residual)
        return (hidden + residual, captured) if captured else hidden + residual


def test_a_broken_capture_of_deepseek_changes_what_is_captured_and_nothing_else():
    hidden = torch.linspace(-1, 1, 6).reshape(2, 3)
    right, streams = Stack()(hidden)
    for value, expected in (
        (lambda _, update, residual: update + residual, streams),
        (lambda _, update, residual: update.clone(), None),
    ):
        changed = type("Changed", (Stack,), {})
        broken._capture_deepseek(changed, value)
        model = changed()
        output, captured = model(hidden)
        assert torch.equal(output, right) and len(captured) == 3
        assert model.aux_hidden_state_layers == (1, 3, 4) and not model.layers[1]._forward_pre_hooks
        assert expected is None or all(map(torch.equal, captured, expected))
    before = [hidden]  # the stream before each boundary's layer is what tanh made the update of
    for _ in model.layers:
        before.append(before[-1] + torch.tanh(before[-1]))
    assert all(torch.allclose(got, torch.tanh(before[k - 1])) for got, k in zip(captured, (1, 3, 4), strict=True))
