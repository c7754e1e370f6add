"""Draws what experiments found: a measure along a coordinate, or as heat maps, and validation over training."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from diff_lab.coordinates import NO_COORDINATES, Coordinates, axis
from diff_lab.learning import ACCURACY_CURVE, CURVES, LOSS_CURVE
from diff_lab.record import Baseline, Comparison, Result
from diff_lab.report import wording
from diff_lab.report.findings import ExperimentResults, slug
from diff_lab.report.plots import CYCLE, MUTED, Drawing, Series, ends_in_words, line_plot, styled, variant_style
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


def experiment_figures(results: ExperimentResults, called: str) -> list[Drawing]:
    """Draw the headline's measure, or another that is compared, along a coordinate; without one the course of training.

    That is the difference in loss, or the accuracy. Of a user's own comparison there are all curves as well.

    Args:
        results: the experiment's. Where no comparison is named as its headline nothing is drawn.
        called: the beginning of titles.
    """
    row = results.headline
    if row is None or results.file.headline is None:
        return []
    curves = list(_learning(results, row, called))
    by_size = _by_size(results, row, called) if row.name == _PARAMETERS_FOR_EQUAL_LOSS else None
    main = by_size or _heat_maps(results, row, called) or _headline_line(results, row, called)
    if results.is_own:
        return [*curves, *([main] if main else [])]
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


def _mean_lines(data: pd.DataFrame, variants: Sequence[str]) -> list[Series]:
    """Return a line for each variant of a `frame`: the mean over seeds, NaN if one is, with Student's interval, or with
    one seed the measurement's own.
    """
    lines = []
    for number, variant in enumerate(variants):
        means, ends = [], []
        by_x = data[data.variant == variant].groupby("x")
        for _, rows in by_x:
            means.append(rows.value.mean(skipna=False))
            measured = (rows.low.iloc[0], rows.high.iloc[0])
            interval = mean_interval(list(rows.value)) or (measured if data.seed.nunique() == 1 else None)
            ends.append(interval or (math.nan, math.nan))
        style = variant_style(variant, _MARKERS[number % len(_MARKERS)])
        lines.append(Series(variant_label(variant), list(by_x.groups), means, intervals=ends, **style))
    return lines


def _caption(data: pd.DataFrame) -> str:
    seeds, cross = data.seed.nunique(), " A cross above: diverged, or not known." * bool(data.value.isna().any())
    if seeds > 1:
        return f"Mean of {seeds} seeds; bands are 95 % intervals (Student's t), cut at the axis.{cross}"
    return f"One seed.{' Bands are 95 % intervals of the measurement.' * bool(data.low.notna().any())}{cross}"


def _limits(lines: Sequence[Series], *levels: float, begin: float = 0.0) -> tuple[float, float] | None:
    """Return the ends of an axis that holds all levels, and all means but those before the share `begin` of the line.

    If every run diverged in the beginning, its means are all there is; None if there is nothing at all.
    """
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    if not points:
        return None
    start = begin * max(x for line in lines for x in line.x)
    values = [*([y for x, y in points if x >= start] or [y for _, y in points]), *levels]
    margin = 0.06 * (max(values) - min(values) or 1.0)
    return min(values) - margin, max(values) + margin


# --- Validation over training, and the differences of losses ---


def _learning(results: ExperimentResults, row: Comparison, called: str) -> Iterator[Drawing]:
    """Yield the curves of the runs that a comparison is of; of several sizes that it is made of, the largest."""
    records = [one for one in results.file.records if one.name in CURVES and "step" in one.coordinates]
    found = dict.fromkeys(one.coordinates.without("step") for one in records)
    fitting = [at for at in found if all(row.coordinates.get(name, value) == value for name, value in at.items())]
    at = min(reversed(fitting or [NO_COORDINATES]), key=len)
    # Results of early versions do not tell how many tokens a step has.
    tokens = [one.get("tokens_per_step") for one in results.variants if Coordinates(one["coordinates"]) == at]
    part = f", {at.label}" if at else ""
    for name in CURVES:
        data = frame([one for one in records if (one.name, one.coordinates.without("step")) == (name, at)], "step")
        if data.x.nunique() < 2:
            continue
        levels, xlabel = {}, "step of training"
        if name == ACCURACY_CURVE:
            levels = known_levels(results.file.baselines)
        elif tokens and tokens[0]:
            data["x"] *= tokens[0]
            xlabel = "tokens of training"
        word = wording.measure_words(name)
        lines = _mean_lines(_whole(data), wording.ordered_variants(data.variant))
        title = f"{called}: {word}{part}"
        figure = line_plot(
            lines,
            title=title,
            xlabel=xlabel,
            ylabel=f"{word} ↑" if name == ACCURACY_CURVE else f"{word} (nats/token) ↓",
            levels=levels,
            limits=(0.0, 1.0) if name == ACCURACY_CURVE else _limits(lines, begin=_BEGINNING),
        )
        alt = f"{title} over training: {'; '.join([*map(ends_in_words, lines), *levels])}."
        file = slug(f"{results.anchor}-learning-{word.split()[-1]}{part}")
        yield Drawing(figure, alt, _caption(data), f"{title} over training", file)
        if name == LOSS_CURVE:
            yield from _differences(results, row, called, data, part, xlabel)


def known_levels(baselines: Sequence[Baseline]) -> dict[str, float]:
    """Return the levels of the validation accuracy by name, "chance 0.06"; of equal ones the last, which says most."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().items()]
    by_height = {height: label for label, height in levels}
    return {f"{label} {format_number(height, 2)}": height for height, label in by_height.items()}


def _differences(
    results: ExperimentResults, row: Comparison, called: str, data: pd.DataFrame, part: str, xlabel: str
) -> Iterator[Drawing]:
    """Yield how much higher the loss of one variant is than another's, of each compared pair whose seeds have it; the
    interval is of the pair that a comparison is of.
    """
    paired: dict[str, pd.DataFrame] = {}
    for pair in dict.fromkeys((one.variant, one.against) for one in results.file.comparisons):
        first, second = (data[data.variant == variant] for variant in pair)
        both = first.merge(second[["seed", "x", "value"]], on=["seed", "x"], suffixes=("", "_against"))
        if len(both):
            label = wording.pair_label(*pair)
            paired[label] = both.assign(value=both.value - both.value_against, variant=label)
    if not paired:
        return
    of_pair = wording.pair_label(row.variant, row.against)
    lines = [
        replace(line, colour=CYCLE[number % len(CYCLE)], intervals=line.intervals if line.label == of_pair else ())
        for number, line in enumerate(_mean_lines(_whole(pd.concat(paired.values())), list(paired)))
        if line.x
    ]
    title = f"{called}: difference in loss{part}"
    figure = line_plot(
        lines,
        title=title,
        xlabel=xlabel,
        ylabel="first − second (nats/token)",
        levels={"equal": 0.0},
        limits=_limits(lines, 0.0, begin=_BEGINNING),
    )
    caption = (
        f"Differences in validation loss over paired seeds, of {of_pair} with the 95 % interval (Student's t), cut at "
        "the axis: below 0 the first variant is ahead. Where two variants have different learning rates, what stands "
        "before the end comes of the rates as well."
    )
    alt = f"{title} over training: {'; '.join(map(ends_in_words, lines))}."
    yield Drawing(figure, alt, caption, f"{title} over training", slug(f"{results.anchor}-difference{part}"))


# --- Figure 3: losses by size with their fits ---


@styled
def _by_size(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Draw final losses by size with the fits of a comparison, and an arrow from the second variant's size to the
    first's of equal loss. None if losses are not of three sizes of both.
    """
    records = results.file.records
    counted = {
        one.coordinates.position("parameters"): one.value
        for one in records
        if one.name == _FITTED_SIZE and one.variant == row.against
    }
    losses = frame([one for one in records if one.name == _FITTED_LOSS], "parameters")
    losses["x"] = losses.x.map(counted)
    lines = _mean_lines(losses, (row.variant, row.against))
    sizes = np.array(sorted(counted.values()))
    if len(sizes) < FEWEST or any(list(line.x) != list(sizes) or not np.isfinite(line.y).all() for line in lines):
        return None
    fit, span = fits(sizes, np.array([[line.y for line in lines]]))[0], np.geomspace(sizes[0], sizes[-1], 50)
    title = f"{called}: loss by size"
    figure = line_plot(lines, title=title, xlabel="parameters without λ and norms", ylabel="loss (nats/token) ↓")
    axes = figure.axes[0]
    for drawn in axes.lines:
        drawn.set_linestyle("")  # points, as the lines are the fits
    for number, line in enumerate(lines):
        axes.plot(span, fit.losses(number, span), color=line.colour, linewidth=1.4, linestyle=("-", "--")[number])
    ratio, (height,) = fit.equal_loss_ratio(), fit.losses(0, np.array([fit.middle]))
    if math.isfinite(ratio):
        ends = (fit.middle, height), (fit.middle / ratio, height)
        axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "linewidth": 1.6})
        axes.text(0.03, 0.05, f"→ {ratio:.2f} times the parameters", transform=axes.transAxes, fontsize=9)
    axes.set(xscale="log", yscale="log")
    for one, form in ((axes.xaxis, EngFormatter(sep="")), (axes.yaxis, StrMethodFormatter("{x:g}"))):
        one.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        one.set_major_formatter(form)
        one.set_minor_locator(NullLocator())
    words = f"{'; '.join(map(ends_in_words, lines))}; for an equal loss {wording.format_difference(row)} of parameters"
    caption = f"{_caption(losses)} Lines are the fits that the comparison is made of."
    return Drawing(figure, f"{title}: {words}.", caption, title, slug(f"{results.anchor}-size"))


# --- A measure along a coordinate: sizes, depths, bits ---


def _compared_names(results: ExperimentResults, row: Comparison) -> list[str]:
    """Return the measures that are compared, that of the headline first."""
    return list(dict.fromkeys([row.name, *(one.name for one in results.file.comparisons)]))


def _headline_line(results: ExperimentResults, row: Comparison, called: str) -> Drawing | None:
    """Return the first measure taken at three numbers of a coordinate or more, along the headline's own others."""
    for name in _compared_names(results, row):
        records = [record for record in results.file.records if record.name == name]
        line = _line_through(records, row.coordinates)
        if line is None:
            continue
        coordinate, on_line = line
        label = on_line[0].coordinates.without(coordinate).label
        title = f"{wording.measure_words(name)}{f', {label}' if label else ''}"
        drawing = _along(coordinate, on_line, f"{called}: {title}", results.file.baselines)
        return replace(drawing, name=slug(f"{results.anchor}-{title}"))
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
        records = [one for one in results.file.records if one.name == name and {context, "depth"} <= {*one.coordinates}]
        contexts, depths = (
            {one.coordinates.position(key): axis(key).text(one.coordinates[key]) for one in records}
            for key in (context, "depth")
        )
        if min(len(contexts), len(depths)) >= FEWEST:
            break
    else:
        return None
    data = frame(records, context).assign(depth=[one.coordinates.position("depth") for one in records])
    title = f"{called}: {wording.measure_words(name)}"
    figure = Figure(figsize=(4.8, 3.1), layout="constrained")
    figure.suptitle(title, x=0.0, ha="left", fontsize=11)
    words = []
    for axes, variant in zip(figure.subplots(1, 2, sharey=True), (row.variant, row.against), strict=True):
        means = data[data.variant == variant].pivot_table(values="value", index="depth", columns="x")
        colour = variant_style(variant)["colour"] or CYCLE[0]
        shades = LinearSegmentedColormap.from_list(variant, [f"{colour}00", f"{colour}99"])
        axes.pcolormesh(means, cmap=shades, vmin=0.0, vmax=1.0, edgecolors="none")
        for (y, x), mean in zip(itertools.product(*map(range, means.shape)), means.to_numpy().flat, strict=True):
            axes.text(x + 0.5, y + 0.5, format_number(mean, 2), ha="center", va="center", fontsize=8)
        axes.set_title(variant_label(variant), fontsize=10)
        axes.set_xticks([x + 0.5 for x in range(means.shape[1])], [contexts[at] for at in means.columns])
        axes.set_yticks([y + 0.5 for y in range(means.shape[0])], [depths[at] for at in means.index])
        axes.grid(visible=False)
        lowest, highest = (format_number(end) for end in (means.min(axis=None), means.max(axis=None)))
        words.append(f"{variant_label(variant)} from {lowest} to {highest}")
    figure.axes[0].invert_yaxis()  # shared: the beginning above
    figure.supxlabel(axis(context).title, fontsize=10)
    figure.supylabel(axis("depth").title, fontsize=10)
    caption = "Mean over seeds; the fuller the colour, the nearer to 1."
    return Drawing(figure, f"{title}: {'; '.join(words)}.", caption, title, slug(f"{results.anchor}-depth"))


def _along(coordinate: str, records: Sequence[Result], title: str, baselines: Sequence[Baseline]) -> Drawing:
    """Draw one measure's records, which differ in one coordinate alone, as a line for each variant over its numbers."""
    first, described, data = records[0], axis(coordinate), frame(records, coordinate)
    numbers = {record.coordinates: record.coordinates.position(coordinate) for record in records}
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
    lines = _mean_lines(data, wording.variants_of(records))
    levels = list(_levels(first.name, numbers, baselines))
    measure = wording.measure_words(first.name) + wording.unit_and_direction(first)
    is_tall = data.value.min() > 0 and data.value.max() >= _TALL * data.value.min()
    limits = None if is_tall else _limits([*lines, *levels])
    figure = line_plot([*lines, *levels], title=title, xlabel=described.title, ylabel=measure, limits=limits)
    axes = figure.axes[0]
    _scale(axes, list(numbers.values()), [described.text(at[coordinate]) for at in numbers])
    if is_tall:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    words = "; ".join(map(ends_in_words, (*lines, *levels)))
    whole_title = f"{title} by {described.title}"
    return Drawing(figure, f"{whole_title}: {measure}. {words}.", _caption(data), whole_title)


def _levels(name: str, numbers: Mapping[Coordinates, float], baselines: Sequence[Baseline]) -> Iterator[Series]:
    """Yield chance, floor, elimination and ceiling where they are known at every position; of equal ones the last."""
    by_position = {
        one.coordinates: one.levels() | ({} if one.ceiling is None else {"ceiling": one.ceiling})
        for one in baselines
        if one.name == name and one.is_accuracy
    }
    known = [by_position.get(position, by_position.get(NO_COORDINATES, {})) for position in numbers]
    heights = pd.DataFrame(known).dropna(axis="columns").T.drop_duplicates(keep="last").T
    for label in heights:
        yield Series(label, list(numbers.values()), list(heights[label]), MUTED, "")


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
