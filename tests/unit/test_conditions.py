"""The same prompt cold and warm, alone and in company: ties are silent, wrong tokens of one condition are named by it."""

import numpy as np
import pytest

from eagle3_lib.verdict import conditions, diagnose, wrong_tokens
from eagle3_lib.verdict.card import Asked, Card
from eagle3_lib.verdict.conditions import COLD, LATE, TOGETHER, WARM

TOKENS, ROUNDS = 96, 38  # rounds that accept 1, 2, 1, 2, ... drafts: 1 + 38 * 2.5 tokens
SHORT, LONG, COMPANY = 20, 5, 4


def answer(
    name: str,
    condition: str,
    wrong: int = 0,
    differs_at: int | None = None,
    of: str = "",
    own: int = -1,
    margin: float = 6.0,
) -> dict:
    """A request of replay.json whose rounds are a correct engine's. own: of the wrong tokens, those that no draft stood for."""
    rounds = [1, 2] * (ROUNDS // 2)
    rows = [{"slot": 40 + i, "engine": n, "replay": n, "cut": False, "sure": True} for i, n in enumerate(rounds)]
    own = wrong if own < 0 else own
    request = {
        "id": name,
        "prompt_length": 40,
        "output_length": TOKENS,
        "engine_rounds": rounds,
        "replay_rounds": rounds,
        "rows": rows,
        "condition": condition,
        "cached_tokens": 32 if condition == WARM else 0,
        "lossless": wrong,
        "greedy": {"accepted": [57, wrong - own], "own": [38, own], "largest_margin": margin if wrong else 0.2},
    }
    if of:
        request["reference"] = {"id": of, "differs_at": differs_at}
    return request


def replay_of(
    wrong: dict[str, list[int]] | None = None, own: int = -1, differs_at: int | None = None, late: int = 0
) -> dict:
    """A run of stage 00. wrong: wrong tokens of the answers of each condition, 0 where the list ends."""
    wrong = {name: counts + [0] * 40 for name, counts in (wrong or {}).items()}

    def of(condition: str, index: int, name: str, cold: str = "") -> dict:
        count = wrong.get(condition, [0] * 40)[index]
        place = differs_at if cold and (count or not wrong) else None
        return answer(name, condition, count, place, cold, own if count else -1)

    requests = [of(COLD, index, f"p{index}") for index in range(SHORT)]
    for index in range(LONG):
        requests.append(of(COLD, SHORT + index, f"long {index} cold"))
        requests.append(of(WARM, index, f"long {index} warm", f"long {index} cold"))
    requests += [of(TOGETHER, index, f"p{index} together", f"p{index}") for index in range(COMPANY)]
    requests += [of(LATE, index, f"p{index} late", f"p{index}") for index in range(late)]
    return {"drafter": "base", "positions": 4, "requests": requests, "dtype": "bfloat16"}


def rows_of(replay: dict) -> dict[str, dict]:
    return {row["condition"]: row for row in diagnose.judge(replay).evidence["conditions"]}


def test_an_answer_is_held_against_the_first_cold_one_to_the_same_prompt():
    def asked(name, condition, ids, cached=None, prompt=(1, 2, 3)):
        return {
            "id": name,
            "prompt_ids": list(prompt),
            "output_ids": ids,
            "condition": condition,
            "cached_tokens": cached,
        }

    requests = [
        asked("other", COLD, [9], prompt=(4,)),
        asked("cold", COLD, [5, 6, 7]),
        asked("warm", WARM, [5, 6, 7]),
        asked("differs", WARM, [5, 8, 7]),
        asked("shorter", TOGETHER, [5, 6]),
        asked("late", LATE, [8]),
        {"id": "none", "prompt_ids": [1, 2, 3], "output_ids": [5, 6, 7]},
    ]
    found = conditions.references(requests)
    assert found[0] is None and found[1] is None and found[6] is None
    assert found[2:6] == [{"id": "cold", "differs_at": place} for place in (None, 1, 2, 0)]
    assert conditions.of(asked("", WARM, [], cached=0)) == COLD, "asked a second time, and nothing came from the cache"
    assert conditions.of(asked("", WARM, [])) == WARM and conditions.of(asked("", COLD, [], cached=16)) == WARM


def test_ties_that_rounding_turns_are_counted_and_silent():
    """Every warm answer and those in company differ from the cold ones; no token is one that the target excludes."""
    replay = replay_of(differs_at=17)
    replay["requests"][-1]["reference"]["differs_at"] = 3
    verdict = diagnose.judge(replay)
    assert (verdict.kind, verdict.fault, verdict.warnings) == (diagnose.HEALTHY, None, [])
    rows = rows_of(replay)
    assert (rows[WARM]["answers"], rows[WARM]["compared"], rows[WARM]["differ"], rows[WARM]["first"]) == (5, 5, 5, 17)
    assert (rows[TOGETHER]["compared"], rows[TOGETHER]["differ"], rows[TOGETHER]["first"]) == (4, 4, 3)
    assert (rows[COLD]["answers"], rows[COLD]["compared"], rows[COLD]["tokens"]) == (25, 0, 25 * TOKENS)
    assert Card.of(verdict.as_dict()).exit_code == 0


@pytest.mark.parametrize(
    ("condition", "wrong", "words", "flag"),
    [
        (WARM, [12, 9, 14, 11, 8], "only after a prefix-cache hit", "--no-enable-prefix-caching"),
        (TOGETHER, [6, 7, 5, 9], "only in company of other requests", "--max-num-seqs 1"),
        (LATE, [4, 4, 4, 4, 4, 4, 4], "only in requests asked again later", "eagle3 diagnose"),
    ],
)
def test_wrong_tokens_of_one_condition_are_named_by_it(condition, wrong, words, flag):
    verdict = diagnose.judge(replay_of({condition: wrong}, differs_at=2, late=20 if condition == LATE else 0))
    assert verdict.kind == diagnose.FAULT and verdict.fault == f"the target's own tokens are wrong {words}"
    answers = {WARM: 5, TOGETHER: 4, LATE: 20}[condition]
    told = (
        f"{sum(wrong)} of {answers * TOKENS} tokens of the answers asked {condition} are not the target's first choice"
    )
    assert told in verdict.sentence
    assert (
        f"{len(wrong)} of {answers} of these answers have one more than 1 logit below it, and none of"
        in verdict.sentence
    )
    assert (
        f"{len(wrong)} of {answers} answers differ from the cold answer to the same prompt, the first at token 2"
        in (verdict.sentence)
    )
    card = Card.of(verdict.as_dict(), asked=Asked("vllm", "drafters/base", "org/target"))
    assert (
        card.exit_code == 2 and card.headline == f"The engine is at fault: the target's own tokens are wrong {words}."
    )
    assert flag in card.next and card.mended is None
    assert card.confidence.startswith("wrong tokens by condition: cold 0 of 2400, warm ")


def test_wrong_accepted_drafts_alone_are_verification_in_that_condition():
    verdict = diagnose.judge(replay_of({WARM: [5] * 5}, own=0))
    assert verdict.fault == "verification is not lossless only after a prefix-cache hit"


@pytest.mark.parametrize("wrong", [[4], [9, 12], [40, 40, 40]])
def test_too_few_wrong_answers_are_not_held_against_their_condition(wrong):
    verdict = diagnose.judge(replay_of({WARM: wrong}))
    assert (verdict.kind, verdict.fault) == (diagnose.CANNOT_TELL, None)
    assert f"{len(wrong)} of 5 of these answers have one more than 1 logit below it" in verdict.sentence
    assert "too few answers are wrong to tell whether the condition is the cause" in verdict.sentence
    assert Card.of(verdict.as_dict()).exit_code == 3


def test_two_wrong_tokens_are_no_finding():
    verdict = diagnose.judge(replay_of({WARM: [1, 1]}, differs_at=9))
    assert (verdict.kind, verdict.warnings) == (diagnose.HEALTHY, [])


def test_ties_of_a_server_that_does_not_tell_its_bfloat16_are_no_finding_and_hide_none():
    """Held against float32, they count as tokens that are not the target's first choice, by less than a logit."""
    tied = replay_of({WARM: [3, 2, 3, 1, 2]})
    for request in tied["requests"]:
        request["greedy"]["largest_margin"] = 0.4
    verdict = diagnose.judge(tied)
    assert (verdict.kind, verdict.fault) == (diagnose.HEALTHY, None)
    assert rows_of(tied)[WARM]["not_greedy"] == 11 and rows_of(tied)[WARM]["wrong_answers"] == 0
    spoiled = replay_of({WARM: [12] * 5, COLD: [2, 1, 0, 3, 2]})
    for request in spoiled["requests"]:
        request["greedy"]["largest_margin"] = 5.0 if request["condition"] == WARM else 0.3
    assert diagnose.judge(spoiled).fault == "the target's own tokens are wrong only after a prefix-cache hit"


def test_wrong_tokens_in_several_conditions_are_no_conditions_fault():
    """Another checkpoint, or a fault at random: the rules for the whole run say so, with the counts of each condition."""
    several = diagnose.judge(replay_of({WARM: [12] * 5, COLD: [1, 0, 0, 1, 1]}))
    assert several.kind == diagnose.HEALTHY and several.fault is None
    (warning,) = several.warnings
    assert "(cold 3 of 2400, warm 60 of 480, together 0 of 384 tokens)" in warning
    everywhere = diagnose.judge(replay_of({name: [10] * 25 for name in (COLD, WARM, TOGETHER)}))
    assert everywhere.kind == diagnose.TARGET and "in all 34 requests" in everywhere.sentence
    cold = diagnose.judge(replay_of({COLD: [20] * 10}))
    assert cold.kind == diagnose.TARGET and "only" not in cold.sentence.split("Ask the same")[0]


def test_without_rounds_the_condition_is_told_and_no_fault_is_named():
    rows = rows_of(replay_of({WARM: [12] * 5}))
    untold = [{**row, "own": [0, 0]} for row in rows.values()]
    assert wrong_tokens.find(untold).fault == "the tokens are not the target's only after a prefix-cache hit"


def test_a_run_in_one_condition_has_no_rows():
    replay = replay_of({COLD: [30] * 25})
    replay["requests"] = [request for request in replay["requests"] if request["condition"] == COLD]
    verdict = diagnose.judge(replay)
    assert verdict.evidence["conditions"] == [] and verdict.kind == diagnose.TARGET


def test_an_engine_that_errs_at_random_is_hardly_ever_held_against_a_condition():
    """Wrong answers dealt out at random, over all answers or over the long prompts alone: at most 1 % of 2,000 runs."""
    random = np.random.default_rng(40)
    base = list(rows_of(replay_of(late=20)).values())
    for among in ((COLD, WARM, TOGETHER, LATE), "long"):
        named = 0
        for _ in range(1000):
            rows = [{**row, "pairs": 0} for row in base]
            by_name = {row["condition"]: row for row in rows}
            if among == "long":
                dealt = {COLD: random.random(LONG) < 0.5, WARM: random.random(LONG) < 0.5}
            else:
                share = random.choice([0.02, 0.05, 0.1])
                dealt = {name: random.random(by_name[name]["answers"]) < share for name in among}
            for name, wrong in dealt.items():
                by_name[name] |= {"wrong_answers": int(wrong.sum()), "not_greedy": 10 * int(wrong.sum())}
            by_name[WARM]["pairs"] = by_name[WARM]["wrong_answers"]  # right when cold, or there is no finding
            found = wrong_tokens.find(rows)
            named += found is not None and found.certain
        assert named <= 10, among
