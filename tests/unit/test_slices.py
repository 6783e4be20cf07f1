"""The part of a run that departs, by the distance from a cached prefix and by the time of a request; the truth is known."""

import numpy as np
import pytest

from eagle3_lib.verdict import diagnose, slices
from eagle3_lib.verdict.card import Card
from eagle3_lib.verdict.evidence import NOISE, Table

BEGAN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
ROUNDS = 60  # of a request


def request(index, engine, correct, prompt=40, cached=0, sent=None, seconds=1.0) -> dict:
    """A request of replay.json."""
    slots = prompt - 1 + np.concatenate([[0], np.cumsum(np.add(engine, 1))[:-1]])
    rows = [
        {"slot": int(slot), "engine": int(a), "replay": int(b), "cut": False}
        for slot, a, b in zip(slots, engine, correct, strict=True)
    ]
    start = BEGAN + 5.0 * index if sent is None else sent
    return {
        "id": str(index),
        "prompt_length": prompt,
        "output_length": 1 + int(sum(engine)) + len(rows),
        "engine_rounds": [int(count) for count in engine],
        "replay_rounds": [int(count) for count in correct],
        "rows": rows,
        "cached_tokens": cached,
        "started_s": start,
        "seconds": seconds,
        "first_token_s": 0.1,
    }


def replay_of(requests: list[dict]) -> dict:
    return {"drafter": "base", "positions": 4, "requests": requests, "dtype": "float32"}


def run(random, departs, pairs=5, short=10, cached=128, **more) -> dict:
    """Short cold prompts, and in their middle long ones, cold and warm. departs: (index, prompt, cached, round, slot) -> share."""
    half = [(40, 0)] * (short // 2)
    kinds = [*half, *[(300 + 16 * (number // 2), cached * (number % 2)) for number in range(2 * pairs)], *half]
    kinds += more.get("kinds", [])
    sent = more.get("sent", {})
    requests = []
    for index, (prompt, hit) in enumerate(kinds):
        correct = random.integers(1, 4, ROUNDS)
        slot, engine = prompt - 1, []
        for number, count in enumerate(correct):
            engine.append(count - (random.random() < departs(index, prompt, hit, number, slot)))
            slot += engine[-1] + 1
        requests.append(request(index, engine, correct, prompt, hit, sent.get(index)))
    return replay_of(requests)


def words(replay: dict) -> str:
    found = slices.find(Table.of(replay["requests"]), NOISE["float32"])
    return found.words(len(replay["requests"])) if found else ""


def test_columns_of_distance_and_time():
    counts = np.ones(3, int)
    told = [request(0, counts, counts, prompt=300, cached=256), request(1, counts, counts)]
    table = Table.of(told)
    assert table.distance[:3].tolist() == [43, 45, 47] and np.isnan(table.distance[3:]).all()
    assert table.sent.tolist() == [0, 0, 0, 5, 5, 5] and table.began == BEGAN
    untold = [{**some, "cached_tokens": None, "condition": "warm", "started_s": 12.0} for some in told]
    table = Table.of(untold)
    assert np.isnan(table.distance).all() and table.began is None, "seconds of another clock"
    assert table.cached.tolist() == [1] * 6
    untold[1]["started_s"] = None
    assert np.isnan(Table.of(untold).sent).all()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_fault_near_the_end_of_the_cached_prefix_is_named_so(share):
    """Faulty in warm answers up to slot 231 after it, where the first round of an answer is 171 to 235 after it."""
    for seed in range(4):
        near = run(
            np.random.default_rng(seed),
            lambda _, prompt, hit, number, slot: share if hit and slot - hit < 232 else 0,
        )
        verdict = diagnose.judge(near)
        assert verdict.where["by"] == "distance" and verdict.where["outside"][0] == 0, seed
        assert 220 <= verdict.where["until"] <= 232
        told = f"only in the first {verdict.where['until']} tokens after a cached prefix"
        assert told in verdict.sentence and told in Card.of(verdict.as_dict()).headline
        assert "--no-enable-prefix-caching" in Card.of(verdict.as_dict()).next
        assert verdict.where["at"] is None


@pytest.mark.slow
def test_a_fault_after_every_hit_is_not_named_by_the_distance():
    """All rounds of warm answers, or a random half, fifth or twentieth of them: the condition, and no distance."""
    found = [
        words(run(np.random.default_rng(seed), lambda _, prompt, hit, number, slot, share=share: share if hit else 0))
        for share in (1.0, 0.5, 0.2, 0.05)
        for seed in range(8)
    ]
    assert set(found) == {"only after a prefix-cache hit"}


@pytest.mark.slow
def test_the_first_tokens_of_all_answers_are_no_distance():
    """The same places depart without a hit; and where every answer had a hit, nothing says that the hit matters."""
    for seed in range(4):
        first = run(np.random.default_rng(seed), lambda _, prompt, hit, number, slot: 0.5 if number < 15 else 0)
        assert words(first).startswith("before "), seed
        hits = run(
            np.random.default_rng(seed),
            lambda _, prompt, hit, number, slot: 0.5 if number < 15 else 0,
            short=0,
            cached=128,
        )
        for some in hits["requests"]:
            some["cached_tokens"] = 128
        assert "cached prefix" not in words(hits)


@pytest.mark.slow
def test_a_fault_that_begins_after_a_while_is_named_by_the_time():
    """The short prompts once more an hour later, all of them faulty, at half of their rounds."""
    for seed in range(4):
        late = run(
            np.random.default_rng(seed),
            lambda index, prompt, hit, number, slot: 0.5 if index >= 20 else 0,
            kinds=[(40, 0)] * 10,
            sent={20 + number: BEGAN + 3600 + 5 * number for number in range(10)},
        )
        verdict = diagnose.judge(late)
        assert (verdict.where["by"], verdict.where["since"], verdict.where["at"]) == ("sent", 3600, BEGAN + 3600), seed
        told = "only in requests sent from 15:13:20 UTC on, 3600 seconds after the first"
        assert told in verdict.sentence and told in Card.of(verdict.as_dict()).headline
        assert verdict.where["outside"][0] == 0
    for some in late["requests"]:
        some["started_s"] -= BEGAN
    assert words(late) == "only in requests sent from 3600 seconds after the first on"


@pytest.mark.slow
def test_the_first_requests_after_a_start_are_named_by_the_time():
    for seed in range(4):
        first = run(
            np.random.default_rng(seed),
            lambda index, prompt, hit, number, slot: 0.6 if index < 8 else 0,
            short=40,
            pairs=0,
        )
        assert words(first) == "only in requests sent before 14:13:56 UTC, in the first 36 seconds", seed


@pytest.mark.slow
@pytest.mark.parametrize("middle", [True, False])
def test_a_fault_of_long_prompts_or_of_company_is_no_matter_of_time(middle):
    """Even where they are the last that are asked, as they were once: no earlier request is like them."""
    for seed in range(4):
        long_ones = run(
            np.random.default_rng(seed), lambda _, prompt, hit, number, slot: 0.5 if prompt > 200 else 0, short=10
        )
        if not middle:
            long_ones["requests"] = sorted(long_ones["requests"], key=lambda some: some["prompt_length"])
            for index, some in enumerate(long_ones["requests"]):
                some["started_s"] = BEGAN + 5 * index
        assert words(long_ones) == "only on prompts of 300 tokens or more", seed
        company = run(
            np.random.default_rng(seed),
            lambda index, prompt, hit, number, slot: 0.5 if index >= 20 else 0,
            kinds=[(40, 0)] * 4,
            sent=dict.fromkeys(range(20, 24), BEGAN + 200),
        )
        told = words(company)
        assert told.startswith("from ") and "requests beside" in told, (seed, told)


@pytest.mark.slow
def test_a_fault_of_requests_at_random_times_stays_one_of_requests():
    for seed in range(4):
        some = run(np.random.default_rng(seed), lambda index, *_: 0.5 if index in (2, 7, 11, 16) else 0)
        assert words(some) == "in 4 of 20 requests", seed


def test_parts_by_distance_and_time_leave_out_what_has_no_value():
    replay = run(np.random.default_rng(1), lambda _, prompt, hit, number, slot: 0.5 if hit else 0)
    parts = slices.parts(Table.of(replay["requests"]))
    rounds = {by: sum(part["rounds"] for part in some) for by, some in parts.items()}
    assert rounds["distance"] == 5 * ROUNDS and rounds["sent"] == rounds["cached"] == 20 * ROUNDS
    assert parts["sent"][0]["from"] == 0 and parts["sent"][-1]["to"] == 95


@pytest.mark.slow
def test_slices_of_a_run_with_all_orders_are_rare():
    """Departing rounds at random places of a run that tells cache and times: a slice is found in at most 1 % of 200 runs."""
    random = np.random.default_rng(41)
    found = [words(run(random, lambda *_: 0.03, kinds=[(40, 0)] * 8)) for _ in range(200)]
    assert sum(map(bool, found)) <= 2, found
