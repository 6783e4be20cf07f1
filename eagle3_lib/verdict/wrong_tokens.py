"""Wrong tokens in one condition alone: a fault of the target's own cache or batch, or of verification, in that state.

The same prompts are answered rightly in the other conditions, so that the folder which the replay loads is the served target, and
rounding is not the cause: near ties are no wrong tokens (:data:`eagle3_lib.verdict.lossless.NEAR_TIE`), and a wrong answer is one
with a token that no rounding makes, whatever the dtype (:data:`eagle3_lib.verdict.conditions.SURELY_WRONG`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from ..results import ConditionTokens
from .conditions import COLD, ONLY, SURELY_WRONG
from .evidence import FALSE_ALARM, WRONG_TOKENS, surely_more

# Prompts whose cold answer is right and whose answer in the condition is wrong: with fewer, an engine that errs at random on
# such prompts may have erred in that condition by chance (5 wrong of 10 answers to 5 prompts: 1 in 252, 4 of 10: 1 in 42).
LEAST_PAIRS = 4


@dataclass(frozen=True)
class Finding:
    """fault: what is wrong, with the condition. counts: a sentence's part. certain: whether the condition is surely the cause;
    else too few answers are wrong to tell."""

    condition: str
    fault: str
    counts: str
    certain: bool


def find(rows: Sequence[ConditionTokens]) -> Finding | None:
    """The one condition that has wrong answers; None where none, several, or the cold one has.

    Certain: by the binomial test of wrong tokens, by the chance that so many wrong answers lie in this condition alone had they
    been dealt out over all answers, both at FALSE_ALARM over all conditions, and by LEAST_PAIRS prompts.
    """
    wrong = [row for row in rows if row["wrong_answers"]]
    if len(wrong) != 1 or wrong[0]["condition"] not in ONLY or all(row["condition"] != COLD for row in rows):
        return None
    (row,) = wrong
    false_alarm = FALSE_ALARM / (len(rows) - 1)
    if not surely_more(row["not_greedy"], row["tokens"], WRONG_TOKENS, false_alarm):
        return None
    answers = sum(other["answers"] for other in rows)
    chance = comb(row["answers"], row["wrong_answers"]) / comb(answers, row["wrong_answers"])
    certain = chance <= false_alarm and row["pairs"] >= LEAST_PAIRS
    fault = f"{_what(row)} {ONLY[row['condition']]}"
    return Finding(row["condition"], fault, _counts(row, rows), certain)


def _what(row: ConditionTokens) -> str:
    own_tokens, own_wrong = row["own"]
    if not own_tokens:
        return "the tokens are not the target's"
    if surely_more(own_wrong, own_tokens, WRONG_TOKENS):
        return "the target's own tokens are wrong"
    return "verification is not lossless"


def _counts(row: ConditionTokens, rows: Sequence[ConditionTokens]) -> str:
    others = sum(other["answers"] for other in rows if other is not row)
    beside = f"{row['differ']} of {row['compared']} answers differ from the cold answer to the same prompt"
    first = "" if row["first"] is None else f", the first at token {row['first']}"
    return (
        f"{row['not_greedy']} of {row['tokens']} tokens of the answers asked {row['condition']} are not the target's first choice, "
        f"near ties left out; {row['wrong_answers']} of {row['answers']} of these answers have one more than {SURELY_WRONG:g} logit "
        f"below it, and none of {others} other answers has; {beside}{first}"
    )
