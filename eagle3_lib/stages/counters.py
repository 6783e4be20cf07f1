"""Numbers alone: what /metrics, a log or another tool's file says of acceptance, without the tokens that it is of.

They can raise an alarm and never clear an engine or name a fault (:func:`eagle3_lib.verdict.pooled.judge_pooled`).
"""

from pathlib import Path

from ..engines.records import reading
from ..engines.records.recorded import Recorded
from ..errors import Eagle3Error
from ..paths import project_path, short_path, usable_path
from ..verdict import acceptance, diagnose, pooled, replayed
from ..verdict.card import Asked, Card
from ..verdict.changes import HEALTHY
from ..verdict.diagnose import Verdict
from ..verdict.pooled import PooledCurve


def run(
    file: str,
    since: str | None = None,
    positions: int = 0,
    reference: str | None = None,
    drafter: str = "drafter",
    expect_length: float = 0.0,
    folder: str = "",
) -> Card:
    """The card of a file that holds acceptance (:mod:`eagle3_lib.engines.records`).

    Args:
        since: an earlier scrape of /metrics, whose counts are taken off.
        positions: K; 0 is what the file tells.
        reference: folder with a replay.json of this drafter on texts of the same kind, whose correct engine is the measure.
        expect_length: a gate; 0: none.
        folder: the drafter's, for the next command; "" where it is not given.
    Raises:
        Eagle3Error: a file that is none of those known, K that the file contradicts, or a reference with another K.
    """
    path = project_path(file)
    found = reading.read_difference(project_path(since), path) if since else reading.read(path)
    if positions and found.positions and positions != found.positions:
        raise Eagle3Error(f"--k: found {positions}, expected {found.positions} as {short_path(path)} tells")
    verdict = _verdict(found, found.positions or positions, reference, drafter, short_path(path))
    verdict.warnings = [*verdict.warnings, *found.notes]
    asked = Asked(
        found.engine or "vllm",
        usable_path(folder) if folder else Asked.drafter,
        positions=found.positions or positions or 3,
    )
    files = [usable_path(path)] + ([f"{reference}/replay.json"] if reference else [])
    return Card.of(verdict.as_dict(), None, "pooled", asked, files, expect_length or None)


def _verdict(found: Recorded, positions: int, reference: str | None, drafter: str, where: str) -> Verdict:
    if found.counters is None:
        length = f", only a mean acceptance length of {found.mean_length:.2f}" if found.mean_length else ""
        return Verdict(
            drafter,
            diagnose.CANNOT_TELL,
            f"{drafter}: cannot tell, because {where} ({found.tool}) has no accepted counts by position{length}.",
        )
    if not positions:
        positions = len(found.counters["accepted"])
    verdict = pooled.judge_pooled(found.counters, positions, _curves(reference, positions), drafter)
    if found.requests and found.counters["rounds"]:
        rounds = [request["accepted"] for request in found.requests]
        drafted = [request["drafted"] for request in found.requests]
        verdict.evidence["engine"] = acceptance.summary(rounds, positions, drafted)
    return verdict


def _curves(reference: str | None, positions: int) -> dict[str, PooledCurve] | None:
    """Curves of a correct engine, and of every fault where the replay has its rounds, on the reference's texts."""
    if reference is None:
        return None
    path = Path(project_path(reference)) / "replay.json"
    if not path.is_file():
        raise Eagle3Error(f"--reference: found no {short_path(path)}, expected a folder that stage 08 wrote")
    replay = replayed.read(path)
    if replay["positions"] != positions:
        raise Eagle3Error(f"{short_path(path)}: positions: found {replay['positions']}, expected K = {positions}")
    own: dict[str, list[list[int]]] = {}
    for request in replay["requests"]:
        rounds = request.get("own_rounds") or {HEALTHY: request["replay_rounds"]}
        for name, some in rounds.items():
            own.setdefault(name, []).append(some)
    return pooled.pooled_curves(own, positions)
