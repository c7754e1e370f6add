"""Draws what experiments found: a measure along a coordinate, as heat maps or with fits, and curves over training."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from diff_lab.coordinates import NO_COORDINATES, Coordinates, axis
from diff_lab.learning import (
    ACCURACY_CURVE,
    CURVES,
    LOSS_CURVE,
    TOKENS_FOR_EQUAL_LOSS,
    compared_curves,
    curves_of_one_rate,
    steps_ratio,
)
from diff_lab.record import Baseline, Comparison, Result
from diff_lab.report import wording
from diff_lab.report.findings import ExperimentResults, slug
from diff_lab.report.plots import (
    CYCLE,
    INK,
    MUTED,
    Drawing,
    Series,
    axes_of,
    ends_in_words,
    legend_below,
    line_plot,
    styled,
    variant_style,
)
from diff_lab.report.wording import format_number, variant_label
from diff_lab.statistics import fits, mean_interval

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Fewer numbers of a coordinate are no line; from this ratio of the largest to the smallest on, an axis is logarithmic.
FEWEST, _WIDE, _TALL = 3, 8, 30
# Of losses what lies above the curves at this share of the training is cut off.
_BEGINNING = 0.1
# Figure 3: the comparison that its fits are for, the losses that are fitted, and the sizes as they are counted there.
_PARAMETERS_FOR_EQUAL_LOSS = "scaling/parameters_for_equal_loss"
_FITTED_LOSS, _FITTED_SIZE = "language/validation_loss", "training/parameters_without_lambda_and_norms"
# Coordinates that are drawn against the depth as heat maps (Figure 5).
_CONTEXTS = ("length", "context_factor")
# Numbers that fall as a power law does: straight on logarithmic axes.
_RANKED = "rank"


def experiment_figures(results: ExperimentResults, called: str) -> list[Drawing]:
    """Draw what carries an experiment's headline: one figure, or two where the paper has two.

    It is the measure of the headline, or else another that is compared, along a coordinate; where none was taken at
    three numbers, it is the course of training. Of a user's own comparison there are the curves as well.

    Args:
        results: the experiment's. Where no comparison is named as its headline nothing is drawn.
        called: the beginning of titles.
    """
    row = results.headline
    if row is None or results.file.headline is None:
        return []
    if row.name == _PARAMETERS_FOR_EQUAL_LOSS:
        drawn = [_by_size(results, row, called), _by_tokens(results, row, called)]
        return [one for one in drawn if one is not None]
    curves = list(_learning(results, row, called))
    main = _heat_maps(results, row, called) or _headline_line(results, row, called)
    if results.is_own:
        return [*curves, *([main] if main else [])]
    # A difference in loss, which comes behind its curves, tells more than they do.
    return [main] if main else curves[-1:]


def frame(records: Sequence[Result], coordinate: str) -> pd.DataFrame:
    """Return a row for each record: variant, seed, position along the coordinate, value, and ends of its interval."""
    unknown = (math.nan, math.nan)
    rows = [
        (one.variant, str(one.seed), one.coordinates.position(coordinate), one.value, *(one.interval or unknown))
        for one in records
    ]
    return pd.DataFrame(rows, columns=["variant", "seed", "x", "value", "low", "high"])


def _whole(data: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of each variant that all of its seeds have: if one diverged, the others are not its mean."""
    present = data.groupby(["variant", "x"]).value.transform("size")
    return data[present == data.groupby("variant").seed.transform("nunique")]


def _mean_lines(data: pd.DataFrame, variants: Sequence[str], *, student: bool = False) -> list[Series]:
    """Return a line for each variant of a `frame`: the mean over seeds, NaN if one is, with its interval.

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


def _learning(results: ExperimentResults, row: Comparison, called: str) -> Iterator[Drawing]:
    """Return the curves of what a comparison is about, and of losses the differences."""
    at = _trained_at(results, row)
    for name in CURVES:
        data = _curve_data(results, name, at)
        if data is None:
            continue
        tokens = _tokens_per_step(results, at) if name == LOSS_CURVE else None
        data["x"] *= tokens or 1
        over = "tokens of training" if tokens else "step of training"
        yield _curves(results, called, name, at, data, over)
        if name == LOSS_CURVE:
            yield from _differences(results, row, called, data, at, over)


def _trained_at(results: ExperimentResults, row: Comparison) -> Coordinates:
    """Return the coordinates of the runs that a comparison is of; of several sizes that it is made of, the largest."""
    found = dict.fromkeys(one.coordinates.without("step") for one in results.file.records if one.name in CURVES)
    fitting = [at for at in found if all(row.coordinates.get(name, value) == value for name, value in at.items())]
    return min(reversed(fitting or [NO_COORDINATES]), key=len)


def _curve_data(results: ExperimentResults, name: str, at: Coordinates) -> pd.DataFrame | None:
    """Return the validation curves of runs; None where they are no curves."""
    records = [one for one in results.file.records if one.name == name and "step" in one.coordinates]
    data = frame([one for one in records if one.coordinates.without("step") == at], "step")
    return data if data.x.nunique() > 1 else None


def _curves(
    results: ExperimentResults, called: str, name: str, at: Coordinates, data: pd.DataFrame, over: str
) -> Drawing:
    word, is_accuracy = ("accuracy", True) if name == ACCURACY_CURVE else ("loss", False)
    part = f", {at.label}" if at else ""
    lines = _mean_lines(_whole(data), wording.ordered_variants(data.variant), student=True)
    levels = known_levels(results.file.baselines) if is_accuracy else {}
    figure = line_plot(
        lines,
        title=f"{called}: validation {word}{part}",
        xlabel=over,
        ylabel=f"validation {word}{' ↑' if is_accuracy else ' (nats/token) ↓'}",
        levels=levels,
        limits=(0.0, 1.0) if is_accuracy else _loss_limits(lines),
    )
    ends = [*map(ends_in_words, lines), *(f"{level} is drawn as a line" for level in levels)]
    title = f"{called}: validation {word}{part} over training"
    cut = "" if is_accuracy else " The beginning is cut off."
    caption = _seeds(data, "are 95 % intervals (Student's t), cut at the axis") + cut
    return Drawing(figure, f"{title}: {'; '.join(ends)}.", caption, title, slug(f"{results.anchor}-{word}{part}"))


def known_levels(baselines: Sequence[Baseline]) -> dict[str, float]:
    """Return the levels of the validation accuracy by name, "chance 0.06"; of equal ones the last, which says most."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().items()]
    by_height = {height: label for label, height in levels}
    return {f"{label} {format_number(height, 2)}": height for height, label in by_height.items()}


def _tokens_per_step(results: ExperimentResults, at: Coordinates) -> int | None:
    """Return how many tokens a step of the runs of one size has; None in results that do not tell."""
    known = [one.get("tokens_per_step") for one in results.variants if Coordinates(one["coordinates"]) == at]
    return known[0] if known else None


def _seeds(data: pd.DataFrame, bands: str) -> str:
    seeds = data.seed.nunique()
    return f"Mean of {seeds} seeds; bands {bands}." if seeds > 1 else "One seed."


def _differences(
    results: ExperimentResults, row: Comparison, called: str, data: pd.DataFrame, at: Coordinates, over: str
) -> Iterator[Drawing]:
    """How much higher the loss of one variant is than that of another, where two of them are compared; the interval is
    of the pair that a comparison is of.
    """
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
    of_pair = wording.pair_label(row.variant, row.against)
    lines = [
        replace(line, colour=CYCLE[number % len(CYCLE)], intervals=line.intervals if line.label == of_pair else ())
        for number, line in enumerate(lines)
        if line.x
    ]
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
        f"Differences in validation loss over paired seeds, of {of_pair} with the 95 % interval (Student's t), cut at "
        "the axis: below 0 the first variant is ahead. The beginning is cut off."
    )
    fair = {(first.variant, second.variant, first.coordinates) for first, second in curves_of_one_rate(results.file)}
    if not all((*pair, at) in fair for pair in compared if values.keys() >= set(pair)):
        caption += (
            " Where two variants have different learning rates, what stands before the end, with the places where a "
            "curve changes its sign, comes of the rates as well."
        )
    name = slug(f"{results.anchor}-difference{part}")
    yield Drawing(figure, f"{title}: {'; '.join(map(ends_in_words, lines))}.", caption, title, name)


def _loss_limits(lines: Sequence[Series], *levels: float) -> tuple[float, float] | None:
    """Return the ends of an axis for losses: all means but those of the beginning, and all levels.

    If every run diverged in the beginning, its means are all there is; None if there is nothing at all.
    """
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    if not points:
        return None
    begin = _BEGINNING * max(x for line in lines for x in line.x)
    values = [*([y for x, y in points if x >= begin] or [y for _, y in points]), *levels]
    margin = 0.06 * (max(values) - min(values) or 1.0)
    return min(values) - margin, max(values) + margin


# --- Figure 3: losses by size with fits, and by tokens ---


@styled
def _by_size(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Draw final losses by size with the fits of a comparison, and an arrow from the second variant's size to the
    first's of equal loss. None where losses are not of three sizes of both.
    """
    records = results.file.records
    numbers = {one.coordinates: one.value for one in records if one.name == _FITTED_SIZE and one.variant == row.against}
    losses = frame([one for one in records if one.name == _FITTED_LOSS], "parameters")
    by_nominal = {at.position("parameters"): number for at, number in numbers.items()}
    losses["x"] = losses.x.map(by_nominal)
    lines = _mean_lines(losses, (row.variant, row.against))
    sizes = sorted(by_nominal.values())
    if len(sizes) < FEWEST or any(sorted(line.x) != sizes or not all(map(math.isfinite, line.y)) for line in lines):
        return None
    fit = fits(np.array(sizes), np.array([[line.y for line in lines]]))[0]
    title = f"{called}: loss by size"
    figure, axes = axes_of(title, "parameters without λ and norms", "validation loss (nats/token) ↓")
    span = list(np.geomspace(sizes[0], sizes[-1], 50))
    for number, line in enumerate(lines):
        axes.plot(line.x, line.y, color=line.colour, marker=line.marker, linestyle="", label=line.label)
        axes.vlines(line.x, *zip(*line.intervals, strict=True), color=line.colour, linewidth=1.2)
        axes.plot(span, fit.losses(number, span), color=line.colour, linewidth=1.4, linestyle=("-", "--")[number])
    ratio = fit.equal_loss_ratio()
    if math.isfinite(ratio):
        (loss,) = fit.losses(0, [fit.middle])
        _arrow(axes, fit.middle / ratio, fit.middle, loss, f"{ratio:.2f} times the parameters")
    _logarithmic(axes)
    legend_below(figure, axes)
    words = f"{'; '.join(map(ends_in_words, lines))}; for an equal loss {wording.format_difference(row)} of parameters"
    caption = f"{_seeds(losses, 'from the lowest to the highest')} Lines are the fits that the comparison is made of."
    return Drawing(figure, f"{title}: {words}.", caption, title, f"{results.anchor}-size")


@styled
def _by_tokens(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Return the validation loss of the largest size by tokens, and an arrow between the tokens of equal loss."""
    at = _trained_at(results, row)
    data, tokens = _curve_data(results, LOSS_CURVE, at), _tokens_per_step(results, at)
    if data is None or tokens is None:
        return None
    data["x"] *= tokens
    drawing = _curves(results, called, LOSS_CURVE, at, data, "tokens of training")
    axes = drawing.figure.axes[0]
    _logarithmic(axes)
    of_size = [pair for pair in compared_curves(results.file.records, [row]) if pair[0].coordinates == at]
    known = any(one.name == TOKENS_FOR_EQUAL_LOSS and math.isfinite(one.difference) for one in results.file.comparisons)
    if known and of_size and (reached := steps_ratio(*of_size[0])) is not None and math.isfinite(reached.ratio):
        first, second = (tokens * fmean(steps) for steps in reached.steps)
        _arrow(axes, second, first, reached.level, f"{reached.ratio:.2f} times the tokens")
    return drawing


def _arrow(axes: Axes, start: float, end: float, height: float, words: str) -> None:
    axes.annotate("", (end, height), (start, height), arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.6})
    axes.text(0.03, 0.05, f"→ {words}", transform=axes.transAxes, fontsize=9)


def _logarithmic(axes: Axes) -> None:
    """Both axes logarithmic, with few ticks at round numbers."""
    axes.set(xscale="log", yscale="log")
    for one, form in ((axes.xaxis, EngFormatter(sep="")), (axes.yaxis, StrMethodFormatter("{x:g}"))):
        _few_ticks(one, form)


def _few_ticks(one: Axis, form: Formatter) -> None:
    """Round numbers on a logarithmic axis that may span less than a power of ten."""
    one.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    one.set_major_formatter(form)
    one.set_minor_locator(NullLocator())


# --- A measure along a coordinate: sizes, depths, bits ---


def _compared_names(results: ExperimentResults, row: Comparison) -> list[str]:
    """Return the measures that are compared, that of the headline first."""
    return list(dict.fromkeys([row.name, *(one.name for one in results.file.comparisons)]))


def _headline_line(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Return the first measure taken at three numbers of a coordinate or more, along the headline's own others."""
    has_diverged = any(variant["diverged"] for variant in results.variants)
    for name in _compared_names(results, row):
        records = [record for record in results.file.records if record.name == name]
        line = _line_through(records, row.coordinates)
        if line is None:
            continue
        coordinate, on_line = line
        label = on_line[0].coordinates.without(coordinate).label
        part = f", {label}" if label else ""
        drawing = along(
            coordinate,
            on_line,
            f"{called}: {wording.measure_words(name)}{part}",
            baselines=results.file.baselines,
            missing=wording.DIVERGED if has_diverged else wording.NOT_KNOWN,
        )
        return replace(drawing, name=slug(f"{results.anchor}-{wording.measure_words(name)}{part}"))
    return None


def _line_through(records: Sequence[Result], headline: Coordinates) -> tuple[str, list[Result]] | None:
    """Return the records that differ in one number alone, with its name: at the headline, or else at the first place
    that has three such numbers, of several coordinates the last. Numbers that all variants share are no line.
    """
    places = dict.fromkeys(record.coordinates for record in records)
    for start in sorted(places, key=lambda place: place != headline):
        for name in reversed(list(start)):
            along_it = [
                one
                for one in records
                if one.coordinates.keys() == start.keys()
                and one.coordinates.without(name) == start.without(name)
                and math.isfinite(one.coordinates.position(name))
            ]
            numbers = {one.coordinates.position(name) for one in along_it}
            if len(numbers) >= FEWEST and len({one.value for one in along_it}) > 1:
                return name, along_it
    return None


@styled
def _heat_maps(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Return the first measure that was taken at contexts and depths, three or more of each: a map for each of the two
    variants of the headline, from 0 to 1 (Figure 5).
    """
    for name, context in itertools.product(_compared_names(results, row), _CONTEXTS):
        records = [
            one for one in results.file.records if one.name == name and {context, "depth"} <= one.coordinates.keys()
        ]
        contexts, depths = (
            {one.coordinates.position(key): axis(key).text(one.coordinates[key]) for one in records}
            for key in (context, "depth")
        )
        if min(len(contexts), len(depths)) >= FEWEST:
            break
    else:
        return None
    contexts, depths = dict(sorted(contexts.items())), dict(sorted(depths.items()))
    title = f"{called}: {wording.measure_words(name)}"
    figure = Figure(figsize=(4.8, 3.1), layout="constrained")
    figure.suptitle(title, x=0.0, ha="left", fontsize=11)
    words = []
    for axes, variant in zip(figure.subplots(1, 2, sharey=True), (row.variant, row.against), strict=True):
        values: dict[tuple[float, float], list[float]] = {}
        for one in records:
            if one.variant == variant:
                at = (one.coordinates.position("depth"), one.coordinates.position(context))
                values.setdefault(at, []).append(one.value)
        means = [[fmean(values.get((depth, at), [math.nan])) for at in contexts] for depth in depths]
        colour = variant_style(variant)["colour"] or CYCLE[0]
        shades = LinearSegmentedColormap.from_list(variant, [f"{colour}00", f"{colour}99"])
        axes.pcolormesh(means, cmap=shades, vmin=0.0, vmax=1.0, edgecolors="none")
        for y, x in itertools.product(range(len(depths)), range(len(contexts))):
            axes.text(x + 0.5, y + 0.5, format_number(means[y][x], 2), ha="center", va="center", fontsize=8)
        axes.set_title(variant_label(variant), fontsize=10)
        axes.set_xticks([x + 0.5 for x in range(len(contexts))], list(contexts.values()))
        axes.set_yticks([y + 0.5 for y in range(len(depths))], list(depths.values()))
        axes.grid(visible=False)
        known = [mean for line in means for mean in line if math.isfinite(mean)]
        lowest, highest = min(known, default=math.nan), max(known, default=math.nan)
        words.append(f"{variant_label(variant)} from {format_number(lowest)} to {format_number(highest)}")
    figure.axes[0].invert_yaxis()  # shared: the beginning above
    figure.supxlabel(axis(context).title, fontsize=10)
    figure.supylabel(axis("depth").title, fontsize=10)
    caption = "Mean over seeds; the fuller the colour, the nearer to 1."
    return Drawing(figure, f"{title}: {'; '.join(words)}.", caption, title, slug(f"{results.anchor}-depth"))


def along(
    coordinate: str,
    records: Sequence[Result],
    title: str,
    *,
    baselines: Sequence[Baseline] = (),
    missing: str = wording.NOT_KNOWN,
) -> Drawing:
    """Draw one measure's records, which differ in one coordinate alone, as a line for each variant over its numbers."""
    first, described, data = records[0], axis(coordinate), frame(records, coordinate)
    numbers = {record.coordinates: record.coordinates.position(coordinate) for record in records}
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
    lines = _mean_lines(data, wording.variants_of(records))
    levels = list(_levels(first.name, numbers, baselines))
    measure = wording.measure_words(first.name) + wording.unit_and_direction(first)
    figure = line_plot([*lines, *levels], title=title, xlabel=described.title, ylabel=measure)
    axes = figure.axes[0]
    _scale(axes, list(numbers.values()), [described.text(at[coordinate]) for at in numbers])
    values = data.value[data.value.notna()]
    if len(values) and min(values) > 0 and (coordinate == _RANKED or max(values) >= _TALL * min(values)):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        if max(values) < _TALL * min(values):
            _few_ticks(axes.yaxis, StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    words = "; ".join(map(ends_in_words, (*lines, *levels))).replace(wording.DIVERGED, missing)
    caption = _seeds(data, "from the lowest to the highest")
    if data.seed.nunique() < 2 and data.low.notna().any():
        caption += " Bands are 95 % intervals of the measurement."
    if data.value.isna().any():
        caption += f" A cross above: {'a run diverged' if missing == wording.DIVERGED else missing}."
    whole_title = f"{title} by {described.title}"
    return Drawing(figure, f"{whole_title}: {measure}. {words}.", caption, whole_title)


def _levels(name: str, numbers: Mapping[Coordinates, float], baselines: Sequence[Baseline]) -> Iterator[Series]:
    """Chance, floor, elimination and ceiling as lines, where they are known at every position; of equal ones the
    highest.
    """
    by_position = {
        one.coordinates: one.levels() | ({} if one.ceiling is None else {"ceiling": one.ceiling})
        for one in baselines
        if one.name == name and one.is_accuracy
    }
    known = [by_position.get(position, by_position.get(NO_COORDINATES, {})) for position in numbers]
    shown: list[list[float]] = []
    for label in reversed(list(dict.fromkeys(name for levels in known for name in levels))):
        heights = [levels[label] for levels in known if label in levels]
        if len(heights) == len(numbers) and heights not in shown:
            shown.append(heights)
            yield Series(label, list(numbers.values()), heights, MUTED, "")


def _scale(axes: Axes, positions: Sequence[float], texts: Sequence[str]) -> None:
    """Make an axis logarithmic if the numbers span much; tick each position if there are few."""
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
