"""Files of other tools, written by the tools themselves: every number that an import has to give, and what it refuses."""

import json
import shutil

import pytest

from eagle3_lib.engines.records import reading as records
from eagle3_lib.engines.records.reading import READERS
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT
from eagle3_lib.verdict import acceptance

DATA = ROOT / "tests" / "data" / "records"
EXPECTED = json.loads((DATA / "expected.json").read_text())
ANSWERS = [
    "vllm-server/on/completion.json",
    "vllm-server/on/chat.json",
    "vllm-server/on/completion_stream.txt",
    "vllm-server/on/chat_stream.txt",
    "vllm-server/on/chat_stream_long.txt",
    "vllm-server/on/two_tokens.txt",
    "vllm-server/on/context_end_stream.txt",
    "vllm-server/on/structured_stream.txt",
]
DIFFERENCES = {
    "vllm-server/off: metrics_after - metrics_before": "vllm-server/off/metrics",
    "vllm-server/on: metrics_after - metrics_before": "vllm-server/on/metrics",
    "vllm-server/replay12 metrics delta": "vllm-server/replay12/metrics",
    "vllm-bench/chat_c1 metrics delta": "vllm-bench/chat_c1.metrics",
    "vllm-bench/completions_c4_ignore_eos metrics delta": "vllm-bench/completions_c4_ignore_eos.metrics",
    "aiperf metrics delta": "aiperf/metrics",
}
REPLAY12 = "vllm-server/replay12 by per_step_accepted"
ROUNDS12, ACCEPTED12 = 511, [136, 48, 19, 8]


def near(value):
    return pytest.approx(value, abs=6e-7)


def check(found, expected, drafted=True):
    """A Recorded against a row of expected.json."""
    told = found.counters
    by_position = expected["accepted_by_position"]
    assert told["rounds"] == expected["rounds"]
    assert told["accepted"] == by_position and sum(told["accepted"]) == expected["accepted"]
    assert found.mean_length == near(expected["mean_length"])
    curve = [accepted / told["rounds"] for accepted in told["accepted"]]
    if "curve" in expected:
        assert curve == near(expected["curve"])
    if "conditional" in expected:
        for ours, theirs in zip(acceptance.conditional(curve), expected["conditional"], strict=True):
            assert ours == (None if theirs is None else near(theirs))
    if drafted and "drafted" in expected:
        assert told["drafted"] == expected["drafted"]
    if "accepted_over_drafted" in expected:
        assert sum(told["accepted"]) / told["drafted"] == near(expected["accepted_over_drafted"])
    if "mean_of_curve" in expected:
        assert sum(curve) / len(curve) == near(expected["mean_of_curve"])
    if "requests" in expected and found.histograms:
        assert len(found.histograms) == expected["requests"]


def mean_over_requests(found):
    lengths = [1 + sum(request["accepted"]) / len(request["accepted"]) for request in found.requests]
    return sum(lengths) / len(lengths)


def past_end(found):
    """Tokens that the engine counted and the answers do not have."""
    emitted = sum(1 + len(request["accepted"]) + sum(request["accepted"]) for request in found.requests)
    return emitted - sum(request["output_tokens"] for request in found.requests)


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------------------- real files


def test_every_row_of_expected_is_tested_here():
    rows = {*DIFFERENCES, *ANSWERS, REPLAY12}
    rows |= {
        "vllm-server/on/one_token.json",
        "vllm-server/on/stop_string_stream.txt",
        "vllm-server/replay12 by chunks (cut at the end)",
        "vllm-bench/chat_c1.json",
        "vllm-bench/completions_c4_ignore_eos.json",
        "aiperf/profile_export.jsonl",
        "aiperf/profile_export_aiperf.json",
        "aiperf/server_metrics_export.json",
        "aiperf/summary_level.profile_export.jsonl",
        "specdec_bench/acceptance_rate.json",
        "vllm-server/summary/completion.json",
    }
    assert rows == set(EXPECTED)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_difference_of_two_scrapes(name):
    found = records.read_difference(DATA / f"{DIFFERENCES[name]}_before.txt", DATA / f"{DIFFERENCES[name]}_after.txt")
    check(found, EXPECTED[name])
    assert (found.tool, found.engine, found.positions, found.exact) == ("vllm metrics", "vllm", 4, True)
    assert found.requests is None and found.histograms is None and found.warnings == []


def test_one_scrape_counts_since_the_start():
    found = records.read(DATA / "vllm-server/off/metrics_after.txt")
    check(found, EXPECTED["vllm-server/off: metrics_after - metrics_before"])
    assert any("since the server's start" in note for note in found.notes)
    assert any("646 drafts, not rounds * K = 652" in note for note in found.notes)
    nothing = records.read(DATA / "vllm-server/off/metrics_before.txt")
    assert nothing.counters == {"rounds": 0, "drafted": 0, "accepted": [0] * 4} and nothing.mean_length is None
    assert nothing.warnings


@pytest.mark.parametrize("name", ANSWERS)
def test_one_answer(name):
    found = records.read(DATA / name)
    row = EXPECTED[name]
    expected = row.get("told", row)
    check(found, expected)
    assert (found.tool, found.engine, found.positions, found.exact) == ("vllm answer", "vllm", 4, True)
    assert len(found.requests) == expected["requests"] == 1
    (request,), (histogram,) = found.requests, found.histograms
    assert len(request["accepted"]) == expected["rounds"] == sum(histogram)
    assert sum(request["drafted"]) == expected["drafted"]
    if "completion_tokens" in row:
        assert request["output_tokens"] == row["completion_tokens"]
    summary = acceptance.summary([request["accepted"]], found.positions, [request["drafted"]])
    assert summary["accepted"] == expected["accepted_by_position"]
    assert summary["mean_length"]["value"] == near(expected["mean_length"])


def test_twelve_streamed_answers():
    found = records.read(DATA / "vllm-server/replay12/answers.sse.txt")
    expected = EXPECTED[REPLAY12]
    check(found, expected)
    assert len(found.requests) == expected["requests"] == 12 and found.exact
    assert sum(request["output_tokens"] for request in found.requests) == expected["completion_tokens"]
    assert past_end(found) == expected["past_the_end"]
    assert mean_over_requests(found) == near(expected["mean_over_requests_of_length"])
    assert found.requests[0]["accepted"][:6] == [4, 2, 4, 0, 3, 0] and found.histograms[0] == [11, 3, 2, 4, 5]


def without_records(text):
    """A saved stream as a server without the flag gives it."""
    lines = []
    for line in text.splitlines():
        if '"speculative_decoding"' in line:
            value = json.loads(line[6:])
            del value["metrics"]
            line = f"data: {json.dumps(value)}"
        lines.append(line)
    return "\n".join(lines)


def test_twelve_streamed_answers_by_their_chunks(tmp_path):
    text = without_records((DATA / "vllm-server/replay12/answers.sse.txt").read_text())
    found = records.read(write(tmp_path, text))
    check(found, EXPECTED["vllm-server/replay12 by chunks (cut at the end)"])
    assert not found.exact and found.positions is None and found.engine == "vllm"
    assert any("cut at the end" in note for note in found.notes)


@pytest.mark.parametrize("name", [*ANSWERS[2:], "vllm-server/on/stop_string_stream.txt"])
def test_chunks_of_one_stream(name, tmp_path):
    row = EXPECTED[name]
    path = write(tmp_path, without_records((DATA / name).read_text()))
    if row["accepted_by_chunks"] == 0:  # as plain decoding looks
        with pytest.raises(Eagle3Error, match="found none in 1 answers"):
            records.read(path)
        return
    found = records.read(path)
    assert not found.exact and found.counters["rounds"] == row["steps_by_chunks"]
    assert sum(found.counters["accepted"]) == row["accepted_by_chunks"]
    assert found.requests[0]["output_tokens"] == row["completion_tokens"]


def test_a_stream_whose_first_chunk_holds_several_tokens(tmp_path):
    text = without_records((DATA / "vllm-server/on/chat_stream.txt").read_text())
    first, second = [line for line in text.splitlines() if '"token_ids":[' in line and "prompt_token_ids" not in line][
        :2
    ]
    joined = json.loads(second[6:])
    joined["choices"][0]["token_ids"] = (
        json.loads(first[6:])["choices"][0]["token_ids"] + joined["choices"][0]["token_ids"]
    )
    text = text.replace(first, "").replace(second, f"data: {json.dumps(joined)}")
    found = records.read(write(tmp_path, text))
    assert found.counters["rounds"] == 3 and found.warnings[0].startswith("1 answers begin with several tokens")


def test_an_answer_ended_by_a_stop_string_has_no_record():
    found = records.read(DATA / "vllm-server/on/stop_string_stream.txt")
    assert EXPECTED["vllm-server/on/stop_string_stream.txt"]["told"] is None and not found.exact


def test_no_round_is_no_length():
    found = records.read(DATA / "vllm-server/on/one_token.json")
    expected = EXPECTED["vllm-server/on/one_token.json"]
    assert found.counters == {"rounds": expected["rounds"], "drafted": expected["drafted"], "accepted": [0] * 4}
    assert found.mean_length is None and found.requests[0]["accepted"] == [] and "1.0" in found.warnings[0]


def test_answers_together_in_json_and_json_lines(tmp_path):
    names = ("completion", "one_token", "n2", "chat")
    answers = [json.loads((DATA / f"vllm-server/on/{name}.json").read_text()) for name in names]
    wrapped = [{"prompt": "?", "response": {"body": answer}} for answer in answers]
    texts = ["\n".join(json.dumps(answer) for answer in answers), json.dumps(answers), json.dumps({"answers": wrapped})]
    for text in texts:
        found = records.read(write(tmp_path, text))
        assert found.counters == {"rounds": 14, "drafted": 56, "accepted": [5, 3, 3, 0]}
        assert [len(request["accepted"]) for request in found.requests] == [10, 0, 4]
        assert found.notes[0].startswith("1 of 4 answers hold no record")
        assert found.warnings[0].startswith("1 answers had no round")


@pytest.mark.parametrize("name", ["completion.json", "completion_stream.txt"])
def test_level_summary(name):
    found = records.read(DATA / "vllm-server/summary" / name)
    check(found, EXPECTED["vllm-server/summary/completion.json"])
    assert found.requests is None and found.histograms == [[6, 2, 0, 2, 0]] and found.exact
    assert found.counters["drafted"] == 40


def test_steps_without_drafts_are_no_rounds(tmp_path):
    """Asynchronous scheduling counts a step whose drafts a grammar refused as a round with 0 drafted."""
    answer = json.loads((DATA / "vllm-server/on/chat.json").read_text())
    record = answer["metrics"]["speculative_decoding"]
    record["num_spec_steps"] += 2
    record["acceptance_histogram"][0] += 2
    record["per_step_accepted"] += [0, 0]
    record["per_step_drafted"] += [0, 0]
    found = records.read(write(tmp_path, json.dumps(answer)))
    assert found.counters["rounds"] == 4 and len(found.requests[0]["accepted"]) == 6
    assert found.mean_length == near(EXPECTED["vllm-server/on/chat.json"]["mean_length"])
    assert any(note.startswith("2 steps drafted nothing") for note in found.notes)


@pytest.mark.parametrize("name", ["vllm-bench/chat_c1.json", "vllm-bench/completions_c4_ignore_eos.json"])
def test_vllm_bench_serve(name, tmp_path):
    found = records.read(DATA / name)
    check(found, EXPECTED[name])
    assert (found.tool, found.positions, found.exact, found.requests) == ("vllm bench serve", 4, True, None)
    assert json.loads((DATA / name).read_text())["total_output_tokens"] == EXPECTED[name]["output_tokens"]


def test_vllm_bench_serve_appends_results(tmp_path):
    results = [
        json.loads((DATA / f"vllm-bench/{name}.json").read_text()) for name in ("chat_c1", "completions_c4_ignore_eos")
    ]
    plain = {key: value for key, value in results[0].items() if not key.startswith("spec_decode")}
    path = write(tmp_path, "\n".join(json.dumps(result) for result in [*results, plain]))
    found = records.read(path)
    assert found.counters == {"rounds": 1056, "drafted": 4224, "accepted": [276, 99, 38, 16]}
    assert any("1 results without speculation" in note for note in found.notes)
    with pytest.raises(Eagle3Error, match="spec_decode_num_drafts: found none"):
        records.read(write(tmp_path, json.dumps(plain)))
    results[1]["model_id"] = "other"
    path = write(tmp_path, "\n".join(json.dumps(result) for result in results))
    with pytest.raises(Eagle3Error, match="model_id: found 'other', 'target', expected one"):
        records.read(path)
    assert records.read(path, of="target").counters["rounds"] == ROUNDS12


def test_aiperf_records():
    name = "aiperf/profile_export.jsonl"
    found, expected = records.read(DATA / name), EXPECTED[name]
    check(found, expected)
    assert (found.tool, found.engine, found.positions, found.exact) == ("aiperf", "vllm", 4, True)
    assert len(found.requests) == expected["requests"]
    assert sum(request["output_tokens"] for request in found.requests) == expected["completion_tokens"]
    assert mean_over_requests(found) == near(expected["mean_over_requests_of_length"])
    first_ten = records.read(DATA / "vllm-server/replay12/answers.sse.txt").requests[:10]
    assert [request["accepted"] for request in found.requests] == [request["accepted"] for request in first_ten]


def test_aiperf_records_of_level_summary():
    name = "aiperf/summary_level.profile_export.jsonl"
    found = records.read(DATA / name)
    check(found, EXPECTED[name])
    assert found.requests is None and len(found.histograms) == EXPECTED[name]["requests"] == 3
    whole = records.read(DATA / "aiperf/summary_level.profile_export_aiperf.json")
    assert whole.counters == found.counters and whole.mean_length == found.mean_length


def test_aiperf_without_records(tmp_path):
    lines = (DATA / "aiperf/profile_export.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    del values[0]["spec_decode_acceptance"]
    values[1]["metadata"]["benchmark_phase"] = "warmup"
    found = records.read(write(tmp_path, "\n".join(map(json.dumps, values))))
    assert len(found.requests) == 8
    assert found.notes[:2] == [
        "1 of 9 answers hold no record and are left out.",
        "1 answers of the warm-up are left out.",
    ]
    for value in values:
        value.pop("spec_decode_acceptance", None)
    with pytest.raises(Eagle3Error, match="spec_decode_acceptance: found none"):
        records.read(write(tmp_path, "\n".join(map(json.dumps, values))))


def test_aiperf_summary():
    found = records.read(DATA / "aiperf/profile_export_aiperf.json")
    expected = EXPECTED["aiperf/profile_export_aiperf.json"]
    counts = expected["pooled_histogram"]
    by_position = [sum(number for key, number in counts.items() if int(key) > i) for i in range(4)]
    assert found.counters == {"rounds": sum(counts.values()), "drafted": 1648, "accepted": by_position}
    assert found.mean_length == near(expected["token_weighted"]) != near(expected["request_mean"])
    rate = sum(found.counters["accepted"]) / found.counters["drafted"]
    assert 100 * rate == near(expected["overall_rate_percent"])
    assert found.positions == 4 and found.exact


def test_aiperf_server_metrics(tmp_path):
    name = "aiperf/server_metrics_export.json"
    found, expected = records.read(DATA / name), EXPECTED[name]
    assert [found.counters["rounds"]] == expected["vllm:spec_decode_num_drafts"]
    assert [found.counters["drafted"]] == expected["vllm:spec_decode_num_draft_tokens"]
    assert found.counters["accepted"] == expected["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert [sum(found.counters["accepted"])] == expected["vllm:spec_decode_num_accepted_tokens"]
    values = json.loads((DATA / name).read_text())
    for metric in [key for key in values["metrics"] if "spec_decode" in key]:
        del values["metrics"][metric]
    with pytest.raises(Eagle3Error, match="vllm:spec_decode_num_drafts: found none"):
        records.read(write(tmp_path, json.dumps(values)))


def test_specdec_bench(tmp_path):
    name = "specdec_bench/acceptance_rate.json"
    expected = EXPECTED[name]
    found = records.read(DATA / name)
    check(found, expected["without_prefill"])
    assert (found.tool, found.engine, found.positions, found.exact) == ("specdec_bench", "vllm", 4, False)
    assert "drafted" not in found.counters and found.requests is None
    assert (
        found.notes[0].startswith(f"{expected['requests']} steps of prefill")
        and f"{expected['steps']} steps" in found.notes[0]
    )
    told = json.loads((DATA / name).read_text())[0]
    steps = {int(length): number for length, number in told["Acceptance_Length_Histogram"].items()}
    emitted = sum(length * number for length, number in steps.items())
    assert emitted / sum(steps.values()) == near(expected["as_told_per_step_length"])
    assert emitted - sum(steps.values()) == expected["accepted"] == sum(found.counters["accepted"])
    assert told["Average_AL"] == near(expected["Average_AL"])
    truth = EXPECTED[expected["truth_same_prompts"]]["mean_length"]
    assert truth > found.mean_length  # cut at the end: hence exact is False

    alone = records.read(shutil.copy(DATA / name, tmp_path / "a.json"))
    assert "assumed" in alone.notes[0] and "specbench_responses.jsonl" in found.notes[0]
    assert alone.positions is None and alone.counters == found.counters and alone.engine == ""


def test_specdec_bench_takes_off_a_prefill_for_each_turn(tmp_path):
    histogram = {"0": 3, "1": 20, "2": 6}
    plain = {"Acceptance_Length_Histogram": histogram, "Request_AL": {"0": {"0": 1.2, "1": 1.3}, "1": {"0": 1.1}}}
    found = records.read(write(tmp_path, json.dumps([plain])))
    assert found.counters == {"rounds": 23, "accepted": [6]} and found.notes[0].startswith("3 steps of prefill")
    spec_bench = {"Acceptance_Length_Histogram": histogram, "Request_AL": {"7": 1.2, "8": 1.1}}
    path = write(tmp_path, json.dumps([spec_bench]))
    assert records.read(path).counters["rounds"] == 24
    responses = [{"question_id": 7, "turns": ["a", "b"]}, {"question_id": 8, "turns": ["a", "b", "c"]}]
    write(tmp_path, "\n".join(map(json.dumps, responses)), "specbench_responses.jsonl")
    assert records.read(path).counters["rounds"] == 21
    write(tmp_path, json.dumps({"mtbench": "questions.jsonl", "concurrency": 8}), "configuration.json")
    found = records.read(path)
    assert found.counters["rounds"] == 22 and any(note.startswith("Concurrency 8") for note in found.notes)
    tree = {"engine": "SGLANG", "runtime_params": {"engine_args": {"speculative_eagle_topk": 4}}}
    write(tmp_path, json.dumps({**tree, "draft_length": 5, "speculative_algorithm": "EAGLE3"}), "configuration.json")
    found = records.read(path)
    assert (found.engine, found.positions, found.counters, found.mean_length) == ("sglang", None, None, None)
    assert "tree" in found.warnings[0]


def test_specdec_bench_lengths_that_never_occur(tmp_path):
    histogram = {"1": 14, "3": 2}  # no step emitted 2
    run = {"Acceptance_Length_Histogram": histogram, "Request_AL": {"1": 1.2, "2": 1.3}}
    path = write(tmp_path, json.dumps([run, run]))
    write(tmp_path, json.dumps({"draft_length": 4, "speculative_algorithm": "EAGLE3"}), "configuration.json")
    found = records.read(path)
    assert found.counters == {"rounds": 14, "accepted": [2, 2, 0, 0]} and any("2 runs" in note for note in found.notes)
    write(tmp_path, json.dumps({"draft_length": 1, "speculative_algorithm": "EAGLE3"}), "configuration.json")
    merged = records.read(path)
    assert merged.counters is None and merged.mean_length is None and "more than K + 1" in merged.warnings[0]


@pytest.mark.parametrize("folder", ["off", "on"])
def test_vllm_log(folder):
    found = records.read(DATA / f"vllm-server/{folder}/log_specdecoding.txt")
    if folder == "off":  # every line leaves one number of rounds, though some rounds drafted fewer than K
        check(found, EXPECTED["vllm-server/off: metrics_after - metrics_before"])
        assert found.exact
        return
    counted = records.read(DATA / "vllm-bench/completions_c4_ignore_eos.metrics_after.txt").counters
    assert found.counters["drafted"] == counted["drafted"] == 11082
    assert sum(found.counters["accepted"]) == sum(counted["accepted"]) == 873
    assert not found.exact and any("between 2772 and 4662 fit" in note for note in found.notes)
    assert counted["rounds"] == 2772


def test_an_older_vllm_log_line(tmp_path):
    line = (
        "INFO 07-01 10:00:00 [metrics.py:61] SpecDecoding metrics: Draft acceptance rate: 6.6%, Mean acceptance length: 1.26, "
        "Accepted: 43 tokens, Drafted: 652 tokens, Per-position acceptance rate: 0.178, 0.049, 0.037, 0.000"
    )
    found = records.read(write(tmp_path, line))
    assert found.counters == {"rounds": 163, "drafted": 652, "accepted": [29, 8, 6, 0]} and found.exact


def test_log_lines_of_two_servers(tmp_path):
    lines = (DATA / "vllm-server/off/log_specdecoding.txt").read_text()
    other = (
        "SpecDecoding metrics: Mean acceptance length: 1.26, Accepted: 43 tokens, Drafted: 326 tokens, Per-position "
    )
    with pytest.raises(Eagle3Error, match=r"found \[2, 4\] positions, expected one K"):
        records.read(write(tmp_path, f"{lines}{other}acceptance rate: 0.178, 0.086"))
    with pytest.raises(Eagle3Error, match="line 3: Per-position acceptance rate: found none.*cut off"):
        records.read(write(tmp_path, f"{lines}{other}acc"))


# As posted in sgl-project/sgl-kernel-npu, pull request 608, and mit-han-lab/fastrl, pull request 4.
SGLANG_NEW = (
    "[2026-07-21 15:00:13 TP0 EP0] Decode batch, #running-req: 24, #token: 233600, token usage: 0.66, accept len: 3.05, "
    "accept rate: 0.68, npu graph: True, gen throughput (token/s): 239.06, #queue-req: 2\n"
    '[2026-07-21 15:00:15] INFO:     127.0.0.1:43514 - "POST /generate HTTP/1.1" 200 OK\n'
    "[2026-07-21 15:00:17 TP0 EP0] Decode batch, #running-req: 23, #token: 227968, token usage: 0.64, accept len: 2.63, "
    "accept rate: 0.54, npu graph: True, gen throughput (token/s): 631.96, #queue-req: 3\n"
)
SGLANG_OLD = (
    "2025-12-04 20:35:53 INFO 151972 [scheduler_metrics_mixin.py:287] Decode batch. #running-req: 48, #token: 3894, token "
    "usage: 0.00, accept len: 1.00, accept rate: 0.11, cuda graph: False, gen throughput (token/s): 5452.63, #queue-req: 0, \n"
)


def test_sglang_log(tmp_path):
    found = records.read(write(tmp_path, SGLANG_NEW))
    assert (found.tool, found.engine, found.positions, found.exact) == ("sglang log", "sglang", None, False)
    assert found.mean_length == near((24 * 3.05 + 23 * 2.63) / 47)
    assert found.counters is None and found.requests is None
    assert any("0.5.11" in note and "not tell its version" in note for note in found.notes)
    assert any("chain or a tree" in note for note in found.notes)
    assert records.read(write(tmp_path, SGLANG_OLD)).mean_length == 1  # its rate, 0.11, is the bonus token alone


@pytest.mark.parametrize("form", ["ServerArgs(speculative_num_steps={}, speculative_eagle_topk={}, speculative_num_draft_tokens={})",
                                  "{{'speculative_num_steps': {}, 'speculative_eagle_topk': {}, 'speculative_num_draft_tokens': {}}}"])  # fmt: skip
def test_sglang_log_that_begins_with_the_arguments(form, tmp_path):
    chain = records.read(write(tmp_path, f"[2026-07-21 14:59:00] server_args={form.format(3, 1, 4)}\n{SGLANG_NEW}"))
    assert chain.positions == 3 and chain.mean_length == near(2.844468) and chain.warnings == []
    tree = records.read(write(tmp_path, f"[2026-07-21 14:59:00] server_args={form.format(5, 4, 8)}\n{SGLANG_NEW}"))
    assert tree.positions is None and tree.mean_length is None and tree.counters is None
    assert "topk 4" in tree.notes[-1] and "not a chain's" in tree.warnings[0]


def test_sglang_metrics(tmp_path):
    text = (DATA / "sglang/metrics.txt").read_text()
    found = records.read(write(tmp_path, text))
    assert (found.tool, found.engine, found.positions, found.exact) == ("sglang metrics", "sglang", 3, False)
    assert found.mean_length == 2.85 and found.counters is None
    tree = records.read(
        write(
            tmp_path,
            text.replace(
                'spec_num_draft_tokens{model_name="target",tp_rank="0"} 4.0',
                'spec_num_draft_tokens{model_name="target",tp_rank="0"} 8.0',
            ),
        )
    )
    assert tree.mean_length is None and tree.positions is None and tree.warnings
    with pytest.raises(Eagle3Error, match="spec_accept_length: found 0, expected a length"):
        records.read(write(tmp_path, text.replace("} 2.85", "} 0.0")))
    with pytest.raises(Eagle3Error, match="spec_accept_length: found nan"):
        records.read(write(tmp_path, text.replace("} 2.85", "} NaN")))
    with pytest.raises(Eagle3Error, match="spec_accept_length: found none"):
        records.read(write(tmp_path, text.replace("spec_accept_length", "spec_other")))


def test_speculators():
    found = records.read(DATA / "speculators/acceptance.csv")
    assert (found.tool, found.engine, found.positions, found.exact) == ("speculators", "vllm", 4, True)
    assert found.counters == {"rounds": 1056, "drafted": 4224, "accepted": [276, 99, 38, 16]}
    one = records.read(DATA / "speculators/acceptance.csv", of="chat")
    assert one.counters == {"rounds": ROUNDS12, "drafted": 2044, "accepted": ACCEPTED12}
    sweep = records.read(DATA / "speculators/perf_results.csv")  # two rows, one subset
    assert sweep.counters == one.counters


def test_speculators_on_a_data_parallel_server():
    """Before its issue 1095 was fixed, the rates by position were those of one engine over the rounds of all."""
    found = records.read(DATA / "speculators/data_parallel.acceptance.csv")
    assert found.counters is None and found.mean_length == 1 + 429 / 1056
    assert "1095" in found.warnings[0]


def test_specforge():
    found = records.read(DATA / "specforge/benchmark.json")
    assert (found.tool, found.engine, found.positions, found.exact) == ("specforge", "sglang", None, False)
    cut = EXPECTED["vllm-server/replay12 by chunks (cut at the end)"]["mean_length"]  # the same answers
    assert found.mean_length == near(cut) and found.counters is None
    with pytest.raises(Eagle3Error, match="found '1,4,1,5', '1,5,4,8', expected one"):
        records.read(DATA / "specforge/results.jsonl")
    chain = records.read(DATA / "specforge/results.jsonl", of="1,4,1,5")
    assert chain.mean_length == near(cut) and chain.positions == 4
    tree = records.read(DATA / "specforge/results.jsonl", of="1,5,4,8")
    assert tree.mean_length is None and tree.positions is None and "topk 4" in tree.notes[-1]


def test_specforge_without_speculation(tmp_path):
    values = json.loads((DATA / "specforge/benchmark.json").read_text())
    values |= {"spec_verify_count": None, "average_acceptance_length": None}
    with pytest.raises(Eagle3Error, match="spec_verify_count: found None"):
        records.read(write(tmp_path, json.dumps(values)))
    matrix = json.loads((DATA / "specforge/results.jsonl").read_text())
    matrix["gsm8k"] = matrix["gsm8k"][:1]
    with pytest.raises(Eagle3Error, match="accept_length: found 1.0 everywhere"):
        records.read(write(tmp_path, json.dumps(matrix)))


def test_the_page_has_every_tool_and_its_files():
    page = (ROOT / "docs/records.md").read_text()
    for reader in READERS:
        assert f"\n| {reader.TOOL} |".lower() in page.lower(), reader.TOOL


# ---------------------------------------------------------------------------------------------------------- scrapes


def scrape(*engines, k=2):
    """/metrics of engines: (model, engine, rounds, drafted, accepted by position)."""
    lines = []
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        lines.append(f"# TYPE vllm:spec_decode_num_{name}_total counter")
        for model, engine, rounds, drafted, accepted in engines:
            value = {"drafts": rounds, "draft_tokens": drafted, "accepted_tokens": sum(accepted)}[name]
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="{model}"}} {value}')
    lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter")
    for model, engine, _, _, accepted in engines:
        for position, value in enumerate(accepted):
            labels = f'engine="{engine}",model_name="{model}",position="{position}"'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def test_engines_of_a_data_parallel_server_are_summed(tmp_path):
    before = write(tmp_path, scrape(("m", 0, 10, 20, [8, 4]), ("m", 1, 5, 10, [1, 0])), "before")
    after = write(tmp_path, scrape(("m", 0, 20, 40, [16, 8]), ("m", 1, 25, 50, [11, 5])), "after")
    found = records.read_difference(before, after)
    assert found.counters == {"rounds": 30, "drafted": 60, "accepted": [18, 9]} and found.positions == 2
    assert found.notes[-1] == "Summed over 2 engines of the server."


def test_one_engine_that_was_started_again_is_not_hidden_by_the_other(tmp_path):
    before = write(tmp_path, scrape(("m", 0, 10, 20, [8, 4]), ("m", 1, 5, 10, [1, 0])), "before")
    after = write(tmp_path, scrape(("m", 0, 90, 180, [80, 40]), ("m", 1, 2, 4, [1, 0])), "after")
    with pytest.raises(
        Eagle3Error, match=r"after: vllm:spec_decode_num_drafts_total: found 2 after 5 .*engine=1.*started again"
    ):
        records.read_difference(before, after)


def test_two_models(tmp_path):
    path = write(tmp_path, scrape(("a", 0, 10, 20, [8, 4]), ("b", 0, 5, 10, [1, 0]), ("idle", 0, 0, 0, [0, 0])))
    with pytest.raises(Eagle3Error, match="file: model_name: found 'a', 'b', expected one"):
        records.read(path)
    assert records.read(path, of="b").counters == {"rounds": 5, "drafted": 10, "accepted": [1, 0]}
    with pytest.raises(Eagle3Error, match="expected 'c'"):
        records.read(path, of="c")
    only = records.read(write(tmp_path, scrape(("a", 0, 10, 20, [8, 4]), ("idle", 0, 0, 0, [0, 0]))))
    assert only.counters["rounds"] == 10


def test_a_server_started_again_between_two_scrapes():
    """chat_c1 is another start than completions_c4 only if the counters began at another time."""
    before, after = DATA / "vllm-server/off/metrics_after.txt", DATA / "vllm-server/replay12/metrics_after.txt"
    with pytest.raises(Eagle3Error, match="spec_decode_num_drafts_created: found .* started again"):
        records.read_difference(before, after)  # every counter rose
    with pytest.raises(Eagle3Error, match="found 511|found 674 after 1185"):
        records.read_difference(after, DATA / "vllm-server/replay12/metrics_before.txt")  # swapped


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("drafts_total{engine=\"0\",model_name=\"m\"} 10", "drafts_total{engine=\"0\",model_name=\"m\"} NaN", "num_drafts_total: found nan"),
        ("drafts_total{engine=\"0\",model_name=\"m\"} 10", "drafts_total{engine=\"0\",model_name=\"m\"} -1", "num_drafts_total: found -1"),
        ("drafts_total{engine=\"0\",model_name=\"m\"} 10", "drafts_total{engine=\"0\",model_name=\"m\"} 10.5", "num_drafts_total: found 10.5"),
        ("drafts_total{engine=\"0\",model_name=\"m\"} 10", "drafts_total{engine=\"0\",model_name=\"m\"} 7", "accepted at position 0: found 8"),
        ("draft_tokens_total{engine=\"0\",model_name=\"m\"} 20", "draft_tokens_total{engine=\"0\",model_name=\"m\"} 11", "drafted: found 11"),
        ('position="1"} 4', 'position="2"} 4', r"positions \[0, 2\], expected 0 to K - 1"),
        ('position="1"} 4', 'position="x"} 4', "position: found 'x'"),
        ('position="1"} 4', 'position="1"} ', "not Prometheus text"),
        ("num_draft_tokens_total", "num_other_total", "num_draft_tokens_total: found none"),
    ],
)  # fmt: skip
def test_a_scrape_with_wrong_values(old, new, message, tmp_path):
    text = scrape(("m", 0, 10, 20, [8, 4]))
    assert old in text
    with pytest.raises(Eagle3Error, match=f"^file: .*{message}"):
        records.read(write(tmp_path, text.replace(old, new)))


def test_a_total_beside_other_counts_by_position(tmp_path):
    text = scrape(("m", 0, 10, 20, [8, 4])).replace("accepted_tokens_total{engine=\"0\",model_name=\"m\"} 12", "accepted_tokens_total{engine=\"0\",model_name=\"m\"} 13")  # fmt: skip
    found = records.read(write(tmp_path, text))
    assert not found.exact and "sums to 12" in found.warnings[0] and "says 13" in found.warnings[0]


def test_a_server_that_does_not_speculate(tmp_path):
    text = "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n"
    with pytest.raises(Eagle3Error, match="spec_decode_num_drafts_total: found none.*does not speculate"):
        records.read(write(tmp_path, text))
    with pytest.raises(Eagle3Error, match="expected a scrape"):
        records.read_difference(write(tmp_path, SGLANG_NEW, "a"), write(tmp_path, text, "b"))


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the file is empty"),
        ("  \n\n", "the file is empty"),
        ("hello\nworld\n", "found none of the known formats"),
        ("[" * 600 + "]" * 600, "found none of the known formats"),
        ('{"question_id": 1, "choices": [{"index": 0, "turns": ["a"]}]}', "found none of the known formats"),
        ('{"a": 1}', "found none of the known formats"),
        ("[]", "found none of the known formats"),
        ("3", "found none of the known formats"),
        ('{"choices": [{"token_ids": [1', "not JSON"),
        ('[{"Request_AL": {"1"', "not JSON"),
        ('{"a": 1}\n{"b": ', "line 2: not JSON"),
        ('data: {"choices": []}\n\ndata: {"choi', "line 3: not JSON"),
        ("subset,num_drafts\nx,1\n", "num_draft_tokens: found none, expected this column"),
        ('{"mode": "base", "positions": 4, "requests": []}', "this project's benchmark.json"),
    ],
)
def test_what_is_none_of_these_files(text, message, tmp_path):
    with pytest.raises(Eagle3Error, match=f"^file: .*{message}"):
        records.read(write(tmp_path, text))


def test_text_that_holds_other_line_ends(tmp_path):
    """vLLM and AIPerf write an answer's U+2028 as it is."""
    answer = json.loads((DATA / "vllm-server/on/chat.json").read_text())
    answer["choices"][0]["message"]["content"] = "one\u2028two\x85three\x0c"
    line = json.dumps(answer, ensure_ascii=False)
    assert records.read(write(tmp_path, f"{line}\n{line}\n")).counters["rounds"] == 8
    stream = f': ping\r\nevent: x\r\ndata: {{"choices": []}}\r\n\r\ndata:{line}\r\n\r\ndata: [DONE]\r\n'
    assert records.read(write(tmp_path, stream)).counters["rounds"] == 4


def test_servers_without_speculation(tmp_path):
    line = "[2026-04-05 20:02:51] Decode batch, #running-req: 32, #token: 11179, token usage: 0.08, cuda graph: True, gen throughput (token/s): 1635.11, #queue-req: 0"  # fmt: skip
    with pytest.raises(Eagle3Error, match="accept len: found none.*does not speculate"):
        records.read(write(tmp_path, line))
    with pytest.raises(Eagle3Error, match="num_drafts: found none, expected this column"):
        records.read(write(tmp_path, "subset,strategy,target_rate,rps_median\nchat,constant,0.1,\n"))


def test_a_log_line_whose_drafts_a_grammar_refused(tmp_path):
    line = (
        "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.00 tokens/s, Drafted throughput: 0.00 tokens/s, "
        "Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance rate: 0.000, 0.000, Avg Draft acceptance rate: nan%"
    )
    found = records.read(write(tmp_path, line))
    assert found.counters == {"rounds": 0, "drafted": 0, "accepted": [0, 0]} and found.mean_length is None


def test_aiperf_records_of_another_engine(tmp_path):
    text = (DATA / "aiperf/profile_export.jsonl").read_text().replace('"engine":"vllm"', '"engine":"trtllm"')
    found = records.read(write(tmp_path, text))
    assert found.engine == "" and not found.exact and "'trtllm'" in found.notes[-1]


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(Eagle3Error, match="found a folder, expected a file"):
        records.read(tmp_path)
    with pytest.raises(Eagle3Error, match="missing: found no such file"):
        records.read(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\x93NUMPY\xff\xfe\x00")
    with pytest.raises(Eagle3Error, match="binary: not text"):
        records.read(tmp_path / "binary")


REAL = [
    *ANSWERS,
    "vllm-server/replay12/answers.sse.txt",
    "vllm-bench/chat_c1.json",
    "aiperf/profile_export.jsonl",
    "aiperf/profile_export_aiperf.json",
    "aiperf/server_metrics_export.json",
    "specdec_bench/acceptance_rate.json",
    "specforge/benchmark.json",
    "specforge/results.jsonl",
    "speculators/acceptance.csv",
    "vllm-server/off/log_specdecoding.txt",
    "vllm-server/off/metrics_after.txt",
]


@pytest.mark.parametrize("name", REAL)
def test_a_file_cut_anywhere_gives_an_error_or_less_never_another_exception(name, tmp_path):
    text = (DATA / name).read_text()
    whole = len(text.rstrip())
    for end in [*range(0, whole - 1, max(1, whole // 40)), whole - 2]:
        path = write(tmp_path, text[:end])
        try:
            found = records.read(path)
        except Eagle3Error as error:
            assert str(error).startswith("file: ")
        else:
            assert found.tool and not name.endswith(".json")  # a JSON file that is cut is no JSON


@pytest.mark.parametrize("name", REAL)
def test_one_reader_recognises_a_file_whatever_its_name(name, tmp_path):
    path = shutil.copy(DATA / name, tmp_path / "x.bin")
    document = records.open_document(path)
    assert sum(reader.recognise(document) for reader in READERS) == 1


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_spec_steps", 5, "per_step_accepted: found 4 rounds, expected num_spec_steps = 5"),
        ("num_spec_steps", -1, "num_spec_steps: found -1"),
        ("num_spec_steps", float("nan"), "num_spec_steps: found nan"),
        ("num_spec_steps", "4", "num_spec_steps: found '4'"),
        ("num_accepted_draft_tokens", 4, "per_step_accepted: found 3 accepted, expected num_accepted_draft_tokens = 4"),
        ("num_draft_tokens", 17, "per_step_drafted: found 16 drafted, expected num_draft_tokens = 17"),
        ("num_spec_tokens", 2, "per_step_drafted: found a round of 4, expected at most K = 2"),
        ("acceptance_histogram", [4, 0, 0, 0, 0], "acceptance_histogram: found .4, 0, 0, 0, 0., expected the counts"),
        ("per_step_accepted", [0, 0, 3], "per_step_accepted: found 3 rounds, expected num_spec_steps = 4"),
        ("per_step_accepted", [0, 0, 0, "3"], "per_step_accepted: found '3'"),
        ("per_step_accepted", 3, "per_step_accepted: found 3, expected a list"),
        ("per_step_drafted", [4, 4, 4], "per_step_drafted: found 3 rounds, expected num_spec_steps = 4"),
    ],
)
def test_a_record_that_contradicts_itself(field, value, message, tmp_path):
    answer = json.loads((DATA / "vllm-server/on/chat.json").read_text())
    assert field in answer["metrics"]["speculative_decoding"]
    answer["metrics"]["speculative_decoding"][field] = value
    with pytest.raises(Eagle3Error, match=f"^file: speculative_decoding: .*{message}"):
        records.read(write(tmp_path, json.dumps(answer)))


def test_answers_of_two_servers(tmp_path):
    answers = [json.loads((DATA / f"vllm-server/on/{name}.json").read_text()) for name in ("chat", "completion")]
    record = answers[0]["metrics"]["speculative_decoding"]
    record["num_spec_tokens"] = 5
    with pytest.raises(Eagle3Error, match="num_spec_tokens: found .4, 5., expected one K"):
        records.read(write(tmp_path, json.dumps(answers)))


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        ("vllm-bench/chat_c1.json", '"spec_decode_num_drafts": 511', '"spec_decode_num_drafts": 512', "expected a whole number of them"),
        ("vllm-bench/chat_c1.json", '"spec_decode_num_drafts": 511', '"spec_decode_num_drafts": -511', "spec_decode_num_drafts: found -511"),
        ("vllm-bench/chat_c1.json", '"spec_decode_accepted_tokens": 211', '"spec_decode_accepted_tokens": 212', "rates that make 211 accepted"),
        ("vllm-bench/chat_c1.json", "[0.26614481409001955", "[NaN", "spec_decode_per_position_acceptance_rates: found nan"),
        ("specdec_bench/acceptance_rate.json", '"1": 389', '"1": 5', "at least one step of prefill"),
        ("specdec_bench/acceptance_rate.json", '"1": 389', '"1": -5', "Acceptance_Length_Histogram: 1: found -5"),
        ("specdec_bench/acceptance_rate.json", '"5": 8', '"x": 8', "Acceptance_Length_Histogram: found 'x'"),
        ("aiperf/profile_export_aiperf.json", '"0": 293', '"0": 294', "expected total_spec_decode_steps = 412"),
        ("aiperf/profile_export_aiperf.json", '"4": 8', '"5": 8', "found 5 accepted, expected at most K = 4"),
        ("aiperf/server_metrics_export.json", '"total": 119.0', '"total": 500.0', "accepted at position 0: found 500"),
        ("speculators/acceptance.csv", "chat,511.0", "chat,nan", "line 2: num_drafts: found nan"),
        ("speculators/acceptance.csv", "chat,511.0", "chat,many", "line 2: num_drafts: found 'many'"),
        ("speculators/acceptance.csv", "1.4129158512720157", "1.5", "line 2: acceptance_length: found 1.5"),
        ("specforge/benchmark.json", '"output_tokens": 727', '"output_tokens": 500', "output_tokens: found 500, expected at least"),
        ("specforge/results.jsonl", '"latency": 37.25', '"latency": -1', "latency: found -1, expected a number from 0 on"),
        ("vllm-server/off/log_specdecoding.txt", "length: 1.42", "length: nan", "line 1: Mean acceptance length: found nan"),
        ("vllm-server/off/log_specdecoding.txt", "length: 1.42", "length: 1.52", "line 1: .*fit no number of rounds"),
    ],
)  # fmt: skip
def test_one_wrong_value(name, old, new, message, tmp_path):
    text = (DATA / name).read_text()
    assert old in text
    if name.startswith("specdec"):
        shutil.copy(DATA / "specdec_bench/configuration.json", tmp_path)
    with pytest.raises(Eagle3Error, match=f"^file: .*{message}"):
        records.read(write(tmp_path, text.replace(old, new)))
