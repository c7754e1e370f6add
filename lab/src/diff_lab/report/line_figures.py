"""Draws measures as lines: validation curves over training, differences of losses, and measures along a coordinate."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator, StrMethodFormatter

from diff_lab.coordinates import NO_COORDINATES, Coordinates, axis
from diff_lab.learning import ACCURACY_CURVE, CURVES, LOSS_CURVE, curves_of_one_rate
from diff_lab.record import Baseline, Result
from diff_lab.report import wording
from diff_lab.report.experiments import ExperimentResults, slug
from diff_lab.report.plots import CYCLE, MUTED, Drawing, Series, ends_in_words, line_plot, variant_style
from diff_lab.report.wording import format_number, variant_label
from diff_lab.statistics import mean_interval

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Fewer numbers of a coordinate are no line; from this ratio of the largest to the smallest on, an axis is logarithmic.
FEWEST, _WIDE, _TALL = 3, 8, 30
# Of losses what lies above the curves at this share of the training is cut off.
_BEGINNING = 0.1


def frame(records: Sequence[Result], coordinate: str) -> pd.DataFrame:
    """A row for each record: variant, seed, position along the coordinate, value, and the ends of its interval."""
    unknown = (math.nan, math.nan)
    rows = [
        (one.variant, str(one.seed), one.coordinates.position(coordinate), one.value, *(one.interval or unknown))
        for one in records
    ]
    return pd.DataFrame(rows, columns=["variant", "seed", "x", "value", "low", "high"])


def _whole(data: pd.DataFrame) -> pd.DataFrame:
    """The steps of each variant that all of its seeds have: where one diverged, the others are not its mean."""
    present = data.groupby(["variant", "x"]).value.transform("size")
    return data[present == data.groupby("variant").seed.transform("nunique")]


def _mean_lines(data: pd.DataFrame, variants: Sequence[str], *, student: bool = False) -> list[Series]:
    """A line for each variant of a `frame`: the mean over seeds, NaN where one is, with its interval.

    That is Student's, or the lowest and the highest seed, or with one seed the measurement's own.
    """
    lines = []
    for number, variant in enumerate(variants):
        by_x = data[data.variant == variant].groupby("x")
        means = by_x.value.apply(lambda values: values.mean(skipna=False))
        if student:
            ends = [mean_interval(list(values)) or (math.nan, math.nan) for _, values in by_x.value]
        elif data.seed.nunique() > 1:
            ends = list(zip(by_x.value.min(), by_x.value.max(), strict=True))
        else:
            ends = list(zip(by_x.low.min(), by_x.high.max(), strict=True))
        known = [pair if math.isfinite(mean) else (math.nan, math.nan) for mean, pair in zip(means, ends, strict=True)]
        style = variant_style(variant, _MARKERS[number % len(_MARKERS)])
        lines.append(Series(variant_label(variant), list(means.index), list(means), intervals=known, **style))
    return lines


# --- Validation over training, and the differences of losses ---


def learning_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """The curves of each size that was trained, and of losses the differences; their titles begin with `called`."""
    file = results.file
    curves = [one for one in file.records if one.name in CURVES and "step" in one.coordinates]
    # The file of a figure says which validation it shows where an experiment has two, as encoders have.
    has_both = len({one.name for one in curves}) > 1
    for name, at in dict.fromkeys((one.name, one.coordinates.without("step")) for one in curves):
        records = [one for one in curves if one.name == name and one.coordinates.without("step") == at]
        data, word = frame(records, "step"), "accuracy" if name == ACCURACY_CURVE else "loss"
        if data.x.nunique() < 2:
            continue
        tokens = _tokens_per_step(results, at) if name == LOSS_CURVE else None
        data["x"] *= tokens or 1
        over = "tokens of training" if tokens else "step of training"
        part = f", {at.label}" if at else ""
        lines = _mean_lines(_whole(data), wording.variants_of(records), student=True)
        levels = known_levels(file.baselines) if name == ACCURACY_CURVE else {}
        figure = line_plot(
            lines,
            title=f"{called}: validation {word}{part}",
            xlabel=over,
            ylabel=f"validation {word}{' ↑' if name == ACCURACY_CURVE else ' (nats/token) ↓'}",
            levels=levels,
            limits=(0.0, 1.0) if name == ACCURACY_CURVE else _loss_limits(lines),
        )
        ends = [*map(ends_in_words, lines), *(f"{level} is drawn as a line" for level in levels)]
        title = f"{called}: validation {word}{part} over training"
        kind = f"learning-{word}" if has_both else "learning"
        cut = "" if name == ACCURACY_CURVE else " The beginning is cut off."
        caption = _seeds(data, "are 95 % intervals (Student's t), cut at the axis") + cut
        yield Drawing(figure, f"{title}: {'; '.join(ends)}.", caption, title, slug(f"{results.anchor}-{kind}{part}"))
        if name == LOSS_CURVE:
            yield from _differences(results, called, data, at, over)


def known_levels(baselines: Sequence[Baseline]) -> dict[str, float]:
    """The levels of the validation accuracy by name, "chance 0.06"; of equal ones the last, which tells the most."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().items()]
    by_height = {height: label for label, height in levels}
    return {f"{label} {format_number(height, 2)}": height for height, label in by_height.items()}


def _tokens_per_step(results: ExperimentResults, at: Coordinates) -> int | None:
    """How many tokens a step of the runs of one size has; None in results that do not tell."""
    known = [one.get("tokens_per_step") for one in results.variants if Coordinates(one["coordinates"]) == at]
    return known[0] if known else None


def _seeds(data: pd.DataFrame, bands: str) -> str:
    seeds = data.seed.nunique()
    return f"Mean of {seeds} seeds; bands {bands}." if seeds > 1 else "One seed."


def _differences(
    results: ExperimentResults, called: str, data: pd.DataFrame, at: Coordinates, over: str
) -> Iterator[Drawing]:
    """How much higher the loss of one variant is than that of another, where two of them are compared."""
    values = {variant: of_variant.set_index(["x", "seed"]).value for variant, of_variant in data.groupby("variant")}
    paired: dict[str, pd.DataFrame] = {}
    compared = dict.fromkeys((row.variant, row.against) for row in results.file.comparisons)
    for first, second in (pair for pair in compared if values.keys() >= set(pair)):
        shared = values[first].index.intersection(values[second].index)
        difference = (values[first][shared] - values[second][shared]).reset_index()
        label = wording.pair_label(first, second)
        paired[label] = difference.assign(variant=label)
    if not paired:
        return
    lines = _mean_lines(_whole(pd.concat(paired.values())), list(paired), student=True)
    lines = [replace(line, colour=CYCLE[number % len(CYCLE)]) for number, line in enumerate(lines) if line.x]
    part = f", {at.label}" if at else ""
    title = f"{called}: difference in validation loss{part} over training"
    figure = line_plot(
        lines,
        title=f"{called}: difference in loss{part}",
        xlabel=over,
        ylabel="first − second (nats/token)",
        levels={"equal": 0.0},
        limits=_loss_limits(lines, 0.0),
    )
    caption = (
        "Differences in validation loss over paired seeds, with 95 % intervals (Student's t), cut at the axis: below 0 "
        "the first variant is ahead. The beginning is cut off."
    )
    fair = {(first.variant, second.variant, first.coordinates) for first, second in curves_of_one_rate(results.file)}
    if not all((*pair, at) in fair for pair in compared if values.keys() >= set(pair)):
        caption += (
            " Where two variants have different learning rates, what stands before the end, with the places where a "
            "curve changes its sign, comes of the rates as well."
        )
    name = slug(f"{results.anchor}-learning-difference{part}")
    yield Drawing(figure, f"{title}: {'; '.join(map(ends_in_words, lines))}.", caption, title, name)


def _loss_limits(lines: Sequence[Series], *levels: float) -> tuple[float, float] | None:
    """The ends of an axis for losses: all means but those of the beginning, and all levels.

    Where every run diverged in the beginning, its means are all there is; None where there is nothing at all.
    """
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    if not points:
        return None
    begin = _BEGINNING * max(x for line in lines for x in line.x)
    values = [*([y for x, y in points if x >= begin] or [y for _, y in points]), *levels]
    margin = 0.06 * (max(values) - min(values) or 1.0)
    return min(values) - margin, max(values) + margin


# --- A measure along a coordinate: sizes, tokens, depths, bits ---


def coordinate_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """A figure of each measure but those of training that was taken at three numbers or more, and is not always the
    same; their titles begin with `called`.
    """
    file, used = results.file, Counter[str]()
    has_diverged = any(variant["diverged"] for variant in results.variants)
    for name in dict.fromkeys(record.name for record in file.records if not record.name.startswith("training/")):
        records = [record for record in file.records if record.name == name]
        for coordinate, positions in _rows(list(dict.fromkeys(record.coordinates for record in records))):
            row = [record for record in records if record.coordinates in positions]
            # What is the same for all variants at every position is no line.
            if len({record.value for record in row}) < 2:
                continue
            label = positions[0].without(coordinate).label
            part = f", {label}" if label else ""
            drawing = along(
                coordinate,
                row,
                f"{called}: {wording.measure_words(name)}{part}",
                baselines=file.baselines,
                missing=wording.DIVERGED if has_diverged else wording.NOT_KNOWN,
            )
            drawing_name = slug(f"{results.anchor}-{name}{part}")
            used[drawing_name] += 1
            again = f"-{used[drawing_name]}" if used[drawing_name] > 1 else ""
            yield replace(drawing, name=drawing_name + again)


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


def along(
    coordinate: str,
    records: Sequence[Result],
    title: str,
    *,
    baselines: Sequence[Baseline] = (),
    missing: str = wording.NOT_KNOWN,
) -> Drawing:
    """One measure's records, which differ in one coordinate alone, as a line for each variant over its numbers."""
    first, described, data = records[0], axis(coordinate), frame(records, coordinate)
    numbers = {record.coordinates: record.coordinates.position(coordinate) for record in records}
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
    lines = _mean_lines(data, wording.variants_of(records))
    levels = list(_levels(first.name, numbers, baselines))
    measure = f"{first.name.split('/', 1)[-1].replace('_', ' ').replace('/', ' ')}{wording.unit_and_direction(first)}"
    figure = line_plot([*lines, *levels], title=title, xlabel=described.title, ylabel=measure)
    axes = figure.axes[0]
    _scale(axes, list(numbers.values()), [described.text(at[coordinate]) for at in numbers])
    values = data.value[data.value.notna()]
    if len(values) and min(values) > 0 and max(values) >= _TALL * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    words = "; ".join(map(ends_in_words, (*lines, *levels))).replace(wording.DIVERGED, missing)
    caption = _seeds(data, "from the lowest to the highest")
    if data.seed.nunique() < 2 and data.low.notna().any():
        caption += " Bands are 95 % intervals of the measurement."
    if data.value.isna().any():
        caption += f" A cross above: {'a run diverged' if missing == wording.DIVERGED else missing}."
    whole_title = f"{title} by {described.title}"
    return Drawing(figure, f"{whole_title}: {measure}. {words}.", caption, whole_title)


def _levels(name: str, numbers: Mapping[Coordinates, float], baselines: Sequence[Baseline]) -> Iterator[Series]:
    """Chance, floor and elimination as lines, where they are known at every position; of equal ones the highest."""
    by_position = {one.coordinates: one.levels() for one in baselines if one.name == name and one.is_accuracy}
    known = [by_position.get(position, by_position.get(NO_COORDINATES, {})) for position in numbers]
    shown: list[list[float]] = []
    for label in reversed(list(dict.fromkeys(name for levels in known for name in levels))):
        heights = [levels[label] for levels in known if label in levels]
        if len(heights) == len(numbers) and heights not in shown:
            shown.append(heights)
            yield Series(label, list(numbers.values()), heights, MUTED, "")


def _scale(axes: Axes, positions: Sequence[float], texts: Sequence[str]) -> None:
    """A logarithmic axis where the numbers span much; a tick at each position where there are few."""
    low, *_, high = positions
    # Shares of a whole, such as depths, lie evenly however far they are apart.
    wide = low > 0 and high / low >= _WIDE and not any("%" in text for text in texts)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if low >= 1 else StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    places = [math.log(number) if wide else number for number in positions]
    gap = min((after - before for before, after in itertools.pairwise(places)), default=0.0)
    if len(places) <= 8 and gap >= 0.07 * (places[-1] - places[0]):
        axes.set_xticks(positions, texts)
        axes.xaxis.set_minor_locator(NullLocator())
