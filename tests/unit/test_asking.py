"""The plan of what a running server is asked: cold, warm, long, in company."""

import threading
import time

from eagle3_lib.stages import asking
from eagle3_lib.verdict.conditions import COLD, LATE, TOGETHER, WARM

PROMPTS = [(f"p{number}", [number] * 40) for number in range(6)]
TEXTS = ["one two three four five six seven eight nine ten"] * 60


def render(text: str) -> list[int]:
    return [1] * len(text.split())


def test_long_prompts_are_asked_cold_and_then_warm_with_the_same_salt():
    long_prompts = asking.lengthened(TEXTS, render, most=2000)
    assert [len(ids) for _, ids in long_prompts] == [300] * asking.LONG_PROMPTS
    alone, company = asking.plan(PROMPTS, long_prompts, in_company=True)
    long_ones = 2 * asking.LONG_PROMPTS
    assert [ask.condition for ask in alone] == [COLD] * 3 + [COLD, WARM] * asking.LONG_PROMPTS + [COLD] * 3
    in_the_middle, short = alone[3 : 3 + long_ones], alone[:3] + alone[3 + long_ones :]
    assert [ask.id for ask in short] == [name for name, _ in PROMPTS]
    pairs = list(zip(in_the_middle[::2], in_the_middle[1::2], strict=True))
    assert all(cold.salt == warm.salt and cold.prompt_ids == warm.prompt_ids for cold, warm in pairs)
    salts = [ask.salt for ask in short] + [cold.salt for cold, _ in pairs] + [ask.salt for ask in company]
    assert len(set(salts)) == len(salts) and "" not in salts
    assert [ask.condition for ask in company] == [TOGETHER] * asking.IN_COMPANY
    ids = [ask.id for ask in (*alone, *company)]
    assert len(set(ids)) == len(ids)


def test_no_long_prompt_where_context_or_texts_are_too_short():
    assert asking.lengthened(TEXTS, render, most=299) == []
    assert asking.lengthened(TEXTS[:2], render, most=2000) == []


def test_a_second_try_is_as_cold_as_the_first_and_a_pair_is_tried_once():
    alone, _ = asking.plan(PROMPTS[:1], [("long", [1] * 300)], in_company=False)
    cold, warm, first = alone
    assert len(set(first.salts(3))) == 3 and first.salts(3)[0] == first.salt
    assert cold.salts(3) == warm.salts(3) == [cold.salt]
    assert asking.Ask("p", [1]).salts(3) == ["", "", ""], "a server without salts is asked again all the same"


def test_in_company_all_are_asked_at_once():
    barrier = threading.Barrier(3, timeout=10)
    asks = [asking.Ask(name, ids) for name, ids in PROMPTS[:3]]

    def one(ask):
        barrier.wait()
        return {"id": ask.id}

    assert [found["id"] for found in asking.together(asks, one)] == ["p0", "p1", "p2"]
    assert asking.together([], one) == []


def test_the_short_prompts_are_asked_again_with_a_cold_cache_after_a_wait_that_shows_its_progress(capsys):
    alone, _ = asking.plan(PROMPTS, [], in_company=False)
    later = asking.again(PROMPTS)
    assert [ask.prompt_ids for ask in later] == [ids for _, ids in PROMPTS]
    assert {ask.condition for ask in later} == {LATE} and not {ask.salt for ask in later} & {ask.salt for ask in alone}
    assert not {ask.id for ask in later} & {ask.id for ask in alone}
    began = time.time()
    asking.wait(began + 0.3, step_s=0.1)
    assert 0.3 <= time.time() - began < 2
    asking.wait(began - 100)
    assert time.time() - began < 2, "a time that has passed is not waited for"
    assert "waiting until" in capsys.readouterr().err
