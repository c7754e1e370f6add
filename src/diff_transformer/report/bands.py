"""A measure over a number (size, tokens, position, bits): a line for each arm, with a band over its seeds."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from diff_transformer.report.figures import DASHES, PAGE, Series, axes_of, colours_of, legend, styled
from diff_transformer.results import Interval

# From this ratio of the largest to the smallest on, an axis is logarithmic.
_WIDE, _TALL = 8, 30
_MOST_TICKS = 8


@dataclass(frozen=True)
class Places:
    """The horizontal axis: its numbers, each with the text that stands for it."""

    label: str
    numbers: tuple[float, ...]
    texts: tuple[str, ...]


@styled
def bands(series: Sequence[Series], places: Places, *, title: str, ylabel: str, paper: Sequence[Series] = ()) -> Figure:
    """Lines with bands where `series` have intervals; `paper`, hollow and dotted; a cross above where y is NaN."""
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
    _scale(axes, places, [value for line in (*series, *paper) for value in line.y if math.isfinite(value)])
    legend(axes)
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
    wide = low > 0 and high / low >= _WIDE
    if wide:
        axes.set_xscale("log")
    if values and min(values) > 0 and max(values) / min(values) >= _TALL:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    at = [math.log(number) if wide else number for number in places.numbers]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    if len(at) <= _MOST_TICKS and min(gaps) > 0.07 * (at[-1] - at[0]):
        axes.set_xticks(places.numbers, places.texts)
        axes.xaxis.set_minor_locator(NullLocator())
    elif not wide:
        axes.xaxis.set_major_locator(MaxNLocator(6))
