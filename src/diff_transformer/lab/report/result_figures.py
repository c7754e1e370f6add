"""Draws results of experiments: differences as forest plots, measures over numbers as lines, verdicts as bars."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from diff_transformer.lab.record import Better, Interval, Verdict
from diff_transformer.lab.report.figures import (
    DASHES,
    INK,
    MUTED,
    PAGE,
    RULE,
    THEME,
    Series,
    axes_of,
    colours_of,
    short,
    styled,
)
from diff_transformer.lab.report.wording import ANSWERS, NOT_KNOWN, verdict_word

# Verdict → (marker, colour, filled): each is told from the others without colour.
MARKS: dict[Verdict | None, tuple[str, str, bool]] = {
    "reproduced": ("o", THEME["diff"][0], True),
    "inconclusive": ("o", INK, False),
    "contrary": ("s", THEME["softmax"][0], True),
    "not comparable": ("X", MUTED, False),
    None: ("D", MUTED, False),
}
# Verdict → (what it is called, fill, edge and hatching): each is told from the others without colour, and the two that
# decide are equally strong.
_FILLS: dict[Verdict | None, tuple[str, str, str, str]] = {
    "reproduced": ("reproduced, or yes", THEME["diff"][0], THEME["diff"][0], ""),
    "inconclusive": ("inconclusive", RULE, INK, ""),
    "contrary": ("contrary, or no", THEME["softmax"][0], PAGE, "////"),
    "not comparable": ("not comparable", PAGE, INK, "xxxx"),
    None: ("nothing claimed", PAGE, MUTED, "...."),
}
# Inches, as wide as other figures, so that a phone shows it whole with legible text: labels stand above their rows.
_WIDTH, _LINE = 4.8, 0.19
# Inches: text is set by whatever shows the figure, whose letters may be a little wider.
_MARGIN = 0.08
# Characters of a line of text.
_LONGEST = 66
# From this ratio of the largest to the smallest number on, an axis is logarithmic.
_WIDE, _TALL = 8, 30
_MOST_TICKS = 8
# Of levels, the highest first.
_LEVEL_DASHES = ("--", "-.", ":")


@dataclass(frozen=True)
class ForestRow:
    """A row: a difference with its interval, or a heading over those below it, which has no difference.

    Attributes:
        label: what is compared.
        difference: NaN where it is not known.
        interval: None where nothing is known of the spread.
        verdict: None where nothing is claimed.
        exploratory: whether the verdict is on a question of ours, and not on a claim of the paper's.
        paper: the paper's difference.
        missing: what stands for a difference that is not known.
        remark: what follows the verdict.
    """

    label: str
    difference: float | None = None
    interval: Interval | None = None
    verdict: Verdict | None = None
    exploratory: bool = False
    paper: float | None = None
    missing: str = NOT_KNOWN
    remark: str = ""


@styled
def forest(rows: Sequence[ForestRow], *, title: str, xlabel: str, better: Better | None) -> Figure:
    """One dot and interval a row, zero as a line, the paper's difference as a cross, the claim's side shaded.

    What lies far beyond the others is cut at the edge, with an arrow; the table has its numbers.
    """
    texts = [_lines(row) for row in rows]
    *places, end = itertools.accumulate(
        (_height(row, lines) for row, lines in zip(rows, texts, strict=True)), initial=0.0
    )
    figure = Figure(figsize=(_WIDTH, 1.35 + _LINE * end), layout=ConstrainedLayoutEngine(w_pad=_MARGIN))
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel)
    low, high = _limits(rows)
    claim = {"higher": (0.0, high), "lower": (low, 0.0), None: None}[better]
    for row, lines, top in zip(rows, texts, places, strict=True):
        _write(axes, row, lines, top)
        if row.difference is not None:
            place = top + len(lines) + 0.5
            if claim is not None:
                axes.fill_between(claim, place - 0.45, place + 0.45, color=RULE, alpha=0.45, linewidth=0, zorder=0)
            axes.plot([0.0, 0.0], [place - 0.45, place + 0.45], color=INK, linewidth=1.2, zorder=1)
            _draw(axes, place, row, (low, high))
    axes.set(xlim=(low, high), ylim=(end, -0.2))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}".replace("-", "−")))
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    _keys(figure, rows)
    return figure


def _lines(row: ForestRow) -> list[str]:
    """The lines of text above a row: its label, and its verdict in a line of its own where the last is full."""
    lines = textwrap.wrap(row.label, _LONGEST)
    if row.difference is not None and len(lines[-1]) + 2 + len(_word(row)) > _LONGEST:
        lines.append("")
    return lines


def _height(row: ForestRow, lines: Sequence[str]) -> float:
    """Lines of text, one for the interval, and space before the next row."""
    return len(lines) + (0.1 if row.difference is None else 1.25)


def _write(axes: Axes, row: ForestRow, lines: Sequence[str], top: float) -> None:
    """A row's label on the left, its verdict on the right."""
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for number, line in enumerate(lines):
        bold = "bold" if row.difference is None else "normal"
        axes.text(0.0, top + number + 0.5, line, color=INK, fontweight=bold, **style)
    if row.difference is not None:
        colour = MUTED if row.verdict is None else INK
        axes.text(1.0, top + len(lines) - 0.5, _word(row), color=colour, ha="right", **style)


def _draw(axes: Axes, place: float, row: ForestRow, limits: tuple[float, float]) -> None:
    """The interval, the paper's cross and the dot of a row."""
    low, high = limits
    marker, colour, filled = MARKS[row.verdict]
    assert row.difference is not None  # headings are not drawn
    if not np.isfinite(row.difference):
        axes.text(0.0, place, f" {row.missing}", color=INK, va="center", fontsize=9, fontstyle="italic")
        return
    if row.interval is not None:
        ends = [min(max(end, low), high) for end in row.interval]
        axes.plot(ends, [place, place], color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2)
        for end, edge, arrow in ((row.interval[0], low, "<"), (row.interval[1], high, ">")):
            if not low <= end <= high:
                _at_edge(axes, edge, place, arrow, colour)
    if row.paper is not None:
        if low <= row.paper <= high:
            style: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "color": INK, "zorder": 3}
            axes.plot([row.paper], [place], marker="x", linestyle="", **style)
        else:
            below = row.paper < low
            away = (6 if below else -6, 0)
            axes.annotate(
                f"× {row.paper:+,.{0 if abs(row.paper) >= 100 else 3}{'f' if abs(row.paper) >= 100 else 'g'}}".replace(
                    "-", "−"
                ),
                (low if below else high, place),
                xytext=away,
                textcoords="offset points",
                ha="left" if below else "right",
                va="center",
                fontsize=8,
                color=INK,
                bbox={"facecolor": PAGE, "edgecolor": "none", "pad": 0.5, "alpha": 0.85},  # an interval may lie there
                zorder=4,
            )
    face = colour if filled else PAGE
    axes.plot([row.difference], [place], marker=marker, markersize=6.5, color=colour, markerfacecolor=face, zorder=5)


def _at_edge(axes: Axes, edge: float, place: float, arrow: str, colour: str) -> None:
    axes.plot([edge], [place], marker=arrow, markersize=6, color=colour, clip_on=False, zorder=4)


def _limits(rows: Sequence[ForestRow]) -> tuple[float, float]:
    """The ends of the axis: all dots and zero; of intervals, what is not far wider than most; the paper where near."""
    drawn = [row for row in rows if row.difference is not None and np.isfinite(row.difference)]
    dots = [row.difference for row in drawn if row.difference is not None]
    halves = [(row.interval[1] - row.interval[0]) / 2 for row in drawn if row.interval is not None]
    reach = max([abs(dot) for dot in dots] + ([3 * median(halves)] if halves else []), default=0.0) or 1.0
    ends = [end for row in drawn if row.interval is not None for end in row.interval if abs(end) <= 1.5 * reach]
    cut = [
        np.sign(end) * 1.5 * reach for row in drawn if row.interval for end in row.interval if abs(end) > 1.5 * reach
    ]
    papers = [row.paper for row in drawn if row.paper is not None and abs(row.paper) <= 3 * reach]
    everything = [0.0, *dots, *ends, *map(float, cut), *papers]
    low, high = min(everything), max(everything)
    margin = 0.06 * (high - low or 1.0)
    # Beside all dots and intervals there is space for the paper's differences that lie far away.
    far = [row.paper for row in drawn if row.paper is not None and not low - margin <= row.paper <= high + margin]
    left, right = (margin * (4 if any(sign * paper > 0 for paper in far) else 1) for sign in (-1, 1))
    return low - left, high + right


def _word(row: ForestRow) -> str:
    word = "no claim" if row.verdict is None else verdict_word(row.verdict, row.exploratory)
    return f"{word}; {row.remark}" if row.remark else word


def _keys(figure: Figure, rows: Sequence[ForestRow]) -> None:
    """What the marks mean, below the plot."""
    handles = figure.axes[0]
    for verdict, (marker, colour, filled) in MARKS.items():
        asked = {row.exploratory for row in rows if row.difference is not None and row.verdict == verdict}
        if asked:
            words = ["no claim"] if verdict is None else [verdict] * (False in asked)
            words += [ANSWERS[verdict]] if verdict is not None and True in asked else []
            style: dict[str, Any] = {"color": colour, "markerfacecolor": colour if filled else PAGE, "linewidth": 1.8}
            handles.plot([], [], marker=marker, label=", or ".join(dict.fromkeys(words)), **style)
    if any(row.paper is not None for row in rows):
        handles.plot([], [], marker="x", linestyle="", color=INK, markeredgewidth=1.6, label="the paper")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)


@styled
def counted(rows: Sequence[tuple[str, Mapping[Verdict | None, int]]]) -> Figure:
    """A bar for each experiment, by name, with a part for each verdict as long as it is frequent, and its number."""
    # As wide as other figures, so that a phone shows it whole with legible text: names stand above their bars.
    figure = Figure(figsize=(4.8, 1.5 + 0.36 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title="Verdicts by experiment", xlabel="comparisons")
    longest = max(sum(counts.values()) for _, counts in rows) or 1
    for place, (name, counts) in enumerate(rows):
        start = 0
        axes.text(0, place - 0.43, short(name, 56), color=INK, fontsize=9, va="center")
        for verdict, (_, fill, edge, hatch) in _FILLS.items():
            count = counts.get(verdict, 0)
            if not count:
                continue
            axes.barh(place, count, left=start, height=0.5, facecolor=fill, edgecolor=edge, hatch=hatch, linewidth=1)
            if count >= 0.025 * longest:
                box = {"facecolor": fill, "edgecolor": "none", "pad": 1.0} if hatch else None
                colour = PAGE if verdict in ("reproduced", "contrary") else INK
                axes.text(
                    start + count / 2, place, str(count), ha="center", va="center", fontsize=9, color=colour, bbox=box
                )
            start += count
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    parts = [
        Patch(facecolor=fill, edgecolor=edge, hatch=hatch, label=word) for word, fill, edge, hatch in _FILLS.values()
    ]
    figure.legend(handles=parts, loc="outside lower center", ncols=2, fontsize=9)
    return figure


@dataclass(frozen=True)
class Places:
    """The horizontal axis: its numbers, each with the text that stands for it."""

    label: str
    numbers: tuple[float, ...]
    texts: tuple[str, ...]


@styled
def bands(
    series: Sequence[Series],
    places: Places,
    *,
    title: str,
    ylabel: str,
    paper: Sequence[Series] = (),
    levels: Sequence[Series] = (),
) -> Figure:
    """Lines with bands where `series` have intervals; `paper`, hollow and dotted; `levels` that lines are read against,
    thin and without marks; a cross above where y is NaN.
    """
    figure, axes = axes_of(title, places.label, ylabel)
    colours = colours_of(series)
    shown = dict(zip((line.label for line in series), colours, strict=True))
    for number, (line, colour) in enumerate(zip(series, colours, strict=True)):
        _band(axes, line, colour)
        dash = DASHES[number % len(DASHES)]
        axes.plot(
            line.x,
            line.y,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            marker=line.marker,
            markersize=5,
            label=line.label,
        )
        lost = [x for x, y in zip(line.x, line.y, strict=True) if not math.isfinite(y)]
        above = axes.get_xaxis_transform()
        height = 0.97 - 0.05 * number
        axes.plot(
            lost, [height] * len(lost), marker="x", linestyle="", color=colour, markeredgewidth=1.8, transform=above
        )
    for line in paper:
        label, colour = f"{line.label}, paper", shown.get(line.label, colours[0])
        axes.plot(
            line.x,
            line.y,
            color=colour,
            linestyle=":",
            linewidth=1,
            marker=line.marker,
            markersize=5,
            markerfacecolor=PAGE,
            label=label,
        )
    for line, dash in zip(levels, _LEVEL_DASHES, strict=False):
        axes.plot(line.x, line.y, color=line.colour, linestyle=dash, linewidth=1.2, label=line.label, zorder=1)
    if any(not math.isfinite(y) for line in series for y in line.y):
        axes.margins(y=0.15)
    _scale(axes, places, [value for line in (*series, *paper, *levels) for value in line.y if math.isfinite(value)])
    figure.set_figheight(3.2 + 0.2 * math.ceil((len(series) + len(paper) + len(levels)) / 2))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, [short(label, 32) for label in labels], loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _band(axes: Axes, line: Series, colour: str) -> None:
    """The intervals of a line as a band, with hatching enough to see it in print."""
    ends: list[tuple[float, Interval]] = [
        (x, interval) for x, interval in zip(line.x, line.intervals, strict=False) if interval is not None
    ]
    if ends:
        x, both = zip(*ends, strict=True)
        low, high = zip(*both, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _scale(axes: Axes, places: Places, values: Sequence[float]) -> None:
    """Logarithmic axes where the numbers span much; a tick at each place where there are few."""
    low, high = min(places.numbers), max(places.numbers)
    # Shares of a whole, such as depths, lie evenly however far they are apart.
    wide = low > 0 and high / low >= _WIDE and not any("%" in text for text in places.texts)
    if wide:
        axes.set_xscale("log")
    if values and min(values) > 0 and max(values) / min(values) >= _TALL:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_power))
        axes.yaxis.set_minor_formatter(NullFormatter())
    at = [math.log(number) if wide else number for number in places.numbers]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    if len(at) <= _MOST_TICKS and min(gaps) > 0.07 * (at[-1] - at[0]):
        axes.set_xticks(places.numbers, places.texts)
        axes.xaxis.set_minor_locator(NullLocator())
    elif wide:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))


def _power(value: float, _: object) -> str:
    """A tick of a logarithmic axis; a power of ten where that is shorter."""
    exponent = round(math.log10(value))
    plain = f"{value:g}"
    raised = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return plain if "e" not in plain and len(plain) <= 5 else raised


def _thousands(value: float, _: object) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
