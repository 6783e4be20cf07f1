"""Stage 09: what the report says. It reads the result files of the other stages and computes nothing anew."""

import json

import numpy as np

from ..engines import measured
from ..params import GREEDY, DiagnoseParams
from ..paths import project_path
from ..verdict import acceptance, diagnose, replayed, slices, suspects

ENDS = {  # what becomes of a round: the name on the page, and evidence's
    "all drafts accepted": "full",
    "outside the vocabulary": "outside the vocabulary",
    "first draft wrong": "wrong at step 0",
    "later draft wrong": "lost at later steps",
}


def by_concurrency(plain: dict, other: dict) -> dict[str, dict]:
    """Throughput over plain at each concurrency: median of the repeats' ratios, and the smallest and largest."""
    ratios = {
        level: [ours / theirs for ours, theirs in zip(rates, plain["summary"]["by_concurrency"][level], strict=True)]
        for level, rates in other["summary"]["by_concurrency"].items()
    }
    return {
        level: {"value": float(np.median(values)), "low": min(values), "high": max(values), "n": len(values)}
        for level, values in ratios.items()
    }


def cost(plain: dict, other: dict, replay: dict) -> dict:
    """Time of a round over a plain step, and what of the speedup comes from acceptance and what from cost.

    Steps after prefill, at one request at a time; see :func:`eagle3_lib.verdict.diagnose.speed`.
    """

    def repeats(run: dict) -> list[dict]:
        found: dict[int, dict] = {}
        for row in run["timed"]:
            if row["concurrency"] == 1:
                total = found.setdefault(row["repeat"], {"tokens": 0, "seconds": 0.0, "rounds": 0})
                total["tokens"] += row["tokens"] - 1
                total["seconds"] += row["seconds"] - row["first_token_s"]
                total["rounds"] += row["steps"]
        return list(found.values())

    engine, correct = (replay[f"{who}_acceptance"]["mean_length"]["value"] for who in ("engine", "replay"))
    result = diagnose.speed(repeats(plain), repeats(other))
    return diagnose.speed(repeats(plain), repeats(other), result["mean_length"] * correct / engine)


def round_costs(run: dict, speedups: dict[str, dict], cost: dict) -> dict[str, float]:
    """Time of a round in plain steps, by concurrency: mean length over speedup.

    At one request at a time it is the ratio of steps after prefill, at more of whole waves, prefill included.
    """
    costs = {}
    for level, speedup in speedups.items():
        timed = [row for row in run["timed"] if row["concurrency"] == int(level)]
        steps = sum(row["steps"] for row in timed)  # 0 where the engine tells no rounds and the answers came whole
        length = sum(row["tokens"] - 1 for row in timed) / steps if steps else cost["mean_length"]
        costs[level] = length / speedup["value"]
    return costs | {"1": cost["step_ratio"]}


def break_even_rows(found: dict[str, dict]) -> list[dict]:
    """The break-even model as table rows; ``found``: an engine's "break_even" in the report."""
    return [
        {"drafter": name, "requests at a time": int(level), "measured at": run["measured_K"], **row}
        | {"recommended": run["recommended"]}
        for name, levels in found.items()
        for level, run in levels.items()
        for row in run["rows"]
    ]


def latency(run: dict) -> dict[str, dict]:
    """Time to the first token and time of each later one, one request at a time: medians over prompts, in seconds."""

    def median(values: np.ndarray) -> np.ndarray:
        return np.median(values, axis=-1)

    first, later, _ = _prompt_times(run)
    return {"first_token_s": acceptance.bootstrap(median, first), "later_token_s": acceptance.bootstrap(median, later)}


def step_time(run: dict) -> dict:
    """Time of a decode step, a round where the engine speculates, after prefill, one request at a time, in seconds."""
    _, _, steps = _prompt_times(run)
    return acceptance.bootstrap(lambda steps: np.median(steps, axis=-1), steps)


def _prompt_times(run: dict) -> list[np.ndarray]:
    """For each prompt [prompts], medians over repeats at one request at a time: first token, later token, step."""
    prompts: dict[str, list[tuple[float, float, float]]] = {}
    for row in run["timed"]:
        if row["concurrency"] == 1:
            rest = row["seconds"] - row["first_token_s"]
            times = row["first_token_s"], rest / max(row["tokens"] - 1, 1), rest / max(row["steps"], 1)
            prompts.setdefault(row["id"], []).append(times)
    return list(np.array([np.median(times, axis=0) for times in prompts.values()]).T)


def speedup(plain: dict, other: dict) -> dict:
    """Throughput of ``other`` over plain, one request at a time, paired by prompt."""
    pairs = [measured.throughput(run["timed"]) for run in (plain, other)]

    def ratio(plain_tokens, plain_seconds, tokens, seconds):
        return (tokens.sum(-1) / seconds.sum(-1)) / (plain_tokens.sum(-1) / plain_seconds.sum(-1))

    return acceptance.bootstrap(ratio, *pairs[0], *pairs[1])


def replays(params: DiagnoseParams, engine: str) -> dict[str, dict]:
    """replay.json of each drafter in one engine, for the figures."""
    folder = project_path(params.folder)
    return {name: replayed.read(folder / "replay" / engine / name / "replay.json") for name in params.drafters}


def curve_rows(replays: dict[str, dict]) -> list[dict]:
    """The acceptance curves as table rows, one for each drafter, engine or replay, and draft position.

    Returns:
        [{"drafter", "who", "position", "rate", "low", "high", "conditional", "conditional low", "conditional high",
        "rounds", "requests"}]; the conditional rate is None where no round reached the position.
    """
    rows = []
    for name, replay in replays.items():
        for who in ("engine", "replay") if replay["engine_acceptance"]["rounds"] else ():
            result = replay[f"{who}_acceptance"]
            given = conditional_curve([r[f"{who}_rounds"] for r in replay["requests"]], replay["positions"])
            for index in range(replay["positions"]):
                rates = {key: result["curve"][key][index] for key in ("value", "low", "high")}
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
    return {key: [*found[key], *[None] * (positions - reached)] for key in ("value", "low", "high")}


def acceptance_rows(replays: dict[str, dict]) -> list[dict]:
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


def verdicts(engines: dict[str, dict]) -> dict[str, dict]:
    """Every verdict by "engine: drafter"; ``engines``: of the report."""
    return {
        f"{engine}: {verdict['drafter']}": verdict for engine, found in engines.items() for verdict in found["verdicts"]
    }


def not_excluded_rows(verdict: dict, most: int = 8) -> list[dict]:
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


def loss_rows(verdicts: dict[str, dict]) -> list[dict]:
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


def departing_rows(verdict: dict) -> list[dict]:
    """How often rounds depart, by each order of :mod:`eagle3_lib.verdict.slices`, as table rows; [] where none departs.

    Returns:
        [{"by", "from", "to": first and last value of the part, "rounds": that can tell, "departing", "share"}]
    """
    parts = verdict["evidence"].get("slices") or {}
    return [
        {"by": by, **part, "share": part["departing"] / part["rounds"]} for by, some in parts.items() for part in some
    ]


def departing_told(verdict: dict) -> str:
    """Where rounds depart from a correct engine, in a sentence."""
    evidence, where = verdict["evidence"], verdict["where"]
    if "slices" not in evidence:
        return f"{verdict['kind']}, so its rounds are not held against a correct engine's"
    if not evidence["departing"]:
        return "no round departs from a correct engine"
    if where:
        (departing, rounds), (others, rest) = where["inside"], where["outside"]
        words = _where(where).words(evidence["engine"]["requests"])
        what = verdict["fault"] or "what departs"
        return f"{what} holds {words}: {departing} of {rounds} rounds depart there, {others} of {rest} elsewhere"
    counts = f"{evidence['departing']} of {evidence['can_tell']} rounds depart"
    if verdict["fault"]:
        return f"{counts}; {verdict['fault']} explains them in the whole run"
    return f"{counts}; no part of the run is told apart"


def _where(where: dict) -> slices.Slice:
    """The slice of a verdict, without its rounds."""
    fields = {name: where[name] for name in ("by", "p", "since", "until", "requests")}
    counts = {side: where[side] for side in ("inside", "outside")}
    return slices.Slice(inside=np.zeros(0, bool), counts=counts, **fields)


def config_rows(verdict: dict, most: int = 5) -> list[dict]:
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


def config_told(verdict: dict) -> str:
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


def token_rows(replays: dict[str, dict]) -> list[dict]:
    """Are the emitted tokens the target's own: one row a drafter, and one for the plain decoding beside it."""
    rows = []
    for name, replay in replays.items():
        of_run = {"sampled": replay.get("sampled"), "not_greedy": replay["agreement"]["tokens_not_greedy"]}
        of_run["tokens"] = sum(request["output_length"] for request in replay["requests"])
        for decoding, found in ((name, of_run), (f"plain, beside {name}", replay.get("plain"))):
            if found:
                rows.append({"decoding": decoding} | _token_row(found))
    return rows


def _token_row(found: dict) -> dict:
    sampled = found["sampled"]
    if not sampled:
        return {"tokens": found["tokens"], "not the target's first choice": found["not_greedy"]}
    tests = {f"p, {name}": f"{test['p']:.2g}" for name, test in sampled["tests"].items() if test["n"]}
    return {"tokens": found["tokens"], "lossless": "yes" if sampled["lossless"] else f"no: {sampled['fault']}"} | tests


def sampling_told(sampling: dict | None) -> str:
    """How tokens were chosen, in words: "greedy", or the settings that differ from it."""
    changed = {name: value for name, value in (sampling or {}).items() if value != GREEDY.model_dump()[name]}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "greedy"


def training_log(params: DiagnoseParams) -> list[dict]:
    """One row a batch of stage 05: loss, accuracy of each step."""
    path = project_path(params.folder) / "train" / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def speed_rows(report: dict, engine: str) -> list[dict]:
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
