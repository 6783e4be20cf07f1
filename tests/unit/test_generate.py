"""Data: from servers that fail, killed on the way, each sample once; splits by hash; damage named by line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import stub_server

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import GenerateParams
from eagle3_lib.paths import ROOT
from eagle3_lib.stages import generate
from eagle3_lib.targets import prompts
from eagle3_lib.targets.answers import iter_answers, read_answers
from eagle3_lib.targets.prompts import split_of

QUICKSTART = [c.first_prompt for c in prompts.read("params/prompts/python_functions.jsonl")]
TARGET = "models/SmolLM2-135M-Instruct"
CHILD = """
import json, resource, sys
from eagle3_lib.stages import generate
from eagle3_lib.params import GenerateParams
generate.run(GenerateParams(**json.loads(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.fixture(scope="module")
def servers(target_folder):
    """Two servers that never fail."""
    with stub_server.running("--fail", 0) as one, stub_server.running("--fail", 0) as two:
        yield [one, two]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def params_for(folder, rows, servers, **more):
    path = write_lines(folder / "prompts.jsonl", rows)
    return GenerateParams(out=str(folder / "out"), prompts=path, servers=servers, target=TARGET, **more)


def child(params):
    command = [sys.executable, "-c", CHILD, params.model_dump_json()]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.slow
def test_two_thousand_requests_to_failing_servers_killed_three_times(tmp_path, target_folder):
    rows = [{"prompt": f"prompt number {n}"} for n in range(2000)]
    with stub_server.running("--fail", 0.05) as one, stub_server.running("--fail", 0.05, "--seed", 1) as two:
        params = params_for(tmp_path, rows, [one, two], stall_timeout_s=1)
        log = tmp_path / "out" / "log.jsonl"
        for least in (300, 900, 1500):
            process = child(params)
            while lines_of(log) < least:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert lines_of(log) < 2000
        early = child(params_for(tmp_path, rows[:400], [one, two], stall_timeout_s=1))  # all of these are there
        few_mib = float(early.communicate()[0])
        params_for(tmp_path, rows, [one, two])
        whole = child(params)
        output, errors = whole.communicate()
        assert whole.returncode == 0, errors
    answers = read_answers(params.out)
    assert [a.prompt for a in answers] == [row["prompt"] for row in rows]
    assert all(a.output_ids == stub_server.answer_ids(a.prompt) and a.prompt_ids == [1, 2, 3] for a in answers)
    assert Counter(json.loads(line)["id"] for line in log.open()).most_common(1)[0][1] == 1  # each written once
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["samples"] == 2000 and summary["refused"] == 0
    assert set(summary["failed_tries"]) == {"429", "500", "503", "timeout", "connection"}
    assert float(output) - few_mib < 30  # 1600 more answers: the same memory


@pytest.mark.slow
def test_streamed_replies_that_break_are_asked_again(tmp_path, target_folder):
    rows = [{"prompt": f"prompt number {n}"} for n in range(100)]
    with stub_server.running("--fail", 0.15) as server:
        summary = generate.run(params_for(tmp_path, rows, [server], stream=True, stall_timeout_s=1))
    assert set(summary["failed_tries"]) == {"429", "500", "503", "timeout", "connection", "broken reply"}
    answers = read_answers(tmp_path / "out")
    assert [a.output_ids for a in answers] == [stub_server.answer_ids(row["prompt"]) for row in rows]
    assert all(a.text == f"answer to {a.prompt}" for a in answers)
    assert max(a.tries for a in answers) > 1


def test_the_columns_of_the_parquet_file(tmp_path, servers):
    params = params_for(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], servers)
    generate.run(params)
    row = pyarrow.parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist()[1]
    assert row["prompt"] == "b" and row["server"] in servers and row["finish_reason"] == "stop"
    assert row["loss_mask"] == [False] * 3 + [True] * len(row["output_ids"])
    assert (
        row["reasoning_span"] == []
        and json.loads(row["sampling"])["max_tokens"] == GenerateParams().max_tokens
        and row["seconds"] >= 0
    )


def test_the_quickstart_prompts_split_by_hash_and_never_overlap():
    sides = {side: {p for p in QUICKSTART if split_of(p, 0.25) == side} for side in ("train", "held_out")}
    assert len(QUICKSTART) == 120 and len(sides["train"]) == 94 and len(sides["held_out"]) == 26
    half = {p for p in QUICKSTART if split_of(p, 0.5) == "held_out"}
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
    row = {"id": "a", "split": "train", "prompt": "p", "prompt_ids": [1], "output_ids": [2], "text": "t"}
    row |= {"finish_reason": "stop", "seconds": 0.1}
    (tmp_path / "samples.jsonl").write_text(f"{json.dumps(row)}\n")
    assert read_answers(tmp_path)[0].loss_mask == [False, True]
    (tmp_path / "samples.jsonl").write_text(f"{json.dumps(row)}\n{line}\n")
    with pytest.raises(Eagle3Error) as error:
        read_answers(tmp_path)
    assert all(word in str(error.value) for word in ["samples.jsonl", *words])


def test_a_truncated_parquet_file_is_named(tmp_path, servers):
    generate.run(params_for(tmp_path, [{"prompt": "a"}], servers))
    path = tmp_path / "out" / "samples.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(Eagle3Error, match="samples.parquet: not a whole Parquet file"):
        list(iter_answers(tmp_path / "out"))


@pytest.mark.slow
def test_a_killed_run_asks_only_what_is_missing(tmp_path, servers):
    params = params_for(tmp_path, [{"prompt": prompt} for prompt in QUICKSTART], servers)
    assert generate.run(params)["asked_now"] == 120
    log = tmp_path / "out" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:50]) + lines[50][:30])  # killed while writing
    first = read_answers(params.out)
    summary = generate.run(params)
    assert summary["asked_now"] == 70 and summary["samples"] == 120 and lines_of(log) == 120
    again = read_answers(params.out)
    assert [(a.id, a.split, a.output_ids) for a in again] == [(a.id, a.split, a.output_ids) for a in first]
    assert Counter(a.split for a in again) == {"train": 94, "held_out": 26}


def test_a_damaged_line_of_the_log_is_named(tmp_path, servers):
    params = params_for(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], servers)
    generate.run(params)
    log = tmp_path / "out" / "log.jsonl"
    log.write_text(log.read_text().replace('"answers"', '"answ', 1))
    with pytest.raises(Eagle3Error, match=r"log.jsonl, line 1: damaged .*asked anew"):
        generate.run(params)


def test_answers_of_other_settings_are_moved_aside(tmp_path, servers):
    rows = [{"prompt": "a"}]
    generate.run(params_for(tmp_path, rows, servers))
    generate.run(params_for(tmp_path, rows, servers, concurrency=3, held_out_share=0.5))
    assert not list((tmp_path / "out").glob("log.*.jsonl"))
    generate.run(params_for(tmp_path, rows, servers, max_tokens=50))
    assert len(list((tmp_path / "out").glob("log.*.jsonl"))) == 1


def test_a_conversation_is_one_row_for_each_turn_of_the_target(tmp_path, servers):
    said = [("user", "one"), ("assistant", "of another model"), ("user", "two"), ("assistant", "also")]
    messages = [{"role": role, "content": text} for role, text in said]
    other = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "three"}]
    rows = [{"system": "Be short.", "messages": messages}, {"conversations": other, "system": "Be short."}]
    summary = generate.run(params_for(tmp_path, rows, servers, held_out_share=0.5))
    answers = read_answers(tmp_path / "out")
    assert summary["samples"] == 4 and [(a.turn, a.prompt) for a in answers] == [
        (0, "one"),
        (1, "two"),
        (0, "one"),
        (1, "three"),
    ]
    assert answers[1].id == f"{answers[0].id}-1" and len({a.split for a in answers}) == 1  # one first prompt: one side


def test_calls_of_tools_stay_and_their_results_with_them():
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": call, "content": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 4."},
    ]
    conversation = prompts.parse({"messages": messages, "tools": [{"type": "function"}]}, "here")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"] == call and conversation.turns == [3]


def test_a_sharegpt_row_without_a_human_turn_is_skipped_and_counted(tmp_path, capsys):
    system, greeting = {"from": "system", "value": "Be short."}, {"from": "gpt", "value": "Hello, ask me."}
    nobody, silent = {"conversations": [system, greeting]}, {"conversations": [greeting]}
    path = write_lines(tmp_path / "p.jsonl", [nobody, {"prompt": "a"}, silent, {"prompt": "b"}])
    found, skipped = prompts.read_counted(path)
    assert [c.first_prompt for c in found] == ["a", "b"] and skipped == 2
    assert [c.first_prompt for c in prompts.read(path)] == ["a", "b"]
    assert "2 ShareGPT rows without a human turn are skipped" in capsys.readouterr().out
    with pytest.raises(Eagle3Error, match=r"found no row with a human turn \(1 without one\), expected prompts"):
        prompts.read(write_lines(tmp_path / "none.jsonl", [nobody]))
    with pytest.raises(Eagle3Error, match="found no message of role user"):  # of OpenAI's messages it is a mistake
        prompts.parse({"messages": [{"role": "system", "content": "Be short."}]}, "here")


def test_what_an_assistant_says_before_anybody_has_asked_is_left_out():
    said = [("system", "Be short."), ("gpt", "Hello, ask me."), ("human", "one"), ("gpt", "x")]
    row = {"conversations": [{"from": role, "value": text} for role, text in said]}
    conversation = prompts.parse(row, "here")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.turns == [2] and conversation.first_prompt == "Be short.\none"


def test_prompts_from_parquet_and_without_doubles(tmp_path):
    texts = ["a  b", "a b", "c"]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "p.parquet")
    assert [c.first_prompt for c in prompts.read(str(tmp_path / "p.parquet"))] == ["a  b", "c"]
    assert len(prompts.read(str(tmp_path / "p.parquet"), most=1)) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"promt": "b"}, "line 2: field prompt: found NoneType, expected str"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            r"messages\[0\]: role: found 'human', expected one of system",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content: found None, expected text"),
        ({"messages": "x"}, "line 2: field messages: found str, expected list"),
        ({"conversations": [{"from": "me"}]}, r"conversations\[0\]: from: found 'me'"),
        ([], "line 2: found list, expected an object"),
    ],
)
def test_wrong_prompts_are_named(tmp_path, row, words):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(Eagle3Error, match=words):
        prompts.read(path)


def test_a_data_set_is_read_by_the_datasets_library(monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}], "tools": None}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [c.first_prompt for c in prompts.read("datasets:some/set:test")] == ["a", "b"]
    assert asked == [("some/set", "test", True)]


def test_a_data_set_without_the_datasets_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Eagle3Error, match="datasets:some/set: the package datasets is not installed"):
        prompts.read("datasets:some/set")


@pytest.mark.slow
def test_each_share_of_the_data_is_sampled_as_its_settings_say(tmp_path, servers):
    rows = [{"prompt": f"prompt {n}"} for n in range(400)]
    sampling = [{"share": 0.25, "temperature": 1.0, "top_p": 0.9}, {"share": 0.25, "temperature": 0.5}]
    generate.run(params_for(tmp_path, rows, servers, sampling=sampling))
    used = Counter(json.loads(a.sampling)["temperature"] for a in iter_answers(tmp_path / "out"))
    assert used[1.0] == pytest.approx(100, abs=25) and used[0.5] == pytest.approx(100, abs=25)
    assert used[0.0] == 400 - used[1.0] - used[0.5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"share": 0.5, "temprature": 1.0}], "temprature"),
        ([{"share": 0.7}, {"share": 0.7}], "shares that sum to 1 at most"),
    ],
)
def test_wrong_sampling_is_refused(options, words):
    with pytest.raises(Eagle3Error, match=words):
        GenerateParams.check({"sampling": options}, "here")


def test_flaws_are_counted_and_dropped_only_when_asked(tmp_path):
    replies = {
        "loop": {"content": "x", "token_ids": [5] + [7, 8, 9] * 20, "finish_reason": "length"},
        "empty": {"content": "", "token_ids": [2], "finish_reason": "stop"},
        "good": {"content": "y", "token_ids": list(range(60)), "finish_reason": "stop"},
        "refuse": {"status": 400, "message": "this prompt is too long"},
    }
    (tmp_path / "replies.json").write_text(json.dumps(replies))
    rows = [{"prompt": name} for name in replies]
    with stub_server.running("--fail", 0, "--replies", tmp_path / "replies.json") as server:
        kept = generate.run(params_for(tmp_path, rows, [server], drop=[]))
        fewer = generate.run(params_for(tmp_path, rows, [server], drop=["loop", "empty"]))
    assert kept["samples"] == 3 and kept["dropped"] == {} and kept["refused"] == 1
    assert kept["flaws"] == {"cut": 1, "empty": 1, "loop": 1, "unrendered": 2}
    assert fewer["samples"] == 1 and fewer["dropped"] == {"loop": 1, "empty": 1} and fewer["asked_now"] == 1
    assert fewer["tokens_at_most"] == {"64": 1}
    refused = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").open() if "too long" in line]
    assert len(refused) == 2 and refused[0]["refused"].startswith("400")  # asked again by the second run


def test_a_server_that_refuses_everything_ends_the_run(tmp_path):
    (tmp_path / "replies.json").write_text(json.dumps({f"p{n}": {"status": 400, "message": "no"} for n in range(30)}))
    with stub_server.running("--fail", 0, "--replies", tmp_path / "replies.json") as server:
        with pytest.raises(Eagle3Error, match="prompts refused; the last: 400"):
            generate.run(params_for(tmp_path, [{"prompt": f"p{n}"} for n in range(30)], [server], concurrency=2))


def test_a_server_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Eagle3Error, match="servers: http://127.0.0.1:9 does not answer"):
        generate.run(params_for(tmp_path, [{"prompt": "a"}], ["http://127.0.0.1:9"], tries=2))


def test_a_server_without_token_ids_is_helped_by_the_tokenizer(tmp_path, tokenizer):
    (tmp_path / "replies.json").write_text(json.dumps({"Hi": {"content": "Hello there.", "finish_reason": "stop"}}))
    with stub_server.running("--fail", 0, "--no-ids", "--replies", tmp_path / "replies.json") as server:
        summary = generate.run(params_for(tmp_path, [{"prompt": "Hi"}], [server]))
    answer = read_answers(tmp_path / "out")[0]
    assert summary["ids_from"] == {"tokenizer": 1}
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}], tokenize=False
    )
    assert tokenizer.decode(answer.prompt_ids + answer.output_ids) == rendered.rstrip("\n")


def test_the_key_of_a_server_must_be_there(tmp_path, servers, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(Eagle3Error, match="found no environment variable NO_SUCH_KEY"):
        generate.run(params_for(tmp_path, [{"prompt": "a"}], servers, api_key_env="NO_SUCH_KEY"))
