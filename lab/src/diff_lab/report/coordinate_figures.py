"""Finds the measures that were taken along a coordinate (sizes, tokens, bits), and draws them as lines over it."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from diff_lab.coordinates import NOWHERE, Coordinates, axis
from diff_lab.record import Baseline, Comparison, Interval, Result
from diff_lab.report import figures, wording
from diff_lab.report.experiment_tables import ExperimentResults, slug
from diff_lab.report.figures import Drawing, Series

# Fewer are no line.
FEWEST = 3
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# From this ratio of the largest to the smallest number on, an axis is logarithmic.
_WIDE, _TALL = 8, 30
_MOST_TICKS = 8
# Of levels, the highest first.
_LEVEL_DASHES = ("--", "-.", ":")


@dataclass(frozen=True)
class Panel:
    """One figure: a measure of several variants over the numbers of a coordinate.

    `part` names the coordinates that are the same everywhere in it, `label` is the measure as the vertical axis has it,
    and `texts` stand for the `numbers`, which ascend. `lines` are the means over seeds of each variant, NaN where one
    is not known, with the lowest and the highest seed or, with one seed, the measurement's own interval. `paper` are
    the paper's values and `levels` chance and floor, where they are known at every position.
    """

    name: str
    part: str
    label: str
    axis: str
    numbers: tuple[float, ...]
    texts: tuple[str, ...]
    lines: tuple[Series, ...]
    paper: tuple[Series, ...]
    levels: tuple[Series, ...]
    seeds: int
    measured_intervals: bool


def panels(
    records: Sequence[Result], comparisons: Sequence[Comparison], baselines: Sequence[Baseline] = ()
) -> Iterator[Panel]:
    """Every measure but those of training itself that was taken at three numbers or more and is not always the same."""
    for name in dict.fromkeys(record.name for record in records):
        if name.startswith("training/"):
            continue
        of_measure = [record for record in records if record.name == name]
        for coordinate, positions in _rows(list(dict.fromkeys(record.coordinates for record in of_measure))):
            row = [record for record in of_measure if record.coordinates in positions]
            # What is the same for all variants at every position is no line.
            if len({record.value for record in row}) > 1:
                yield panel_along(coordinate, row, comparisons, baselines)


def _rows(positions: Sequence[Coordinates]) -> Iterator[tuple[str, list[Coordinates]]]:
    """The coordinates that differ in one number alone, with its name: the last that has as many numbers as a line."""
    alike: dict[tuple[tuple[str, str], ...], list[Coordinates]] = {}
    for position in positions:
        words = tuple((name, value if isinstance(value, str) else "") for name, value in position.items())
        alike.setdefault(words, []).append(position)
    for words, members in alike.items():
        for name in (name for name, word in reversed(words) if not word):
            by_others: dict[Coordinates, list[Coordinates]] = {}
            for position in members:
                by_others.setdefault(position.without(name), []).append(position)
            rows = [row for row in by_others.values() if len({position.position(name) for position in row}) >= FEWEST]
            yield from ((name, row) for row in rows)
            if rows:
                break


def panel_along(
    coordinate: str,
    records: Sequence[Result],
    comparisons: Sequence[Comparison] = (),
    baselines: Sequence[Baseline] = (),
) -> Panel:
    """The panel of one measure's records, which differ in one coordinate alone; see `panels`."""
    first, along = records[0], axis(coordinate)
    numbers = {record.coordinates: record.coordinates.position(coordinate) for record in records}
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
    lines, has_single_results = [], False
    for number, variant in enumerate(wording.variants_of(records)):
        of_variant = [record for record in records if record.variant == variant]
        by_position = ((at, [record for record in of_variant if record.coordinates == at]) for at in numbers)
        measured = {position: results for position, results in by_position if results}
        has_single_results |= all(len(results) == 1 for results in measured.values())
        lines.append(
            Series(
                wording.variant_label(variant),
                [numbers[position] for position in measured],
                [fmean(result.value for result in results) for results in measured.values()],
                intervals=[_interval(results) for results in measured.values()],
                **figures.variant_style(variant, _MARKERS[number % len(_MARKERS)]),
            )
        )
    return Panel(
        name=first.name,
        part=first.coordinates.without(coordinate).label,
        label=f"{first.name.split('/', 1)[-1].replace('_', ' ').replace('/', ' ')}{wording.unit_and_direction(first)}",
        axis=along.title,
        numbers=tuple(numbers.values()),
        texts=tuple(along.text(position[coordinate]) for position in numbers),
        lines=tuple(lines),
        paper=tuple(_paper(first.name, numbers, comparisons)),
        levels=tuple(_levels(first.name, numbers, baselines)),
        seeds=len({record.seed for record in records}),
        measured_intervals=has_single_results and any(record.interval is not None for record in records),
    )


def _interval(results: Sequence[Result]) -> Interval | None:
    values = [result.value for result in results]
    if not all(map(math.isfinite, values)):
        return None
    return results[0].interval if len(results) == 1 else (min(values), max(values))


def _levels(name: str, numbers: Mapping[Coordinates, float], baselines: Sequence[Baseline]) -> Iterator[Series]:
    """Chance, floor and elimination as lines, where they are known at every position; of equal ones the highest."""
    by_position = {one.coordinates: one.levels() for one in baselines if one.name == name and one.is_accuracy}
    known = [by_position.get(position, by_position.get(NOWHERE, {})) for position in numbers]
    shown: list[list[float]] = []
    for label in reversed(list(dict.fromkeys(name for levels in known for name in levels))):
        heights = [levels[label] for levels in known if label in levels]
        if len(heights) == len(numbers) and heights not in shown:
            shown.append(heights)
            yield Series(label, list(numbers.values()), heights, colour=figures.MUTED)


def _paper(name: str, numbers: Mapping[Coordinates, float], comparisons: Sequence[Comparison]) -> Iterator[Series]:
    """A line for each variant of which the paper gives as many values as a line needs."""
    values: dict[str, dict[float, float]] = {}
    for row in comparisons:
        if row.name == name and row.coordinates in numbers and row.paper is not None:
            for variant, value in zip((row.variant, row.against), row.paper, strict=True):
                if math.isfinite(value):
                    values.setdefault(variant, {})[numbers[row.coordinates]] = value
    for variant, points in values.items():
        if len(points) >= FEWEST:
            x = sorted(points)
            y = [points[number] for number in x]
            yield Series(wording.variant_label(variant), x, y, **figures.variant_style(variant))


def line_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """A figure of each measure that was taken along a coordinate; their titles begin with `called`."""
    file = results.file
    drawn = list(panels(file.records, file.comparisons, file.baselines))
    often = Counter((panel.name, panel.part) for panel in drawn)
    missing = wording.DIVERGED if any(variant["diverged"] for variant in results.variants) else wording.NOT_KNOWN
    used: set[str] = set()
    for panel in drawn:
        part = f", {panel.part}" if panel.part else ""
        along = f"-{panel.axis}" if often[panel.name, panel.part] > 1 else ""
        name = slug(f"{results.anchor}-{panel.name}{part}{along}")
        name = next(unused for unused in (name, *(f"{name}-{n}" for n in range(2, 1000))) if unused not in used)
        used.add(name)
        ends = []
        for line in (*panel.lines, *panel.paper, *panel.levels):
            first, last = (wording.format_number(line.y[index], missing=missing) for index in (0, -1))
            ends.append(f"{line.label} goes from {first} to {last}")
        title = f"{called}: {wording.measure_words(panel.name)}{part}"
        alt = f"{called}, {panel.label}{part} by {panel.axis}: {'; '.join(ends)}."
        yield Drawing(
            bands(panel, title=title), alt, _caption(panel, missing), title=f"{title} by {panel.axis}", name=name
        )


def _caption(panel: Panel, missing: str) -> str:
    if panel.seeds > 1:
        caption = f"Mean of {panel.seeds} seeds; bands from the lowest to the highest."
    else:
        caption = "One seed; bands are 95 % intervals of the measurement." if panel.measured_intervals else "One seed."
    if panel.paper:
        caption += " Dotted, hollow: the paper."
    if any(not math.isfinite(value) for line in panel.lines for value in line.y):
        caption += f" A cross above: {'a run diverged' if missing == wording.DIVERGED else missing}."
    return caption


@figures.styled
def bands(panel: Panel, *, title: str, from_zero: bool = False) -> Figure:
    """Lines with bands for intervals; the paper's hollow and dotted, levels thin; a cross above where y is NaN."""
    figure, axes = figures.axes_of(title, panel.axis, panel.label)
    colours = figures.colours_of(panel.lines)
    by_label = dict(zip((line.label for line in panel.lines), colours, strict=True))
    marked: dict[str, Any] = {"linewidth": 1.6, "markersize": 5}
    for number, (line, colour) in enumerate(zip(panel.lines, colours, strict=True)):
        ends = [(x, *interval) for x, interval in zip(line.x, line.intervals, strict=False) if interval is not None]
        if ends:
            x, low, high = zip(*ends, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        dashes = figures.DASHES[number % len(figures.DASHES)]
        style = marked | {"color": colour, "linestyle": dashes, "marker": line.marker}
        axes.plot(line.x, line.y, label=line.label, **style)
        lost = [x for x, y in zip(line.x, line.y, strict=True) if not math.isfinite(y)]
        cross: dict[str, Any] = {"marker": "x", "linestyle": "", "color": colour, "markeredgewidth": 1.8}
        axes.plot(lost, [0.97 - 0.05 * number] * len(lost), transform=axes.get_xaxis_transform(), **cross)
    for line in panel.paper:
        colour = by_label.get(line.label, colours[0])
        style = marked | {"color": colour, "linestyle": ":", "linewidth": 1, "marker": line.marker}
        axes.plot(line.x, line.y, label=f"{line.label}, paper", markerfacecolor=figures.PAGE, **style)
    for line, dash in zip(panel.levels, _LEVEL_DASHES, strict=False):
        axes.plot(line.x, line.y, color=line.colour, linestyle=dash, linewidth=1.2, label=line.label, zorder=1)
    if any(not math.isfinite(y) for line in panel.lines for y in line.y):
        axes.margins(y=0.15)
    if from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    lines = (*panel.lines, *panel.paper, *panel.levels)
    values = [value for line in lines for value in line.y if math.isfinite(value)]
    _scale(axes, panel, tall=not from_zero and bool(values) and min(values) > 0 and max(values) / min(values) >= _TALL)
    figure.set_figheight(3.2 + 0.2 * math.ceil(len(lines) / 2))
    figures.legend(axes, figure, loc="outside lower center", ncols=2)
    return figure


def _scale(axes: Axes, panel: Panel, *, tall: bool) -> None:
    """Logarithmic axes where the numbers span much; a tick at each position where there are few."""
    low, high = min(panel.numbers), max(panel.numbers)
    # Shares of a whole, such as depths, lie evenly however far they are apart.
    wide = low > 0 and high / low >= _WIDE and not any("%" in text for text in panel.texts)
    if wide:
        axes.set_xscale("log")
    if tall:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_power))
        axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = [math.log(number) if wide else number for number in panel.numbers]
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    if len(ticks) <= _MOST_TICKS and min(gaps, default=math.inf) > 0.07 * (ticks[-1] - ticks[0]):
        axes.set_xticks(panel.numbers, panel.texts)
        axes.xaxis.set_minor_locator(NullLocator())
    elif wide:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))


def _power(value: float, _: object) -> str:
    """A tick of a logarithmic axis; a power of ten where that is shorter."""
    exponent = round(math.log10(value))
    plain = f"{value:g}"
    raised = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return plain if "e" not in plain and len(plain) <= 5 else raised


def thousands(value: float, _: object) -> str:
    """A tick of an axis that has room for few digits: "20k", "1.5M"."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
