"""Parameters: defaults in one place, unknown and wrong ones refused by name."""

import pytest
import yaml

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import STAGES, BenchmarkParams, Run, TrainParams


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_braces_are_filled_from_other_fields():
    params = BenchmarkParams(run="a", mode="base", drafter="d/{run}")
    assert params.out == "runs/a/benchmark/vllm/base"
    assert params.drafter == "d/a"


def test_quickstart_resolves_every_stage_to_plain_yaml():
    run = Run("params/quickstart.yaml")
    for stage in STAGES:
        assert yaml.safe_load(yaml.safe_dump(run.flat(stage)))["run"] == "quickstart"
    assert run.modes == ["plain", "ngram", "base", "finetuned"]
    assert run.flat("benchmark", mode="finetuned", drafter="x")["out"] == "runs/quickstart/benchmark/vllm/finetuned"


def test_flat_files_change_only_when_their_stage_does(tmp_path, monkeypatch):
    run = Run("params/quickstart.yaml")
    monkeypatch.setattr("eagle3_lib.paths.ROOT", tmp_path)
    path = tmp_path / run.write_flat("train", "test_flat")
    before = path.stat().st_mtime_ns
    run.write_flat("train", "test_flat")
    assert path.stat().st_mtime_ns == before
    run.write_flat("train", "test_flat", epochs=1)
    assert path.stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {eopchs: 3}", ["mine.yaml: train", "unknown parameter eopchs", "epochs"]),
        ("train: {learning_rate: 1e-4}", ["mine.yaml: train", "learning_rate", "'1e-4'", "1.0e-04", "text"]),
        ("train: {epochs: 0}", ["epochs", "found 0", "greater than or equal to 1"]),
        ("trian: {epochs: 1}", ["unknown section trian", "train"]),
        ("shared: {tarket: x}", ["shared", "unknown parameter tarket"]),
        ("train: 3", ["train", "found int"]),
        ("[1]", ["found list", "sections"]),
        ("train: {epochs: [}", ["not YAML"]),
        ("benchmark: {engine: tgi}", ["engine", "'tgi'", "'vllm'"]),
    ],
)
def test_a_params_file_is_refused_by_file_and_field(tmp_path, text, words):
    with pytest.raises(Eagle3Error) as error:
        Run(write(tmp_path, text))
    for word in words:
        assert word in str(error.value)


def test_every_fault_is_told_at_once(tmp_path):
    with pytest.raises(Eagle3Error) as error:
        Run(write(tmp_path, "train: {epochs: x, seed: y}"))
    assert "epochs" in str(error.value) and "seed" in str(error.value)


def test_a_notebook_refuses_names_that_papermill_injected_and_nobody_knows():
    namespace = {"In": ["", "# Parameters\nepochs = 2\neopchs = 1\n"], "epochs": 2, "eopchs": 1, "live": object()}
    with pytest.raises(Eagle3Error, match="unknown parameter eopchs"):
        TrainParams.from_notebook(namespace)
    del namespace["eopchs"]
    namespace["In"][1] = "# Parameters\nepochs = 2\n"
    assert TrainParams.from_notebook(namespace).epochs == 2


def test_a_mode_and_its_drafter_go_together():
    with pytest.raises(Eagle3Error, match="drafter"):
        BenchmarkParams.check({"mode": "plain", "drafter": "d"}, "x")
    with pytest.raises(Eagle3Error, match="drafter"):
        BenchmarkParams.check({"mode": "base"}, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drafters: [a]", "drafters: found .*, expected: a valid dictionary"),
        ("drafters: {a: 1}", "drafters.a: found 1, expected: a valid string"),
        ("drafters: {a: 'x/{foo}'}", "drafters.a: found 'x/{foo}', expected a folder"),
        ("drafters: {a: 'x/{'}", "drafters.a: found 'x/{', expected a folder"),
        ("engines: 5", "engines.*: found 5, expected"),
        ("engines: {vllm: abc}", "engines.*vllm: found 'abc', expected"),
        ("shared: [1]", "shared: found .*, expected: a valid dictionary"),
        ("run: [1]", "run: found"),
    ],
)
def test_a_section_of_another_shape_is_one_error(tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(Eagle3Error, match=f"mine.yaml: {said}"):
        Run(path)
    path.write_bytes(b"run: \xff\xfe")
    with pytest.raises(Eagle3Error, match="mine.yaml: not YAML"):
        Run(path)
