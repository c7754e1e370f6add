"""Finds the measures that were taken along an axis (sizes, tokens, bits), and makes their records lines over it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from diff_transformer.lab.coordinates import Coordinates, axis, value_text
from diff_transformer.lab.record import Baseline, Comparison, Interval, Result
from diff_transformer.lab.report.figures import MUTED, Series, variant_colour, variant_marker
from diff_transformer.lab.report.result_figures import Places
from diff_transformer.lab.report.wording import ARROWS, variant_label, variants_of

# Fewer are no line.
FEWEST = 3
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Panel:
    """One figure: a measure of several variants over a number.

    Attributes:
        name: the measure.
        part: the coordinates that are the same everywhere in it, as a reader is told of them; "" where there are none.
        lines: one for each variant: means over seeds, NaN where one is not known; intervals from the lowest to the
            highest seed, or, with one seed, the measurement's own.
        paper: the paper's values, where it gives as many.
        seeds: over how many.
        own_intervals: whether bands are the measurement's own intervals.
        levels: chance and floor, where they are known at every place.
    """

    name: str
    part: str
    label: str
    places: Places
    lines: tuple[Series, ...]
    paper: tuple[Series, ...]
    seeds: int
    own_intervals: bool
    levels: tuple[Series, ...] = ()


@dataclass(frozen=True)
class _Row:
    """Coordinates that differ in one number alone.

    Attributes:
        name: of the coordinate that differs.
        rest: the others.
        numbers: coordinates → where they lie on the axis, ascending.
    """

    name: str
    rest: Coordinates
    numbers: Mapping[Coordinates, float]


def panels(
    records: Sequence[Result], comparisons: Sequence[Comparison], baselines: Sequence[Baseline] = ()
) -> Iterator[Panel]:
    """Every measure that was taken at three numbers or more and is not the same at all of them.

    Args:
        records: of all variants and seeds; those of training (sizes, seconds) are not drawn.
        comparisons: what the paper's values are taken from.
        baselines: of the accuracies.
    """
    for name in dict.fromkeys(record.name for record in records):
        if name.startswith("training/"):
            continue
        own = [record for record in records if record.name == name]
        for row in _rows(list(dict.fromkeys(record.coordinates for record in own))):
            here = [record for record in own if record.coordinates in row.numbers]
            # What is the same for all variants at every place is no line.
            if len({record.value for record in here}) > 1:
                panel = _panel(name, row, here, comparisons)
                known = {one.coordinates: one for one in baselines if one.name == name and one.is_accuracy}
                has_levels = row.numbers.keys() <= known.keys()
                yield replace(panel, levels=tuple(_levels(row.numbers, known))) if has_levels else panel


def _rows(places: Sequence[Coordinates]) -> Iterator[_Row]:
    """Of coordinates with the same names and words, those along the last name that has as many numbers as a line."""
    alike: dict[tuple[tuple[str, str], ...], list[Coordinates]] = {}
    for place in places:
        words = tuple((name, value if isinstance(value, str) else "") for name, value in place.items())
        alike.setdefault(words, []).append(place)
    for words, members in alike.items():
        for name in (name for name, word in reversed(words) if not word):
            by_rest: dict[Coordinates, dict[Coordinates, float]] = {}
            for place in members:
                by_rest.setdefault(place.without(name), {})[place] = place.place(name)
            found = {rest: row for rest, row in by_rest.items() if len(set(row.values())) >= FEWEST}
            for rest, row in found.items():
                yield _Row(name, rest, dict(sorted(row.items(), key=lambda item: item[1])))
            if found:
                break


def _panel(name: str, row: _Row, records: Sequence[Result], comparisons: Sequence[Comparison]) -> Panel:
    lines, own = [], False
    for number, variant in enumerate(variants_of(records)):
        points: dict[Coordinates, list[Result]] = {place: [] for place in row.numbers}
        for record in records:
            if record.variant == variant:
                points[record.coordinates].append(record)
        taken = {place: found for place, found in points.items() if found}
        own = own or all(len(found) == 1 for found in taken.values())
        lines.append(
            Series(
                variant_label(variant),
                [row.numbers[place] for place in taken],
                [fmean(record.value for record in found) for found in taken.values()],
                colour=variant_colour(variant),
                intervals=[_band(found) for found in taken.values()],
                marker=variant_marker(variant, _MARKERS[number % len(_MARKERS)]),
            )
        )
    first = records[0]
    unit = f" ({first.unit})" if first.unit else ""
    texts = tuple(value_text(row.name, place[row.name]) for place in row.numbers)
    return Panel(
        name=name,
        part=row.rest.label,
        label=f"{name.split('/', 1)[-1].replace('_', ' ').replace('/', ' ')}{unit}{ARROWS[first.better]}",
        places=Places(axis(row.name).title, tuple(row.numbers.values()), texts),
        lines=tuple(lines),
        paper=tuple(_paper(name, row.numbers, comparisons)),
        seeds=len({record.seed for record in records}),
        own_intervals=own and any(record.interval is not None for record in records),
    )


def _levels(numbers: Mapping[Coordinates, float], known: Mapping[Coordinates, Baseline]) -> Iterator[Series]:
    """Chance, floor and elimination as lines; only the highest of those that are the same."""
    x = list(numbers.values())
    names = list(dict.fromkeys(name for place in numbers for name in known[place].levels()))
    heights = {name: [known[place].levels().get(name) for place in numbers] for name in reversed(names)}
    shown: list[list[float]] = []
    for label, values in heights.items():
        y = [value for value in values if value is not None]
        if len(y) == len(x) and y not in shown:
            shown.append(y)
            yield Series(label, x, y, colour=MUTED)


def _band(found: Sequence[Result]) -> Interval | None:
    values = [record.value for record in found]
    if not all(map(math.isfinite, values)):
        return None
    return found[0].interval if len(found) == 1 else (min(values), max(values))


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
            yield Series(
                variant_label(variant),
                x,
                [points[place] for place in x],
                variant_colour(variant),
                marker=variant_marker(variant),
            )
