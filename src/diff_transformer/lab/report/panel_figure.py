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


@dataclass(frozen=True)
class Dot:
    """A number with its 95 % interval; `variant` decides its colour and its mark."""

    variant: str
    value: float
    interval: Interval | None = None
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
    for number, row in enumerate(panel.rows):
        _draw_row(axes, row, float(number))
        if panel.neutral is not None:
            y = number + _LINE
            axes.plot([panel.neutral] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.2, zorder=1)
            side = {"left": (low, panel.neutral), "right": (panel.neutral, high), "": (low, low)}[panel.better]
            axes.fill_between(side, y - 0.24, y + 0.24, color=RULE, alpha=0.45, linewidth=0, zorder=0)
    axes.set(xlim=(low, high), ylim=(len(panel.rows) + 0.05, -0.05), yticks=[])
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
    for name, level in row.levels.items():
        axes.plot([level, level], [y - 0.2, y + 0.2], color=MUTED, linewidth=1.4, zorder=2)
        # Nearest to what lies beyond it, but for the leftmost, which may stand at the edge.
        is_first = level == min(row.levels.values())
        place: dict[str, Any] = {"xytext": (3 if is_first else -3, 0), "ha": "left" if is_first else "right"}
        axes.annotate(name, (level, y), textcoords="offset points", color=MUTED, fontsize=8, va="center", **place)
    for dot in row.dots:
        mark = _mark(dot.variant)
        if dot.interval is not None and all(map(math.isfinite, dot.interval)):
            axes.plot(dot.interval, [y, y], color=mark["color"], linewidth=1.8, solid_capstyle="butt", zorder=3)
        face = {"markerfacecolor": PAGE} if dot.is_open else {}
        axes.plot([dot.value], [y], linestyle="", markersize=6.5, zorder=4, **{**mark, **face})


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
