"""Draws few rows under each other in panels, each panel on the scale that fits its numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from diff_transformer.lab.record import Interval
from diff_transformer.lab.report.figures import INK, MUTED, PAGE, RULE, styled, variant_style

# Inches of a row (its label above its dots), of a panel's title with its axis, and of the legend.
_ROW, _AROUND, _LEGEND = 0.37, 0.78, 0.35
_TICKS_OF_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
_FONT = 9
# Heights in a row, from its top.
_LABEL, _LINE = 0.25, 0.72
# Dots of a row are so far apart.
_APART = 0.16
# The share of a scale that a letter of a level's name takes.
_LETTER = 0.0135


@dataclass(frozen=True)
class Dot:
    """A number with its 95 % interval; `variant` decides its colour and its mark.

    Of a number that is only known to lie below or above `value`, an arrow is drawn that way.
    """

    variant: str
    value: float
    interval: Interval | None = None
    bound: Literal["below", "above"] | None = None
    is_open: bool = False  # of a verdict that does not decide


@dataclass(frozen=True)
class PanelRow:
    """A label, the numbers beside each other on its line, and levels that are drawn as ticks with their names."""

    label: str
    dots: tuple[Dot, ...]
    levels: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""  # at the right, above the line


@dataclass(frozen=True)
class Panel:
    """Rows on one scale. `neutral` is where no variant is ahead; the side of it that is `better` is shaded."""

    title: str
    rows: tuple[PanelRow, ...]
    is_ratio: bool = False  # on a logarithmic scale
    limits: tuple[float, float] | None = None
    neutral: float | None = None
    better: Literal["left", "right", ""] = ""


@styled
def panels(all_panels: Sequence[Panel], labels: Mapping[str, str]) -> Figure:
    """The panels under each other; `labels` names the variants of the legend."""
    heights = [_AROUND + _ROW * len(panel.rows) for panel in all_panels]
    figure = Figure(figsize=(4.8, sum(heights) + _LEGEND), layout="constrained")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05))
    grid = figure.add_gridspec(len(all_panels), 1, height_ratios=heights)
    for number, panel in enumerate(all_panels):
        _draw_panel(figure.add_subplot(grid[number]), panel)
    first = figure.axes[0]
    for variant, label in labels.items():
        first.plot([], [], linewidth=1.8, label=label, **_mark(variant))
    figure.legend(loc="outside lower center", ncols=len(labels), fontsize=_FONT)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10)
    if panel.is_ratio:
        axes.set_xscale("log")
    low, high = panel.limits or _limits(panel)
    axes.set(xlim=(low, high), ylim=(len(panel.rows) + 0.05, -0.05), yticks=[])
    for number, row in enumerate(panel.rows):
        _draw_row(axes, row, float(number))
        if panel.neutral is not None:
            y = number + _LINE
            axes.plot([panel.neutral] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.2, zorder=1)
            side = {"left": (low, panel.neutral), "right": (panel.neutral, high), "": (low, low)}[panel.better]
            axes.fill_between(side, y - 0.24, y + 0.24, color=RULE, alpha=0.45, linewidth=0, zorder=0)
    if panel.is_ratio:
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS_OF_RATIOS if low <= tick <= high]))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("-", "−")))
    axes.tick_params(labelsize=_FONT)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


def _draw_row(axes: Axes, row: PanelRow, top: float) -> None:
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": _FONT}
    axes.text(0.0, top + _LABEL, row.label, color=INK, **style)
    axes.text(1.0, top + _LABEL, row.remark, color=MUTED, ha="right", **style)
    y = top + _LINE
    low, high = axes.get_xlim()
    _draw_levels(axes, row, y)
    for number, dot in enumerate(row.dots):
        # Two that are equal do not hide each other.
        height = y + _APART * (number - (len(row.dots) - 1) / 2)
        mark = _mark(dot.variant)
        if dot.interval is not None and all(map(math.isfinite, dot.interval)):
            axes.plot(dot.interval, [height] * 2, color=mark["color"], linewidth=1.8, solid_capstyle="butt", zorder=3)
        if dot.bound is not None:
            edge, arrow = (low, "<") if dot.bound == "below" else (high, ">")
            axes.plot([dot.value, edge], [height] * 2, color=mark["color"], linewidth=1.8, linestyle=":", zorder=3)
            axes.plot([edge], [height], marker=arrow, markersize=6, color=mark["color"], clip_on=False, zorder=4)
            axes.plot([dot.value] * 2, [height - 0.15, height + 0.15], color=mark["color"], linewidth=1.8, zorder=4)
            continue
        face = {"markerfacecolor": PAGE} if dot.is_open else {}
        axes.plot([dot.value], [height], linestyle="", markersize=6.5, clip_on=False, zorder=4, **{**mark, **face})


def _draw_levels(axes: Axes, row: PanelRow, y: float) -> None:
    """Ticks with their names, on the right of them where there is space, else on the left, else without."""
    low, high = axes.get_xlim()
    taken = [(end, end) for dot in row.dots for end in (dot.value, *(dot.interval or ())) if math.isfinite(end)]
    taken += [(level, level) for level in row.levels.values()]
    for name, level in sorted(row.levels.items(), key=lambda item: item[1]):
        axes.plot([level, level], [y - 0.2, y + 0.2], color=MUTED, linewidth=1.4, zorder=2)
        width = (0.02 + _LETTER * len(name)) * (high - low)
        for offset, align, place in ((3, "left", (level, level + width)), (-3, "right", (level - width, level))):
            others = [one for one in taken if one != (level, level)]
            if (
                all(end <= place[0] or start >= place[1] for start, end in others)
                and low <= place[0] < place[1] <= high
            ):
                style: dict[str, Any] = {"color": MUTED, "fontsize": 8, "va": "center", "ha": align}
                axes.annotate(name, (level, y), xytext=(offset, 0), textcoords="offset points", **style)
                taken.append(place)
                break


def _mark(variant: str) -> dict[str, Any]:
    style = variant_style(variant)
    return {"color": style["colour"] or INK, "marker": style["marker"]}


def _limits(panel: Panel) -> tuple[float, float]:
    """All numbers with their intervals, and where neither is ahead."""
    dots = [dot for row in panel.rows for dot in row.dots]
    numbers = [number for dot in dots for number in (dot.value, *(dot.interval or ()))]
    ends = [number for number in (*numbers, panel.neutral) if number is not None and math.isfinite(number)]
    low, high = min(ends), max(ends)
    if panel.is_ratio:
        return low / 1.25, high * 1.25
    margin = 0.08 * (high - low or 1.0)
    return low - margin, high + margin
