"""Rounds on the text: steps without drafts shift nothing, and no place is called sure that is not the true one."""

import random

import pytest

from eagle3_lib.verdict import rounds
from eagle3_lib.verdict.rounds import Laid, lay

STEPS = 4


@pytest.mark.parametrize(
    ("length", "accepted", "chunks", "laid"),
    [
        # every step a round
        (8, [1, 2, 1], (), Laid([1, 3, 6], [True] * 3)),
        # the answer's end hides one accepted draft
        (7, [1, 2, 1], (), Laid([1, 3, 6], [True] * 3, [], 1)),
        # one step without drafts, and nothing tells which
        (9, [1, 2, 1], (), Laid([1, 3, 6], [False] * 3, [8])),
        # its chunk tells: between the first round and the second
        (10, [1, 2, 0], [1, 2, 1, 3, 1, 1, 1], Laid([1, 4, 7], [True, True, False], [3, 8, 9])),
        # a round that accepted nothing looks like a step without drafts
        (7, [0, 2, 0], [1, 1, 1, 3, 1], Laid([1, 3, 6], [False, True, True], [2])),
        # two steps in one chunk
        (8, [1, 2, 1], [1, 5, 2], Laid([1, 3, 6], [True] * 3)),
        # no round at all
        (4, [], [1, 1, 1, 1], Laid([], [], [1, 2, 3])),
        (1, [], [1], Laid()),
    ],
)
def test_places(length, accepted, chunks, laid):
    assert lay(length, accepted, chunks) == laid


def test_an_end_that_may_hide_a_step_without_drafts_leaves_no_round_sure():
    assert lay(7, [1, 2, 1], (), may_idle=True).sure == [True] * 3  # it hides the last draft; no room for more
    assert lay(8, [1, 2, 1], (), may_idle=True).sure == [False] * 3  # or a step, and the last round's second token
    assert lay(7, [1, 2, 0], (), may_idle=True).sure == [True] * 3


@pytest.mark.parametrize(
    ("length", "accepted", "chunks", "said"),
    [
        (6, [1, 2, 1], (), "its rounds emit 8 tokens, the answer has 6"),
        (7, [3, 0], [1, 3, 3], "do not fit into the 3 streamed chunks of its 7 tokens"),
    ],
)
def test_rounds_that_cannot_make_up_the_answer(length, accepted, chunks, said):
    assert said in lay(length, accepted, chunks)


def answer(source: random.Random) -> tuple[list[int], list[int], list[int], int]:
    """A random answer: accepted counts, true first token of each round, chunks, length."""
    accepted, firsts, emitted = [], [], [1]
    for _ in range(source.randint(1, 12)):
        if source.random() < 0.25:
            emitted.append(1)
        else:
            accepted.append(min(STEPS, int(source.expovariate(1))))
            firsts.append(sum(emitted))
            emitted.append(accepted[-1] + 1)
    if not accepted:
        return answer(source)
    if emitted[-1] > 1 and source.random() < 0.5:
        emitted[-1] -= source.randint(0, emitted[-1] - 1)
    chunks = [emitted[0]]
    for tokens in emitted[1:]:
        if source.random() < 0.1:
            chunks[-1] += tokens
        else:
            chunks.append(tokens)
    return accepted, firsts, chunks, sum(emitted)


@pytest.mark.slow
def test_a_sure_place_is_the_true_one():
    source, sure, every = random.Random(0), 0, 0
    for number in range(20000):
        accepted, firsts, chunks, length = answer(source)
        streamed = number % 4 > 0
        laid = lay(length, accepted, chunks if streamed else (), may_idle=True)
        assert isinstance(laid, Laid), (accepted, chunks)
        wrong = [pair for pair, known in zip(zip(laid.firsts, firsts, strict=True), laid.sure, strict=True) if known]
        assert all(found == true for found, true in wrong), (accepted, chunks, firsts, laid)
        sure, every = sure + streamed * sum(laid.sure), every + streamed * len(firsts)
    assert sure > 0.4 * every  # and most of the others stand beside a step that looks like them


def test_a_replay_is_capped_at_what_each_round_drafted():
    accepted = [0, 3, 0, 0, 0, 2, 0, 0, 0, 0]  # of a round at each slot
    rows = rounds.compare([1, 1, 2], accepted, 2, STEPS, drafted=[1, 4, 4], laid=Laid([1, 3, 5], [True, False, True]))
    found = [(row["slot"], row["drafted"], row["replay"], row["cut"], row["sure"]) for row in rows]
    assert found == [(1, 1, 1, False, True), (3, 4, 0, False, False), (5, 4, 2, False, True)]
    assert [rounds.comparable(row) for row in rows] == [True, False, True]
    assert not rounds.comparable({"cut": False, "drafted": 0})  # a round that drafted nothing tells nothing


def test_a_correct_engine_walks_as_the_engine_drafted():
    accepted = [0, 3, 0, 0, 0, 2, 0, 0, 0, 0]
    assert rounds.walk(accepted, 2) == [3, 2, 0]
    laid = Laid([1, 4, 5], [True] * 3, [3])
    drafts_at = rounds.drafts_by_slot(laid, [1, 0, 2], [1, 4, 4], 2)
    assert drafts_at == {1: 1, 2: 1, 3: 0, 4: 4, 5: 4, 6: 4, 7: 4}
    assert rounds.walk_as_drafted(accepted, 2, drafts_at, STEPS) == ([1, 0, 2, 0], [1, 4, 4, 4])


def test_answers_at_the_end_of_the_context():
    bench = {"positions": 4, "max_model_len": 20}
    request = {"prompt_ids": [1] * 10, "output_ids": [1] * 6, "drafted": [4, 4]}
    assert not rounds.at_context_limit(request, bench)
    assert rounds.at_context_limit(request | {"output_ids": [1] * 7}, bench)
    assert rounds.at_context_limit(
        request | {"drafted": [4, 3, 2, 1]}, {"positions": 4}
    )  # where the limit is not known
