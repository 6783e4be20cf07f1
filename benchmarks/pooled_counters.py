"""What pooled counters alone can tell: totals of rounds and of accepted drafts by position, as from Prometheus.

    python benchmarks/pooled_counters.py      after `make demo`, whose answers and drafter it uses

Every hypothesis walks the target's own answers (replayed rounds, no engine). In each draw the requests are parted at
random: one half is what the replay knows, of the other half requests are counted until there are N rounds, as when the
counters come from traffic whose tokens nobody kept. A fault is told from a hypothesis when its counters reject that
hypothesis at 1 % in at least 95 % of the draws (pooled.rank_pooled). Also: how many hypotheses give the very same
counters on the same tokens. Writes benchmarks/results/pooled_counters.json.
"""

import datetime
import json

import numpy as np
import torch
from tqdm import tqdm

from eagle3_lib.drafter import checkpoint
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.targets import capture, targets
from eagle3_lib.targets.answers import read_answers
from eagle3_lib.verdict import acceptance, changes, hypotheses, pooled

DATA, DRAFTER = "runs/quickstart/generate", "runs/quickstart/train/drafter"
KEPT = "runs/fault_matrix/pooled/rounds.json"
REQUESTS, POSITIONS, GROUP = 120, 4, 12
ROUNDS, DRAWS, ENOUGH = (250, 500, 1000, 2000), 100, 0.95


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
            setups = hypotheses.hypotheses(drafter, changes.TargetParts.of(target))
        requests = [(answer.prompt_ids, answer.output_ids) for answer in answers[first : first + GROUP]]
        texts = [prompt + output for prompt, output in requests]
        with torch.no_grad():
            features = capture.capture(target, texts, drafter.config.boundaries, also=hypotheses.extra_streams(setups))
            made = hypotheses.replay_all(setups, hypotheses.texts_of(requests, features), None, POSITIONS)
        kept = {name: kept.get(name, []) + rounds for name, rounds in made.items()}
        write_json(path, kept)
    return kept


def counted(counts: np.ndarray, rounds: int) -> np.ndarray:
    """Counters of the first requests that have ``rounds`` rounds together (of all, where they have fewer)."""
    enough = np.searchsorted(counts[:, 0].cumsum(), rounds) + 1
    return counts[:enough].sum(0)


def study(own: dict[str, list[list[int]]]) -> list[dict]:
    """For each fault: how many rounds tell it from a correct engine, and from what 2,000 rounds do not tell it."""
    random, names = np.random.default_rng(0), list(own)
    counts = {name: acceptance.request_counts(rounds, POSITIONS) for name, rounds in own.items()}
    rejects = np.zeros((len(ROUNDS), len(names), len(names)))  # how often counters of one reject another
    first = np.zeros(len(names))
    for _ in tqdm(range(DRAWS), desc="draws", mininterval=5):
        order = random.permutation(len(own[names[0]]))
        known, engine = order[: len(order) // 2], order[len(order) // 2 :]
        curves = pooled.pooled_curves({name: [own[name][i] for i in known] for name in names}, POSITIONS)
        for n, rounds in enumerate(ROUNDS):
            for f, name in enumerate(names):
                ranked = pooled.rank_pooled(counted(counts[name][engine], rounds), curves)
                for row in ranked:
                    rejects[n, f, names.index(row["hypothesis"])] += row["p"] < 0.01
                first[f] += rounds == ROUNDS[-1] and ranked[0]["hypothesis"] == name
    rejects /= DRAWS
    healthy, table = names.index(changes.HEALTHY), []
    for f, name in enumerate(names):
        enough = [rounds for n, rounds in enumerate(ROUNDS) if rejects[n, f, healthy] >= ENOUGH]
        table.append(
            {
                "fault": name,
                "mean_length": round(float(acceptance.mean_length(counts[name])), 3),
                "rounds_to_tell_from_a_correct_engine": enough[0] if enough and f != healthy else None,
                "not_told_from_at_2000": [o for i, o in enumerate(names) if i != f and rejects[-1, f, i] < ENOUGH],
                "true_rejected_at_2000": round(float(rejects[-1, f, f]), 2),
                "true_first_at_2000": round(float(first[f] / DRAWS), 2),
            }
        )
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
        "rounds_of_a_correct_engine": sum(map(len, own[changes.HEALTHY])),
        "draws": DRAWS,
        "other_tokens": study(own),
        "same_tokens": same_counters(own),
    }
    write_json(project_path("benchmarks/results/pooled_counters.json"), result)


if __name__ == "__main__":
    main()
