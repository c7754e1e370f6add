"""A measure over a number (size, tokens, position, bits): a line for each arm, with a band over its seeds."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from diff_transformer.report.figures import DASHES, PAGE, Series, axes_of, colours_of, short, styled
from diff_transformer.results import Interval

# From this ratio of the largest to the smallest on, an axis is logarithmic.
_WIDE, _TALL = 8, 30
_MOST_TICKS = 8
# Of levels, the highest first.
_LEVEL_DASHES = ("--", "-.", ":")


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
