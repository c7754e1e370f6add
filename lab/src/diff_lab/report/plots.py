"""Draws lines and attention maps with matplotlib as SVG, in the colours of the page that shows them, light or dark.

Each figure of a report is a `Drawing`: the figure with a description in words, for those who do not see it.
"""

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import matplotlib
import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from diff_lab.record import AttentionExample
from diff_lab.report import wording
from diff_lab.report.documents import DARK, LIGHT, THEME
from diff_lab.report.wording import format_number, variant_label
from diff_transformer.attention_types import ATTENTION_TYPES

PAGE, INK, MUTED, RULE = (THEME[name][0] for name in ("page", "ink", "muted", "rule"))
CYCLE = [THEME[name][0] for name in ("diff", "softmax", "diff_v2", "dex", "fifth", "sixth")]
_DASHES = ("-", "--", "-.", ":")
# The explorer's hues, legible on white and on black: of a positive weight and of A1, of a negative one and of λA2.
_POSITIVE, _NEGATIVE = "#2f7fd1", "#d9761f"
# Of a weight: nothing is drawn where it is 0, so that the page shows through, light or dark.
_SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0.0, _NEGATIVE), (0.5, f"{_NEGATIVE}00"), (0.5, f"{_POSITIVE}00"), (1.0, _POSITIVE)]
)
CROSS: dict[str, Any] = {"marker": "x", "linestyle": "", "color": INK, "markersize": 7, "markeredgewidth": 1.6}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}
# Decorates what draws: under this module's style, with the caller's matplotlib left as it was.
styled = matplotlib.rc_context(_STYLE)
# What tells a figure of this package from another file of the same name.
FIGURE_MARK = "<!-- diff-lab report -->"
_PIXELS_PER_POINT = 96 / 72
_FILE_STYLE = f"<style>svg {{ {LIGHT}}} @media (prefers-color-scheme: dark) {{ svg {{ {DARK}}} }}</style>"
# A curve of more points than this is drawn faintly as it is and boldly as a running mean.
MANY = 60


@dataclass(frozen=True)
class Series:
    """A named line: x and y of the same length, with intervals of y, if any. Numbers that are not known are NaN."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | None = None
    marker: str = "o"
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Drawing:
    """A figure of a page.

    `alt` says what it shows in words, `caption` what a reader must know to read it. `name` is that of its file, of
    which no report has two.
    """

    figure: Figure
    alt: str
    caption: str = ""
    title: str = ""
    name: str = ""

    @cached_property
    def svg(self) -> str:
        return svg(self.figure)


def variant_style(variant: str, marker: str = "o") -> dict[str, Any]:
    """Return an attention type's colour on light pages and its marker; another variant's place decides its colour."""
    described = ATTENTION_TYPES.get(variant)
    return {"colour": described and described.colour[0], "marker": described.marker if described else marker}


def layer_colour(depth: float) -> str:
    """Return a layer's colour on one ramp of middle lightness from the first (0) to the last (1)."""
    return to_hex(LinearSegmentedColormap.from_list("layers", ["#8e44ad", "#2e86c1", "#17a589", "#b7950b"])(depth))


def svg(figure: Figure) -> str:
    """Return the figure as an <svg> element: text as text, theme colours as CSS variables, no network address."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context({**_STYLE, "svg.hashsalt": "diff-transformer"}):
        # Text is set by the browser, which has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # No metadata: it carries the date (the same results give the same page) and addresses of vocabularies.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, dpi=150)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    # Names of places repeat from figure to figure; an id must be the page's only one.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for name, (light, _) in THEME.items():
        text = text.replace(light, f"var(--{name})")
    return text.replace("xlink:href", "href")


def svg_file(element: str, description: str, *, width: int | None = None) -> str:
    """Return an element that `svg` made as the text of a file, `width` pixels wide or as wide as it was drawn.

    The page's own colour lies behind it: a host may be dark although the browser is told to be light.
    """
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', element)
    assert box is not None  # matplotlib's own
    drawn_width, drawn_height = (float(side) * _PIXELS_PER_POINT for side in box.groups())
    height = round(drawn_height * (width or drawn_width) / drawn_width)
    size = f'width="{width or round(drawn_width)}" height="{height}"'
    # A browser without the font that the layout was made for takes one that is no wider.
    inside = element[element.index(">") + 1 :].replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    behind = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} {size}>\n{FIGURE_MARK}\n'
        f"<desc>{escape(description)}</desc>\n{_FILE_STYLE}\n{behind}{inside}"
    )


def axes_of(title: str, xlabel: str, ylabel: str = "", height: float = 3.3) -> tuple[Figure, Axes]:
    """Make a figure of the common width, whole on a phone with legible text, and its axes. Long titles wrap."""
    figure = Figure(figsize=(4.8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=textwrap.fill(title, 48, break_long_words=False), xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def short(label: str, most: int) -> str:
    """Return the end of a label that would crowd the figure out: of a path, its end tells the most."""
    return label if len(label) <= most else "…" + label[1 - most :]


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend of `axes` under the plot, which keeps its height; long labels stand below each other."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [short(label, 60) for label in labels]
    columns = 1 if any(len(label) > 24 for label in labels) else 2
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


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

    A line of many points without intervals is drawn faintly, with its running mean. The legend leaves out labels that
    begin with "_".
    """
    figure, axes = axes_of(title, xlabel, ylabel)
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
        known = [(at, *ends) for at, ends in zip(x, line.intervals, strict=False) if math.isfinite(sum(ends))]
        if known:
            at, low, high = zip(*known, strict=True)
            axes.fill_between(at, low, high, color=colour, alpha=0.17, linewidth=0)
        lost = [at for at, y in zip(x, line.y, strict=True) if not math.isfinite(y)]
        if lost:
            cross = CROSS | {"color": colour, "transform": axes.get_xaxis_transform()}
            axes.plot(lost, [0.97 - 0.05 * number] * len(lost), **cross)
    for (label, height), dash in zip((levels or {}).items(), itertools.cycle(("--", "-.", ":"))):
        axes.axhline(height, label=label, color=MUTED, linestyle=dash, linewidth=1.2, zorder=1)
    if limits:
        axes.set_ylim(*limits)
    if max((max(line.x, default=0) for line in lines), default=0) >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    legend_below(figure, axes)
    return figure


def ends_in_words(line: Series) -> str:
    """Return the ends of a line, for those who do not see it."""
    first, last = (format_number(line.y[index], missing=wording.DIVERGED) for index in (0, -1))
    return f"{line.label} goes from {first} to {last}"


def asked_positions(example: AttentionExample) -> list[int]:
    """Return the positions of keys that are asked for, behind all needles; the marked query is one of them."""
    keys = (position for position, token in enumerate(example.tokens) if token.startswith("k"))
    return sorted({example.query_position, *keys} - set(example.needle_positions))


@styled
def attention_map(rows: Sequence[Sequence[float]], example: AttentionExample, *, title: str, largest: float) -> Figure:
    """Draw the rows of a causal map (N, N) at `asked_positions`, from −`largest` to `largest`. The scale grows as the
    square root; zero is the page. Needles are named below it, a key with its value, and queries left of it; the marked
    query and its answer stand out.
    """
    figure, axes = axes_of("", "attends to: pairs in noise, then the queries", height=2.7)
    signed_root = (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x))
    norm = FuncNorm(signed_root, vmin=-largest, vmax=largest)
    asked, answers = asked_positions(example), example.answer_positions
    shown = [[weight if at <= row else math.nan for at, weight in enumerate(rows[row])] for row in asked]
    image = axes.imshow(shown, cmap=_SIGNED, norm=norm, interpolation="nearest", aspect="auto")
    figure.colorbar(image, ax=axes, ticks=[share * largest for share in (-1, -0.25, 0, 0.25, 1)], format="{x:.2f}")
    mark: dict[str, Any] = {"linestyle": "", "marker": "v", "color": INK, "markersize": 5, "clip_on": False}
    axes.plot(answers, [1.04] * len(answers), transform=axes.get_xaxis_transform(), **mark)
    marked = asked.index(example.query_position)
    for answer in answers:
        axes.add_patch(Rectangle((answer - 0.5, marked - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.2))
    axes.set_title(title, pad=12)
    axes.grid(visible=False)
    needles = sorted(example.needle_positions)
    keys = [at for at, after in itertools.pairwise(needles) if after == at + 1 and example.tokens[at].startswith("k")]
    pairs = [f"{example.tokens[key]} {example.tokens[key + 1]}" for key in keys]
    axes.set_xticks([key + 0.5 for key in keys], pairs, rotation=90)
    axes.set_yticks(
        range(len(asked)), [f"{'▸ ' * (row == marked)}{example.tokens[at]}?" for row, at in enumerate(asked)]
    )
    names = [*zip(axes.get_xticklabels(), (key + 1 in answers for key in keys), strict=True)]
    names += zip(axes.get_yticklabels(), (row == marked for row in range(len(asked))), strict=True)
    for label, stands_out in names:
        label.set(fontsize=8, color=INK if stands_out else MUTED, fontweight="bold" if stands_out else "normal")
    return figure


def shown_maps(example: AttentionExample) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield the maps of each variant's head with their titles, λA2 in place of A2."""
    for variant in filter(example.maps.__contains__, ATTENTION_TYPES):
        for name, rows in example.maps[variant].items():
            title = {"A2": "λA2", "difference": "A1 − λA2"}.get(name, name)
            factor = example.lambda_ if name == "A2" else 1.0
            yield f"{variant_label(variant)}: {title}", [[factor * weight for weight in row] for row in rows]


def map_drawing(example: AttentionExample, rows: list[list[float]], title: str, largest: float) -> Drawing:
    at_answer = ", ".join(f"{rows[example.query_position][position]:.2f}" for position in example.answer_positions)
    figure = attention_map(rows, example, title=title, largest=largest)
    return Drawing(figure, f"{title}: every query's weights; the marked query gives the answer {at_answer}.")
