"""Engines by version: options that a version knows, its definitions, and the real answers of the CPU build of vLLM."""

import json
import sys

import pytest

from eagle3_lib.engines import base, versions
from eagle3_lib.engines.registry import ENGINES
from eagle3_lib.engines.sglang import server as sglang
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import ROOT
from eagle3_lib.stages import benchmark
from eagle3_lib.verdict import acceptance

VLLM, SGLANG = ENGINES["vllm"].spec, ENGINES["sglang"].spec
ANSWERS = json.loads((ROOT / "tests/data/vllm_answers.json").read_text())
OPTIONS = json.loads((ROOT / "tests/data/engine_options.json").read_text())["options"]
DRAFTER = "drafters/smollm2-135m-eagle3"
EAGLE3, NGRAM = base.Speculation("base", DRAFTER, 4), base.Speculation("ngram", tokens=3)


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("version", ["0.5.8", "0.5.16"])
@pytest.mark.parametrize("speculation", [base.PLAIN, EAGLE3, NGRAM], ids=lambda s: s.mode)
def test_sglang_knows_all_that_it_is_given(version, speculation):
    params = BenchmarkParams(engine="sglang")
    words = sglang.arguments(params, ROOT, version, 1, speculation)
    assert SGLANG.is_read(version)
    assert versions.keep_known(words, OPTIONS[f"sglang {version}"], SGLANG, version) == (words, ())


@pytest.mark.parametrize("speculation", [base.PLAIN, EAGLE3, NGRAM], ids=lambda s: s.mode)
def test_vllm_knows_all_that_it_is_given(speculation, tmp_path):
    words = vllm.arguments(BenchmarkParams(), ROOT, "0.32.0", 1, speculation, tmp_path)
    assert versions.keep_known(words, ANSWERS["help_options"], VLLM, "0.32.0") == (words, ())


def test_an_unread_version_does_without_what_it_does_not_know(capsys):
    """The recorded help of 0.32 without two options, as of a version that does not have them."""
    lacking = {"--per-request-spec-decode-metrics", "--disable-uvicorn-access-log"}
    params = BenchmarkParams(engine_args=["-tp", "2", "--max-num-seqs", "8"])
    words = vllm.arguments(params, ROOT, "0.40.0", 1, EAGLE3)
    kept, left_out = versions.keep_known(words, set(ANSWERS["help_options"]) - lacking, VLLM, "0.40.0")
    assert set(left_out) == lacking and "detailed" not in kept
    assert kept == [word for word in words if word not in lacking | {"detailed"}]
    assert "vllm 0.40.0 is not a version that was read, and has no" in capsys.readouterr().out


def test_an_option_that_the_run_needs_is_refused():
    words = vllm.arguments(BenchmarkParams(), ROOT, "0.10.0", 1, EAGLE3)
    known = set(ANSWERS["help_options"]) - {"--speculative-config"}
    with pytest.raises(
        Eagle3Error, match=r"vllm 0.10.0 has no option --speculative-config; expected a version from 0.16"
    ):
        versions.keep_known(words, known, VLLM, "0.10.0")


def test_the_engines_own_help_is_asked(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text("import sys; print('--model-path X, --port N') if sys.argv[1] == '--help' else sys.exit(2)")
    command = (sys.executable, str(script))
    assert versions.of_engine(VLLM, command) == {"--model-path", "--port"}  # has no --help=all
    kept, left_out = versions.for_version(["--model-path", "m", "--disable-cuda-graph"], SGLANG, "0.4.0", command)
    assert kept == ["--model-path", "m"] and left_out == ("--disable-cuda-graph",)
    script.write_text("raise SystemExit('no such module')")
    with pytest.raises(Eagle3Error, match="names no option for a model(.|\n)*no such module"):
        versions.of_engine(SGLANG, (sys.executable, str(script), "again"))


@pytest.mark.parametrize(
    ("engine", "version", "read"),
    [
        ("vllm", "0.16.0", True),
        ("vllm", "0.33.1+cu130", True),
        ("vllm", "0.15.1", False),
        ("vllm", "0.34.0rc1", False),
        ("sglang", "0.5.16.post1", True),
        ("sglang", "0.5.24", False),
        ("sglang", "0.5", False),
    ],
)
def test_versions_that_were_read(engine, version, read):
    assert ENGINES[engine].spec.is_read(version) is read


# ---------------------------------------------------------------------------------------------------------- definitions


def test_a_rate_with_the_bonus_over_tokens_with_the_root():
    """10 rounds of K = 3 that accept 12 of 30: SGLang 0.5.8's scheduler tells (12 + 10) / (10 * 4)."""
    assert SGLANG.definitions_in("0.5.8").acceptance_rate(22 / 40, 3) == pytest.approx(0.4)
    assert SGLANG.definitions_in("0.5.8").acceptance_rate(0.25, 3) == 0  # its floor, with nothing accepted
    assert SGLANG.definitions_in("0.5.16").acceptance_rate(0.4, 3) == VLLM.definitions_in("0.23.0").acceptance_rate(
        0.4, 3
    )


def test_a_length_that_counts_prefills_token():
    """1 token of prefill and 10 rounds that emit 22 tokens: SGLang tells 23 / 10, and the mean length is 2.2."""
    assert SGLANG.definitions_in("0.5.16").mean_length(23 / 10, 10) == pytest.approx(2.2)
    assert VLLM.definitions_in("0.32.0").mean_length(2.2, 10) == 2.2


# Fields as srt/managers/tokenizer_manager.py of the wheels sets them; counts made up: 4 rounds of K = 3 that accept 5.
META = {"spec_verify_ct": 4, "spec_accept_rate": 5 / 12, "spec_accept_length": 10 / 4}
META_0_5_8 = META | {"spec_accept_token_num": 5, "spec_draft_token_num": 12}
META_0_5_9 = META_0_5_8 | {"spec_accept_histogram": [1, 2, 0, 1]}
META_0_5_11 = META | {"spec_accepted_drafts": 5, "spec_proposed_drafts": 12, "spec_accept_histogram": [1, 2, 0, 1]}
META_0_5_23 = META | {"spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12, "spec_correct_drafts_histogram": [1, 2, 0, 1]}  # fmt: skip
META_0_5_12 = META_0_5_11 | META_0_5_23  # 0.5.12 to 0.5.16 have both


@pytest.mark.parametrize(
    ("version", "meta", "histogram"),
    [
        ("0.5.8", META_0_5_8, None),
        ("0.5.9", META_0_5_9, [1, 2, 0, 1]),
        ("0.5.10.post1", META_0_5_9, [1, 2, 0, 1]),
        ("0.5.11", META_0_5_11, [1, 2, 0, 1]),
        ("0.5.12", META_0_5_12, [1, 2, 0, 1]),
        ("0.5.16", META_0_5_12, [1, 2, 0, 1]),
        ("0.5.23", META_0_5_23, [1, 2, 0, 1]),
    ],
)
def test_sglangs_answer_by_version(version, meta, histogram):
    result, definitions = base.Completion([1]), SGLANG.definitions_in(version)
    sglang._take({"output_ids": [5], "meta_info": {}}, result, 0.1, definitions)
    sglang._take(
        {"output_ids": [5, 6, 7], "meta_info": meta | {"finish_reason": {"type": "length"}}}, result, 0.2, definitions
    )
    assert result.chunks == [1, 2] and result.finish_reason == "length"
    assert result.histogram == histogram and result.totals == {"rounds": 4, "accepted": 5, "drafted": 12}


def test_the_running_rate_lost_its_bonus_in_sglang_0_5_11():
    assert SGLANG.definitions_in("0.5.10.post1").acceptance_rate(22 / 40, 3) == pytest.approx(0.4)
    assert SGLANG.definitions_in("0.5.11").acceptance_rate(0.4, 3) == 0.4


# RequestSpecDecodeMetrics.to_dict (v1/metrics/stats.py), the same in 0.29.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0.
VLLM_METRICS = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 5 / 11,
    "acceptance_histogram": [1, 2, 0, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 11,
    "num_spec_tokens": 3,
    "per_step_accepted": [1, 0, 3, 1],
    "per_step_drafted": [3, 3, 3, 2],
}


@pytest.mark.parametrize(
    ("version", "tells"), [("0.28.0", False), ("0.29.0", True), ("0.30.0", True), ("0.33.0+cu130", True)]
)
def test_vllms_answer_by_version(version, tells):
    totals = {"rounds": 4, "accepted": 5, "drafted": 11}  # not 4 * 3: the last round drafted fewer
    assert VLLM.definitions_in(version).totals_in(VLLM_METRICS) == (totals if tells else None)
    assert VLLM.definitions_in(version).histogram_in(VLLM_METRICS) == ([1, 2, 0, 1] if tells else None)


def test_drafted_is_left_out_where_the_answer_does_not_tell_it():
    untold = {key: value for key, value in VLLM_METRICS.items() if key != "num_draft_tokens"}
    assert VLLM.definitions_in("0.32.0").totals_in(untold) == {"rounds": 4, "accepted": 5}
    assert VLLM.definitions_in("0.32.0").totals_in({}) is None


def test_draft_tokens_count_the_root_in_sglang_only():
    words = sglang.speculative_arguments(EAGLE3)
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"
    assert (
        words[words.index("--speculative-num-steps") + 1] == "4" and VLLM.definitions_in("0.32.0").draft_tokens(4) == 4
    )


# --------------------------------------------------------------------------------------------------- real answers of vLLM


@pytest.fixture
def recorded(monkeypatch):
    """A server whose wire carries what vLLM sent (the record's origin is in its file)."""
    import httpx
    import openai

    def answer(request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=ANSWERS[f"metrics_{moment['now']}"])
        if json.loads(request.content).get("stream"):
            return httpx.Response(200, text=ANSWERS["streamed"], headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=ANSWERS["whole"])

    moment = {"now": "before"}
    http = httpx.Client(base_url="http://recorded", transport=httpx.MockTransport(answer))
    client = openai.OpenAI(base_url="http://recorded/v1", api_key="none", http_client=http)
    monkeypatch.setattr(base.Access, "openai", lambda access, timeout_s: client)
    monkeypatch.setattr(base.Access, "http", lambda access: http)
    server = base.Server(
        "http://recorded", "target", "vllm", "0.32.0", tells_rounds=True, definitions=VLLM.definitions_in("0.32.0")
    )
    return server, moment


def test_streamed_and_whole_answers_tell_the_same_rounds(recorded):
    server, _ = recorded
    streamed, whole = (base.complete(server, ANSWERS["prompt_ids"], 20, stream=stream) for stream in (True, False))
    assert streamed.output_ids == whole.output_ids and len(streamed.output_ids) == 18
    assert streamed.finish_reason == whole.finish_reason == "stop"
    assert streamed.accepted == whole.accepted and set(streamed.drafted) <= {1, 2, 3, 4}
    assert len(streamed.chunks) == len(streamed.accepted) + 1 and whole.chunks == [18]
    told, counted = streamed.accepted, streamed.rounds_from_chunks()
    assert told[:-1] == counted[:-1] and told[-1] >= counted[-1]  # what follows the end of text is cut
    assert streamed.histogram == [told.count(count) for count in range(5)]
    totals = {"rounds": len(told), "accepted": sum(told), "drafted": sum(streamed.drafted)}
    assert streamed.totals == totals == whole.totals


def test_counters_count_the_same_rounds(recorded):
    server, moment = recorded
    before = vllm.counters(server)
    moment["now"] = "after"
    after = vllm.counters(server)
    answers = [base.complete(server, ANSWERS["prompt_ids"], 20, stream=stream) for stream in (True, False)]
    rows = [{"id": str(index)} | vars(answer) for index, answer in enumerate(answers)]
    check = benchmark.cross_check(rows, before, after, positions=4)
    rounds = [count for answer in answers for count in answer.accepted]
    assert check["counters"]["rounds"] == len(rounds)
    assert check["counters"]["accepted"] == acceptance.position_counts(rounds, 4).tolist()
    assert (check["histograms_equal"], check["totals_equal"]) == (2, 2)
