"""Draws differences of variants with their intervals as forest plots, and an overview of all verdicts."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from diff_lab.record import Comparison, Verdict
from diff_lab.report import wording
from diff_lab.report.documents import THEME
from diff_lab.report.experiments import ExperimentResults
from diff_lab.report.plots import CROSS, INK, MUTED, PAGE, RULE, Drawing, axes_of, legend_below, short, styled
from diff_lab.report.tables import count_verdicts, verdict_counts

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
    """Forest plots in which each comparison is a row; their titles begin with `called`."""
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
            "is better. An arrow marks an interval that goes on.",
            title=f"{called}: {measures}, differences",
            name=f"{results.anchor}-differences" + (f"-{number}" if several else ""),
            wide=True,
        )


def _sheets(comparisons: Sequence[Comparison]) -> list[list[list[Comparison]]]:
    """The comparisons of each measure, as many of them on a sheet as it has room for."""
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
    """What a row compares; a `brief` label leaves the two variants out where something else tells it from others."""
    pair = wording.pair_label(row.variant, row.against)
    return (
        row.coordinates.label if brief and row.coordinates else ", ".join(filter(None, (row.coordinates.label, pair)))
    )


@styled
def forest(blocks: Sequence[Sequence[Comparison]], *, title: str, trained: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """A plot for each measure, with a mark and its interval in each row, zero as a line, the paper's difference as a
    cross, and the side shaded where the first variant is better.
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
    """Lines above a mark: what is compared at the left, and at the right of the last one the verdict."""
    left, word = textwrap.wrap(_row_label(row, brief=brief), _LINE_LENGTH), wording.verdict_word(row)
    if len(left[-1]) + len(word) + 2 > _LINE_LENGTH:
        left.append("")
    return [*((line, "") for line in left[:-1]), (left[-1], word)]


def _mark(verdict: Verdict | None) -> dict[str, Any]:
    marker, colour, fill, _ = _VERDICTS[verdict]
    return {"marker": marker, "color": colour, "markerfacecolor": fill, "markersize": 6.5, "linewidth": 1.8}


def _mark_row(axes: Axes, row: Comparison, y: float, low: float, high: float) -> None:
    """The interval, with an arrow at an edge that it goes beyond, the paper's difference, and ours."""
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
    """The ends of an axis: all marks and zero; of intervals, what is not far wider than most; the paper where near."""
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
    """A bar for each experiment, with a part for each verdict as long as it is frequent, and its number."""
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
