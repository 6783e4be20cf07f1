"""Figures: each a function from result data to a matplotlib figure, and :func:`show`, which puts one on a page.

Engine and replay, drafters and modes differ by marker and line style besides colour; n and intervals stand on each.
"""

import csv
import html
import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg", force=False)
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

plt.style.use(Path(__file__).with_name("eagle3.mplstyle"))
PAGE_TEXT = "#010203"
MARKERS = "osD^vP"
ENGINE, REPLAY = {"linestyle": "-", "fillstyle": "full"}, {"linestyle": "--", "fillstyle": "none"}


@dataclass(frozen=True)
class Shown:
    """A figure on a page: SVG with alternative text, caption, and links to its PDF and its data."""

    svg: str
    caption: str
    alt: str
    links: tuple[tuple[str, str], ...] = ()

    def _repr_html_(self) -> str:
        links = " · ".join(f'<a href="{html.escape(href)}">{text}</a>' for text, href in self.links)
        return (
            f'<figure class="eagle3" role="group"><div role="img" aria-label="{html.escape(self.alt)}">{self.svg}</div>'
            f"<figcaption>{html.escape(self.caption)} {links}</figcaption></figure>"
        )


def show(figure: Figure, caption: str, alt: str, save: Path | None = None, rows: list[dict] | None = None) -> Shown:
    """Render a figure; with ``save`` (a path without ending) also write its SVG, PDF, and its ``rows`` as CSV.

    Args:
        alt: what a reader who does not see the figure must know: its kind and its finding, with numbers.
        rows: the numbers in the figure.
    """
    buffer, links = io.StringIO(), []
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(PAGE_TEXT, "currentColor")
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.with_suffix(".svg").write_text(svg.replace("currentColor", PAGE_TEXT))
        figure.savefig(save.with_suffix(".pdf"), metadata={"CreationDate": None})
        links.append(("PDF", f"figures/{save.name}.pdf"))
        if rows:
            with save.with_suffix(".csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
            links.append(("data", f"figures/{save.name}.csv"))
    plt.close(figure)
    return Shown(svg, caption, alt, tuple(links))


def _errors(interval: dict) -> list[list[float]]:
    """Distances from value to low and high, as matplotlib's error bars want them."""
    values, lows, highs = (_list(interval[key]) for key in ("value", "low", "high"))
    below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    return [below, above]


def _list(value) -> list[float]:
    return value if isinstance(value, list) else [value]


def acceptance_curves(replays: dict[str, dict]) -> Figure:
    """Rate of acceptance at each draft position, engine against replay, one colour a drafter.

    Args:
        replays: drafter name -> replay.json of stage 08.
    """
    figure, axes = plt.subplots()
    for index, (name, replay) in enumerate(replays.items()):
        positions = range(1, replay["positions"] + 1)
        for who, key, look, shift in (
            ("engine", "engine_acceptance", ENGINE, -0.03),
            ("replay", "replay_acceptance", REPLAY, 0.03),
        ):
            rates = replay[key]["curve"]
            axes.errorbar(
                [p + shift for p in positions],
                rates["value"],
                yerr=_errors(rates),
                color=f"C{index}",
                marker=MARKERS[index],
                capsize=2,
                label=f"{name}, {who} (n = {replay[key]['rounds']} rounds)",
                **look,
            )
    axes.set(xlabel="draft position", ylabel="rounds in which it was accepted", ylim=(0, 1), xticks=list(positions))
    axes.legend()
    return figure


def mean_lengths(replays: dict[str, dict]) -> Figure:
    """Mean acceptance length of each drafter, engine beside replay."""
    figure, axes = plt.subplots(figsize=(6.4, 0.9 + 0.75 * len(replays)))
    for index, (_name, replay) in enumerate(replays.items()):
        for key, shift, fill in (("engine_acceptance", -0.13, "full"), ("replay_acceptance", 0.13, "none")):
            interval = replay[key]["mean_length"]
            axes.errorbar(
                [interval["value"]],
                [index + shift],
                xerr=_errors(interval),
                marker=MARKERS[index],
                color=f"C{index}",
                capsize=3,
                fillstyle=fill,
            )
            axes.annotate(
                f"{interval['value']:.2f}",
                (interval["high"], index + shift),
                (5, 0),
                textcoords="offset points",
                va="center",
            )
    axes.set(
        yticks=range(len(replays)),
        yticklabels=list(replays),
        xlabel="mean acceptance length (filled: engine, open: replay)",
    )
    axes.set_ylim(len(replays) - 0.5, -0.5)
    axes.set_xlim(left=1)
    return figure


def throughput(speeds: dict[str, dict]) -> Figure:
    """Throughput over plain decoding, one request at a time; ``speeds``: mode -> interval of the paired ratio."""
    figure, axes = plt.subplots(figsize=(6.4, 0.9 + 0.5 * len(speeds)))
    for index, (_mode, interval) in enumerate(speeds.items()):
        axes.errorbar(
            [interval["value"]],
            [index],
            xerr=_errors(interval),
            marker=MARKERS[index],
            color=f"C{index}",
            capsize=3,
            linestyle="none",
        )
        axes.annotate(
            f"{interval['value']:.2f}x", (interval["high"], index), (5, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=PAGE_TEXT, linewidth=1, linestyle=":")
    axes.set(
        yticks=range(len(speeds)),
        yticklabels=list(speeds),
        xlabel="throughput over plain decoding (dotted line: equal)",
    )
    axes.set_ylim(len(speeds) - 0.5, -0.5)
    axes.set_xlim(left=0)
    return figure


def throughput_by_concurrency(speeds: dict[str, dict]) -> Figure:
    """Throughput over plain decoding by requests at a time; ``speeds``: mode -> concurrency -> interval of repeats."""
    figure, axes = plt.subplots()
    for index, (mode, levels) in enumerate(speeds.items()):
        bars = {key: [interval[key] for interval in levels.values()] for key in ("value", "low", "high")}
        axes.errorbar(
            [int(level) for level in levels],
            bars["value"],
            yerr=_errors(bars),
            color=f"C{index}",
            marker=MARKERS[index],
            capsize=2,
            label=mode,
        )
    levels = [int(level) for level in next(iter(speeds.values()))]
    axes.axhline(1, color=PAGE_TEXT, linewidth=1, linestyle=":")
    axes.set(xlabel="requests at a time", ylabel="throughput over plain", xscale="log", ylim=(0, None))
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.legend()
    return figure


def agreement(ranking: list[dict], most: int = 8) -> Figure:
    """Share of the engine's rounds that each hypothesis reproduces, the best first."""
    rows = ranking[:most]
    figure, axes = plt.subplots(figsize=(6.4, 0.9 + 0.33 * len(rows)))
    bars = {key: [row[key] for row in rows] for key in ("value", "low", "high")}
    axes.errorbar(bars["value"], range(len(rows)), xerr=_errors(bars), linestyle="none", marker="o", capsize=2)
    axes.set(yticks=range(len(rows)), yticklabels=[row["hypothesis"] for row in rows], xlim=(0, 1.02))
    axes.set_xlabel("share of the engine's rounds reproduced, 95 % interval by request")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def training(log: list[dict], evaluations: list[dict]) -> Figure:
    """Loss, per-step accuracy, and the held-out mean acceptance length replayed after each epoch."""
    figure, (losses, accuracies, lengths) = plt.subplots(1, 3, figsize=(9, 3))
    if log:
        steps = [row["step"] for row in log]
        losses.plot(steps, _smooth([row["loss"] for row in log]))
        for k in range(len(log[0]["accuracy"])):
            curve = _smooth([row["accuracy"][k] for row in log])
            accuracies.plot(steps, curve, linestyle=("-", "--", ":", "-.")[k % 4], label=f"step {k}")
        accuracies.legend()
    if evaluations:
        means = {key: [e["mean_length"][key] for e in evaluations] for key in ("value", "low", "high")}
        lengths.errorbar([e["epoch"] for e in evaluations], means["value"], yerr=_errors(means), marker="o", capsize=2)
        lengths.set_title(f"n = {evaluations[0]['requests']} held-out texts", fontsize=9)
        lengths.set_xticks([e["epoch"] for e in evaluations])
    losses.set(xlabel="batch", ylabel="loss (mean of 10 batches)")
    accuracies.set(xlabel="batch", ylabel="accuracy (mean of 10)", ylim=(0, 1))
    lengths.set(xlabel="epoch", ylabel="replayed mean length")
    return figure


def _smooth(values: list[float], width: int = 10) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def profile(result: dict) -> Figure:
    """Share of one decode's busy time by kind of operation."""
    share = {kind: value for kind, value in sorted(result["share"].items(), key=lambda item: item[1])}
    figure, axes = plt.subplots(figsize=(6.4, 3))
    bars = axes.barh(list(share), [100 * value for value in share.values()], color="C0")
    axes.bar_label(bars, [f"{100 * value:.1f} %" for value in share.values()], padding=3)
    axes.set(xlabel=f"share of busy time (%), {result['tokens']} tokens on {result['device'].upper()}", xlim=(0, 100))
    return figure


def token_lengths(answers) -> Figure:
    """Histogram of answer lengths by split."""
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    splits = sorted({answer.split for answer in answers})
    data = [[len(a.output_ids) for a in answers if a.split == split] for split in splits]
    axes.hist(data, bins=12, label=[f"{split} (n = {len(d)})" for split, d in zip(splits, data, strict=True)])
    axes.set(xlabel="answer length (tokens)", ylabel="answers")
    axes.legend()
    return figure


def round_strip(request: dict, rounds: int = 40) -> Figure:
    """The first rounds of one request: accepted tokens by the engine (bars) and by the replay (marks)."""
    rows = request["rows"][:rounds]
    figure, axes = plt.subplots(figsize=(9, 2.2))
    axes.bar(range(len(rows)), [row["engine"] for row in rows], color="C0", label="engine")
    axes.plot(range(len(rows)), [row["replay"] for row in rows], "o", color="C1", fillstyle="none", label="replay")
    axes.set(xlabel="round", ylabel="accepted")
    axes.legend(ncols=2, loc="upper right")
    return figure
