"""The decision card: what a verdict means for the one who has to act on it.

What is wrong, how sure that is, what it costs and what mending brings, the one next command, where the evidence stands, and an exit code for
scripts. It computes nothing anew: every number stands in verdict.json or report.json.

Exit codes: 0 healthy, no alarm, or a deviation too small to matter; 1 the drafter or its config.json, or a gate that is not met; 2 the
engine; 3 cannot tell. A small deviation is 0: the verdict itself does not hold the engine at fault there, and a script that must not lose
even that sets a gate.
"""

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from ..errors import Eagle3Error
from ..results import Acceptance, Cost, Gate, Interval, StoredCard, StoredVerdict, Yield
from . import conditions, diagnose, slices

FINE, OF_DRAFTER, OF_ENGINE, UNTOLD = 0, 1, 2, 3
EXIT = {
    diagnose.HEALTHY: FINE,
    diagnose.NO_ALARM: FINE,
    diagnose.SMALL: FINE,
    diagnose.WEAK: OF_DRAFTER,
    diagnose.CONFIG: OF_DRAFTER,
    diagnose.FAULT: OF_ENGINE,
    diagnose.UNKNOWN: OF_ENGINE,
    diagnose.ALARM: UNTOLD,
    diagnose.NOTHING: UNTOLD,
    diagnose.TARGET: UNTOLD,
    diagnose.NOT_ENOUGH: UNTOLD,
    diagnose.CANNOT_TELL: UNTOLD,
}
WORST_FIRST = (OF_ENGINE, UNTOLD, OF_DRAFTER, FINE)
GRADES = {  # of evidence: what told the rounds, and what that leaves open
    "told": "rounds told by the engine for each request",
    "chunks": "rounds read off streamed chunks, checked against the engine's own counts",
    "histograms": "a histogram of each request's rounds; their order is not known",
    "counters": "the engine's counters over these requests; which request accepted what is not known",
    "pooled": "the engine's counters over traffic whose tokens nobody kept",
}
LABELS = {  # of the fields of a card, in the order in which they are read
    "headline": "Finding",
    "confidence": "How sure",
    "cost": "What it costs",
    "next": "Next",
    "gate": "Gate",
    "evidence": "Evidence",
}
UNKNOWN = "unknown"
# Another config.json that undoes what an engine does to the boundaries.
UNDOES = {"boundaries -1": "boundaries +1", "boundaries +1": "boundaries -1"}
# Flags of vLLM and SGLang.
WITHOUT_CACHE = ("--no-enable-prefix-caching", "--disable-radix-cache")
FLAGS = {  # that avoid a fault
    "prompt missing in drafter cache": WITHOUT_CACHE,
    "cliff after step 0": ("--enforce-eager", "--disable-cuda-graph"),
    "nothing accepted": ("--enforce-eager", "--disable-cuda-graph"),
    "float8 features": ("--dtype bfloat16", "--dtype bfloat16"),
}
UNTIL_MENDED = "serve without prefix caching until the engine is mended, then measure and diagnose again:"
ONE_AT_A_TIME = ("--max-num-seqs 1", "--max-running-requests 1")
UNKNOWN_FLAGS = ("--enforce-eager --no-enable-prefix-caching", "--disable-cuda-graph --disable-radix-cache")


@dataclass(frozen=True)
class Asked:
    """What was served and where it was measured, for the next command; a name in capitals stands for what is not known.

    engine: "vllm", "sglang", or the run's name of it. drafter, benchmark: folders. target: a folder or hub id. run: the run's name.
    replayed: the target as it was given to the replay, where the server calls it otherwise.
    """

    engine: str = "vllm"
    drafter: str = "DRAFTER"
    target: str = "TARGET"
    benchmark: str = "FOLDER"
    positions: int = 3
    run: str = ""
    replayed: str = ""

    @property
    def local(self) -> str:
        """The target as this project's own commands take it."""
        return shlex.quote(self.replayed or self.target)

    @property
    def is_sglang(self) -> bool:
        return "sglang" in self.engine.lower()

    def serve(self, *flags: str) -> str:
        """The command that serves this drafter; flags: for vLLM, and for SGLang."""
        target = "TARGET" if self.target.startswith("pypi:") else shlex.quote(self.target)
        more = f" {flags[self.is_sglang]}" if flags and flags[self.is_sglang] else ""
        if self.is_sglang:
            return (
                f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
                f"--speculative-draft-model-path {shlex.quote(self.drafter)} --speculative-num-steps {self.positions} "
                f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {self.positions + 1}{more}"
            )
        config = json.dumps({"method": "eagle3", "model": self.drafter, "num_speculative_tokens": self.positions})
        return f"vllm serve {target} --speculative-config {shlex.quote(config)}{more}"

    def audit(self) -> str:
        engine = "sglang" if self.is_sglang else "vllm"
        return f"eagle3 audit {shlex.quote(self.drafter)} --target {self.local} --engine {engine} --matrix"

    def diagnose_url(self) -> str:
        """The command that asks a running server."""
        return f"eagle3 diagnose --url http://HOST:PORT --drafter {shlex.quote(self.drafter)} --target {self.local}"

    def diagnose(self) -> str:
        words = ("--benchmark", self.benchmark, "--drafter", self.drafter, "--target", self.replayed or self.target)
        return f"eagle3 diagnose {shlex.join(words)}"


@dataclass(frozen=True)
class Card:
    """What is shown at the end of a diagnosis.

    kind: of the verdict. headline, confidence, cost: sentences. next: one shell command; after: what it is for. evidence: the grade in
    words; files: where the evidence stands. now, mended: what is accepted, and what would be with the cause mended; None: not known. gate:
    None where none was asked for.
    """

    drafter: str
    engine: str
    kind: str
    headline: str
    confidence: str
    cost: str
    next: str
    after: str
    evidence: str
    exit_code: int
    grade: str = "told"
    files: tuple[str, ...] = ()
    now: Yield | None = None
    mended: Yield | None = None
    gate: Gate | None = None
    warnings: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls,
        verdict: StoredVerdict,
        cost: Cost | None = None,
        grade: str = "told",
        asked: Asked | None = None,
        files: Sequence[str] = (),
        expect_length: float | None = None,
    ) -> "Card":
        """The card of a verdict.

        Args:
            cost: of verdict.json; None where plain decoding was not timed beside the run.
            grade: of the evidence, a key of GRADES.
            asked: what was served.
            files: where the evidence stands.
            expect_length: the mean acceptance length that the run must reach; None: no gate.
        Raises:
            Eagle3Error: a verdict or grade that no card knows, or a length below 1.
        """
        kind = verdict["kind"]
        if kind not in EXIT:
            raise Eagle3Error(
                f"verdict of {verdict['drafter']}: kind: found {kind!r}, expected one of {', '.join(EXIT)}"
            )
        if grade not in GRADES:
            raise Eagle3Error(f"evidence: found {grade!r}, expected one of {', '.join(GRADES)}")
        asked = asked or Asked()
        now, mended = _now(verdict, cost), _mended(verdict, cost)
        gate = _gate(verdict, expect_length)
        code = EXIT[kind]
        if gate and gate["met"] is not True and code == FINE:
            code = UNTOLD if gate["met"] is None else OF_DRAFTER
        command, after = _next(verdict, grade, asked)
        return cls(
            drafter=verdict["drafter"],
            engine=asked.engine,
            kind=kind,
            headline=_headline(verdict),
            confidence=_confidence(verdict, grade),
            cost=_cost(kind, now, mended) + _break_even(verdict),
            next=command,
            after=after,
            evidence=GRADES[grade],
            exit_code=code,
            grade=grade,
            files=tuple(files),
            now=now,
            mended=mended,
            gate=gate,
            warnings=tuple(verdict["warnings"]),
        )

    @classmethod
    def read(cls, stored: StoredCard) -> "Card":
        """The card that card.json holds."""
        values = {name: value for name, value in stored.items() if name not in ("schema", "files", "warnings")}
        card = cls(**values)  # type: ignore[arg-type]
        return replace(card, files=tuple(stored["files"]), warnings=tuple(stored["warnings"]))

    def as_dict(self) -> StoredCard:
        """As card.json holds it, without its schema."""
        return cast(StoredCard, {**asdict(self), "files": list(self.files), "warnings": list(self.warnings)})

    def rows(self) -> list[tuple[str, str, str]]:
        """What stands on the card: label, words, and a command where the row has one."""
        rows = [
            (LABELS["headline"], self.headline, ""),
            (LABELS["confidence"], self.confidence, ""),
            (LABELS["cost"], self.cost, ""),
            (LABELS["next"], self.after, self.next),
        ]
        if self.gate:
            rows.append((LABELS["gate"], gate_words(self.gate), ""))
        rows += [("Warning", warning, "") for warning in self.warnings]
        places = ", ".join(map(shlex.quote, self.files))
        files = f": {places}" if places else ""
        return [*rows, (LABELS["evidence"], f"{self.evidence}{files}", "")]

    def text(self, width: int = 100) -> str:
        """The card for a terminal. A command stands on a line of its own, whole, so that it can be copied."""
        rows = self.rows()
        pad = max(len(label) for label, _, _ in rows) + 2
        title = f"{self.drafter} in {self.engine}: {self.kind}"
        lines = ["=" * width, *textwrap.wrap(title, width), "-" * width]
        for label, words, command in rows:
            wrapped = textwrap.wrap(words, max(width - pad, 20), break_long_words=False, break_on_hyphens=False) or [""]
            lines += [f"{label:<{pad}}{wrapped[0]}", *(f"{'':{pad}}{line}" for line in wrapped[1:])]
            if command:
                lines.append(f"{'':{pad}}{command}")
        return "\n".join([*lines, f"{'Exit code':<{pad}}{self.exit_code}", "=" * width])


def worst(codes: Sequence[int]) -> int:
    """The exit code of several cards: an engine's fault before "cannot tell", that before the drafter's, 0 last."""
    return min(codes, key=WORST_FIRST.index)


def check_gate(expected: float | None) -> None:
    """Refuse a gate that no acceptance length can be held against, before anything is asked or computed for it.

    Args:
        expected: the least mean acceptance length; None: no gate.
    Raises:
        Eagle3Error: it is below 1, or no finite number.
    """
    if expected is not None and not 1 <= expected < float("inf"):
        raise Eagle3Error(f"expect_length: found {expected}, expected a mean acceptance length of 1 or more")


def gate_words(gate: Gate) -> str:
    """Whether a gate is met, with the interval of what was found."""
    expected, found = gate["expect_length"], gate["found"]
    if gate["met"] is None:
        return f"cannot tell: a mean acceptance length of {expected:g} is expected, and there is no round to measure"
    words = "met" if gate["met"] else "not met"
    inside = found["low"] is not None and found["high"] is not None and found["low"] <= expected <= found["high"]
    near = "; the interval holds the expected length, so more requests may decide otherwise" if inside else ""
    return f"{words}: a mean acceptance length of {expected:g} is expected, {_span(found)} was found{near}"


# -------------------------------------------------------------------------------------------------------------- parts


def _acceptance(verdict: StoredVerdict, who: str) -> Acceptance | None:
    evidence = verdict["evidence"]
    found = evidence.get("engine") if who == "engine" else evidence.get("replay")
    return found if found and found["rounds"] else None


def _now(verdict: StoredVerdict, cost: Cost | None) -> Yield | None:
    found = _acceptance(verdict, "engine")
    if found is None:
        return None
    return {
        "acceptance_rate": found["acceptance_rate"]["value"],
        "mean_length": found["mean_length"]["value"],
        "over_plain": cost["throughput_ratio"] if cost else None,
    }


def _mended(verdict: StoredVerdict, cost: Cost | None) -> Yield | None:
    """What a correct engine accepts of the same tokens, or the engine with the config.json that fits; None where that is not known."""
    kind, suspect = verdict["kind"], verdict["suspect"]
    engine, correct = _acceptance(verdict, "engine"), _acceptance(verdict, "replay")
    if engine is None:
        return None
    now = engine["mean_length"]["value"]
    if kind == diagnose.CONFIG and suspect:
        length: float | None = 1 + suspect["accepted"]
        rate: float | None = suspect["accepted"] / engine["positions"]
    elif kind in (diagnose.FAULT, diagnose.UNKNOWN, diagnose.SMALL) and correct and not _untrusted(verdict):
        length, rate = correct["mean_length"]["value"], correct["acceptance_rate"]["value"]
    else:
        return None
    speed = cost["throughput_ratio"] * length / now if cost and length and now else None
    return {"acceptance_rate": rate, "mean_length": length, "over_plain": speed}


def _untrusted(verdict: StoredVerdict) -> bool:
    """Whether the tokens are not the target's, so that what a correct engine accepts of them says nothing."""
    return verdict["kind"] == diagnose.FAULT and not verdict["evidence"].get("ranking")


def _cost(kind: str, now: Yield | None, mended: Yield | None) -> str:
    if now is None:
        return f"{UNKNOWN}: no round was measured"
    if mended is None:
        same = " A correct engine accepts the same." if kind in (diagnose.HEALTHY, diagnose.WEAK) else ""
        brings = "" if same or kind == diagnose.NO_ALARM else f" What mending brings is {UNKNOWN}."
        return f"{_yield(now)}.{same}{brings}"
    changed = [
        f"{_percent(now['acceptance_rate'])} -> {_percent(mended['acceptance_rate'])} of the drafts accepted",
        f"{_number(now['mean_length'])} -> {_number(mended['mean_length'])} tokens a round",
    ]
    if now["over_plain"] is not None and mended["over_plain"] is not None:
        changed.append(
            f"{now['over_plain']:.2f} -> {mended['over_plain']:.2f} times plain decoding at the same time of a round"
        )
    else:
        changed.append(f"speed {UNKNOWN}: not timed beside plain decoding")
    return f"now -> mended: {'; '.join(changed)}."


def _break_even(verdict: StoredVerdict) -> str:
    length = verdict["evidence"].get("break_even_length")
    return f" Speculation breaks even at {length:.2f} tokens a round in this engine." if length is not None else ""


def _yield(values: Yield) -> str:
    speed = f"speed {UNKNOWN}: not timed beside plain decoding"
    if values["over_plain"] is not None:
        speed = f"{values['over_plain']:.2f} times plain decoding"
    return f"{_percent(values['acceptance_rate'])} of the drafts accepted; {_number(values['mean_length'])} tokens a round; {speed}"


def _gate(verdict: StoredVerdict, expected: float | None) -> Gate | None:
    if expected is None:
        return None
    check_gate(expected)
    engine = _acceptance(verdict, "engine")
    nothing: Interval = {"value": None, "low": None, "high": None, "n": 0}
    found = engine["mean_length"] if engine else nothing
    met = None if found["value"] is None else found["value"] >= expected
    return {"expect_length": expected, "found": found, "met": met}


def _headline(verdict: StoredVerdict) -> str:
    kind, fault, suspect, where = verdict["kind"], verdict["fault"], verdict["suspect"], verdict["where"]
    if kind == diagnose.FAULT:
        other = f", or one of {len(verdict['ties'])} faults that look the same" if verdict["ties"] else ""
        place = f" It holds {_part(verdict)}." if where else ""
        return f"The engine is at fault: {fault}{other}.{place}"
    if kind == diagnose.CONFIG and suspect:
        return f"config.json does not describe the drafter: {suspect.get('field', suspect['name'])} should be {suspect.get('value')}."
    part = f", {_part(verdict)}" if where else ""
    return {
        diagnose.HEALTHY: "Nothing is wrong: the engine runs this drafter as it was trained.",
        diagnose.NO_ALARM: "No sign of a fault: what was counted is what a correct engine gives.",
        diagnose.SMALL: "The engine departs a little from a correct one, at a small cost.",
        diagnose.WEAK: "The drafter is weak on this text; the engine is not the cause.",
        diagnose.CONFIG: "config.json does not describe the drafter.",
        diagnose.UNKNOWN: f"The engine is at fault{part}, and no fault of the catalogue explains it for sure.",
        diagnose.ALARM: "Alarm: acceptance ends at one position, which other text does not do.",
        diagnose.NOTHING: "Nothing is accepted, and these data do not say whose fault that is.",
        diagnose.TARGET: "The served target is not the target that the replay loads, or its caches are at fault.",
        diagnose.NOT_ENOUGH: "Too few rounds to decide.",
        diagnose.CANNOT_TELL: _reason(verdict),
    }[kind]


def _part(verdict: StoredVerdict) -> str:
    """The part of a run that a verdict names, as in "only after a prefix-cache hit"."""
    where, engine = verdict["where"], verdict["evidence"].get("engine")
    return slices.Slice.told(where).words(engine["requests"] if engine else 0) if where else ""


def _reason(verdict: StoredVerdict) -> str:
    reason = verdict["sentence"].removeprefix(f"{verdict['drafter']}: ")
    return reason[:1].upper() + reason[1:]


def _confidence(verdict: StoredVerdict, grade: str) -> str:
    kind, evidence, suspect = verdict["kind"], verdict["evidence"], verdict["suspect"]
    if kind == diagnose.CONFIG and suspect:
        ties = f" Not told from: {', '.join(suspect['ties'])}." if suspect["ties"] else ""
        gain = _span(suspect["gain"], "{:+.2f}")
        return f"it would accept {gain} drafts a round more in {suspect['requests']} requests, 95 % interval by request.{ties}"
    if kind == diagnose.NOT_ENOUGH:
        needed = evidence.get("rounds_needed")
        about = f"; about {needed} would decide" if needed else ""
        return f"none: {evidence.get('rounds_compared', 0)} rounds, of which {evidence.get('can_tell', 0)} can tell{about}."
    if kind in (diagnose.CANNOT_TELL, diagnose.NOTHING, diagnose.TARGET, diagnose.ALARM):
        return "no cause is named."
    if "can_tell" not in evidence:
        return "counts of other text are no proof."
    if _untrusted(verdict) and evidence.get("conditions"):
        return f"wrong tokens by condition: {conditions.counts(evidence['conditions'])}."
    told = f"{evidence['can_tell']} rounds that can tell"
    if kind == diagnose.FAULT:
        row = next((r for r in evidence.get("ranking", []) if r.get("hypothesis") == verdict["fault"]), None)
        share = f", {_shares(row)} of them as this fault predicts" if row and row.get("value") is not None else ""
        ties = (
            f" Not told from: {', '.join(verdict['ties'])}."
            if verdict["ties"]
            else " No other fault of the catalogue fits."
        )
        return f"{told}{share}.{ties}"
    unlike = f"{evidence.get('departing', 0)} of them are not a correct engine's"
    left = verdict["not_excluded"]
    names = diagnose.listed([row["hypothesis"] for row in left], 3)
    open_ = f" Not excluded: {names}." if left else ""
    part = " Faults in a part of the run are not excluded." if grade in ("histograms", "counters") and not open_ else ""
    return f"{told}, {unlike}.{open_}{part}"


def _shares(row: object) -> str:
    values = cast(Interval, row)
    return _span({"value": values["value"], "low": values.get("low"), "high": values.get("high"), "n": 0}, "{:.1%}")


def _next(verdict: StoredVerdict, grade: str, asked: Asked) -> tuple[str, str]:
    """The one next command, and what it is for."""
    kind = verdict["kind"]
    suspect, again = verdict["suspect"], "then measure and diagnose again"
    if grade == "pooled":
        return asked.diagnose_url(), "ask the server itself some prompts, and replay its answers:"
    if kind == diagnose.CONFIG and suspect and suspect.get("shim"):
        return suspect["shim"], "write a copy of the drafter with that value, serve it, and diagnose again:"
    where = verdict["where"]
    if where and where["by"] in slices.OF_CACHE and (where["by"] != slices.CACHED or where["since"] is not None):
        return asked.serve(*WITHOUT_CACHE), UNTIL_MENDED
    if kind == diagnose.FAULT:
        return _next_of_fault(verdict, asked)
    if kind == diagnose.WEAK:
        return (
            f"eagle3 run {asked.run or 'RUN'}",
            "train the drafter on the target's own answers to texts like these (stages 03 to 09):",
        )
    if kind in (diagnose.HEALTHY, diagnose.SMALL):
        return (
            asked.serve(),
            "serve it as it is:" if kind == diagnose.HEALTHY else "serve it, or look at where rounds depart first:",
        )
    if kind == diagnose.NOTHING:
        return asked.audit(), "let the audit check map, head and config before anything else is tried:"
    if kind == diagnose.TARGET:
        return asked.serve(*WITHOUT_CACHE), f"serve without prefix caching, {again}:"
    if kind == diagnose.NOT_ENOUGH:
        return asked.diagnose(), "ask for more answers of the same kind, add them to benchmark.json, and judge again:"
    told = grade in ("told", "chunks")
    if kind == diagnose.UNKNOWN and told:
        return asked.serve(
            *UNKNOWN_FLAGS
        ), f"serve without graphs and prefix caching, {again}: what changes names the part:"
    if kind in (diagnose.CANNOT_TELL, diagnose.UNKNOWN, diagnose.NO_ALARM) and not told and not asked.is_sglang:
        return asked.serve(
            "--per-request-spec-decode-metrics detailed", ""
        ), f"have the rounds of each request told (vLLM 0.29 on), {again}:"
    if kind == diagnose.ALARM or not told:
        return asked.diagnose(), "keep the tokens of some answers, streamed one at a time, and replay them:"
    return asked.diagnose(), "remove the reason above, measure again, and judge again:"


def _next_of_fault(verdict: StoredVerdict, asked: Asked) -> tuple[str, str]:
    fault = verdict["fault"] or ""
    undone = UNDOES.get(fault)
    scores = verdict["evidence"].get("config", [])
    shim = next((row["shim"] for row in scores if undone and row.get("fault") == undone and row.get("shim")), None)
    if shim and not verdict["ties"]:
        return shim, "write a copy of the drafter whose config.json undoes it, serve that, and diagnose again:"
    if fault in FLAGS:
        return asked.serve(*FLAGS[fault]), "serve without what is suspected, then measure and diagnose again:"
    if _untrusted(verdict) and fault.endswith(conditions.ONLY[conditions.WARM]):
        return asked.serve(*WITHOUT_CACHE), UNTIL_MENDED
    if _untrusted(verdict) and fault.endswith(conditions.ONLY[conditions.TOGETHER]):
        return asked.serve(*ONE_AT_A_TIME), "serve one request at a time, then measure and diagnose again:"
    if _untrusted(verdict):
        return (
            asked.diagnose(),
            "ask the same prompts without speculation and beside it with an older engine, and judge both:",
        )
    return asked.audit(), "see which engine versions read this checkpoint rightly, and serve it with one of them:"


# -------------------------------------------------------------------------------------------------------------- words


def _span(interval: Interval, words: str = "{:.2f}") -> str:
    value, low, high = interval["value"], interval["low"], interval["high"]
    if value is None:
        return UNKNOWN
    if low is None or high is None:
        return words.format(value)
    return f"{words.format(value)} ({words.format(low)} to {words.format(high)})"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
