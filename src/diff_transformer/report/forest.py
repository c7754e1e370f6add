"""Differences of arms with their intervals, below each other: a forest plot, one axis for all of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diff_transformer.report.figures import INK, MUTED, PAGE, RULE, THEME, short, styled
from diff_transformer.report.rows import NOT_KNOWN
from diff_transformer.report.verdicts import ANSWERS, verdict_word
from diff_transformer.results import Better, Claimant, Interval, Verdict

# Verdict → (marker, colour, filled): each is told from the others without colour.
MARKS: dict[Verdict | None, tuple[str, str, bool]] = {
    "reproduced": ("o", THEME["diff"][0], True),
    "inconclusive": ("o", INK, False),
    "contrary": ("s", THEME["softmax"][0], True),
    None: ("D", MUTED, False),
}
_ROW = 0.27
# Inches: labels are set by whatever shows the figure, whose letters may be a little wider.
_MARGIN = 0.14
# Inches; the wider one for rows with long labels.
_WIDTH, _WIDER, _LONG = 7.2, 8.6, 34
_LONGEST = 60


@dataclass(frozen=True)
class ForestRow:
    """A row: a difference with its interval, or a heading over those below it, which has no difference.

    Attributes:
        label: what is compared.
        difference: NaN where it is not known.
        interval: None where nothing is known of the spread.
        verdict: None where nothing is claimed.
        claimed_by: whose claim it is on.
        paper: the paper's difference.
        missing: what stands for a difference that is not known.
    """

    label: str
    difference: float | None = None
    interval: Interval | None = None
    verdict: Verdict | None = None
    claimed_by: Claimant = "paper"
    paper: float | None = None
    missing: str = NOT_KNOWN


@styled
def forest(rows: Sequence[ForestRow], *, title: str, xlabel: str, better: Better | None) -> Figure:
    """One dot and interval a row, zero as a line, the paper's difference as a cross, the claim's side shaded.

    What lies far beyond the others is cut at the edge, with an arrow; the table has its numbers.
    """
    width = _WIDER if any(len(row.label) > _LONG for row in rows) else _WIDTH
    figure = Figure(figsize=(width, 1.25 + _ROW * len(rows)), layout=ConstrainedLayoutEngine(w_pad=_MARGIN))
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel)
    low, high = _limits(rows)
    claim = {"higher": (0.0, high), "lower": (low, 0.0), None: None}[better]
    if claim is not None:
        axes.axvspan(*claim, color=RULE, alpha=0.45, linewidth=0, zorder=0)
    axes.axvline(0.0, color=INK, linewidth=1.2, zorder=1)
    for place, row in enumerate(rows):
        if row.difference is not None:
            _draw(axes, place, row, (low, high))
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}".replace("-", "−")))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, pad=8)
    axes.set_yticks(range(len(rows)), [short(row.label, _LONGEST) for row in rows])
    for row, text in zip(rows, axes.get_yticklabels(), strict=True):
        text.set(color=INK, fontsize=9, fontweight="bold" if row.difference is None else "normal")
    _verdicts(axes, rows)
    _keys(figure, rows)
    return figure


def _draw(axes: Axes, place: int, row: ForestRow, limits: tuple[float, float]) -> None:
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


def _at_edge(axes: Axes, edge: float, place: int, arrow: str, colour: str) -> None:
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
    room = 0.06 * (high - low or 1.0)
    # Beside all dots and intervals there is place for what the paper found far away.
    far = [row.paper for row in drawn if row.paper is not None and not low - room <= row.paper <= high + room]
    left, right = (room * (4 if any(sign * paper > 0 for paper in far) else 1) for sign in (-1, 1))
    return low - left, high + right


def _word(row: ForestRow) -> str:
    return "no claim" if row.verdict is None else verdict_word(row.verdict, row.claimed_by)


def _verdicts(axes: Axes, rows: Sequence[ForestRow]) -> None:
    """The verdict of each row in words, on the right."""
    right = axes.secondary_yaxis("right")
    places = [place for place, row in enumerate(rows) if row.difference is not None]
    right.set_yticks(places, [_word(rows[place]) for place in places])
    right.tick_params(axis="y", length=0, pad=8)
    right.spines["right"].set_visible(False)
    for place, text in zip(places, right.get_yticklabels(), strict=True):
        text.set(color=MUTED if rows[place].verdict is None else INK, fontsize=9)


def _keys(figure: Figure, rows: Sequence[ForestRow]) -> None:
    """What the marks mean, below the plot."""
    handles = figure.axes[0]
    for verdict, (marker, colour, filled) in MARKS.items():
        claimants = {row.claimed_by for row in rows if row.difference is not None and row.verdict == verdict}
        if claimants:
            words = ["no claim"] if verdict is None else [verdict] * ("paper" in claimants)
            words += [ANSWERS[verdict]] if verdict is not None and "us" in claimants else []
            style: dict[str, Any] = {"color": colour, "markerfacecolor": colour if filled else PAGE, "linewidth": 1.8}
            handles.plot([], [], marker=marker, label=", or ".join(dict.fromkeys(words)), **style)
    if any(row.paper is not None for row in rows):
        handles.plot([], [], marker="x", linestyle="", color=INK, markeredgewidth=1.6, label="the paper")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
