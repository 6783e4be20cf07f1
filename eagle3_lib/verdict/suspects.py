"""Suspects: other values of a drafter's config.json, one of which may be what the weights were trained with.

An engine obeys config.json, so a wrong value in it (layer ids, rope_theta, norm_before_residual) shows in no
comparison of engine and replay: both draft badly in the same way. But the replay can tell for every other value what
it would have accepted at the same rounds. Where one of them accepts clearly more than config.json does, it is the value
that fits the weights, and the file is the suspect.

:func:`suspects` lists the values, :func:`score` and :func:`clearly_better` judge their accepted counts, :func:`examine`
does all of it on texts, and :func:`shim` is a shell line that tries one.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from ..drafter.checkpoint import IDS, default_boundaries, read_config
from ..drafter.model import Drafter
from ..paths import project_path
from ..results import MeasuredRequest, Score, Text, ToldSuspect
from .acceptance import bootstrap
from .changes import HEALTHY, TargetParts, boundaries, variant
from .faults import FAULTS
from .hypotheses import forward, hypotheses, lay_all
from .replay import Setup, all_slots, correct, counts_at
from .rounds import Laid

FALSE_ALARM = 0.01  # of one drafter, over all its suspects
# Share of the config's accepted tokens that a suspect must accept beyond them. Neighbouring values (a theta of 500,000
# for 1,000,000) draft almost alike, and one of them may suit the text at hand a little better than the one of training;
# less than this is not worth another checkpoint, even where it is sure.
LEAST_GAIN = 0.05
# A suspect that is not clearly better, and would accept so much more, keeps a drafter from being called weak; p of the sign test over
# all suspects below which the gain is not taken for chance. A smaller gain leaves a weak drafter weak.
DOUBTFUL_GAIN, UNSETTLED = 0.2, 0.5
LEAST_REQUESTS = 4  # with fewer, a bootstrap over requests says little: one text can carry the whole gain
# Only rounds that start before this slot count. In longer contexts than it was trained on, a drafter can draft better under
# another rope than its own: one trained on texts of 512 tokens did so at 4,000 (benchmarks/results/healthy_zoo.json).
SHORT = 1024
LEAST_DIFFERENT = 20  # rounds that a suspect and the config accept differently; below it both tests rest on a few texts
UNTOLD = 0.05  # suspects that the best one does not beat at this level are named beside it

THETAS = (10000.0, 100000.0, 500000.0, 1000000.0, 5000000.0)  # of rope_theta, in public drafters and targets
HEAD_DIMS = (32, 64, 80, 96, 128, 256)  # of attention heads, in public drafters and targets
SHIFTS = (-1, 1, -2, 2)  # of layer ids: ids of layers for boundaries, or the other way round, once and twice
CATALOGUED = (  # entries of the fault catalogue that a value of config.json can cause too
    "boundaries -1",
    "boundaries +1",
    "default boundaries",
    "last three boundaries",
    "last hidden only",
    "norm_before_residual flipped",
    "norm_output flipped",
    "fc_norm ignored",
    "norm_before_fc ignored",
    "rope theta 10000",
    "rope scaling ignored",
    "rope of the target",
)
AUX = "eagle_config.use_aux_hidden_state"


@dataclass(frozen=True)
class Suspect:
    """One other value of config.json.

    name: such as "rope_theta 10000". field: the field of config.json that would change; value: what would be written
    there. setup: a correct engine that obeys it. fault: the entry of the fault catalogue that drafts the same, or None.
    """

    name: str
    field: str
    value: object
    setup: Setup
    fault: str | None


def suspects(drafter: Drafter, parts: TargetParts) -> dict[str, Suspect]:
    """Every suspect of a drafter by its name; none that drafts as its config does, and none twice.

    Args:
        drafter: as its config.json describes it, with grouped-query or latent attention.
        parts: of the target; a boundary above its number of layers is left out.
    """
    catalogued: dict[Drafting, str] = {}
    for name, setup in hypotheses(drafter, parts, CATALOGUED).items():
        catalogued.setdefault(_drafting(setup), name)
    seen, found = {_drafting(correct(drafter))}, {}
    for name, field, value, setup in _candidates(correct(drafter), parts):
        drafting = _drafting(setup)
        if drafting not in seen:
            seen.add(drafting)
            found[name] = Suspect(name, field, value, setup, catalogued.get(drafting))
    return found


Drafting = tuple[object, ...]


def _drafting(setup: Setup) -> Drafting:
    """All that decides the drafts of a setup among those of this module."""
    drafter, config = setup.drafter, setup.drafter.config
    flags = (config.norm_before_residual, config.norm_output, config.fc_norm, config.norm_before_fc)
    rope = (drafter.rotary.attention_scaling, tuple(drafter.rotary.inv_freq.tolist()))
    return setup.sources, setup.through_fc, flags, rope, drafter.layers[0].self_attn.scale


Candidate = tuple[str, str, object, Setup]  # name, field, value, setup


def _candidates(healthy: Setup, parts: TargetParts) -> Iterator[Candidate]:
    yield from _boundaries(healthy, parts)
    yield from _ropes(healthy, parts)
    for flag in ("norm_before_residual", "norm_output"):
        value = not getattr(healthy.drafter.config, flag)
        setup = FAULTS[f"{flag} flipped"].change(healthy, parts)
        assert setup is not None
        yield f"{flag} {str(value).lower()}", flag, value, setup
    for flag in ("fc_norm", "norm_before_fc"):  # not the other way round: their tensors are missing then
        if setup := FAULTS[f"{flag} ignored"].change(healthy, parts):
            yield f"{flag} false", flag, False, setup
    if setup := FAULTS["last hidden only"].change(healthy, parts):
        yield "use_aux_hidden_state false", AUX, False, setup
    yield from _heads(healthy.drafter)


def _boundaries(healthy: Setup, parts: TargetParts) -> Iterator[Candidate]:
    configured, default = healthy.drafter.config.boundaries, default_boundaries(parts.layers)
    tried = [tuple(k + shift for k in configured) for shift in SHIFTS]
    tried += [tuple(k + shift for k in default) for shift in (0, *SHIFTS[:2])]
    tried.append(tuple(range(parts.layers - len(configured) + 1, parts.layers + 1)))
    for ids in tried:
        rising = list(ids) == sorted(set(ids))  # the only order in which engines capture
        setup = boundaries(partial(_these, ids))(healthy, parts)
        if rising and setup is not None:
            yield f"boundaries {list(ids)}", IDS, list(ids), setup


def _these(ids: tuple[int, ...], configured: tuple[int, ...], layers: int) -> tuple[int, ...]:
    return ids


def _ropes(healthy: Setup, parts: TargetParts) -> Iterator[Candidate]:
    """The same scaling with another theta, no scaling, and all that the target's config.json says of rope."""
    now, of_target = healthy.drafter.config.rope_parameters, parts.rope_parameters
    thetas = {*THETAS, float(of_target["rope_theta"])} if of_target else set(THETAS)
    for theta in sorted(thetas):
        yield f"rope_theta {theta:.10g}", "rope_theta", theta, _turned(healthy, now | {"rope_theta": theta})
    if setup := FAULTS["rope scaling ignored"].change(healthy, parts):
        yield "no rope_scaling", "rope_scaling", None, setup
    if of_target:
        yield "rope_parameters of the target", "rope_parameters", of_target, _turned(healthy, of_target)


def _turned(healthy: Setup, rope_parameters: dict[str, Any]) -> Setup:
    return replace(healthy, drafter=variant(healthy.drafter, rope_parameters=rope_parameters))


def _heads(drafter: Drafter) -> Iterator[Candidate]:
    """The same projections cut into heads of another size; latent attention and norms of heads fix it by shape."""
    config = drafter.config
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    for size in () if config.latent or config.qk_norm else HEAD_DIMS:
        if size == config.head_dim or queries % size or keys % size:
            continue
        sizes = {"head_dim": size, "num_attention_heads": queries // size, "num_key_value_heads": keys // size}
        new = variant(drafter, rope_parameters=config.rope_parameters, **sizes)
        for layer in new.layers:
            layer.self_attn.head_dim = size
        yield f"head_dim {size} ({queries // size} heads)", "head_dim", size, correct(new)


# ------------------------------------------------------------------------------------------------------------ judgement


def score(accepted: dict[str, list[list[int]]], correct: list[list[int]]) -> list[Score]:
    """What each suspect accepts beside what the config does, at the same rounds.

    Args:
        accepted: for each suspect, by request, its accepted count in each round.
        correct: the same of a correct engine that obeys the config.
    Returns:
        the suspects, the one that accepts most first: [{"name", "accepted", "of_config": mean accepted count of a
        round, "gain": their difference with a paired 95 % interval by request, "surely": the least gain by the same
        bootstrap, at FALSE_ALARM over all suspects, "differ": rounds in which the counts differ, "p": of a sign test
        over those, times the number of suspects, "ties": of one that is clearly better, the suspects that these rounds
        do not tell from it}]; [] without a round.
    Raises:
        ValueError: a suspect has other numbers of rounds than ``correct``.
    """
    if not sum(map(len, correct)):
        return []
    rows = [_row(name, _differences(counts, correct), correct, len(accepted)) for name, counts in accepted.items()]
    rows.sort(key=lambda row: -(row["gain"]["value"] or 0.0))
    for row in rows:
        if _is_clear(row):
            others = {name: counts for name, counts in accepted.items() if name != row["name"]}
            row["ties"] = [name for name, counts in others.items() if not _beats(accepted[row["name"]], counts)]
    return rows


def _row(name: str, differences: list[NDArray[Any]], correct: list[list[int]], suspects: int) -> Score:
    pairs, every = _pairs(differences), np.concatenate(differences)
    won, lost = int((every > 0).sum()), int((every < 0).sum())
    p = stats.binomtest(won, max(won + lost, 1), alternative="greater").pvalue * suspects
    of_config = float(np.concatenate([np.asarray(counts, int) for counts in correct]).mean())
    return {
        "name": name,
        "accepted": round(of_config + float(every.mean()), 6),
        "of_config": round(of_config, 6),
        "gain": bootstrap(_per_round, pairs),
        "surely": bootstrap(_per_round, pairs, level=1 - 2 * FALSE_ALARM)["low"] or 0.0,
        "requests": len(pairs),
        "differ": won + lost,
        "p": min(1.0, float(p)),
        "ties": [],
    }


def _differences(ours: list[list[int]], others: list[list[int]]) -> list[NDArray[Any]]:
    """By request, our count minus the other's in each round; requests without rounds are left out."""
    lengths = [[len(counts) for counts in by_request] for by_request in (ours, others)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"rounds by request: found {lengths[0]}, expected {lengths[1]}")
    return [np.subtract(a, b) for a, b in zip(ours, others, strict=True) if len(b)]


def _pairs(differences: list[NDArray[Any]]) -> NDArray[Any]:
    """[requests, 2] rounds, and the sum of the differences in them."""
    return np.array([(len(some), some.sum()) for some in differences], float)


def _per_round(pairs: NDArray[Any]) -> NDArray[Any]:
    """[..., requests, 2] -> [...] the mean difference of a round."""
    total = pairs.sum(-2)
    return np.asarray(total[..., 1] / total[..., 0])


def _beats(ours: list[list[int]], others: list[list[int]]) -> bool:
    pairs = _pairs(_differences(ours, others))
    low = bootstrap(_per_round, pairs, level=1 - 2 * UNTOLD)["low"]
    return low is not None and low > 0


def clearly_better(scores: Sequence[Score]) -> Score | None:
    """The suspect of :func:`score` that accepts most, of those that clearly accept more than the config, or None.

    Surely: by the sign test over rounds, with a false alarm of FALSE_ALARM over all suspects together, and by the bootstrap
    over LEAST_REQUESTS requests or more; by LEAST_GAIN at least; and in LEAST_DIFFERENT rounds at least.
    """
    return next((row for row in scores if _is_clear(row)), None)


def unsettled(scores: Sequence[Score], rounds: int) -> tuple[Score, int] | None:
    """The best suspect of :func:`score` where these rounds do not say whether it or the config is right, and about how many would.

    Args:
        rounds: that were compared.
    Returns:
        None where no suspect is so near to clearly better.
    """
    row = next((row for row in scores if row["gain"]["value"]), None)
    if row is None or _is_clear(row) or row["p"] >= UNSETTLED:
        return None
    gain, low, high = row["gain"]["value"], row["gain"]["low"], row["gain"]["high"]
    if gain is None or low is None or high is None or gain < DOUBTFUL_GAIN * row["of_config"]:
        return None
    sure_at = stats.norm.isf(FALSE_ALARM / len(scores))
    by_bootstrap = sure_at * (high - low) / (2 * stats.norm.ppf(0.975)) / gain
    by_signs = sure_at / stats.norm.isf(row["p"] / len(scores))
    return row, max(int(np.ceil(rounds * max(by_bootstrap, by_signs) ** 2)), rounds + 1)


def _is_clear(row: Score) -> bool:
    sure = row["surely"] > 0 and row["p"] < FALSE_ALARM and row["requests"] >= LEAST_REQUESTS
    return sure and row["differ"] >= LEAST_DIFFERENT and row["accepted"] >= (1 + LEAST_GAIN) * row["of_config"]


# ------------------------------------------------------------------------------------------------------------ on texts


@dataclass(frozen=True)
class Examined:
    """What :func:`examine` found.

    slots: rounds that were compared. scores: of :func:`score`. suspect: the one that is clearly better, or None.
    """

    slots: int
    scores: list[Score]
    suspect: Suspect | None


@torch.no_grad()  # type: ignore[untyped-decorator]
def examine(target: Any, drafter: Drafter, requests: Sequence[Text | MeasuredRequest], steps: int) -> Examined:
    """Replay all suspects on texts of the target.

    Args:
        target, drafter: as :func:`eagle3_lib.drafter.checkpoint.load_for` puts them together.
        requests: [{"prompt_ids", "output_ids"}]. Where "accepted" holds the rounds of an engine that obeyed the config,
            those are compared; else a round that starts at every slot of the answer.
        steps: K.
    Returns:
        nothing but counts is kept of a text, so memory holds the streams of one text at a time.
    """
    tried = suspects(drafter, TargetParts.of(target))
    setups = {HEALTHY: correct(drafter)} | {name: suspect.setup for name, suspect in tried.items()}
    counts: dict[str, list[list[int]]] = {name: [] for name in setups}
    for request in requests:
        _, texts = forward(target, setups, [request])
        slots = _slots(cast(MeasuredRequest, request), steps) if "accepted" in request else all_slots(texts)
        for name, setup in setups.items():
            counts[name] += counts_at(setup, texts, slots, steps)
    of_config = counts.pop(HEALTHY)
    scores = score(counts, of_config)
    best = clearly_better(scores)
    return Examined(sum(map(len, of_config)), scores, tried[best["name"]] if best else None)


def _slots(request: MeasuredRequest, steps: int) -> list[list[int]]:
    (laid,) = lay_all([request], steps)
    return [laid.slots(len(request["prompt_ids"])) if isinstance(laid, Laid) else []]


# --------------------------------------------------------------------------------------------------------- to try one

EDIT = (
    "import json, sys; path, new = sys.argv[1:]; old = json.load(open(path)); "
    'json.dump(old | json.loads(new), open(path, "w"), indent=1)'
)


def shim(suspect: Suspect, folder: str | Path = "DRAFTER") -> str:
    """One shell line that copies the drafter to FOLDER-NAME and writes the suspect's value into its config.json.

    Args:
        folder: the drafter's; its config.json tells where the value must stand. Without one, a flat one is meant.
    """
    there = (project_path(folder) / "config.json").is_file()
    new = json.dumps(config_fields(suspect, read_config(project_path(folder)) if there else {}))
    copy = f"{str(folder).rstrip('/')}-{re.sub('[^A-Za-z0-9_.]+', '-', suspect.name).strip('-')}"
    ours, theirs, path = (shlex.quote(str(word)) for word in (folder, copy, f"{copy}/config.json"))
    return f"cp -rL {ours} {theirs} && python3 -c {shlex.quote(EDIT)} {path} {shlex.quote(new)}"


def told(suspect: Suspect, folder: str | Path) -> ToldSuspect:
    """A suspect as replay.json and audit.json tell it; ``folder``: the drafter's."""
    return {
        "name": suspect.name,
        "field": suspect.field,
        "value": suspect.value,
        "fault": suspect.fault,
        "shim": shim(suspect, folder),
    }


def config_fields(suspect: Suspect, raw: dict[str, Any]) -> dict[str, Any]:
    """The top-level fields of config.json, whole, that give it the suspect's value everywhere engines look for it.

    Args:
        raw: config.json as it is, flat or of speculators.
    """
    nested, layer = dict(raw.get("eagle_config") or {}), raw.get("transformer_layer_config")
    if suspect.field == IDS:
        assert isinstance(suspect.value, list)
        outputs = [k - 1 for k in suspect.value]  # ids of the layers whose output is taken, as SGLang reads them
        nested = {"use_aux_hidden_state": True} | nested | ({IDS: outputs} if min(outputs) >= 0 else {})
        return {IDS: suspect.value} | ({} if layer else {"eagle_config": nested})
    if suspect.field == AUX:
        return {"eagle_config": nested | {"use_aux_hidden_state": suspect.value}}
    if suspect.field in ("head_dim", "rope_theta", "rope_scaling", "rope_parameters"):
        fields = _head_fields(suspect) if suspect.field == "head_dim" else _rope_fields(suspect)
        return {"transformer_layer_config": layer | fields} if layer else fields
    new: dict[str, Any] = {suspect.field: suspect.value}
    if suspect.field in nested:
        new["eagle_config"] = nested | new
    if suspect.field == "fc_norm" and "use_aux_norm" in raw:
        new["use_aux_norm"] = suspect.value
    return new


def _head_fields(suspect: Suspect) -> dict[str, int]:
    config = suspect.setup.drafter.config
    return {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}


def _rope_fields(suspect: Suspect) -> dict[str, Any]:
    """As transformers 4 (rope_theta, rope_scaling) and transformers 5 (rope_parameters) name them."""
    rope = suspect.setup.drafter.config.rope_parameters
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = rope.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling, "rope_parameters": rope}
