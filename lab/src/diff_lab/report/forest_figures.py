"""Draws the comparisons of experiments: their differences as forest plots, and how often each verdict came out."""

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diff_lab.record import Better, Comparison, Interval, Verdict
from diff_lab.report import wording
from diff_lab.report.experiment_tables import ExperimentResults, count_verdicts, verdict_counts
from diff_lab.report.figures import INK, MUTED, PAGE, RULE, THEME, Drawing, axes_of, short, styled

# How a verdict is drawn, told from the others without colour: its mark in a forest plot, and its part of a bar. The two
# verdicts that decide are equally strong.
_DIFF, _SOFTMAX = THEME["diff"][0], THEME["softmax"][0]
_MARKS: dict[Verdict | None, dict[str, Any]] = {
    "reproduced": {"marker": "o", "color": _DIFF},
    "inconclusive": {"marker": "o", "color": INK, "markerfacecolor": PAGE},
    "contrary": {"marker": "s", "color": _SOFTMAX},
    "still learning": {"marker": "^", "color": INK, "markerfacecolor": PAGE},
    "not comparable": {"marker": "X", "color": MUTED, "markerfacecolor": PAGE},
    None: {"marker": "D", "color": MUTED, "markerfacecolor": PAGE},
}
_BARS: dict[Verdict | None, dict[str, Any]] = {
    "reproduced": {"facecolor": _DIFF, "edgecolor": _DIFF},
    "inconclusive": {"facecolor": RULE, "edgecolor": INK},
    "contrary": {"facecolor": _SOFTMAX, "edgecolor": PAGE, "hatch": "////"},
    "still learning": {"facecolor": PAGE, "edgecolor": INK, "hatch": "|||"},
    "not comparable": {"facecolor": PAGE, "edgecolor": INK, "hatch": "xxxx"},
    None: {"facecolor": PAGE, "edgecolor": MUTED, "hatch": "...."},
}
# Inches of a line of text; labels stand above their rows, since the figure is as narrow as others.
_LINE = 0.19
# Inches: text is set by whatever shows the figure, whose letters may be a little wider.
_MARGIN = 0.08
# Characters of a line of text.
_LONGEST = 66
# Rows of one forest plot, and how much larger the differences of one measure in it may be than those of another.
MOST_ROWS = 24
MOST_RATIO = 10
_CAPTION = (
    "Mean difference over paired seeds, with its 95 % interval where there is one. An arrow at the edge marks an "
    "interval that goes on. Where the paper's difference lies beyond the edge, its value is written there."
)
_LEVELS_CAPTION = (
    " In brackets behind an accuracy: chance, and the floor without any binding, or what elimination gives if that is "
    "higher."
)


@dataclass(frozen=True)
class ForestRow:
    """A row: a difference with its interval, or a heading over those below it, which has no difference.

    `missing` stands for a difference that is NaN, `paper` is the paper's difference, `remark` follows the verdict.
    """

    label: str
    difference: float | None = None
    interval: Interval | None = None
    verdict: Verdict | None = None
    exploratory: bool = False
    paper: float | None = None
    missing: str = wording.NOT_KNOWN
    remark: str = ""

    @property
    def word(self) -> str:
        """The verdict as it is written at the right."""
        word = "no claim" if self.verdict is None else wording.verdict_word(self.verdict, self.exploratory)
        return f"{word}; {self.remark}" if self.remark else word

    @property
    def lines(self) -> list[str]:
        """The lines of text above the interval; the verdict has a line of its own where the last one is full."""
        lines = textwrap.wrap(self.label, _LONGEST)
        if self.difference is not None and len(lines[-1]) + 2 + len(self.word) > _LONGEST:
            lines.append("")
        return lines


@styled
def overview_figure(all_results: Sequence[ExperimentResults]) -> Drawing:
    """A bar for each experiment, with a part for each verdict as long as it is frequent, and its number."""
    bars: dict[str, Counter[Verdict | None]] = {}
    sentences = []
    for results in all_results:
        name, comparisons = f"{results.title}, {results.preset}", results.file.comparisons
        sentences.append(f"{name}: {verdict_counts(comparisons)}")
        for exploratory, counts in count_verdicts(comparisons).items():
            bars[f"{name}, open questions" if exploratory else name] = counts
    title = "Verdicts by experiment"
    figure, axes = axes_of(title, "comparisons", height=1.5 + 0.36 * len(bars))
    axes.set(yticks=[], ylim=(len(bars) - 0.5, -0.8))
    longest = max(sum(counts.values()) for counts in bars.values()) or 1
    for y, (name, counts) in enumerate(bars.items()):
        start = 0
        axes.text(0, y - 0.43, short(name, 56), color=INK, fontsize=9, va="center")
        for verdict, part in _BARS.items():
            count = counts[verdict]
            if not count:
                continue
            axes.barh(y, count, left=start, height=0.5, linewidth=1, **part)
            if count >= 0.025 * longest:
                box = {"facecolor": part["facecolor"], "edgecolor": "none", "pad": 1.0} if "hatch" in part else None
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "bbox": box}
                colour = INK if "markerfacecolor" in _MARKS[verdict] else PAGE
                axes.text(start + count / 2, y, str(count), color=colour, **style)
            start += count
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    parts = [Patch(label=wording.verdict_words(verdict), **part) for verdict, part in _BARS.items()]
    figure.legend(handles=parts, loc="outside lower center", ncols=2, fontsize=9)
    alt = f"{title}. {'; '.join(sentences)}"
    return Drawing(figure, alt, f"{title}.", title=title, name="overview", wide=True)


def forest_figures(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    """Forest plots in which each comparison is a row; their titles begin with `called`."""
    sheets = _sheets(results.file.comparisons)
    for number, rows in enumerate(sheets, start=1):
        several_sheets = len(sheets) > 1
        several_pairs = len({(row.variant, row.against) for row in rows}) > 1
        names = list(dict.fromkeys(row.name for row in rows))
        better = _direction(rows)
        unit = f" ({rows[0].unit})" if rows[0].unit else ""
        measure = wording.measure_words(names[0]) if len(names) == 1 else "differences"
        figure = forest(
            list(_rows(rows, results.variants, several=len(names) > 1, pairs=several_pairs)),
            title=f"{called}: {measure}{wording.ARROWS[better]}",
            xlabel=("first − second" if several_pairs else wording.pair_label(rows[0]))
            + f"{unit}{'; shaded: the first is better' if better else ''}",
            better=better,
        )
        part = f", part {number} of {len(sheets)}" if several_sheets else ""
        described = [
            f"{_label(row)}: {wording.format_difference(row, results.variants)}, {wording.verdict_text(row)}"
            for row in rows
        ]
        yield Drawing(
            figure,
            f"{called}, differences{part}: {'; '.join(described)}.",
            _CAPTION + (_LEVELS_CAPTION if any(map(wording.levels_of, rows)) else ""),
            title=f"{called}: {', '.join(map(wording.measure_words, names[:3]))}{' …' * (len(names) > 3)}, differences",
            name=f"{results.anchor}-differences" + (f"-{number}" if several_sheets else ""),
            wide=True,
        )


def _sheets(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Comparisons that fit one axis: of one unit and direction, of sizes not too far apart, and not too many."""
    sheets: list[list[Comparison]] = []
    for name in dict.fromkeys(row.name for row in comparisons):
        rows = [row for row in comparisons if row.name == name]
        for start in range(0, len(rows), MOST_ROWS):
            part = rows[start : start + MOST_ROWS]
            fitting = next((sheet for sheet in sheets if _fits(sheet, part)), None)
            if fitting is None:
                sheets.append(part)
            else:
                fitting += part
    return sheets


def _fits(sheet: Sequence[Comparison], part: Sequence[Comparison]) -> bool:
    directions = {_direction(sheet), _direction(part)} - {None}
    if sheet[0].unit != part[0].unit or len(directions) > 1 or len(sheet) + len(part) > MOST_ROWS:
        return False
    small, large = sorted(
        max((abs(row.difference) for row in rows if math.isfinite(row.difference)), default=0.0)
        for rows in (sheet, part)
    )
    return small == 0 or large <= MOST_RATIO * small


def _direction(rows: Sequence[Comparison]) -> Better | None:
    """That of the claims among them."""
    return next((row.better for row in rows if row.better), None)


def _rows(
    rows: Sequence[Comparison], trained: Sequence[Mapping[str, Any]], *, several: bool, pairs: bool
) -> Iterator[ForestRow]:
    """Headings where there are several measures of several rows, and a row for each comparison."""
    counts = Counter(row.name for row in rows)
    for name, block in itertools.groupby(rows, key=lambda row: row.name):
        headed = several and max(counts.values()) > 1
        if headed:
            yield ForestRow(wording.measure_words(name))
        for row in block:
            paper = math.nan if row.paper is None else row.paper[0] - row.paper[1]
            yield ForestRow(
                label=_label(row, measure=several and not headed, pairs=pairs),
                difference=row.difference,
                interval=row.interval if row.interval is not None and all(map(math.isfinite, row.interval)) else None,
                verdict=row.verdict,
                exploratory=row.exploratory,
                paper=paper if math.isfinite(paper) else None,
                missing=wording.missing_word(row, trained),
                remark=wording.verdict_mark(row),
            )


def _label(row: Comparison, *, measure: bool = True, pairs: bool = True) -> str:
    """What a row compares: its measure unless that stands above, its part, and the variants where they differ."""
    name = wording.measure_words(row.name) if measure else ""
    variants = wording.pair_label(row) if pairs else ""
    label = ", ".join(filter(None, (name, row.coordinates.label, variants)))
    return (label or wording.pair_label(row)) + wording.levels_mark(row)


@styled
def forest(rows: Sequence[ForestRow], *, title: str, xlabel: str, better: Better | None) -> Figure:
    """One dot and interval a row, zero as a line, the paper's difference as a cross, the claim's side shaded."""
    # Lines of text, one for the interval, and space before the next row.
    heights = (len(row.lines) + (0.1 if row.difference is None else 1.25) for row in rows)
    *tops, end = itertools.accumulate(heights, initial=0.0)
    figure, axes = axes_of(title, xlabel, height=1.35 + _LINE * end)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=_MARGIN))
    low, high = _limits(rows)
    claim = {"higher": (0.0, high), "lower": (low, 0.0), None: None}[better]
    for row, top in zip(rows, tops, strict=True):
        _draw(axes, row, top, low, high)
        if row.difference is not None and claim is not None:
            y = top + len(row.lines) + 0.5
            axes.fill_between(claim, y - 0.45, y + 0.45, color=RULE, alpha=0.45, linewidth=0, zorder=0)
    axes.set(xlim=(low, high), ylim=(end, -0.2), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}".replace("-", "−")))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    # What the marks mean, below the plot.
    for verdict, mark in _MARKS.items():
        kinds = {row.exploratory for row in rows if row.difference is not None and row.verdict == verdict}
        if kinds:
            label = "no claim" if verdict is None else wording.verdict_words(verdict, sorted(kinds))
            axes.plot([], [], linewidth=1.8, label=label, **mark)
    if any(row.paper is not None for row in rows):
        axes.plot([], [], marker="x", linestyle="", color=INK, markeredgewidth=1.6, label="the paper")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw(axes: Axes, row: ForestRow, top: float, low: float, high: float) -> None:
    """A row's label on the left, its verdict on the right, and below them its interval, the paper's cross, its dot."""
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for number, line in enumerate(row.lines):
        weight = "bold" if row.difference is None else "normal"
        axes.text(0.0, top + number + 0.5, line, color=INK, fontweight=weight, **style)
    if row.difference is None:
        return
    y = top + len(row.lines) + 0.5
    colour = MUTED if row.verdict is None else INK
    axes.text(1.0, y - 1, row.word, color=colour, ha="right", **style)
    axes.plot([0.0, 0.0], [y - 0.45, y + 0.45], color=INK, linewidth=1.2, zorder=1)
    if not math.isfinite(row.difference):
        axes.text(0.0, y, f" {row.missing}", color=INK, va="center", fontsize=9, fontstyle="italic")
        return
    mark = _MARKS[row.verdict]
    if row.interval is not None:
        ends = [min(max(end, low), high) for end in row.interval]
        axes.plot(ends, [y, y], color=mark["color"], linewidth=1.8, solid_capstyle="butt", zorder=2)
        for end, edge, arrow in ((row.interval[0], low, "<"), (row.interval[1], high, ">")):
            if not low <= end <= high:
                axes.plot([edge], [y], marker=arrow, markersize=6, color=mark["color"], clip_on=False, zorder=4)
    if row.paper is not None and low <= row.paper <= high:
        cross: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "color": INK, "zorder": 3}
        axes.plot([row.paper], [y], marker="x", linestyle="", **cross)
    elif row.paper is not None:
        edge, offset, side = (low, 6, "left") if row.paper < low else (high, -6, "right")
        text = f"× {row.paper:+,.0f}" if abs(row.paper) >= 100 else f"× {row.paper:+,.3g}"
        axes.annotate(
            text.replace("-", "−"),
            (edge, y),
            xytext=(offset, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
            color=INK,
            bbox={"facecolor": PAGE, "edgecolor": "none", "pad": 0.5, "alpha": 0.85},  # an interval may lie there
            zorder=4,
        )
    axes.plot([row.difference], [y], markersize=6.5, zorder=5, **mark)


def _limits(rows: Sequence[ForestRow]) -> tuple[float, float]:
    """The ends of the axis: all dots and zero; of intervals, what is not far wider than most; the paper where near."""
    drawn = [row for row in rows if math.isfinite(row.difference or 0.0)]
    dots = [row.difference for row in drawn if row.difference is not None]
    intervals = [row.interval for row in drawn if row.interval is not None]
    papers = [row.paper for row in drawn if row.paper is not None]
    usual = 3 * median((high - low) / 2 for low, high in intervals) if intervals else 0.0
    reach = max([usual, *map(abs, dots)]) or 1.0
    ends = [max(-1.5 * reach, min(end, 1.5 * reach)) for interval in intervals for end in interval]
    everything = [0.0, *dots, *ends, *(paper for paper in papers if abs(paper) <= 3 * reach)]
    low, high = min(everything), max(everything)
    margin = 0.06 * (high - low or 1.0)
    # Beside all dots and intervals there is space for the paper's differences that lie far away.
    far = [paper for paper in papers if not low - margin <= paper <= high + margin]
    left, right = (margin * (4 if any(sign * paper > 0 for paper in far) else 1) for sign in (-1, 1))
    return low - left, high + right
