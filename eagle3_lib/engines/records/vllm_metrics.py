"""vLLM's /metrics: one scrape, or the difference of two.

Names and meaning were read in vLLM 0.16.0 to 0.33.0 (v1/spec_decode/metrics.py). num_drafts counts rounds, not drafted
tokens. Every engine of a data-parallel server has its own series; they are summed, and each one is checked, since growth
of one would hide the restart of another. ``_created`` is the time at which a counter began.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import Eagle3Error
from ...results import Counters
from .document import Document, families_of
from .recorded import Recorded, add_up, choose, count, counters, mean_length, refuse_impossible, shown

TOOL = "vllm metrics"
PREFIX = "vllm:spec_decode_num_"
ROUNDS, DRAFTED, ACCEPTED = f"{PREFIX}drafts", f"{PREFIX}draft_tokens", f"{PREFIX}accepted_tokens"
BY_POSITION = f"{PREFIX}accepted_tokens_per_pos"
FAMILIES = (ROUNDS, DRAFTED, ACCEPTED, BY_POSITION)
PAST_END = "accepted counts a round's whole acceptance, also what lies past the end of an answer."
OTHERS = "Requests of every other client of the server count too."
SAMPLE = re.compile(r"^(# (HELP|TYPE) )?vllm:\w+", re.MULTILINE)
Series = tuple[str, str]  # model_name, and the other labels: engine, instance


@dataclass
class Counts:
    """One engine's counters. created: when its counter of rounds began, where that is told."""

    totals: dict[str, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    created: float | None = None

    def set_total(self, family: str, position: str | None, value: int, where: str) -> None:
        if family != BY_POSITION:
            self.totals[family] = value
            return
        if position is None or not position.isdecimal():
            raise Eagle3Error(f"{where}: position: found {shown(position)}, expected a whole number from 0 on")
        self.accepted[int(position)] = value


Scrape = dict[Series, Counts]


def recognise(document: Document) -> bool:
    return not document.values and SAMPLE.search(document.text) is not None


def read(document: Document, of: str = "") -> Recorded:
    """One scrape: everything since the server's start."""
    scrape = parse(document)
    notes = [
        "One scrape counts since the server's start, warm-up included; the difference to an earlier one (--since) counts what "
        "lies between them."
    ]
    return recorded(TOOL, scrape, document.where, of, notes)


def read_difference(before: Document, after: Document, of: str = "") -> Recorded:
    """What one server counted between two scrapes.

    Raises:
        Eagle3Error: a counter fell or began anew: the server was started again in between, or the files are swapped.
    """
    first, last = parse(before), parse(after)
    changed: Scrape = {}
    for series, counts in last.items():
        changed[series] = _subtract(first.get(series), counts, after.where, series)
    missing = sorted(set(first) - set(last))
    if missing:
        raise Eagle3Error(f"{after.where}: {_named(missing[0])}: found no counters, expected those of {before.where}")
    return recorded(TOOL, changed, after.where, of, [])


def parse(document: Document) -> Scrape:
    """The counters of speculation of a scrape.

    Raises:
        Eagle3Error: it is no Prometheus text, has none of these counters, or one is not a whole number from 0 on.
    """
    scrape: Scrape = {}
    for family in families_of(document):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            created = sample.name == f"{ROUNDS}_created"
            if not created and name not in FAMILIES:
                continue
            rest = {key: value for key, value in sample.labels.items() if key not in ("model_name", "position")}
            others = ", ".join(f"{key}={value}" for key, value in sorted(rest.items()))
            counts = scrape.setdefault((sample.labels.get("model_name", ""), others), Counts())
            if created:
                counts.created = sample.value
                continue
            where = f"{document.where}: {sample.name}"
            counts.set_total(name, sample.labels.get("position"), count(sample.value, where), where)
    _refuse_incomplete(scrape, document.where)
    return scrape


def _refuse_incomplete(scrape: Scrape, where: str) -> None:
    if not scrape:
        raise Eagle3Error(
            f"{where}: {ROUNDS}_total: found none, expected this counter; the server does not speculate, or it was started "
            f"with --disable-log-stats"
        )
    for series, counts in scrape.items():
        for name in (ROUNDS, DRAFTED, ACCEPTED):
            if name not in counts.totals:
                raise Eagle3Error(f"{where}: {name}_total: found none of {_named(series)}, expected this counter")
        if sorted(counts.accepted) != list(range(len(counts.accepted))) or not counts.accepted:
            found = sorted(counts.accepted)
            raise Eagle3Error(f"{where}: {BY_POSITION}_total: found positions {found}, expected 0 to K - 1")


def _named(series: Series) -> str:
    model, others = series
    return f"model_name={model}" + (f", {others}" if others else "")


def _subtract(before: Counts | None, after: Counts, where: str, series: Series) -> Counts:
    if before is None:  # an engine that had not begun
        return after
    named = _named(series)
    if None not in (before.created, after.created) and before.created != after.created:
        raise Eagle3Error(
            f"{where}: {ROUNDS}_created: found {after.created} after {before.created} ({named}), expected the same time; the "
            f"server was started again between the two scrapes"
        )
    changed = Counts()
    for name, value in after.totals.items():
        changed.totals[name] = _risen(before.totals[name], value, f"{where}: {name}_total", named)
    for position, value in after.accepted.items():
        field_name = f"{where}: {BY_POSITION}_total: position {position}"
        changed.accepted[position] = _risen(before.accepted.get(position, 0), value, field_name, named)
    return changed


def _risen(before: int, after: int, where: str, named: str) -> int:
    if after < before:
        raise Eagle3Error(
            f"{where}: found {after} after {before} ({named}), expected a counter that does not fall; the server was started "
            f"again between the two scrapes, or the later one is given first"
        )
    return after - before


def recorded(tool: str, scrape: Mapping[Series, Counts], where: str, of: str, notes: list[str]) -> Recorded:
    """The sum over the engines of one model.

    Raises:
        Eagle3Error: several models have counts and none is named, or the counts are impossible.
    """
    models = sorted({model for model, _ in scrape})
    busy = sorted({model for (model, _), counts in scrape.items() if counts.totals[ROUNDS]})
    model = choose(models if of or not busy else busy, of, where, "model_name")
    engines = [counts for (name, _), counts in scrape.items() if name == model]
    lengths = {len(counts.accepted) for counts in engines}
    if len(lengths) > 1:
        raise Eagle3Error(f"{where}: {BY_POSITION}_total: found {sorted(lengths)} positions, expected one K")
    totals = {name: sum(counts.totals[name] for counts in engines) for name in (ROUNDS, DRAFTED, ACCEPTED)}
    by_position = add_up([counts.accepted[i] for i in sorted(counts.accepted)] for counts in engines)
    told = counters(totals[ROUNDS], by_position, totals[DRAFTED])
    refuse_impossible(told, where)
    warnings = [] if told["rounds"] else ["There was no round, so there is no acceptance."]
    agree = sum(by_position) == totals[ACCEPTED]
    if not agree:
        warnings.append(
            f"accepted by position sums to {sum(by_position)}, and the counter of accepted tokens says {totals[ACCEPTED]}: "
            f"what is given is by position."
        )
    summed = [f"Summed over {len(engines)} engines of the server."] if len(engines) > 1 else []
    return Recorded(
        tool,
        "vllm",
        positions=len(by_position),
        counters=told,
        mean_length=mean_length(told),
        exact=agree,
        notes=[*notes, OTHERS, PAST_END, *short_drafts(told), *summed],
        warnings=warnings,
    )


def short_drafts(told: Counters) -> list[str]:
    """The note on rounds that drafted fewer than K."""
    full = told["rounds"] * len(told["accepted"])
    drafted = told.get("drafted", full)
    if drafted >= full:
        return []
    return [
        f"Some rounds drafted fewer than K = {len(told['accepted'])} (near the end of the context, or under a grammar): "
        f"{drafted} drafts, not rounds * K = {full}."
    ]
