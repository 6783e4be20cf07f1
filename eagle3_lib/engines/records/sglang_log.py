"""The lines "Decode batch ..." of SGLang's log.

Read in SGLang 0.5.8, 0.5.10, 0.5.16, 0.5.23 (srt/managers/scheduler_metrics_mixin.py, later srt/observability/ and
scheduler_components/metrics_reporter.py): "accept len" is (accepted + rounds) / rounds since the line before, in all of them.
"accept rate" is (accepted + rounds) / (rounds * draft tokens) before 0.5.11, with the bonus token, and accepted / (rounds *
(draft tokens - 1)) from then on; the log does not tell its version. Both have two decimals. K and topk stand in the line
"server_args=" at the start of the log.
"""

import re

from ...errors import Eagle3Error
from ..sglang.spec import SPEC
from .document import Document
from .recorded import Recorded, parse_amount, parse_count

TOOL = "sglang log"
DECODE = re.compile(r"Decode batch.*?#running-req: \d+")
LINE = re.compile(r"Decode batch.*?#running-req: (\d+).*?(?<!block )accept len: (-?[\w.]+)")
ARGUMENT = r"speculative_{name}['\"]?\s*[=:]\s*(\d+)"
WITHOUT_BONUS = next(row.since for row in SPEC.definitions if not row.bonus_in_rate)
RATE_NOTE = (
    f"accept rate is not read: before SGLang {'.'.join(map(str, WITHOUT_BONUS))} it counts the bonus token, from then on it does "
    "not, and {source} does not tell its version. In this project's definition the rate of a chain is (mean length - 1) / K."
)
CHAIN_NOTE = "It is not told whether the drafts are a chain or a tree (speculative_eagle_topk)."


def recognise(document: Document) -> bool:
    return not document.values and DECODE.search(document.text) is not None


def read(document: Document, of: str = "") -> Recorded:
    """The mean length over all lines.

    Raises:
        Eagle3Error: a length is no number from 1 on.
    """
    if LINE.search(document.text) is None:
        raise Eagle3Error(
            f"{document.where}: accept len: found none, expected this value; the server does not speculate"
        )
    lengths, weights = [], []
    for number, text in enumerate(document.text.split("\n"), 1):
        found = LINE.search(text)
        if found is None:
            continue
        where = f"{document.where}: line {number}"
        length = parse_amount(found[2], f"{where}: accept len", 1)
        running = parse_count(found[1], f"{where}: #running-req")
        if running:
            lengths.append(length)
            weights.append(running)
    if not lengths:
        raise Eagle3Error(f"{document.where}: #running-req: found 0 in every line, expected one with requests")
    length = sum(length * weight for length, weight in zip(lengths, weights, strict=True)) / sum(weights)
    steps, topk, draft_tokens = (
        argument(document.text, name) for name in ("num_steps", "eagle_topk", "num_draft_tokens")
    )
    notes = [
        f"The mean over {len(lengths)} lines, each with the weight of its running requests; a line has two decimals and does not "
        f"tell its rounds.",
        "Requests of every client of the server count. No count by position is told.",
        RATE_NOTE.format(source="the log"),
    ]
    return of_chain(TOOL, length, steps, topk, draft_tokens, notes)


def argument(text: str, name: str) -> int | None:
    """A speculative argument in the line of server_args; None where the log does not begin with it."""
    found = re.search(ARGUMENT.format(name=name), text)
    return int(found[1]) if found else None


def of_chain(
    tool: str, length: float, steps: int | None, topk: int | None, draft_tokens: int | None, notes: list[str]
) -> Recorded:
    """A mean length, unless the drafts are a tree."""
    wider = None not in (steps, draft_tokens) and draft_tokens != (steps or 0) + 1
    if (topk is not None and topk > 1) or wider:
        told = f"steps {steps}, topk {topk}, {draft_tokens} draft tokens"
        return Recorded(
            tool,
            "sglang",
            exact=False,
            notes=[*notes, f"The drafts are a tree, or K varies: {told}."],
            warnings=[f"The mean length, {length:.3f}, is not a chain's and is not given."],
        )
    unknown = [] if topk == 1 or None not in (steps, draft_tokens) else [CHAIN_NOTE]
    return Recorded(tool, "sglang", steps, mean_length=length, exact=False, notes=[*notes, *unknown])
