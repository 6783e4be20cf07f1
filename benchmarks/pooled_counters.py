"""What pooled counters alone can tell: totals of rounds and of accepted drafts by position, as from Prometheus.

    python benchmarks/pooled_counters.py      after `make demo`, whose answers and drafter it uses

Every hypothesis walks the target's own answers (replayed rounds, no engine). One half of the requests plays the engine:
its requests are drawn again and again until N rounds are counted. The other half is what the replay knows: other tokens
of the same kind, as when the counters come from traffic whose tokens nobody kept. A fault is told from a hypothesis when
its counters reject that hypothesis at 1 % in at least 95 % of the draws (diagnose.rank_pooled). Also: how many
hypotheses give the very same counters on the same tokens. Writes benchmarks/results/pooled_counters.json.
"""

import datetime
import json

import numpy as np
import torch

from eagle3_lib import acceptance, checkpoint, diagnose, faults, replay, targets
from eagle3_lib.answers import read_answers
from eagle3_lib.provenance import hardware, project_path, versions, write_json

DATA, DRAFTER = "runs/quickstart/generate", "runs/quickstart/train/drafter"
KEPT = "runs/fault_matrix/pooled/rounds.json"
REQUESTS, POSITIONS, GROUP = 60, 4, 12
ROUNDS, DRAWS = (250, 500, 1000, 2000, 4000), 100


def own_rounds() -> dict[str, list[list[int]]]:
    """For each hypothesis the rounds it would have made of each answer; kept, group by group."""
    path = project_path(KEPT)
    kept = json.loads(path.read_text()) if path.is_file() else {}
    answers = read_answers(DATA)
    answers = sorted(answers, key=lambda answer: answer.split)[:REQUESTS]  # held_out first
    target = drafter = None
    for first in range(len(next(iter(kept.values()), [])), REQUESTS, GROUP):
        if target is None:
            target = targets.load(targets.resolve(targets.SMOLLM2))
            drafter = checkpoint.load_for(DRAFTER, "SmolLM2", target)
            setups = faults.hypotheses(drafter, faults.TargetParts.of(target))
        requests = [(answer.prompt_ids, answer.output_ids) for answer in answers[first : first + GROUP]]
        texts = [prompt + output for prompt, output in requests]
        with torch.no_grad():
            features = replay.capture(target, texts, drafter.config.boundaries, also=faults.extra_streams(setups))
            made = faults.replay_all(setups, faults.texts_of(requests, features), None, POSITIONS)
        kept = {name: kept.get(name, []) + rounds for name, rounds in made.items()}
        write_json(path, kept)
    return kept


def drawn(counts: np.ndarray, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Counters of requests drawn until there are at least ``rounds``."""
    total = np.zeros(counts.shape[1])
    while total[0] < rounds:
        total += counts[random.integers(len(counts))]
    return total


def study(own: dict[str, list[list[int]]]) -> list[dict]:
    random = np.random.default_rng(0)
    engine = {name: acceptance.request_counts(rounds[::2], POSITIONS) for name, rounds in own.items()}
    known = diagnose.pooled_curves({name: rounds[1::2] for name, rounds in own.items()}, POSITIONS)
    table = []
    for name, counts in engine.items():
        row = {"fault": name, "mean_length": round(float(acceptance.mean_length(counts)), 3)}
        rejected = {}
        for rounds in ROUNDS:
            ranked = [diagnose.rank_pooled(drawn(counts, rounds, random), known) for _ in range(DRAWS)]
            rejected[rounds] = {
                other: float(
                    np.mean([next(r["p"] for r in some if r["hypothesis"] == other) < 0.01 for some in ranked])
                )
                for other in own
            }
            if rounds == 2000:
                row["true_first_at_2000"] = float(np.mean([some[0]["hypothesis"] == name for some in ranked]))
        row["true_rejected_at_2000"] = rejected[2000][name]
        row["not_told_from_at_2000"] = [o for o in own if o != name and rejected[2000][o] < 0.95]
        enough = [rounds for rounds in ROUNDS if rejected[rounds][faults.HEALTHY] >= 0.95]
        row["rounds_to_tell_from_a_correct_engine"] = enough[0] if enough and name != faults.HEALTHY else None
        table.append(row)
        print(row["fault"], row["rounds_to_tell_from_a_correct_engine"], len(row["not_told_from_at_2000"]), flush=True)
    return table


def same_counters(own: dict[str, list[list[int]]]) -> list[list[str]]:
    """Groups of hypotheses whose pooled counters are the same to 0.5 % of rounds on the same tokens."""
    totals = {name: acceptance.request_counts(rounds, POSITIONS).sum(0) for name, rounds in own.items()}
    groups: list[list[str]] = []
    for name, total in totals.items():
        close = (g for g in groups if np.abs(totals[g[0]] - total).max() <= 0.005 * max(total[0], totals[g[0]][0]))
        group = next(close, None)
        groups.append([name]) if group is None else group.append(name)
    return groups


def main() -> None:
    own = own_rounds()
    result = {
        "command": "python benchmarks/pooled_counters.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "requests": REQUESTS,
        "rounds_of_a_correct_engine": sum(map(len, own[faults.HEALTHY])),
        "draws": DRAWS,
        "other_tokens": study(own),
        "same_tokens": same_counters(own),
    }
    write_json(project_path("benchmarks/results/pooled_counters.json"), result)


if __name__ == "__main__":
    main()
