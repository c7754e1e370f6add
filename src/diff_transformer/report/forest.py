"""Differences of arms with their intervals, below each other: a forest plot, one axis for all of its rows."""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diff_transformer.report.figures import INK, MUTED, PAGE, RULE, THEME, styled
from diff_transformer.report.rows import NOT_KNOWN
from diff_transformer.report.verdicts import ANSWERS, verdict_word
from diff_transformer.results import Better, Claimant, Interval, Verdict

# Verdict → (marker, colour, filled): each is told from the others without colour.
MARKS: dict[Verdict | None, tuple[str, str, bool]] = {
    "reproduced": ("o", THEME["diff"][0], True),
    "inconclusive": ("o", INK, False),
    "contrary": ("s", THEME["softmax"][0], True),
    "not comparable": ("X", MUTED, False),
    None: ("D", MUTED, False),
}
# Inches, as wide as other figures, so that a phone shows it whole with legible text: labels stand above their rows.
_WIDTH, _LINE = 4.8, 0.19
# Inches: text is set by whatever shows the figure, whose letters may be a little wider.
_MARGIN = 0.08
# Characters of a line of text.
_LONGEST = 66


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
        remark: what follows the verdict.
    """

    label: str
    difference: float | None = None
    interval: Interval | None = None
    verdict: Verdict | None = None
    claimed_by: Claimant = "paper"
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
    """The lines of text above a row: its label, and its verdict in a line of its own where the last has no room."""
    lines = textwrap.wrap(row.label, _LONGEST)
    if row.difference is not None and len(lines[-1]) + 2 + len(_word(row)) > _LONGEST:
        lines.append("")
    return lines


def _height(row: ForestRow, lines: Sequence[str]) -> float:
    """Lines of text, one for the interval, and room before the next row."""
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
    room = 0.06 * (high - low or 1.0)
    # Beside all dots and intervals there is place for what the paper found far away.
    far = [row.paper for row in drawn if row.paper is not None and not low - room <= row.paper <= high + room]
    left, right = (room * (4 if any(sign * paper > 0 for paper in far) else 1) for sign in (-1, 1))
    return low - left, high + right


def _word(row: ForestRow) -> str:
    word = "no claim" if row.verdict is None else verdict_word(row.verdict, row.claimed_by)
    return f"{word}; {row.remark}" if row.remark else word


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
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
