"""Figures: each a function from result data to a matplotlib figure, and :func:`show`, which puts one on a page.

Engine and replay, drafters and modes differ by marker and line style besides colour; n and intervals stand on each. An
interval is {"value", "low", "high", "n"}. Figures are as wide as a phone, so that their text is readable there.
"""

import csv
import html
import io
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt  # noqa: E402
import pandas as pd
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

matplotlib.use("Agg", force=False)

plt.style.use(Path(__file__).with_name("eagle3.mplstyle"))
PAGE_TEXT = "#010203"
WIDTH = 4.8  # inches
MARKERS = "osD^vP"
LINES = ("-", "--", ":", "-.")
ENGINE, REPLAY = {"linestyle": "-", "fillstyle": "full"}, {"linestyle": "--", "fillstyle": "none"}
LOOKS = {"engine": ENGINE, "replay": REPLAY}
NAME_WIDTH = 24  # letters of a name at the left of a figure, before it goes on in a second line
LOSSES = {  # the bars of a round's end, as report.ENDS names them
    "all drafts accepted": {"color": "C0"},
    "outside the vocabulary": {"color": "C4", "hatch": ".."},
    "first draft wrong": {"color": "C1", "hatch": "//"},
    "later draft wrong": {"color": "C3", "hatch": "xx"},
}
ORDERS = {
    "place": "place in the answer (tokens)",
    "round": "round of the request",
    "request": "request",
    "beside": "other requests at the time",
    "cached": "prompt tokens from the prefix cache",
    "prompt": "tokens of the prompt",
    "distance": "tokens after the cached prefix",
    "sent": "when the request was sent (seconds after the first)",
}


@dataclass(frozen=True)
class Shown:
    """A figure on a page: SVG with alternative text, caption, and links to its PDF and its data."""

    svg: str
    caption: str
    alt: str
    links: tuple[tuple[str, str], ...] = ()

    def _repr_html_(self) -> str:
        links = " · ".join(f'<a href="{html.escape(href)}">{text}</a>' for text, href in self.links)
        image = f'<div role="img" aria-label="{html.escape(self.alt)}">{self.svg}</div>' if self.svg else ""
        caption = f"<figcaption>{html.escape(self.caption)} {links}</figcaption>"
        return f'<figure class="eagle3">{image}{caption}</figure>'


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


# ----------------------------------------------------------------------------------------------------------- acceptance


def acceptance_curves(rows: list[dict]) -> Figure:
    """Rate of acceptance at each draft position, above of all rounds, below of those that reached it.

    Args:
        rows: of :func:`eagle3_lib.reports.report.curve_rows`; one colour a drafter, engine full, replay dashed and open.
    """
    figure, (cumulative, conditional) = plt.subplots(2, figsize=(WIDTH, 5.6), sharex=True)
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    for index, drafter in enumerate(drafters):
        for who, shift in (("engine", -0.05), ("replay", 0.05)):
            points = [row for row in rows if (row["drafter"], row["who"]) == (drafter, who)]
            label = f"{drafter}, {who} (n = {points[0]['rounds']})"
            _line(cumulative, index, shift, points, ("rate", "low", "high"), label=label, **LOOKS[who])
            reached = [row for row in points if row["conditional low"] is not None]
            keys = ("conditional", "conditional low", "conditional high")
            _line(conditional, index, shift, reached, keys, **LOOKS[who])
    positions = sorted({row["position"] for row in rows})
    cumulative.set(ylabel="accepted, of\nall n rounds", ylim=(0, 1))
    conditional.set(
        ylabel="accepted, of those\nthat reached it", xlabel="draft position", ylim=(0, 1), xticks=positions
    )
    figure.legend(loc="outside upper left", ncols=1 if len(drafters) == 1 else 2)
    return figure


def _line(axes: Axes, index: int, shift: float, rows: list[dict], keys: tuple[str, str, str], **look) -> None:
    """A line with error bars over the rows' positions, moved aside by ``shift`` so that two lines stay apart."""
    value, low, high = ([row[key] for row in rows] for key in keys)
    axes.errorbar(
        [row["position"] + shift for row in rows],
        value,
        yerr=_errors({"value": value, "low": low, "high": high}),
        color=f"C{index}",
        marker=MARKERS[index % len(MARKERS)],
        **look,
    )


def acceptance(rows: list[dict]) -> Figure:
    """Mean acceptance length and acceptance rate of each drafter in each engine, engine beside replay.

    Args:
        rows: [{"drafter", "who": "engine" or "replay", "length", "rate"}], the last two intervals.
    """
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    figure, panels = plt.subplots(2, figsize=(WIDTH, 1.6 + 0.9 * len(names)))
    for axes, key, words in zip(panels, ("length", "rate"), ("{:.2f}", "{:.1%}"), strict=True):
        for row in rows:
            index = names.index(row["drafter"])
            place = index + (-0.17 if row["who"] == "engine" else 0.17)
            _dot(axes, index, place, row[key], words, fillstyle=LOOKS[row["who"]]["fillstyle"])
        _name_rows(axes, names)
    n = rows[0]["length"]["n"]
    panels[0].set(xlabel="mean acceptance length (tokens a round)")
    panels[0].set_xlim(left=1)
    panels[1].set(xlabel=f"acceptance rate\n(filled: engine, open: replay; n = {n} requests)")
    panels[1].set_xlim(left=0)
    return figure


def agreement(ranking: list[dict], most: int = 8) -> Figure:
    """Share of the rounds that can tell each hypothesis in which the engine did what it says, the best first.

    Args:
        ranking: of a verdict's evidence; a hypothesis that no round can tell has no share.
    """
    rows = ranking[:most]
    names = [textwrap.fill(row["hypothesis"], NAME_WIDTH) for row in rows]
    lines = sum(1 + name.count("\n") for name in names)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.1 * len(rows) + 0.2 * lines))
    for place, row in enumerate(rows):
        if row["value"] is None:
            axes.text(0.02, place, "no round can tell", va="center")
        else:
            _dot(axes, 0, place, row, "{:.1%}")
    _name_rows(axes, names)
    axes.set(xlim=(0, 1.25), xticks=[0, 0.5, 1], xlabel="reproduced, of the\nrounds that can tell")
    return figure


def losses(rows: list[dict]) -> Figure:
    """How a correct engine's rounds end, as shares of the rounds: one bar a drafter.

    Args:
        rows: of :func:`eagle3_lib.reports.report.loss_rows`; a share that is None is left out of the bar.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.45 * len(rows)))
    before = [0.0] * len(rows)
    for end, look in LOSSES.items():
        shares = [row[end] or 0.0 for row in rows]
        axes.barh(range(len(rows)), shares, left=before, height=0.6, label=end, **look)
        before = [left + share for left, share in zip(before, shares, strict=True)]
    _name_rows(axes, [textwrap.fill(row["drafter"], NAME_WIDTH) for row in rows])
    axes.set(xlim=(0, 1), xlabel="share of the rounds")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def departures(rows: list[dict], where: dict | None = None) -> Figure:
    """Share of departing rounds among those that can tell, one panel an order of :mod:`eagle3_lib.verdict.slices`.

    Args:
        rows: of :func:`eagle3_lib.reports.report.departing_rows`, at least one.
        where: the slice of a verdict, shaded.
    """
    orders = list(dict.fromkeys(row["by"] for row in rows))
    figure, panels = plt.subplots(len(orders), figsize=(WIDTH, 0.8 + 1.35 * len(orders)), squeeze=False, sharey=True)
    for axes, by in zip(panels[:, 0], orders, strict=True):
        parts = [row for row in rows if row["by"] == by]
        starts = [part["from"] - 0.5 for part in parts]
        widths = [part["to"] - part["from"] + 1 for part in parts]
        axes.bar(starts, [part["share"] for part in parts], widths, align="edge", color="C0", edgecolor="C0")
        if where and where["by"] == by:
            _shade(axes, where, parts[0]["from"], parts[-1]["to"])
        axes.set(xlabel=ORDERS[by])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
    panels[0, 0].set_ylim(0, 1.1 * max(row["share"] for row in rows))
    figure.supylabel("share of rounds that depart", fontsize=plt.rcParams["axes.labelsize"])
    if where:
        figure.legend(loc="outside upper left")
    return figure


def _shade(axes: Axes, where: dict, first: int, last: int) -> None:
    """The slice of a verdict as an area, or one area for each of its requests; ``first``, ``last``: of the axis."""
    since = first if where["since"] is None else where["since"]
    until = last + 1 if where["until"] is None else where["until"]
    spans = [(since, until)] if where["requests"] is None else [(number, number + 1) for number in where["requests"]]
    for number, (start, end) in enumerate(spans):
        label = None if number else "the part that the verdict names"
        axes.axvspan(start - 0.5, end - 0.5, color="C1", alpha=0.25, linewidth=0, zorder=0, label=label)


def calibration(rows: list[dict]) -> Figure:
    """Drafts accepted beside what the target's probabilities demand, by that probability.

    Args:
        rows: [{"low", "high": the bin, "drafts", "expected", "found": mean probability and share accepted}].
    """
    figure, axes = plt.subplots(figsize=(WIDTH, WIDTH * 0.8))
    axes.plot([0, 1], [0, 1], linestyle="--", color="C1", label="the target's probabilities")
    expected, found = ([row[key] for row in rows] for key in ("expected", "found"))
    errors = [1.96 * (share * (1 - share) / row["drafts"]) ** 0.5 for share, row in zip(expected, rows, strict=True)]
    axes.errorbar(expected, found, yerr=errors, fmt="o", color="C0", label="the engine, 95 % of a correct one within")
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02), xlabel="probability of the draft", ylabel="share accepted")
    figure.legend(loc="outside upper left")
    return figure


def round_strip(request: dict, rounds: int = 40) -> Figure:
    """The first rounds of one request: accepted tokens by the engine (bars) and by the replay (marks)."""
    rows = request["rows"][:rounds]
    figure, axes = plt.subplots(figsize=(WIDTH, 2.4))
    axes.bar(range(len(rows)), [row["engine"] for row in rows], color="C0", label="engine")
    axes.plot(range(len(rows)), [row["replay"] for row in rows], "o", color="C1", fillstyle="none", label="replay")
    axes.set(xlabel="round", ylabel="accepted", yticks=range(1 + _most(rows)))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def rounds_over_text(request: dict, words: list[str], rounds: int = 14) -> Figure:
    """The first rounds of one request as rows of the tokens that each emitted.

    A round emits its accepted drafts (filled) and one token of the target's own (open); the bar stands where the
    replay's accepted drafts end.

    Args:
        request: of replay.json.
        words: the emitted tokens as text; the first is prefill's, before any round.
    """
    rows = request["rows"][:rounds]
    longest = 1 + _most(rows)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.26 * len(rows)))
    for place, row in enumerate(rows):
        first = row["slot"] - request["prompt_length"] + 2  # a round at a slot emits from the second token after it on
        for column, word in enumerate(words[first : first + row["engine"] + 1]):
            drafted = column < row["engine"]
            look = {"facecolor": "C0", "alpha": 0.35} if drafted else {"facecolor": "none"}
            axes.barh(place, 0.96, left=column + 0.02, height=0.86, edgecolor="C4", **look)
            axes.text(column + 0.5, place, _short(word), ha="center", va="center", fontsize=9, family="monospace")
        axes.plot([row["replay"]] * 2, [place - 0.48, place + 0.48], color="C1", linewidth=3)
    axes.set(xlim=(-0.05, longest + 0.05), ylim=(len(rows) - 0.5, -0.5), ylabel="round", yticks=range(len(rows)))
    axes.set_yticks(range(len(rows)), range(1, len(rows) + 1))
    axes.set_xticks(range(longest + 1))
    axes.set_xlabel("tokens emitted (filled: accepted draft)")
    axes.grid(False)
    return figure


def _most(rows: list[dict]) -> int:
    """The largest accepted count, of the engine or the replay; 0 without a round."""
    return max((max(row["engine"], row["replay"]) for row in rows), default=0)


def _short(word: str, most: int = 9) -> str:
    """A token as it fits into a cell: line ends and blanks visible."""
    shown = word.replace("\n", "↵").replace(" ", "␣")
    return shown if len(shown) <= most else shown[: most - 1] + "…"


# ----------------------------------------------------------------------------------------------------------------- time


def throughput(speeds: dict[str, dict]) -> Figure:
    """Throughput over plain decoding, one request at a time; ``speeds``: mode -> interval of the paired ratio."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.5 * len(speeds)))
    for index, interval in enumerate(speeds.values()):
        _dot(axes, index, index, interval, "{:.2f}x")
    axes.axvline(1, color=PAGE_TEXT, linewidth=1, linestyle=":")
    _name_rows(axes, speeds)
    n = next(iter(speeds.values()))["n"]
    axes.set(xlabel=f"throughput over plain (dotted: equal), n = {n} prompts")
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
            marker=MARKERS[index % len(MARKERS)],
            linestyle=LINES[index % len(LINES)],
            label=mode,
        )
    ticks = [int(level) for level in next(iter(speeds.values()))]
    axes.axhline(1, color=PAGE_TEXT, linewidth=1, linestyle=":")
    axes.set(xlabel="requests at a time", ylabel="throughput over plain", xscale="log", ylim=(0, None))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def latency(latencies: dict[str, dict]) -> Figure:
    """Time to the first token and time of each later one; ``latencies``: mode -> {"first_token_s", "later_token_s"}."""
    figure, (first, later) = plt.subplots(2, figsize=(WIDTH, 1.8 + 0.75 * len(latencies)))
    for index, of_mode in enumerate(latencies.values()):
        for axes, key in ((first, "first_token_s"), (later, "later_token_s")):
            _dot(axes, index, index, {name: 1000 * of_mode[key][name] for name in ("value", "low", "high")}, "{:.0f}")
    for axes in (first, later):
        _name_rows(axes, latencies)
        axes.set_xlim(left=0)
    n = next(iter(latencies.values()))["first_token_s"]["n"]
    first.set(xlabel="time to the first token (ms)")
    later.set(xlabel=f"time of each later token (ms), n = {n} prompts")
    return figure


def step_times(steps: dict[str, dict]) -> Figure:
    """Time of a plain step and of a round of each drafter; ``steps``: mode -> interval in seconds, "plain" among them.

    A round is split at the time of a plain step: what is beyond it is drafting, and checking several tokens at once.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.45 * len(steps)))
    plain = 1000 * steps["plain"]["value"]
    for place, interval in enumerate(steps.values()):
        value, low, high = (1000 * interval[key] for key in ("value", "low", "high"))
        axes.barh(place, min(value, plain), height=0.6, color="C0", label="a plain step" if place == 0 else None)
        if value > plain:
            label = "drafting, and checking the drafts" if place == 1 else None
            axes.barh(place, value - plain, left=plain, height=0.6, color="C1", hatch="//", label=label)
        _dot(axes, None, place, {"value": value, "low": low, "high": high}, "{:.0f}", marker="none")
    _name_rows(axes, steps)
    axes.set(xlabel=f"time of one step or round (ms), n = {steps['plain']['n']} prompts")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def break_even(found: dict[str, dict]) -> Figure:
    """Predicted throughput over plain by drafts in a round; ``found``: name -> {"measured_K", "rows"}.

    The ringed point is where the run was measured; a line goes on beyond the measured positions without markers.
    """
    figure, axes = plt.subplots()
    for index, (name, run) in enumerate(found.items()):
        drafts, speedups = ([row[key] for row in run["rows"]] for key in ("K", "speedup"))
        known = [place for place, row in enumerate(run["rows"]) if not row["beyond_curve"]]
        look = {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINES[index % len(LINES)], "markevery": known}
        axes.plot(drafts, speedups, color=f"C{index}", label=name, **look)
        at = drafts.index(run["measured_K"])
        axes.plot(drafts[at], speedups[at], "o", color=PAGE_TEXT, fillstyle="none", markersize=11)
    axes.axhline(1, color=PAGE_TEXT, linewidth=1, linestyle=":")
    axes.set(xlabel="drafts in a round (ringed: measured)", ylabel="predicted throughput\nover plain", ylim=(0, None))
    axes.set_xticks(drafts)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def profile(result: dict) -> Figure:
    """Share of one decode's busy time by kind of operation."""
    share = dict(sorted(result["share"].items(), key=lambda item: item[1]))
    figure, axes = plt.subplots(figsize=(WIDTH, 3))
    bars = axes.barh(list(share), [100 * value for value in share.values()], color="C0")
    axes.bar_label(bars, [f"{100 * value:.1f} %" for value in share.values()], padding=3)
    axes.set(xlabel=f"share of busy time (%), {result['tokens']} tokens, {result['device'].upper()}", xlim=(0, 118))
    axes.set_xticks(range(0, 101, 25))
    return figure


def communication(decodes: list[dict]) -> Figure:
    """Share of communication in the busy time by requests at a time, a line for each setup.

    Args:
        decodes: of profile.json: {"setup", "batch", "communication_share", ...}; one trace each.
    """
    figure, axes = plt.subplots()
    for index, setup in enumerate(dict.fromkeys(decode["setup"] for decode in decodes)):
        points = [decode for decode in decodes if decode["setup"] == setup]
        axes.plot(
            [point["batch"] for point in points],
            [100 * point["communication_share"] for point in points],
            color=f"C{index}",
            marker=MARKERS[index % len(MARKERS)],
            linestyle=LINES[index % len(LINES)],
            label=setup,
        )
    ticks = sorted({decode["batch"] for decode in decodes})
    axes.set(xlabel="requests at a time", ylabel="communication\n(% of busy time)", xscale="log", ylim=(0, 100))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside upper left", ncols=2)
    return figure


# ---------------------------------------------------------------------------------------------------- data and training


def training(log: list[dict], evaluations: list[dict]) -> Figure:
    """Loss, per-step accuracy, and the held-out mean acceptance length replayed after each epoch."""
    figure, (losses, accuracies, lengths) = plt.subplots(3, figsize=(WIDTH, 6.6))
    if log:
        steps = [row["step"] for row in log]
        losses.plot(steps, _smooth([row["loss"] for row in log]))
        for k in range(len(log[0]["accuracy"])):
            curve = _smooth([row["accuracy"][k] for row in log])
            accuracies.plot(steps, curve, linestyle=LINES[k % len(LINES)], label=f"step {k}")
        accuracies.legend()
    if evaluations:
        means = {key: [e["mean_length"][key] for e in evaluations] for key in ("value", "low", "high")}
        lengths.errorbar([e["epoch"] for e in evaluations], means["value"], yerr=_errors(means), marker="o")
        lengths.set_title(f"n = {evaluations[0]['requests']} held-out texts", fontsize=9)
        if len(evaluations) <= 8:  # an evaluation an epoch; more often, their own ticks would overlap
            lengths.set_xticks([e["epoch"] for e in evaluations])
    losses.set(ylabel="loss\n(mean of 10 batches)")
    accuracies.set(xlabel="batch", ylabel="accuracy\n(mean of 10 batches)", ylim=(0, 1))
    lengths.set(xlabel="epoch", ylabel="replayed\nmean length")
    return figure


def token_lengths(answers) -> Figure:
    """Histogram of answer lengths by split, and, where any answer has a thought, of the lengths of thoughts."""
    thoughts = [end - start for start, end in (answer.reasoning_span for answer in answers if answer.reasoning_span)]
    panels = 2 if thoughts else 1
    figure, axes = plt.subplots(panels, figsize=(WIDTH, 0.4 + 2.2 * panels), squeeze=False)
    splits = sorted({answer.split for answer in answers})
    data = [[len(a.output_ids) for a in answers if a.split == split] for split in splits]
    labels = [f"{split} (n = {len(lengths)})" for split, lengths in zip(splits, data, strict=True)]
    hatches = ["", "//", ".."][: len(splits)]
    axes[0, 0].hist(data, bins=12, label=labels, hatch=hatches)
    axes[0, 0].set(xlabel="answer length (tokens, thought included)" if thoughts else "answer length (tokens)")
    if thoughts:
        axes[1, 0].hist(thoughts, bins=12, color="C2")
        axes[1, 0].set(xlabel=f"thought length (tokens), {len(thoughts)} of {len(answers)} answers")
    for row in axes[:, 0]:
        row.set(ylabel="answers")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def coverage(curves: dict[str, list[dict]], chosen: int | None = None) -> Figure:
    """Share of the target's tokens that a draft vocabulary of each size covers.

    Args:
        curves: name -> [{"size", "coverage"}], such as training and held-out text; the n belongs into the name.
        chosen: the size in use, marked.
    """
    figure, axes = plt.subplots()
    for index, (name, points) in enumerate(curves.items()):
        sizes, shares = [point["size"] for point in points], [point["coverage"] for point in points]
        axes.plot(sizes, shares, marker=MARKERS[index % len(MARKERS)], linestyle=LINES[index % len(LINES)], label=name)
    if chosen:
        axes.axvline(chosen, color=PAGE_TEXT, linewidth=1, linestyle=":")
        axes.annotate(f"{chosen:,}", (chosen, 0), (4, 6), textcoords="offset points")
    axes.set(xlabel="draft vocabulary (tokens)", ylabel="tokens covered", xscale="log", ylim=(0, 1.02))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


# ---------------------------------------------------------------------------------------------------------------- parts


def _dot(axes: Axes, index: int | None, place: float, interval: dict, words: str, **look) -> None:
    """One interval as a horizontal error bar in row ``place``, its value written beside it as ``words`` formats it."""
    look = {"marker": MARKERS[(index or 0) % len(MARKERS)], "linestyle": "none"} | look
    color = PAGE_TEXT if index is None else f"C{index}"
    axes.errorbar([interval["value"]], [place], xerr=_errors(interval), color=color, **look)
    if words:
        right = interval["value"] if interval["high"] is None else interval["high"]
        text, end = words.format(interval["value"]), (right, place)
        axes.annotate(text, end, (5, 0), textcoords="offset points", va="center", annotation_clip=False)


def _name_rows(axes: Axes, names: Iterable[str]) -> None:
    """Names at the left, the first one on top; the right margin holds the written values."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.12)


def span(interval: dict, words: str = "{:.2f}") -> str:
    """An interval in words, which no line end parts: value (low to high); the value alone where nothing else is known, "–" for none."""
    if interval["value"] is None:
        return "–"
    if interval["low"] is None:
        return words.format(interval["value"])
    value, low, high = (words.format(interval[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})".replace(" ", "\u00a0")


def table(rows: list[dict], nothing: str = "nothing to show", **formats: str):
    """Rows as a table of a page: one header line, no index, numbers as ``formats`` (column name -> format) has them.

    Args:
        nothing: what the table says where there are no rows.
    """
    frame = pd.DataFrame(rows or [{"": nothing}])
    known = {name: words for name, words in formats.items() if name in frame}
    return frame.style.hide(axis="index").format(known or None, na_rep="–")


def _errors(interval: dict) -> list[list[float]]:
    """Distances from value to low and high, as matplotlib's error bars want them; 0 where there is no interval."""
    values, lows, highs = (_list(interval[key]) for key in ("value", "low", "high"))
    below = [0.0 if low is None else max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [0.0 if high is None else max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    return [below, above]


def _list(value) -> list[float]:
    return value if isinstance(value, list) else [value]


def _smooth(values: list[float], width: int = 10) -> list[float]:
    """At each place the mean of the last ``width`` values."""
    parts = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
