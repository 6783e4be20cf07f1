"""Data: splits by hash, resumed to the sample, damage named by line."""

import json

import pytest

from eagle3_lib import generate
from eagle3_lib.answers import Answer, read_answers
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import GenerateParams

PROMPTS = generate.read_prompts(generate.project_path("params/prompts/python_functions.jsonl"))


def row(prompt, **more):
    answer = {
        "id": generate.prompt_id(prompt),
        "split": generate.split_of(prompt, 0.25),
        "prompt": prompt,
        "prompt_ids": [1],
    }
    return answer | {"output_ids": [2, 3], "text": "t", "finish_reason": "stop", "seconds": 0.1} | more


def write(folder, rows, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + end)


def test_the_quickstart_prompts_split_by_hash_and_never_overlap():
    sides = {side: {p for p in PROMPTS if generate.split_of(p, 0.25) == side} for side in ("train", "held_out")}
    assert len(PROMPTS) == 120 and len(sides["train"]) == 94 and len(sides["held_out"]) == 26
    half = {p for p in PROMPTS if generate.split_of(p, 0.5) == "held_out"}
    assert sides["held_out"] < half  # a larger share only adds


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "a", ', ["line 2", "not JSON"]),
        ('{"id": "a"}', ["line 2", "field split", "NoneType", "expected str"]),
        ("[]", ["line 2", "found list"]),
    ],
)
def test_a_corrupted_line_is_named(tmp_path, line, words):
    write(tmp_path, [row(PROMPTS[0])], f"\n{line}\n")
    with pytest.raises(Eagle3Error) as error:
        read_answers(tmp_path)
    assert all(word in str(error.value) for word in ["samples.jsonl", *words])


def test_wrong_prompts_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(Eagle3Error, match="line 2: field prompt: found NoneType, expected str"):
        generate.read_prompts(path)


def test_a_killed_run_asks_only_what_is_missing(tmp_path, monkeypatch):
    asked = []

    def ask_all(servers, prompts, params):
        asked.extend(prompts)
        return (Answer(**row(prompt)) for prompt in prompts)

    monkeypatch.setattr(generate, "_ask_all", ask_all)
    monkeypatch.setattr(generate, "_servers", lambda params, out: __import__("contextlib").nullcontext([None]))
    params = GenerateParams(out=str(tmp_path / "out"))
    generate.run(params)
    assert len(asked) == 120
    whole = (tmp_path / "out" / "samples.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "out" / "samples.jsonl").write_text("".join(lines[:50]) + lines[50][:30])  # killed while writing
    asked.clear()
    summary = generate.run(params)
    assert asked == PROMPTS[50:]
    assert summary["samples"] == 120 and (tmp_path / "out" / "samples.jsonl").read_text() == whole


def test_samples_of_other_settings_are_moved_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_ask_all", lambda servers, prompts, params: (Answer(**row(p)) for p in prompts))
    monkeypatch.setattr(generate, "_servers", lambda params, out: __import__("contextlib").nullcontext([None]))
    generate.run(GenerateParams(out=str(tmp_path / "out")))
    generate.run(GenerateParams(out=str(tmp_path / "out"), max_tokens=50))
    assert len(list((tmp_path / "out").glob("samples.*.jsonl"))) == 1
