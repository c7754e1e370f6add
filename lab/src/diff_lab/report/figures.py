"""Draws results: differences as forest plots, curves over training, measures along a coordinate, all verdicts."""

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from diff_lab.coordinates import NO_COORDINATES, Coordinates, axis
from diff_lab.learning import ACCURACY_CURVE, CURVES, LOSS_CURVE, curves_of_one_rate
from diff_lab.record import Baseline, Comparison, Result, Verdict
from diff_lab.report import wording
from diff_lab.report.documents import THEME
from diff_lab.report.findings import ExperimentResults, slug
from diff_lab.report.plots import (
    CROSS,
    CYCLE,
    INK,
    MUTED,
    PAGE,
    RULE,
    Drawing,
    Series,
    axes_of,
    ends_in_words,
    legend_below,
    line_plot,
    short,
    styled,
    variant_style,
)
from diff_lab.report.tables import count_verdicts, verdict_counts
from diff_lab.report.wording import format_number, variant_label
from diff_lab.statistics import mean_interval

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Fewer numbers of a coordinate are no line; from this ratio of the largest to the smallest on, an axis is logarithmic.
FEWEST, _WIDE, _TALL = 3, 8, 30
# Of losses what lies above the curves at this share of the training is cut off.
_BEGINNING = 0.1


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


def learning_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """Yield the curves of each trained size, and the differences of losses; their titles begin with `called`."""
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
    results: ExperimentResults, called: str, data: pd.DataFrame, at: Coordinates, over: str
) -> Iterator[Drawing]:
    """Yield how much higher the loss of one variant is than that of another, for each two that are compared."""
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


# --- A measure along a coordinate: sizes, tokens, depths, bits ---


def coordinate_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """Yield a figure of each measure, but those of training, taken at three numbers or more and not always the same.
    Their titles begin with `called`.
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
    """Yield the coordinates that differ in one number alone, with its name: the last with as many numbers as a line."""
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
    """Draw one measure's records, which differ in one coordinate alone, as a line for each variant over its numbers."""
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
    """Yield chance, floor and elimination as lines, if they are known at every position; of equal ones the highest."""
    by_position = {one.coordinates: one.levels() for one in baselines if one.name == name and one.is_accuracy}
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


# --- Differences with their intervals as forest plots, and an overview of all verdicts ---

_DIFF, _SOFTMAX = THEME["diff"][0], THEME["softmax"][0]
# How a verdict is drawn, told from the others without colour: the mark of a forest plot, the colours of line and fill,
# and the hatching of a bar. The two verdicts that decide are equally strong.
_VERDICTS: dict[Verdict | None, tuple[str, str, str, str]] = {
    "reproduced": ("o", _DIFF, _DIFF, ""),
    "inconclusive": ("o", INK, RULE, ""),
    "contrary": ("s", _SOFTMAX, _SOFTMAX, "////"),
    "still learning": ("^", INK, PAGE, "|||"),
    "not comparable": ("X", MUTED, PAGE, "xxxx"),
    None: ("D", MUTED, PAGE, "...."),
}
# Rows of one forest plot, and characters of a line of text in it.
MOST_ROWS, _LINE_LENGTH = 24, 66


def forest_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """Yield forest plots in which each comparison is a row; their titles begin with `called`."""
    sheets = _sheets(results.file.comparisons)
    for number, blocks in enumerate(sheets, start=1):
        words = [
            f"{wording.measure_words(row.name)}, {_row_label(row, brief=False)}: "
            f"{wording.format_difference(row, results.variants)}, {wording.verdict_text(row)}"
            for block in blocks
            for row in block
        ]
        several = len(sheets) > 1
        measures = ", ".join(wording.measure_words(block[0].name) for block in blocks[:3]) + " …" * (len(blocks) > 3)
        part = f", part {number} of {len(sheets)}" if several else ""
        yield Drawing(
            forest(blocks, title=f"{called}: differences{part}", trained=results.variants),
            f"{called}, differences{part}: {'; '.join(words)}.",
            "Mean difference over paired seeds, with its 95 % interval where there is one; shaded: the first variant "
            "is better. An arrow marks an interval that is longer than the axis.",
            title=f"{called}: {measures}, differences",
            name=f"{results.anchor}-differences" + (f"-{number}" if several else ""),
            wide=True,
        )


def _sheets(comparisons: Sequence[Comparison]) -> list[list[list[Comparison]]]:
    """Return the comparisons of each measure, as many of them on a sheet as it has room for."""
    sheets: list[list[list[Comparison]]] = []
    for name in dict.fromkeys(row.name for row in comparisons):
        rows = [row for row in comparisons if row.name == name]
        for start in range(0, len(rows), MOST_ROWS):
            block = rows[start : start + MOST_ROWS]
            if sheets and sum(map(len, sheets[-1])) + len(sheets[-1]) + len(block) <= MOST_ROWS:
                sheets[-1].append(block)
            else:
                sheets.append([block])
    return sheets


def _row_label(row: Comparison, *, brief: bool) -> str:
    """Name a row's comparison; a `brief` label leaves the two variants out if something else tells it from others."""
    pair = wording.pair_label(row.variant, row.against)
    return (
        row.coordinates.label if brief and row.coordinates else ", ".join(filter(None, (row.coordinates.label, pair)))
    )


@styled
def forest(blocks: Sequence[Sequence[Comparison]], *, title: str, trained: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """Draw a plot for each measure, with a mark and its interval in each row and zero as a line. The paper's difference
    is a cross, and the side on which the first variant is better is shaded.
    """
    rows = [row for block in blocks for row in block]
    pairs = list(dict.fromkeys(wording.pair_label(row.variant, row.against) for row in rows))
    texts = [[_row_texts(row, brief=len(pairs) == 1) for row in block] for block in blocks]
    # In lines of text: those above each mark, the mark, and what a plot's title and ticks take.
    heights = [sum(len(lines) + 1.4 for lines in of_block) + 3.5 for of_block in texts]
    figure = Figure(figsize=(4.8, 0.17 * sum(heights) + 1.0), layout="constrained")
    figure.suptitle(textwrap.fill(title, 48, break_long_words=False), x=0.0, ha="left", fontsize=11)
    all_axes = figure.subplots(len(blocks), squeeze=False, height_ratios=heights)[:, 0]
    for axes, block, of_block in zip(all_axes, blocks, texts, strict=True):
        low, high = _limits(block)
        axes.set_title(wording.measure_words(block[0].name) + wording.unit_and_direction(block[0]), fontsize=10)
        y = -1.0
        for row, lines in zip(block, of_block, strict=True):
            for number, (left, right) in enumerate(lines):
                style = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5, "color": INK}
                axes.text(0.0, y + number + 1.35, left, **style)
                axes.text(1.0, y + number + 1.35, right, ha="right", **style)
            y += len(lines) + 1.4
            axes.plot([0.0, 0.0], [y - 0.45, y + 0.45], color=INK, linewidth=1, zorder=1)
            if row.better:
                side = (0.0, high) if row.better == "higher" else (low, 0.0)
                axes.fill_between(side, y - 0.4, y + 0.4, color=RULE, alpha=0.45, linewidth=0, zorder=0)
            if math.isfinite(row.difference):
                _mark_row(axes, row, y, low, high)
            else:
                axes.text(0.0, y, f" {wording.missing_word(row, trained)}", color=INK, va="center", fontstyle="italic")
        axes.set(xlim=(low, high), ylim=(y + 0.8, -0.5), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    all_axes[-1].set_xlabel("first − second" if len(pairs) > 1 else pairs[0])
    kinds = {verdict: {row.exploratory for row in rows if row.verdict == verdict} for verdict in _VERDICTS}
    handles = [
        Line2D([], [], label=wording.verdict_words(verdict, sorted(found)), **_mark(verdict))
        for verdict, found in kinds.items()
        if found
    ]
    if any(row.paper is not None for row in rows):
        handles.append(Line2D([], [], label="the paper", **CROSS))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _row_texts(row: Comparison, *, brief: bool) -> list[tuple[str, str]]:
    """Return lines above a mark: the comparison at the left, and at the right of the last one the verdict."""
    left, word = textwrap.wrap(_row_label(row, brief=brief), _LINE_LENGTH), wording.verdict_word(row)
    if len(left[-1]) + len(word) + 2 > _LINE_LENGTH:
        left.append("")
    return [*((line, "") for line in left[:-1]), (left[-1], word)]


def _mark(verdict: Verdict | None) -> dict[str, Any]:
    marker, colour, fill, _ = _VERDICTS[verdict]
    return {"marker": marker, "color": colour, "markerfacecolor": fill, "markersize": 6.5, "linewidth": 1.8}


def _mark_row(axes: Axes, row: Comparison, y: float, low: float, high: float) -> None:
    """Mark the interval, with an arrow at an edge that it goes beyond, the paper's difference, and ours."""
    mark = _mark(row.verdict)
    if row.interval is not None and all(map(math.isfinite, row.interval)):
        axes.plot([max(row.interval[0], low), min(row.interval[1], high)], [y, y], color=mark["color"], linewidth=1.8)
        for end, edge, arrow in ((row.interval[0], low, "<"), (row.interval[1], high, ">")):
            if not low <= end <= high:
                axes.plot([edge], [y], marker=arrow, color=mark["color"], clip_on=False)
    paper = _paper_difference(row)
    if low <= paper <= high:
        axes.plot([paper], [y], zorder=3, **CROSS)
    elif math.isfinite(paper):  # farther away than the axis goes
        text = f"paper {paper:+,.3g}".replace("-", "−")
        axes.text(low if paper < low else high, y, text, ha="left" if paper < low else "right", va="center", fontsize=8)
    axes.plot([row.difference], [y], zorder=5, **mark)


def _paper_difference(row: Comparison) -> float:
    return math.nan if row.paper is None else row.paper[0] - row.paper[1]


def _limits(rows: Sequence[Comparison]) -> tuple[float, float]:
    """Return the ends of an axis: all marks and zero, the intervals not far wider than most, and the paper if near."""
    marks = [0.0, *(row.difference for row in rows if math.isfinite(row.difference))]
    intervals = [row.interval for row in rows if row.interval and all(map(math.isfinite, row.interval))]
    reach = (
        max([*map(abs, marks), 3 * median((high - low) / 2 for low, high in intervals) if intervals else 0.0]) or 1.0
    )
    ends = [max(-1.5 * reach, min(end, 1.5 * reach)) for interval in intervals for end in interval]
    near = [paper for paper in map(_paper_difference, rows) if abs(paper) <= 3 * reach]
    low, high = min(*marks, *ends, *near, 0.0), max(*marks, *ends, *near, 0.0)
    margin = 0.06 * (high - low or 1.0)
    return low - margin, high + margin


@styled
def overview_figure(all_results: Sequence[ExperimentResults]) -> Drawing:
    """Draw a bar for each experiment, with a part for each verdict as long as it is frequent, and its number."""
    bars: dict[str, Counter[Verdict | None]] = {}
    for results in all_results:
        for exploratory, counts in count_verdicts(results.file.comparisons).items():
            bars[f"{results.title}, {results.preset}" + ", open questions" * exploratory] = counts
    figure, axes = axes_of("Verdicts by experiment", "comparisons", height=1.2 + 0.36 * len(bars))
    rows = np.arange(len(bars))
    start = np.zeros(len(bars))
    for verdict, (_, colour, fill, hatch) in _VERDICTS.items():
        lengths = np.array([counts[verdict] for counts in bars.values()])
        style: dict[str, Any] = {"facecolor": fill, "edgecolor": PAGE if fill == colour else colour, "hatch": hatch}
        parts = axes.barh(rows, lengths, left=start, height=0.5, label=wording.verdict_words(verdict), **style)
        box = {"facecolor": fill, "edgecolor": "none", "pad": 1.0} if hatch else None
        words = [str(count or "") for count in lengths]
        axes.bar_label(parts, words, label_type="center", color=PAGE if fill == colour else INK, fontsize=9, bbox=box)
        start += lengths
    for y, name in enumerate(bars):
        axes.text(0, y - 0.43, short(name, 56), fontsize=9, va="center")
    axes.set(yticks=[], ylim=(len(bars) - 0.5, -0.8))
    axes.spines["left"].set_visible(False)
    axes.set_axisbelow(True)
    legend_below(figure, axes)
    sentences = [f"{one.title}, {one.preset}: {verdict_counts(one.file.comparisons)}" for one in all_results]
    title = "Verdicts by experiment"
    return Drawing(figure, f"{title}. {'; '.join(sentences)}", f"{title}.", title=title, name="overview", wide=True)
