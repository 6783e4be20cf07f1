"""Targets: the wheel's conversion answers as the real model does; wrong folders are named."""

import pytest
import torch

from eagle3_lib import files
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.targets import targets


def test_the_converted_target_gives_its_known_answer(target, tokenizer):
    question, expected = targets.SMOLLM2_CHECK
    assert targets.greedy_text(target, tokenizer, question) == expected
    config = target.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size, config.rms_norm_eps) == (
        30,
        576,
        49152,
        1e-5,
    )
    assert target.dtype == torch.float32


def test_any_transformers_folder_is_a_target(target_folder):
    assert targets.resolve(str(target_folder)) == target_folder


@pytest.mark.parametrize(("name", "found"), [("models/none", "no such folder"), ("params", "without config.json")])
def test_a_missing_target_is_named(name, found):
    with pytest.raises(Eagle3Error) as error:
        targets.resolve(name)
    assert "target" in str(error.value) and found in str(error.value) and name in str(error.value)


def test_embedding_and_head_are_read_alone(target, target_folder):
    embedding, head = targets.embedding_and_head(target_folder)
    assert torch.equal(embedding, target.get_input_embeddings().weight)
    assert torch.equal(head, target.lm_head.weight)


def test_of_two_that_build_a_folder_the_first_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        files.settle(tmp_path / name, tmp_path / "target")
    assert (tmp_path / "target" / "config.json").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        files.settle(tmp_path / "none", tmp_path / "target")
