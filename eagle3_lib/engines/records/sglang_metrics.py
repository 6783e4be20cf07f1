"""SGLang's /metrics: gauges of the last log interval (--enable-metrics).

Read in SGLang 0.5.10, 0.5.16, 0.5.23 (srt/observability/metrics_collector.py): sglang:spec_accept_length and
sglang:spec_accept_rate are the values of the last "Decode batch" line (:mod:`eagle3_lib.engines.records.sglang_log`), not totals.
0.5.16 and later have sglang:spec_num_steps and sglang:spec_num_draft_tokens, "currently active": adaptive steps change them.
"""

import math
import re

from ...errors import Eagle3Error
from .document import Document, families_of
from .recorded import Recorded, amount, choose, count
from .sglang_log import RATE_NOTE, of_chain

TOOL = "sglang metrics"
LENGTH, STEPS, DRAFT_TOKENS = "sglang:spec_accept_length", "sglang:spec_num_steps", "sglang:spec_num_draft_tokens"
SAMPLE = re.compile(r"^(# (HELP|TYPE) )?sglang:\w+", re.MULTILINE)


def recognise(document: Document) -> bool:
    return not document.values and SAMPLE.search(document.text) is not None


def read(document: Document, of: str = "") -> Recorded:
    """The length of the last log interval.

    Raises:
        Eagle3Error: the gauge is missing, has not been set, or is no length; several models are in it and none is named.
    """
    where = document.where
    gauges = _gauges(document)
    models = sorted({model for (name, model) in gauges if name == LENGTH})
    if not models:
        raise Eagle3Error(f"{where}: {LENGTH}: found none, expected this gauge; the server does not speculate")
    model = choose(models, of, where, "model_name")
    lengths = [value for value in gauges[LENGTH, model] if value != 0]
    if not lengths:
        raise Eagle3Error(f"{where}: {LENGTH}: found 0, expected a length; no decode interval has been logged yet")
    for value in lengths:
        amount(value, f"{where}: {LENGTH}", 1)
    steps, draft_tokens = (_same(gauges.get((name, model), []), f"{where}: {name}") for name in (STEPS, DRAFT_TOKENS))
    notes = [
        "A gauge of the last log interval, not a total: it says nothing of the requests before it.",
        "Requests of every client of the server count. No count by position is told.",
        RATE_NOTE.format(source="/metrics"),
    ]
    if len(lengths) > 1:
        notes.append(f"The mean over {len(lengths)} ranks, whose rounds are not told.")
    return of_chain(TOOL, math.fsum(lengths) / len(lengths), steps, None, draft_tokens, notes)


def _gauges(document: Document) -> dict[tuple[str, str], list[float]]:
    gauges: dict[tuple[str, str], list[float]] = {}
    for family in families_of(document):
        for sample in family.samples:
            if sample.name in (LENGTH, STEPS, DRAFT_TOKENS):
                gauges.setdefault((sample.name, sample.labels.get("model_name", "")), []).append(sample.value)
    return gauges


def _same(values: list[float], where: str) -> int | None:
    """The one value of all ranks above 0; None where it is not told or differs."""
    found = {count(value, where) for value in values} - {0}
    return found.pop() if len(found) == 1 else None
