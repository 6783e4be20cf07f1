"""A figure that shows the training-time test at work: each round's drafts beside the text."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from . import plots

LOOKS: dict[str, dict] = {
    "accepted": {"facecolor": "C2", "alpha": 0.45},
    "right, after a wrong one": {"facecolor": "none", "edgecolor": "C2", "linestyle": "--", "linewidth": 1.5},
    "wrong": {"facecolor": "none", "edgecolor": "#8a8a8a"},
}


def rounds(rows: list[dict]) -> Figure:
    """Guesses of each step (down) of a round started at each slot (across).

    Args:
        rows: of :func:`eagle3_lib.training.trainer.guesses`.
    """
    slots = sorted({row["slot"] for row in rows})
    steps = max(row["step"] for row in rows) + 1
    figure, axes = plt.subplots(figsize=(0.75 * len(slots) + 0.8, 0.42 * steps + 1.1))
    for row in rows:
        look = "accepted" if row["accepted"] else "right, after a wrong one" if row["right"] else "wrong"
        column = slots.index(row["slot"])
        axes.add_patch(plt.Rectangle((column - 0.48, row["step"] - 0.45), 0.96, 0.9, **LOOKS[look]))
        axes.text(column, row["step"], _shown(row["guess"]), ha="center", va="center", fontsize=7)
    after = {row["slot"]: _shown(row["after"]) for row in rows}
    axes.set_xticks(range(len(slots)), [after[slot] for slot in slots], fontsize=7)
    axes.set_yticks(range(steps), [f"step {step}" for step in range(steps)])
    axes.set(
        xlim=(-0.6, len(slots) - 0.4), ylim=(steps - 0.4, -0.6), xlabel="the round starts after this token of the text"
    )
    axes.grid(False)
    figure.legend([Patch(**look) for look in LOOKS.values()], list(LOOKS), loc="outside upper left", ncols=3)
    return figure


def _shown(token: str, most: int = 9) -> str:
    """A token as a label: spaces and line ends visible, cut where it is long, no mathematics."""
    text = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("$", r"\$")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def show_rounds(rows: list[dict], save=None) -> plots.Shown:
    """:func:`rounds` with its caption, for a notebook."""
    share = sum(row["accepted"] for row in rows) / len(rows)
    caption = (
        "What the trained drafter guesses on a held-out answer. A column is a round; read it downwards: it is accepted as "
        "far as it is filled. A right guess below a wrong one earns nothing."
    )
    alt = f"A table of guessed tokens, {len(rows)} cells, {share:.0%} of them accepted."
    return plots.show(rounds(rows), caption, alt, save, rows)
