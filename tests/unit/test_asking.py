"""The plan of what a running server is asked: cold, warm, long, in company."""

import threading

from eagle3_lib.stages import asking
from eagle3_lib.verdict.evidence import COLD, TOGETHER, WARM

PROMPTS = [(f"p{number}", [number] * 40) for number in range(6)]
TEXTS = ["one two three four five six seven eight nine ten"] * 60


def render(text: str) -> list[int]:
    return [1] * len(text.split())


def test_long_prompts_are_asked_cold_and_then_warm_with_the_same_salt():
    long_prompts = asking.lengthened(TEXTS, render, most=2000)
    assert [len(ids) for _, ids in long_prompts] == [300] * asking.LONG_PROMPTS
    alone, company = asking.plan(PROMPTS, long_prompts, in_company=True)
    assert [ask.condition for ask in alone] == [COLD] * 6 + [COLD, WARM] * asking.LONG_PROMPTS
    pairs = list(zip(alone[6::2], alone[7::2], strict=True))
    assert all(cold.salt == warm.salt and cold.prompt_ids == warm.prompt_ids for cold, warm in pairs)
    salts = [ask.salt for ask in alone[:6]] + [cold.salt for cold, _ in pairs] + [ask.salt for ask in company]
    assert len(set(salts)) == len(salts) and "" not in salts
    assert [ask.condition for ask in company] == [TOGETHER] * asking.IN_COMPANY
    ids = [ask.id for ask in (*alone, *company)]
    assert len(set(ids)) == len(ids)


def test_no_long_prompt_where_context_or_texts_are_too_short():
    assert asking.lengthened(TEXTS, render, most=299) == []
    assert asking.lengthened(TEXTS[:2], render, most=2000) == []


def test_a_second_try_is_as_cold_as_the_first_and_a_pair_is_tried_once():
    alone, _ = asking.plan(PROMPTS[:1], [("long", [1] * 300)], in_company=False)
    first, cold, warm = alone
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
