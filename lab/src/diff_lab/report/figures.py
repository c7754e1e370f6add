"""Draws the figures of reports with matplotlib as SVG, in colours for a light and for a dark page.

Each is a `Drawing`: the figure with a description in words, for those who do not see it. Those of an experiment show a
measure along a coordinate, or validation over training.
"""

import io
import itertools
import math
import textwrap
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from diff_lab.coordinates import NO_COORDINATES, Coordinates, axis
from diff_lab.learning import ACCURACY_CURVE, CURVES, LOSS_CURVE
from diff_lab.record import Baseline, Comparison, Result, ResultsFile
from diff_lab.report import wording
from diff_lab.report.findings import ExperimentResults, slug
from diff_lab.report.wording import format_number, variant_label
from diff_lab.statistics import fits, mean_interval
from diff_transformer.attention_types import ATTENTION_TYPES

# CSS variable → (light, dark). The variants' hues are Okabe and Ito's blue and vermilion, told apart by every kind of
# colour vision; each shade has a contrast of at least 3 to the page behind it.
THEME = {
    "page": ("#ffffff", "#14171c"),
    "ink": ("#1c2128", "#e6e9ee"),
    "muted": ("#57606a", "#9aa4b0"),
    "rule": ("#d4d9df", "#3a414b"),
    **{name: described.colour for name, described in ATTENTION_TYPES.items()},
    "fifth": ("#7a6a00", "#c9b22b"),
    "sixth": ("#5b5bd6", "#9a9aff"),
}
MUTED = THEME["muted"][0]
CYCLE = [THEME[name][0] for name in ("diff", "softmax", "diff_v2", "dex", "fifth", "sixth")]
_DASHES, _MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v", "P", "X")
# Decorates what draws: under this module's style, with the caller's matplotlib left as it was.
styled = matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))
# What tells a figure of this package from another file of the same name.
FIGURE_MARK = "<!-- diff-lab report -->"
_LIGHT, _DARK = ("".join(f"--{name}: {shades[side]}; " for name, shades in THEME.items()) for side in (0, 1))
_FILE_STYLE = f"<style>svg {{ {_LIGHT}}} @media (prefers-color-scheme: dark) {{ svg {{ {_DARK}}} }}</style>"
# A curve of more points than this is drawn faintly as it is and boldly as a running mean.
MANY = 60
# Fewer numbers of a coordinate are no line; from these ratios of the largest to the smallest on, its axis or that of a
# measure is logarithmic.
FEWEST, _WIDE, _TALL = 3, 8, 30
# Of losses what lies above the curves at this share of the training is cut off.
_BEGINNING = 0.1
_BY_LAMBDA = "noise/accuracy_by_lambda"  # of a demo's DIFF
# Figure 3: the comparison that its fits are for, the losses that are fitted, and the sizes as they are counted there.
_PARAMETERS_FOR_EQUAL_LOSS = "scaling/parameters_for_equal_loss"
_FITTED_LOSS, _FITTED_SIZE = "language/validation_loss", "training/parameters_without_lambda_and_norms"


@dataclass(frozen=True)
class Series:
    """A named line: x and y of the same length, with intervals of y, if any. Numbers that are not known are NaN."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | None = None
    marker: str = "o"
    intervals: Sequence[tuple[float, float]] = ()

    def __str__(self) -> str:
        """Return the ends of the line, for those who do not see it."""
        return f"{self.label} goes from {format_number(self.y[0])} to {format_number(self.y[-1])}"


@dataclass(frozen=True)
class Drawing:
    """A figure of a page.

    `alt` says what it shows in words, `caption` what a reader must know to read it. `name` is that of its file, of
    which no report has two.
    """

    figure: Figure
    alt: str
    caption: str = ""
    name: str = ""

    @cached_property
    @styled
    def svg(self) -> str:
        """The text of an SVG file: text as text, colours of either page, no network address."""
        buffer = io.StringIO()
        with warnings.catch_warnings():
            # Text is set by the browser, which has glyphs that matplotlib's font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            # No metadata: it carries the date (the same results give the same file) and addresses of vocabularies.
            self.figure.savefig(
                buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), dpi=150
            )
        text = buffer.getvalue()
        for name, (light, _) in THEME.items():
            text = text.replace(light, f"var(--{name})")
        # A browser without the font that the layout was made for takes one that is no wider.
        text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
        inside = text.index(">", text.index("<svg")) + 1
        description = f"{FIGURE_MARK}\n<desc>{escape(self.alt)}</desc>\n{_FILE_STYLE}"
        return f"{text[text.index('<svg') : inside]}\n{description}{text[inside:]}"

    @property
    def base64(self) -> str:
        """The file's content for a page that holds it."""
        return b64encode(self.svg.encode()).decode()


def variant_style(variant: str, marker: str = "o") -> dict[str, Any]:
    """Return an attention type's colour on light pages and its marker; another variant's place decides its colour."""
    described = ATTENTION_TYPES.get(variant)
    return {"colour": described and described.colour[0], "marker": described.marker if described else marker}


@styled
def line_plot(
    lines: Sequence[Series],
    *,
    title: str,
    ylabel: str,
    xlabel: str = "training step",
    levels: Mapping[str, float] | None = None,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw lines with bands for intervals, a cross above each NaN, and named levels across the figure.

    A line of many points without intervals is drawn faintly, with its running mean. The figure, with its legend below
    the plot, is whole on a phone with legible text.
    """
    figure = Figure(figsize=(4.8, 3.3), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=textwrap.fill(title, 48, break_long_words=False), xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for number, line in enumerate(lines):
        x, colour = line.x, line.colour or CYCLE[number % len(CYCLE)]
        style: dict[str, Any] = {"label": line.label, "linestyle": _DASHES[number % 4], "linewidth": 1.6}
        if len(x) > MANY and not line.intervals:
            axes.plot(x, line.y, color=colour, linewidth=0.6, alpha=0.35)
            smooth = pd.Series(line.y).rolling(len(x) // 40 * 2 + 1, center=True, min_periods=1).mean()
            axes.plot(x, smooth, color=colour, **style)
        else:
            marker = line.marker if len(x) <= MANY // 3 else None
            axes.plot(x, line.y, color=colour, marker=marker, markersize=4.5, **style)
        if line.intervals:
            axes.fill_between(x, *np.transpose(line.intervals), color=colour, alpha=0.17, linewidth=0)
        if lost := [at for at, y in zip(x, line.y, strict=True) if not math.isfinite(y)]:
            place, heights = axes.get_xaxis_transform(), [0.97 - 0.05 * number] * len(lost)
            axes.plot(lost, heights, color=colour, marker="x", transform=place, linestyle="", markersize=7)
    for (label, height), dash in zip((levels or {}).items(), itertools.cycle(("--", "-.", ":"))):
        axes.axhline(height, label=label, color=MUTED, linestyle=dash, linewidth=1.2, zorder=1)
    if limits:  # None would keep the limits of an empty figure
        axes.set_ylim(limits)
    if max((max(line.x, default=0) for line in lines), default=0) >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, labels = axes.get_legend_handles_labels()
    # A label that would crowd the figure out is cut: of a path, its end tells the most.
    labels = [label if len(label) <= 60 else "…" + label[-59:] for label in labels]
    columns = 1 if any(len(label) > 24 for label in labels) else 2
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def experiment_figures(results: ExperimentResults, called: str) -> list[Drawing]:
    """Draw the headline's measure, or another that is compared, along a coordinate; without one the course of training.

    That is the difference in loss, or the accuracy. Of a user's own comparison there are all curves as well. Nothing is
    drawn without a headline. Titles begin with `called`.
    """
    row = results.headline
    if row is None or results.file.headline is None:
        return []
    curves = list(_learning(results, row, called))
    names = list(dict.fromkeys([row.name, *(one.name for one in results.file.comparisons)]))
    by_size = _by_size(results, row, called) if row.name == _PARAMETERS_FOR_EQUAL_LOSS else None
    main = by_size or _headline_line(results, row, names, called)
    mains = [main] if main else []
    return [*curves, *mains] if results.is_own else mains or curves[-1:]


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
            measured = (rows.low.iloc[0], rows.high.iloc[0]) if data.seed.nunique() == 1 else None
            ends.append(mean_interval(list(rows.value)) or measured or (math.nan, math.nan))
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


# --- A demo's DIFF by λ ---


def demo_figures(results: ResultsFile) -> list[Drawing]:
    """Draw the accuracy of a demo's DIFF by λ, and a head's maps of one question, with λ as learned and with λ = 0."""
    (line,) = _mean_lines(frame([one for one in results.records if one.name == _BY_LAMBDA], "factor"), ["diff"])
    right, levels = dict(zip(line.x, line.y, strict=True)), known_levels(results.baselines)
    title, xlabel = "DIFF: right answers by λ", "factor of all λ of the trained model"
    figure = line_plot([line], title=title, xlabel=xlabel, ylabel="accuracy ↑", levels=levels, limits=(0.0, 1.02))
    halves = [factor for factor in line.x if factor % 0.5 == 0]
    figure.axes[0].set_xticks(halves, [f"× {factor:g}" for factor in halves])
    caption = (
        f"With the λ that it learned (× 1) the model answers {right[1.0]:.1%} of the questions right, with λ = 0 "
        f"{right[0.0]:.1%}. Bands are 95 % intervals over the questions."
    )
    drawings = [Drawing(figure, f"{title}. {line}; {', '.join(levels)}.", caption)]
    view = results.settings["view"]
    maps = {name: np.array(view[name]) for name in ("learned", "without")}
    # As in the explorer: first rows have few tokens to attend to, and weights near 1.
    scale = max(abs(weights[len(weights) // 4 :]).max() for weights in maps.values())
    words, answer = view["words"], view["answer"]
    for name, weights in maps.items():
        title = f"Layer {view['layer']}, head {view['head']}: {'λ as learned' if name == 'learned' else 'all λ = 0'}"
        largest = int(abs(weights[-1]).argmax())
        caption = (
            f"Blue weights are positive, orange ones negative. Framed: {weights[-1, answer]:.2f}, what the question "
            f"{words[-1]} gives to its answer {words[answer]}"
        )
        caption += (
            "." if largest == answer else f"; its largest weight is {weights[-1, largest]:.2f}, to {words[largest]}."
        )
        drawings.append(Drawing(_head_map(weights / scale, words, answer, title), f"{title}. {caption}", caption))
    return drawings


@styled
def _head_map(weights: np.ndarray, words: Sequence[str], answer: int, title: str) -> Figure:
    """Draw a map, with a frame around the weight of the last row on the answer."""
    figure = Figure(figsize=(4.8, 4.9), layout="constrained")
    axes, length = figure.add_subplot(), len(words)
    shades = np.where(weights[..., None] < 0, to_rgba(THEME["softmax"][0]), to_rgba(THEME["diff"][0]))
    shades[..., 3] = np.sqrt(np.minimum(abs(weights), 1))  # most weights are small
    axes.pcolormesh(shades)
    axes.add_patch(Rectangle((answer, length - 1), 1, 1, fill=False, edgecolor=THEME["ink"][0], linewidth=1.2))
    places = np.arange(length) + 0.5
    axes.set_xticks(places, words, rotation=90, fontsize=7)
    axes.set_yticks(places, words, fontsize=7)
    axes.set(title=title, aspect="equal")
    axes.invert_yaxis()
    axes.grid(visible=False)
    return figure


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

    def drawn(file: str, title: str, lines: Sequence[Series], caption: str, **shown: Any) -> Drawing:
        whole_title = f"{called}: {title}{part}"
        alt = f"{whole_title} over training: {'; '.join([*map(str, lines), *shown['levels']])}."
        figure = line_plot(lines, title=whole_title, **shown)
        return Drawing(figure, alt, caption, slug(f"{results.anchor}-{file}{part}"))

    for name in CURVES:
        of_curve = [one for one in records if (one.name, one.coordinates.without("step")) == (name, at)]
        data = frame(of_curve, "step")
        if data.x.nunique() < 2:
            continue
        xlabel, word = "step of training", wording.measure_words(name)
        if name == LOSS_CURVE and tokens and tokens[0]:
            data["x"] *= tokens[0]
            xlabel = "tokens of training"
        lines = _mean_lines(_whole(data), wording.variants_of(of_curve))
        shown: dict[str, Any] = {"levels": {}, "limits": _limits(lines, begin=_BEGINNING)}
        if name == ACCURACY_CURVE:
            shown = {"levels": known_levels(results.file.baselines), "limits": (0.0, 1.0)}
        ylabel = f"{word} ↑" if name == ACCURACY_CURVE else f"{word} (nats/token) ↓"
        file = f"learning-{word.split()[-1]}"
        yield drawn(file, word, lines, _caption(data), xlabel=xlabel, ylabel=ylabel, **shown)
        lines = list(_differences(results, row, data)) if name == LOSS_CURVE else []
        if lines:
            pair = wording.pair_label(row.variant, row.against)
            caption = (
                f"Differences in validation loss over paired seeds, of {pair} with the 95 % interval (Student's t), "
                "cut at the axis: below 0 the first variant is ahead. Where two variants have different learning "
                "rates, what stands before the end comes of the rates as well."
            )
            shown = {"levels": {"equal losses (0)": 0.0}, "limits": _limits(lines, 0.0, begin=_BEGINNING)}
            ylabel = "first − second (nats/token)"
            yield drawn("difference", "difference in loss", lines, caption, xlabel=xlabel, ylabel=ylabel, **shown)


def known_levels(baselines: Sequence[Baseline]) -> dict[str, float]:
    """Return the levels of the validation accuracy by name, "chance 0.06"; of equal ones the last, which says most."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().items()]
    by_height = {height: label for label, height in levels}
    return {f"{label} {format_number(height, 2)}": height for height, label in by_height.items()}


def _differences(results: ExperimentResults, row: Comparison, data: pd.DataFrame) -> Iterator[Series]:
    """Yield how much higher the loss of one variant is than another's, of each compared pair whose seeds have it; the
    interval is of the pair that a comparison is of.
    """
    pairs = dict.fromkeys((one.variant, one.against) for one in results.file.comparisons)
    for number, pair in enumerate(pairs):
        first, second = (data[data.variant == variant] for variant in pair)
        both = first.merge(second[["seed", "x", "value"]], on=["seed", "x"], suffixes=("", "_against"))
        label = wording.pair_label(*pair)
        (line,) = _mean_lines(_whole(both.assign(value=both.value - both.value_against, variant=label)), [label])
        if line.x:
            intervals = line.intervals if pair == (row.variant, row.against) else ()
            marker = _MARKERS[number % len(_MARKERS)]
            yield replace(line, colour=CYCLE[number % len(CYCLE)], marker=marker, intervals=intervals)


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
    for number, (points, line) in enumerate(zip(axes.get_lines(), lines, strict=True)):
        points.set_linestyle("")  # the lines are the fits
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
    words = f"{'; '.join(map(str, lines))}; for an equal loss {wording.format_difference(row)} of parameters"
    caption = f"{_caption(losses)} Lines are the fits that the comparison is made of."
    return Drawing(figure, f"{title}: {words}.", caption, slug(f"{results.anchor}-size"))


# --- A measure along a coordinate: sizes, depths, bits ---


def _headline_line(results: ExperimentResults, row: Comparison, names: Sequence[str], called: str) -> Drawing | None:
    """Draw the records of the first measure that differ in one coordinate alone and have three numbers of it or more:
    at the headline, or else at the first place with such numbers. Numbers that all variants share are no line.
    """
    for name in names:
        records = [record for record in results.file.records if record.name == name]
        places = sorted(dict.fromkeys(one.coordinates for one in records), key=lambda place: place != row.coordinates)
        for start, coordinate in ((place, coordinate) for place in places for coordinate in reversed(list(place))):
            along_it = [
                one
                for one in records
                if one.coordinates.keys() == start.keys()
                and one.coordinates.without(coordinate) == start.without(coordinate)
                and math.isfinite(one.coordinates.position(coordinate))
            ]
            numbers = {one.coordinates.position(coordinate) for one in along_it}
            if len(numbers) >= FEWEST and len({one.value for one in along_it}) > 1:
                return _along(coordinate, along_it, results, called)
    return None


def _along(coordinate: str, records: Sequence[Result], results: ExperimentResults, called: str) -> Drawing:
    """Draw one measure's records, which differ in one coordinate alone, as a line for each variant over its numbers."""
    first, described, data = records[0], axis(coordinate), frame(records, coordinate)
    label = first.coordinates.without(coordinate).label
    title = f"{wording.measure_words(first.name)}{f', {label}' if label else ''}"
    numbers = {record.coordinates: record.coordinates.position(coordinate) for record in records}
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
    lines = [*_mean_lines(data, wording.variants_of(records)), *_levels(first.name, numbers, results.file.baselines)]
    measure = wording.measure_words(first.name) + wording.unit_and_direction(first)
    is_tall = data.value.min() > 0 and data.value.max() >= _TALL * data.value.min()
    limits = None if is_tall else _limits(lines)
    figure = line_plot(lines, title=f"{called}: {title}", xlabel=described.title, ylabel=measure, limits=limits)
    axes, positions = figure.axes[0], list(numbers.values())
    texts = [described.text(at[coordinate]) for at in numbers]
    # Shares of a whole, such as depths, lie evenly however far they are apart.
    if positions[0] > 0 and positions[-1] >= _WIDE * positions[0] and not any("%" in text for text in texts):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if positions[0] >= 1 else StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(positions) <= 8:
        axes.set_xticks(positions, texts)
        axes.xaxis.set_minor_locator(NullLocator())
    if is_tall:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    alt = f"{called}: {title} by {described.title}: {measure}. {'; '.join(map(str, lines))}."
    return Drawing(figure, alt, _caption(data), slug(f"{results.anchor}-{title}"))


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
