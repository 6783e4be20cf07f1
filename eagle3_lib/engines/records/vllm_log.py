"""The lines "SpecDecoding metrics: ..." of vLLM's log.

Read in vLLM 0.16.0 to 0.33.0 (v1/spec_decode/metrics.py, SpecDecodingLogging.log): each line tells what was accepted and
drafted since the one before, the length with two decimals and the rates with three. It does not tell the rounds. They are
every number that rounds to what is shown, so that a line with few accepted tokens leaves several.
"""

import re
from dataclasses import dataclass

from ...errors import Eagle3Error
from .document import Document
from .recorded import Recorded, add_up, counters, mean_length, parse_amount, parse_count, refuse_impossible, shown
from .vllm_metrics import OTHERS, PAST_END, short_drafts

TOOL = "vllm log"
LINE = re.compile(r"SpecDecoding metrics: .*")
NUMBER = r"(-?[\w.]+)"
FIELDS = {
    "Mean acceptance length": re.compile(rf"Mean acceptance length: {NUMBER}"),
    "Accepted": re.compile(rf"Accepted: {NUMBER} tokens"),
    "Drafted": re.compile(rf"Drafted: {NUMBER} tokens"),
    "Per-position acceptance rate": re.compile(r"Per-position acceptance rate: ((?:-?[\w.]+(?:, (?=[\d-]|nan))?)+)"),
}
HALF_LENGTH, HALF_RATE = 0.005, 0.0005  # half of the last decimal that is shown
SLACK = 1e-9


@dataclass(frozen=True)
class Line:
    """low, high: fewest and most rounds that fit what is shown. accepted: by position, at the fewest. sure: nothing else fits."""

    drafted: int
    low: int
    high: int
    accepted: list[int]
    sure: bool


def recognise(document: Document) -> bool:
    return not document.values and LINE.search(document.text) is not None


def read(document: Document, of: str = "") -> Recorded:
    """The sum over all lines.

    Raises:
        Eagle3Error: a line is cut off, its numbers fit no number of rounds, or lines differ in K.
    """
    lines = []
    for number, text in enumerate(document.text.split("\n"), 1):
        found = LINE.search(text)
        if found:
            lines.append(_line(found[0], f"{document.where}: line {number}"))
    positions = {len(line.accepted) for line in lines}
    if len(positions) > 1:
        raise Eagle3Error(
            f"{document.where}: Per-position acceptance rate: found {sorted(positions)} positions, expected one K; lines of "
            f"different servers have to be read apart"
        )
    low, high = sum(line.low for line in lines), sum(line.high for line in lines)
    told = counters(low, add_up(line.accepted for line in lines), sum(line.drafted for line in lines))
    refuse_impossible(told, document.where)
    exact = all(line.sure for line in lines)
    total = sum(told["accepted"])
    notes = [f"{len(lines)} lines; what was accepted and drafted is their sum.", OTHERS, PAST_END]
    if exact:
        notes.append("A line does not tell its rounds; in each one a single number fits what is shown.")
    else:
        notes.append(
            f"A line does not tell its rounds: between {low} and {high} fit what is shown, a mean length between "
            f"{1 + total / high:.3f} and {1 + total / low:.3f}. The fewest are given, which draft K wherever they can."
        )
    return Recorded(
        TOOL,
        "vllm",
        positions=positions.pop(),
        counters=told,
        mean_length=mean_length(told),
        exact=exact,
        notes=[*notes, *short_drafts(told)],
    )


def _line(text: str, where: str) -> Line:
    found = {}
    for name, pattern in FIELDS.items():
        match = pattern.search(text)
        if match is None:
            raise Eagle3Error(f"{where}: {name}: found none in {shown(text)}, expected this value (cut off?)")
        found[name] = match[1]
    rates = found["Per-position acceptance rate"].split(", ")
    return _fit(
        parse_amount(found["Mean acceptance length"], f"{where}: Mean acceptance length", 1),
        parse_count(found["Accepted"], f"{where}: Accepted"),
        parse_count(found["Drafted"], f"{where}: Drafted"),
        [parse_amount(rate, f"{where}: Per-position acceptance rate") for rate in rates],
        where,
    )


def _fit(length: float, accepted: int, drafted: int, rates: list[float], where: str) -> Line:
    """Every number of rounds that rounds to what a line shows."""
    if not drafted and not accepted:  # a grammar refused all drafts: no round
        return Line(0, 0, 0, [0] * len(rates), True)
    fewest, most = -(-drafted // len(rates)), drafted
    if accepted:
        fewest = max(fewest, int(accepted / (length - 1 + HALF_LENGTH)))
        shown_most = length - 1 - HALF_LENGTH
        most = int(accepted / shown_most) + 1 if shown_most > 0 else drafted
    fitting = []
    for rounds in range(max(fewest, 1), most + 1):
        if abs(1 + accepted / rounds - length) > HALF_LENGTH + SLACK:
            continue
        low = [max(0, _up(rounds * (rate - HALF_RATE))) for rate in rates]
        high = [_down(rounds * (rate + HALF_RATE)) for rate in rates]
        possible = all(least <= largest for least, largest in zip(low, high, strict=True))
        if possible and sum(low) <= accepted <= sum(high):
            fitting.append((rounds, low, high))
    if not fitting:
        raise Eagle3Error(
            f"{where}: found length {length}, accepted {accepted}, drafted {drafted} and rates {rates}, which fit no number of "
            f"rounds; expected a line of vLLM"
        )
    rounds, low, high = fitting[0]
    sure = len(fitting) == 1 and accepted in (sum(low), sum(high))
    return Line(drafted, rounds, fitting[-1][0], _between(low, high, accepted), sure)


def _up(value: float) -> int:
    return -int(-(value - SLACK * max(1, value)) // 1)


def _down(value: float) -> int:
    return int((value + SLACK * max(1, value)) // 1)


def _between(low: list[int], high: list[int], total: int) -> list[int]:
    """Whole numbers between the bounds with this sum, the first positions first."""
    values, missing = list(low), total - sum(low)
    for place, largest in enumerate(high):
        added = min(missing, largest - values[place])
        values[place] += added
        missing -= added
    return values
