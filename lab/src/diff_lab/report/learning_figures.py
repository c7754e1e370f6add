"""Draws validation curves: every variant over training with chance and floor, and the differences of losses."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diff_lab.coordinates import Coordinates
from diff_lab.learning import (
    ACCURACY_CURVE,
    LOSS_CURVE,
    VariantCurves,
    are_equal_and_known,
    compared_curves,
    curves_of,
    curves_of_one_rate,
    learning_rates,
    reported_accuracies,
)
from diff_lab.record import Baseline, Interval
from diff_lab.report import figures, wording
from diff_lab.report.coordinate_figures import thousands
from diff_lab.report.experiment_tables import ExperimentResults, slug
from diff_lab.report.figures import CYCLE, DASHES, INK, MUTED, PAGE, Drawing, Series
from diff_lab.statistics import mean_interval

# A curve of fewer validations is none.
FEWEST = 2
# Of losses what lies above the curves at this share of the training is cut off.
_BEGINNING = 0.1
_UNLIKE_RATES = (
    "Where two variants have different learning rates, what stands before the end, with the places where a curve "
    "changes its sign, comes of the rates as well."
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LEVEL_DASHES = {"chance": "-", "floor": "-.", "by elimination": "--"}


@dataclass(frozen=True)
class Level:
    """A horizontal line with its name beside it; one that is to be reached is drawn faintly."""

    label: str
    height: float
    dashes: Any = "-"
    is_wished: bool = False


def learning_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """The curves of each size that was trained, and of losses the differences; their titles begin with `called`."""
    curves = [one for one in curves_of(results.file.records) if _is_curve(one)]
    # The file of a figure says which validation it shows where an experiment has two, as encoders have.
    has_both = len({one.name for one in curves}) > 1
    for name, at in dict.fromkeys((one.name, one.coordinates) for one in curves):
        here = [one for one in curves if (one.name, one.coordinates) == (name, at)]
        levels = list(_levels(results, name, here))
        kind = ("-accuracy" if name == ACCURACY_CURVE else "-loss") if has_both else ""
        yield _curves_drawing(results, called, here, levels, f"{results.anchor}-learning{kind}")
        if name == LOSS_CURVE:
            pairs = compared_curves(results.file.records, results.file.comparisons)
            differences = [pair for pair in pairs if pair[0].coordinates == at and all(map(_is_curve, pair))]
            if differences:
                yield _differences_drawing(results, called, differences)


def _is_curve(curves: VariantCurves) -> bool:
    return len(curves.means()[0]) >= FEWEST


def _levels(results: ExperimentResults, name: str, curves: Sequence[VariantCurves]) -> Iterator[Level]:
    """Chance, floor and elimination of an accuracy, and those to be reached; of losses the final one of whom others are
    compared with, where all have one learning rate.
    """
    if name == ACCURACY_CURVE:
        yield from _known_levels([one for one in results.file.baselines if one.name == name])
        for accuracy in reported_accuracies(results.file.baselines):
            yield Level(f"{accuracy:g}", accuracy, is_wished=True)
        return
    compared_with = dict.fromkeys(row.against for row in results.file.comparisons)
    of_variants = {one.variant: one for one in curves}
    against = next((of_variants[variant] for variant in compared_with if variant in of_variants), None)
    rates = learning_rates(results.file)
    is_fair = are_equal_and_known(rates.get((one.variant, one.coordinates)) for one in curves)
    if is_fair and against is not None and math.isfinite(end := fmean(against.finals)):
        yield Level(f"end {wording.format_number(end)}", end, is_wished=True)


def _known_levels(baselines: Sequence[Baseline]) -> Iterator[Level]:
    """Each height once: of equal ones the highest word."""
    heights: dict[float, str] = {}
    for baseline in baselines:
        heights.update({height: label for label, height in baseline.levels().items()})
    for height, label in heights.items():
        yield Level(f"{label} {wording.format_number(height, 2)}", height, _LEVEL_DASHES[label])


def _curves_drawing(
    results: ExperimentResults, called: str, curves: Sequence[VariantCurves], levels: Sequence[Level], name: str
) -> Drawing:
    """The curves of one size; `name` begins that of the figure's file."""
    first = curves[0]
    what = "validation accuracy" if first.name == ACCURACY_CURVE else "validation loss"
    part = f", {first.coordinates.label}" if first.coordinates else ""
    tokens = tokens_per_step(results, first)
    figure = draw_curves(
        [_line(one, number, tokens) for number, one in enumerate(curves)],
        levels,
        title=f"{called}: {what}{part}",
        xlabel=_xlabel(tokens),
        ylabel=f"{what}{' (nats/token) ↓' if first.name == LOSS_CURVE else ' ↑'}",
        is_accuracy=first.name == ACCURACY_CURVE,
    )
    ends = []
    for one in curves:
        _, means, _ = one.means()
        numbers = (wording.format_number(value, missing=wording.DIVERGED) for value in (means[0], means[-1]))
        ends.append(f"{wording.variant_label(one.variant)} goes from {' to '.join(numbers)}")
    ends += [f"{level.label} is drawn as a line" for level in levels if not level.is_wished]
    return Drawing(
        figure,
        f"{called}, {what}{part} over {first.steps:,} steps of training: {'; '.join(ends)}.",
        _caption(curves, levels),
        title=f"{called}: {what}{part} over training",
        name=slug(f"{name}{part}"),
    )


def _caption(curves: Sequence[VariantCurves], levels: Sequence[Level]) -> str:
    seeds = max(len(one.by_seed) for one in curves)
    caption = "Validation over training, one seed."
    if seeds > 1:
        caption = f"Validation over training: mean of {seeds} seeds; bands are 95 % intervals, cut at the axis."
    if curves[0].name == ACCURACY_CURVE:
        return caption + " Dotted: accuracies to reach; a mark is where a mean over seeds gets there."
    if levels:
        caption += " Dotted: the final loss of the variant that others are compared with."
    return f"{caption} The beginning is cut off."


def _differences_drawing(
    results: ExperimentResults, called: str, pairs: Sequence[tuple[VariantCurves, VariantCurves]]
) -> Drawing:
    """How much higher the loss of one variant is than that of another, over training."""
    first = pairs[0][0]
    part = f", {first.coordinates.label}" if first.coordinates else ""
    tokens = tokens_per_step(results, first)
    lines = []
    for number, (one, other) in enumerate(pairs):
        steps, means, intervals = differences(one, other)
        x = [step * (tokens or 1) for step in steps]
        label = wording.pair_of(one.variant, other.variant)
        # Several pairs may have the same first variant.
        lines.append(Series(label, x, means, CYCLE[number % len(CYCLE)], intervals, _MARKERS[number % len(_MARKERS)]))
    figure = draw_curves(
        lines,
        [Level("", 0.0)],
        title=f"{called}: difference in loss{part}",
        xlabel=_xlabel(tokens),
        ylabel="first − second (nats/token)",
        is_accuracy=False,
    )
    fair = curves_of_one_rate(results.file)
    rates = "" if all(pair in fair for pair in pairs) else f" {_UNLIKE_RATES}"
    ends = [f"{line.label} ends at {wording.format_number(line.y[-1], missing=wording.DIVERGED)}" for line in lines]
    return Drawing(
        figure,
        f"{called}, differences in validation loss{part} over training: {'; '.join(ends)}.",
        "Differences in validation loss over paired seeds, with 95 % intervals (Student's t), cut at the axis: below 0 "
        f"the first variant is ahead. The beginning is cut off.{rates}",
        title=f"{called}: difference in validation loss{part} over training",
        name=slug(f"{results.anchor}-learning-difference{part}"),
    )


def differences(first: VariantCurves, second: VariantCurves) -> tuple[list[int], list[float], list[Interval | None]]:
    """The mean difference over paired seeds with Student's 95 % interval, at every step that all of them have."""
    seeds = [seed for seed in first.by_seed if seed in second.by_seed]
    pairs = [(first.by_seed[seed], second.by_seed[seed]) for seed in seeds]
    shared = set.intersection(*(set(curve.steps) for pair in pairs for curve in pair)) if pairs else set()
    steps = sorted(shared)
    values = [[one.at(step) - other.at(step) for one, other in pairs] for step in steps]
    return steps, list(map(fmean, values)), list(map(mean_interval, values))


def tokens_per_step(results: ExperimentResults, curves: VariantCurves) -> int | None:
    """How many tokens a step of these runs has; None of an accuracy, and in results that do not tell."""
    if curves.name == ACCURACY_CURVE:
        return None
    for trained in results.variants:
        if (trained["name"], Coordinates(trained["coordinates"])) == (curves.variant, curves.coordinates):
            tokens: int | None = trained.get("tokens_per_step")
            return tokens
    return None


def _xlabel(tokens: int | None) -> str:
    return "step of training" if tokens is None else "tokens of training"


def _line(curves: VariantCurves, number: int, tokens: int | None) -> Series:
    steps, means, intervals = curves.means()
    style = figures.variant_style(curves.variant, _MARKERS[number % len(_MARKERS)])
    style["colour"] = style["colour"] or CYCLE[(number + 2) % len(CYCLE)]
    x = [step * (tokens or 1) for step in steps]
    return Series(wording.variant_label(curves.variant), x, means, intervals=intervals, **style)


@figures.styled
def draw_curves(
    lines: Sequence[Series],
    levels: Sequence[Level],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    is_accuracy: bool,
) -> Figure:
    """Means with their bands over training, and levels with their names at the right."""
    figure, axes = figures.axes_of(title, xlabel, ylabel)
    low, high = (0.0, 1.0) if is_accuracy else _limits(lines, levels)
    for number, line in enumerate(lines):
        known = [(x, *ends) for x, ends in zip(line.x, line.intervals, strict=True) if ends and math.isfinite(ends[0])]
        if known:
            x, bottom, top = zip(*known, strict=True)
            cut_bottom, cut_top = ([min(max(end, low), high) for end in side] for side in (bottom, top))
            axes.fill_between(x, cut_bottom, cut_top, color=line.colour, alpha=0.16, linewidth=0)
        dashes = DASHES[number % len(DASHES)]
        axes.plot(line.x, line.y, label=line.label, color=line.colour, linestyle=dashes, linewidth=1.8)
    for level in levels:
        dashes = ":" if level.is_wished else level.dashes
        axes.axhline(level.height, linewidth=0.9 if level.is_wished else 1.2, zorder=1, color=MUTED, linestyle=dashes)
        if level.is_wished:
            _mark(axes, lines, level.height)
    axes.set_ylim(low, high)
    axes.set_xlim(0, max(x for line in lines for x in line.x))
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    _name_levels(axes, [level for level in levels if level.label], low, high)
    figure.set_figheight(3.2 + 0.2 * math.ceil(len(lines) / 2))
    figures.legend(axes, figure, loc="outside lower center", ncols=2)
    return figure


def _limits(lines: Sequence[Series], levels: Sequence[Level]) -> tuple[float, float]:
    """The ends of an axis for losses: all means but those of the beginning, and all levels.

    Where every run diverged in the beginning, its means are all there is; 0 and 1 where there is nothing at all.
    """
    begin = _BEGINNING * max(x for line in lines for x in line.x)
    means = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    values = [y for x, y in means if x >= begin] or [y for _, y in means]
    values += [level.height for level in levels]
    if not values:
        return 0.0, 1.0
    margin = 0.06 * (max(values) - min(values) or 1.0)
    return min(values) - margin, max(values) + margin


def _mark(axes: Axes, lines: Sequence[Series], height: float) -> None:
    """Where each mean first crosses a level."""
    for line in lines:
        for (x, y), (next_x, next_y) in itertools.pairwise(zip(line.x, line.y, strict=True)):
            if (y - height) * (next_y - height) <= 0 and y != next_y:
                at = x + (height - y) / (next_y - y) * (next_x - x)
                if at == line.x[-1]:  # the final value that is the level
                    break
                edge: dict[str, Any] = {"markeredgecolor": PAGE, "markeredgewidth": 0.8, "markersize": 6.5}
                axes.plot([at], [height], marker=line.marker, linestyle="", color=line.colour, zorder=5, **edge)
                break


def _name_levels(axes: Axes, levels: Sequence[Level], low: float, high: float) -> None:
    """The names beside their lines, apart from each other."""
    heights = figures.apart([level.height for level in levels], [low, high])
    for level, height in zip(levels, heights, strict=True):
        style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.01, height, level.label, color=MUTED if level.is_wished else INK, **style)
