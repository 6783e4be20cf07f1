"""Rounds on the text of answers that a real vLLM gave: origin in tests/data/vllm_server/README.md."""

import json
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle3_lib.engines.registry import ENGINES
from eagle3_lib.paths import ROOT
from eagle3_lib.verdict import acceptance, rounds

FOLDER = ROOT / "tests/data/vllm_server"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
VERSION, K = "0.32.0", 4
DEFINITIONS = ENGINES["vllm"].spec.definitions_in(VERSION)
STREAMS = [
    "on/completion_stream.txt",
    "on/chat_stream.txt",
    "on/chat_stream_long.txt",
    "on/two_tokens.txt",
    "on/context_end_stream.txt",
    "on/structured_stream.txt",
]
REPLAY12 = "replay12/answers.sse.txt"


@dataclass
class Recorded:
    """One answer: tokens of each chunk, () where it came whole, and what it tells of its rounds, {} for nothing."""

    output_ids: list[int]
    chunks: list[int]
    told: dict
    completion_tokens: int | None
    choices: int

    def laid(self) -> rounds.Laid:
        laid = rounds.lay(len(self.output_ids), self.told["per_step_accepted"], self.chunks)
        assert not isinstance(laid, str), laid
        return laid


def read(name: str) -> list[Recorded]:
    """The answers in a file: one whole answer, or streamed ones, each ended by [DONE]."""
    text = (FOLDER / name).read_text()
    if name.endswith(".json"):
        return [_recorded([json.loads(text)], streamed=False)]
    streams = [part for part in text.split("data: [DONE]") if part.strip()]
    return [
        _recorded([json.loads(line.removeprefix("data: ")) for line in part.splitlines() if line], streamed=True)
        for part in streams
    ]


def _recorded(events: list[dict], streamed: bool) -> Recorded:
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
    told = [event["metrics"]["speculative_decoding"] for event in events if event.get("metrics")]
    usage = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    return Recorded(
        output_ids=[token for piece in pieces for token in piece],
        chunks=[len(piece) for piece in pieces] if streamed else [],
        told=told[-1] if told else {},
        completion_tokens=usage[-1] if usage else None,
        choices=1 + max(choice["index"] for choice in choices),
    )


def counters(name: str) -> dict:
    """{"rounds", "drafted", "accepted": by position} of a recorded /metrics."""
    names = {"vllm:spec_decode_num_drafts_total": "rounds", "vllm:spec_decode_num_draft_tokens_total": "drafted"}
    counted = {"rounds": 0, "drafted": 0, "accepted": [0] * K}
    for family in text_string_to_metric_families((FOLDER / name).read_text()):
        for sample in family.samples:
            if sample.name in names:
                counted[names[sample.name]] += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                counted["accepted"][int(sample.labels["position"])] += int(sample.value)
    return counted


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_tells_its_rounds_and_where_they_are(name):
    (answer,), expected = read(name), EXPECTED[name]
    told, laid = answer.told, answer.laid()
    accepted, drafted = told["per_step_accepted"], told["per_step_drafted"]
    assert len(answer.output_ids) == answer.completion_tokens == expected["completion_tokens"]
    assert len(accepted) == len(drafted) == len(laid.firsts) == expected["told"]["rounds"]
    assert sum(drafted) == expected["told"]["drafted"]
    assert acceptance.position_counts(accepted, K).tolist() == expected["told"]["accepted_by_position"]
    steps = len(answer.chunks) - 1  # prefill's chunk is no step
    assert steps == expected["steps_by_chunks"] == len(laid.firsts) + len(laid.idle)
    assert sum(answer.chunks[1:]) - steps == expected["accepted_by_chunks"]
    assert laid.past_end == sum(accepted) - expected["accepted_by_chunks"]


@pytest.mark.parametrize("name", [*STREAMS, "on/completion.json", "on/chat.json", "on/one_token.json", REPLAY12])
def test_totals_and_histogram_are_those_of_the_rounds(name):
    for answer in read(name):
        accepted, drafted = (answer.told[f"per_step_{kind}"] or [] for kind in ("accepted", "drafted"))
        totals = {"rounds": len(accepted), "accepted": sum(accepted), "drafted": sum(drafted)}
        assert DEFINITIONS.totals_in(answer.told) == totals
        histogram = DEFINITIONS.histogram_in(answer.told)
        assert histogram == [accepted.count(count) for count in range(K + 1)]


@pytest.mark.parametrize(
    "name", ["on/completion_stream.txt", "on/chat_stream.txt", "on/chat_stream_long.txt", REPLAY12]
)
def test_every_round_starts_a_chunk(name):
    """Every step is a round here: the places are those of the chunks, and the same without chunks."""
    for answer in read(name):
        laid = answer.laid()
        starts = [sum(answer.chunks[: index + 1]) for index in range(len(answer.chunks) - 1)]
        assert laid.firsts == starts and all(laid.sure) and laid.idle == []
        assert rounds.lay(len(answer.output_ids), answer.told["per_step_accepted"]) == laid


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_whole_answer_tells_what_its_stream_does(kind):
    (whole,), (streamed,) = read(f"on/{kind}.json"), read(f"on/{kind}_stream.txt")
    assert whole.output_ids == streamed.output_ids and whole.told == streamed.told
    assert whole.chunks == [] and whole.laid() == streamed.laid()


def test_short_rounds_and_a_step_without_drafts_at_the_contexts_end():
    (answer,) = read("on/context_end_stream.txt")
    laid = answer.laid()
    assert answer.told["per_step_drafted"] == [K] * 55 + [3, 2, 1]
    assert len(laid.firsts) == 58 and len(laid.idle) == 1 and laid.past_end == 0
    assert laid.idle == [len(answer.output_ids) - 1]  # the last step alone had no room for a draft
    # Which of the last steps, each of one token, had no drafts, the chunks do not tell.
    assert not laid.sure[-1] and all(laid.sure[: laid.sure.index(False)])


def test_steps_whose_drafts_a_grammar_refused_are_no_rounds():
    (answer,) = read("on/structured_stream.txt")
    laid = answer.laid()
    assert answer.told["per_step_drafted"] == [4, 1, 1, 1] and answer.told["per_step_accepted"] == [1, 0, 0, 0]
    assert len(laid.firsts) == 4 and len(laid.idle) == 12 and laid.past_end == 0
    pair = answer.chunks.index(2)  # the one round that accepted something is the one chunk of two tokens
    assert laid.firsts[0] == sum(answer.chunks[:pair]) and laid.sure == [True, False, False, False]
    delta = json.loads((FOLDER / "on/structured_stream.metrics_delta.json").read_text())
    assert (delta["rounds"], delta["drafted"], delta["accepted"]) == (4, 7, 1)


def test_an_answer_of_one_token_has_no_round():
    (answer,) = read("on/one_token.json")
    assert answer.told["per_step_accepted"] is None and answer.told["num_spec_steps"] == 0
    assert EXPECTED["on/one_token.json"]["rounds"] == 0
    assert rounds.lay(1, []) == rounds.Laid()


def test_two_tokens_are_one_round():
    (answer,) = read("on/two_tokens.txt")
    assert answer.laid() == rounds.Laid(firsts=[1], sure=[True], idle=[], past_end=0)


def test_twelve_answers_accept_seven_drafts_past_their_ends():
    answers, expected = read(REPLAY12), EXPECTED["replay12 by per_step_accepted"]
    laid = [answer.laid() for answer in answers]
    accepted = [count for answer in answers for count in answer.told["per_step_accepted"]]
    drafted = [count for answer in answers for count in answer.told["per_step_drafted"]]
    assert len(answers) == expected["requests"] == 12
    assert len(accepted) == expected["rounds"] == 511 and sum(drafted) == expected["drafted"]
    assert acceptance.position_counts(accepted, K).tolist() == expected["accepted_by_position"]
    assert sum(len(answer.output_ids) for answer in answers) == expected["completion_tokens"]
    assert sum(one.past_end for one in laid) == expected["past_the_end"] == 7
    cut = EXPECTED["replay12 by chunks (cut at the end)"]
    by_chunks = [tokens - 1 for answer in answers for tokens in answer.chunks[1:]]
    assert acceptance.position_counts(by_chunks, K).tolist() == cut["accepted_by_position"]


@pytest.mark.parametrize(
    ("folder", "entry"),
    [("on", "on: metrics_after - metrics_before"), ("replay12", "replay12 metrics delta")],
)
def test_counters(folder, entry):
    before, after = counters(f"{folder}/metrics_before.txt"), counters(f"{folder}/metrics_after.txt")
    expected = EXPECTED[entry]
    assert after["rounds"] - before["rounds"] == expected["rounds"]
    assert after["drafted"] - before["drafted"] == expected["drafted"]
    rise = [a - b for a, b in zip(after["accepted"], before["accepted"], strict=True)]
    assert rise == expected["accepted_by_position"]


def test_answers_that_tell_no_rounds():
    (stopped,), (several,) = read("on/stop_string_stream.txt"), read("on/n2.json")
    assert EXPECTED["on/stop_string_stream.txt"]["told"] is None
    assert stopped.told == {} and len(stopped.chunks) - 1 == EXPECTED["on/stop_string_stream.txt"]["steps_by_chunks"]
    delta = json.loads((FOLDER / "on/stop_string_stream.metrics_delta.json").read_text())
    assert delta["rounds"] == len(stopped.chunks) - 1 and delta["accepted"] == sum(stopped.chunks[1:]) - delta["rounds"]
    assert several.told == {} and several.choices == 2


def test_the_summary_level_tells_totals_alone():
    (whole,), (streamed,) = read("summary/completion.json"), read("summary/completion_stream.txt")
    expected = EXPECTED["summary/completion.json"]
    for answer in (whole, streamed):
        assert answer.told.get("per_step_accepted") is None
        totals = DEFINITIONS.totals_in(answer.told)
        assert totals == {"rounds": expected["rounds"], "accepted": expected["accepted"], "drafted": 40}
        steps_by_count = DEFINITIONS.histogram_in(answer.told)
        survivors = [sum(steps_by_count[position:]) for position in range(1, K + 1)]
        assert survivors == expected["accepted_by_position"]
    (without_usage,) = read("summary/completion_stream_without_usage.txt")
    assert without_usage.told == {} and without_usage.completion_tokens is None
    assert without_usage.output_ids == streamed.output_ids
