"""Stage 09: what the report says. It reads the result files of the other stages and computes nothing anew."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..params import GREEDY, DiagnoseParams
from ..paths import project_path
from ..verdict import acceptance, replayed, slices, suspects

ENDS = {  # what becomes of a round: the name on the page, and evidence's
    "all drafts accepted": "full",
    "outside the vocabulary": "outside the vocabulary",
    "first draft wrong": "wrong at step 0",
    "later draft wrong": "lost at later steps",
}


def break_even_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The break-even model as table rows; ``found``: an engine's "break_even" in the report."""
    return [
        {"drafter": name, "requests at a time": int(level), "measured at": run["measured_K"], **row}
        | {"recommended": run["recommended"]}
        for name, levels in found.items()
        for level, run in levels.items()
        for row in run["rows"]
    ]


def replays(params: DiagnoseParams, engine: str) -> dict[str, Any]:
    """replay.json of each drafter that was replayed in one engine, for the figures."""
    folder = project_path(params.folder) / "replay" / engine
    there = [name for name in params.drafters if (folder / name / "replay.json").is_file()]
    return {name: replayed.read(folder / name / "replay.json") for name in there}


def machine(report: Mapping[str, Any]) -> str:
    """What ran the stages, in words: the GPUs, or the processor."""
    if not report["preflight"]:
        return "on a machine that stage 01 did not look at"
    hardware = report["preflight"]["hardware"]
    return ", ".join(gpu["name"] for gpu in hardware["gpus"]) or f"{hardware['cores']} cores of {hardware['cpu']}"


def curve_rows(replays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The acceptance curves as table rows, one for each drafter, engine or replay, and draft position.

    Returns:
        [{"drafter", "who", "position", "rate", "low", "high", "conditional", "conditional low", "conditional high",
        "rounds", "requests"}]; the conditional rate is None where no round reached the position.
    """
    rows = []
    for name, replay in replays.items():
        for who in ("engine", "replay") if replay["engine_acceptance"]["rounds"] else ():
            result = replay[f"{who}_acceptance"]
            rounds = [_rounds(request, who) for request in replay["requests"]]
            alone = [None] * replay["positions"]  # counters of all requests together give no interval
            given = {"value": result["conditional"], "low": alone, "high": alone}
            if any(len(some) for some in rounds):
                given = conditional_curve(rounds, replay["positions"])
            for index in range(replay["positions"]):
                rates = {key: (result["curve"][key] or alone)[index] for key in ("value", "low", "high")}
                rows.append(
                    {
                        "drafter": name,
                        "who": who,
                        "position": index + 1,
                        "rate": rates["value"],
                        "low": rates["low"],
                        "high": rates["high"],
                        "conditional": given["value"][index],
                        "conditional low": given["low"][index],
                        "conditional high": given["high"][index],
                        "rounds": result["rounds"],
                        "requests": result["requests"],
                    }
                )
    return rows


def _rounds(request: Mapping[str, Any], who: str) -> list[int]:
    """Accepted counts of an answer's rounds; of an engine that tells only their histogram, in no order."""
    histogram = request.get("histogram") if who == "engine" and not request["engine_rounds"] else None
    if histogram:
        return [count for count, times in enumerate(histogram) for _ in range(times)]
    rounds: list[int] = request[f"{who}_rounds"]
    return rounds


def conditional_curve(requests: list[list[int]], positions: int) -> dict[str, list[float | None]]:
    """Share of the rounds that reached a position in which it was accepted too, with intervals by request.

    Args:
        requests: the accepted counts of the rounds of each request.
    Returns:
        {"value", "low", "high"}, each [positions], None from the first position that no round reached.
    """
    counts = acceptance.request_counts(requests, positions)
    reached = int((counts.sum(0)[:-1] > 0).sum())

    def rates(counts: np.ndarray) -> np.ndarray:
        total = counts.sum(-2)[..., : reached + 1]
        none = np.full_like(total[..., 1:], np.nan)
        return np.divide(total[..., 1:], total[..., :-1], out=none, where=total[..., :-1] > 0)

    found = acceptance.bootstrap(rates, counts)
    curves: dict[str, Any] = dict(found)
    return {key: [*curves[key], *[None] * (positions - reached)] for key in ("value", "low", "high")}


def acceptance_rows(replays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean acceptance length and acceptance rate of each drafter, engine and replay, as intervals by request."""
    return [
        {
            "drafter": name,
            "who": who,
            "length": replay[f"{who}_acceptance"]["mean_length"],
            "rate": replay[f"{who}_acceptance"]["acceptance_rate"],
        }
        for name, replay in replays.items()
        if replay["engine_acceptance"]["rounds"]
        for who in ("engine", "replay")
    ]


# ------------------------------------------------------------------------------------------ what the verdicts rest on


def verdicts(engines: Mapping[str, Any]) -> dict[str, Any]:
    """Every verdict by "engine: drafter"; ``engines``: of the report."""
    return {
        f"{engine}: {verdict['drafter']}": verdict for engine, found in engines.items() for verdict in found["verdicts"]
    }


def not_excluded_rows(verdict: Mapping[str, Any], most: int = 8) -> list[dict[str, Any]]:
    """What a verdict leaves open as table rows, the hypotheses first that differ in fewest rounds; [] where nothing.

    Args:
        most: hypotheses; a last row says how many more there are.
    """
    left = verdict["not_excluded"]
    differ = f"rounds that differ, of {verdict['evidence']['rounds_compared']}"
    rows = [
        {
            "not excluded": row["hypothesis"],
            differ: str(row["rounds_that_differ"]),
            "what would tell": row["experiment"],
        }
        for row in left[:most]
    ]
    if len(left) > most:
        rows.append({"not excluded": f"and {len(left) - most} more", differ: "", "what would tell": ""})
    return rows


def loss_rows(verdicts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the accepted drafts are lost, one row a drafter; a drafter without rounds to compare is left out.

    Returns:
        [{"drafter", "rounds", each of ENDS: share of the rounds, "vocabulary allows": share of the tokens that the
        drafter can draft, "the engine accepts", "the engine loses": drafts a round}]. Where replay.json does not say which
        tokens the drafter can draft, what would be of them is None, and their rounds count as drafted wrong.
    """
    rows = []
    for name, verdict in verdicts.items():
        evidence = verdict["evidence"]
        losses = evidence.get("losses")
        if not losses:
            continue
        ceiling, length = losses["vocabulary_ceiling"], evidence["engine"]["mean_length"]["value"]
        row = {"drafter": name, "rounds": evidence["rounds_compared"]}
        row |= {end: losses[key] for end, key in ENDS.items()}
        if ceiling is None:
            row["outside the vocabulary"] = None
        row |= {"vocabulary allows": ceiling, "the engine accepts": length - 1}
        row["the engine loses"] = losses["lost by the engine"]
        rows.append(row)
    return rows


def departing_rows(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How often rounds depart, by each order of :mod:`eagle3_lib.verdict.slices`, as table rows; [] where none departs.

    Returns:
        [{"by", "from", "to": first and last value of the part, "rounds": that can tell, "departing", "share"}]
    """
    parts = verdict["evidence"].get("slices") or {}
    return [
        {"by": by, **part, "share": part["departing"] / part["rounds"]} for by, some in parts.items() for part in some
    ]


def departing_told(verdict: Mapping[str, Any]) -> str:
    """Where rounds depart from a correct engine, in a sentence."""
    evidence, where = verdict["evidence"], verdict["where"]
    if "slices" not in evidence:
        return f"{verdict['kind']}, so its rounds are not held against a correct engine's"
    if not evidence["departing"]:
        return "no round departs from a correct engine"
    if where:
        (departing, rounds), (others, rest) = where["inside"], where["outside"]
        words = slices.Slice.told(where).words(evidence["engine"]["requests"])
        what = verdict["fault"] or "what departs"
        return f"{what} holds {words}: {departing} of {rounds} rounds depart there, {others} of {rest} elsewhere"
    counts = f"{evidence['departing']} of {evidence['can_tell']} rounds depart"
    if verdict["fault"]:
        return f"{counts}; {verdict['fault']} explains them in the whole run"
    return f"{counts}; no part of the run is told apart"


def config_rows(verdict: Mapping[str, Any], most: int = 5) -> list[dict[str, Any]]:
    """The other values of config.json that a correct engine would accept most with, best first; [] where none is scored.

    Returns:
        [{"config.json with", "accepted a round", "as it is", "gain", "rounds that differ"}], accepted drafts in a round;
        the gain is a 95 % interval by request.
    """
    return [
        {"config.json with": row["name"], "accepted a round": row["accepted"], "as it is": row["of_config"]}
        | {"gain": row["gain"], "rounds that differ": row["differ"]}
        for row in verdict["evidence"].get("config", [])[:most]
    ]


def config_told(verdict: Mapping[str, Any]) -> str:
    """Whether config.json describes the drafter, in a sentence; of a suspect also the shell line that tries it."""
    scores, suspect = verdict["evidence"].get("config"), verdict["suspect"]
    if scores is None:
        return f"{verdict['kind']}, so no other config.json is scored"
    if not scores:
        return "replay.json scores no other config.json"
    if suspect:
        also = f" (not told from: {', '.join(suspect['ties'])})" if suspect["ties"] else ""
        return f"{suspect['name']}{also} describes the drafter better than its config.json. To try:\n{suspect['shim']}"
    better = suspects.clearly_better(scores)
    if better:
        return f"{better['name']} would accept more, but rounds depart from a correct engine: settle that first"
    return "no other value would surely accept more"


def token_rows(replays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Are the emitted tokens the target's own: one row a drafter, and one for the plain decoding beside it."""
    rows = []
    for name, replay in replays.items():
        of_run = {"sampled": replay.get("sampled"), "not_greedy": replay["agreement"]["tokens_not_greedy"]}
        of_run["tokens"] = sum(request["output_length"] for request in replay["requests"])
        for decoding, found in ((name, of_run), (f"plain, beside {name}", replay.get("plain"))):
            if found:
                rows.append({"decoding": decoding} | _token_row(found))
    return rows


def _token_row(found: Mapping[str, Any]) -> dict:
    sampled = found["sampled"]
    if not sampled:
        return {"tokens": found["tokens"], "not the target's first choice": found["not_greedy"]}
    tests = {f"p, {name}": f"{test['p']:.2g}" for name, test in sampled["tests"].items() if test["n"]}
    return {"tokens": found["tokens"], "lossless": "yes" if sampled["lossless"] else f"no: {sampled['fault']}"} | tests


def sampling_told(sampling: dict | None) -> str:
    """How tokens were chosen, in words: "greedy", or the settings that differ from it."""
    changed = {name: value for name, value in (sampling or {}).items() if value != GREEDY.model_dump()[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "greedy"


def training_log(params: DiagnoseParams) -> list[dict[str, Any]]:
    """One row a batch of stage 05: loss, accuracy of each step."""
    path = project_path(params.folder) / "train" / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def speed_rows(report: Mapping[str, Any], engine: str) -> list[dict[str, Any]]:
    """Throughput, latency and speedup of each mode as table rows."""
    result, rows = report["engines"][engine], []
    for mode, summary in result["throughput"].items():
        ratio = result["speedup"].get(mode, {"value": 1.0, "low": np.nan, "high": np.nan})
        rows.append(
            {
                "mode": mode,
                "tokens/s": summary["tokens_per_s"]["value"],
                "low": summary["tokens_per_s"]["low"],
                "high": summary["tokens_per_s"]["high"],
                "over plain": ratio["value"],
                "over plain low": ratio["low"],
                "over plain high": ratio["high"],
                "median latency (s)": summary["latency_s"]["median"],
                "first token (s)": summary["first_token_s"],
                "load (s)": summary["load_s"],
            }
        )
    return rows


# --------------------------------------------------------------------------------------------------- a running server


def server_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a running server told of itself (server.json), a row a setting, and the remarks."""
    told = {"grade of the evidence": found["grade"] or "none", "K": found["positions"], **found["told"]}
    left_out = ("untold", "positions", "options", "engine_args")
    rows = [(name, value) for name, value in told.items() if name not in left_out and value not in ("", None, [])]
    rows += [(name, value) for name, value in found["told"]["options"].items()]
    rows += [("remark", remark) for remark in found["remarks"]]
    return [{"what": name.replace("_", " "), "told": str(value)} for name, value in rows]
