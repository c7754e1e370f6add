"""Draws training runs and attention as SVG, in the colours of the page that shows them, light or dark."""

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from diff_lab.record import AttentionExample
from diff_transformer.variants import ATTENTION_TYPES

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
# The same as CSS.
LIGHT = "".join(f"--{name}: {light}; " for name, (light, _) in THEME.items())
DARK = "".join(f"--{name}: {dark}; " for name, (_, dark) in THEME.items())
PAGE, INK, MUTED, RULE = (THEME[name][0] for name in ("page", "ink", "muted", "rule"))
CYCLE = [THEME[name][0] for name in ("diff", "softmax", "diff_v2", "dex", "fifth", "sixth")]
DASHES = ("-", "--", "-.", ":")
# The explorer's hues, legible on white and on black: of a positive weight and of A1, of a negative one and of λA2.
_POSITIVE, _NEGATIVE = "#2f7fd1", "#d9761f"
_MAP_COLOURS = {"A1": _POSITIVE, "λA2": _NEGATIVE, "A1 − λA2": INK, "A": INK}
# Layers are ordered: one ramp of middle lightness, legible on white and on black.
_RAMP = LinearSegmentedColormap.from_list("layers", ["#8e44ad", "#2e86c1", "#17a589", "#b7950b"])
# Of a weight: nothing is drawn where it is 0, so that the page shows through, light or dark.
_SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0.0, _NEGATIVE), (0.5, f"{_NEGATIVE}00"), (0.5, f"{_POSITIVE}00"), (1.0, _POSITIVE)]
)
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.titlesize": 11,
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
    "axes.titlelocation": "left",
}
# A curve of more points than this is drawn faintly as it is and boldly as a running mean.
MANY = 60
# What tells a figure of this package from another file of the same name.
FIGURE_MARK = "<!-- diff-lab report -->"
# A browser without the font that the layout was made for takes one that is no wider.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_PIXELS_PER_POINT = 96 / 72
_FILE_STYLE = f"<style>svg {{ {LIGHT}}} @media (prefers-color-scheme: dark) {{ svg {{ {DARK}}} }}</style>"
# Decorates what draws: under this module's style, with the caller's matplotlib left as it was.
styled = matplotlib.rc_context(_STYLE)


def variant_style(variant: str, marker: str = "o") -> dict[str, Any]:
    """The colour on light pages and the marker of an attention type; another variant's place decides its colour."""
    described = ATTENTION_TYPES.get(variant)
    return {"colour": described and described.colour[0], "marker": described.marker if described else marker}


@dataclass(frozen=True)
class Series:
    """A named line: x and y of the same length, with 95 % intervals of y where they are known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str | None = None
    intervals: Sequence[tuple[float, float] | None] = ()
    marker: str = "o"


@dataclass(frozen=True)
class Drawing:
    """A figure of a page.

    `alt` says what it shows in words, `caption` what a reader must know to read it. `name` is that of its file, of
    which no report has two. A `wide` one takes the width of a page, others stand side by side.
    """

    figure: Figure
    alt: str
    caption: str = ""
    title: str = ""
    name: str = ""
    wide: bool = False

    @cached_property
    def svg(self) -> str:
        return svg(self.figure)


@styled
def curves(
    series: Sequence[Series],
    *,
    checks: Sequence[Series] = (),
    levels: Mapping[str, float] | None = None,
    title: str,
    ylabel: str,
    xlabel: str = "training step",
    noisy: bool = True,
) -> Figure:
    """Measures over training steps, `noisy` ones with a running mean; `checks`, made now and then, have markers.

    `levels` are named lines across the figure.
    """
    figure, axes = axes_of(title, xlabel, ylabel)
    for number, (line, colour) in enumerate(zip(series, colours_of(series), strict=True)):
        y = line.y
        if noisy and len(y) > MANY:
            axes.plot(line.x, y, color=colour, linewidth=0.6, alpha=0.35)
            y = running_mean(y)
        # The first is drawn wider, so that it shows on both sides of a second that covers it.
        style: dict[str, Any] = {"linestyle": DASHES[number // len(CYCLE) % 4], "linewidth": 1.5 if number else 2.6}
        axes.plot(line.x, y, label=line.label, color=colour, **style)
    for line, colour in zip(checks, colours_of(checks), strict=True):
        style = {"color": colour, "linestyle": "--", "linewidth": 1, "marker": line.marker, "markersize": 4}
        axes.plot(line.x, line.y, label=line.label, **style)
    for (label, height), dash in zip((levels or {}).items(), itertools.cycle((":", "-.", "--"))):
        axes.axhline(height, color=MUTED, linewidth=1.2, linestyle=dash, label=label, zorder=1)
    legend(axes)
    return figure


@styled
def lambdas(steps: Sequence[int], layers: Sequence[Sequence[float]], initial: Sequence[float], *, title: str) -> Figure:
    """λ of every layer over training: layers[l][i] is λ of layer l + 1 at steps[i]; `initial` marks λ_init."""
    figure, axes = axes_of(title, "training step", "λ")
    span = (max(steps) - min(steps)) or 1
    labelled = range(0, len(layers), math.ceil(len(layers) / 8))
    heights = apart([layers[number][-1] for number in labelled], [value for values in layers for value in values])
    colours = [to_hex(_RAMP(number / max(1, len(layers) - 1))) for number in range(len(layers))]
    for values, colour in zip(layers, colours, strict=True):
        axes.plot(steps, values, color=colour, linewidth=1.8)
    for value, colour in zip(initial, colours, strict=False):
        mark: dict[str, Any] = {"marker": ">", "markersize": 6, "color": colour, "clip_on": False}
        axes.plot([min(steps) - 0.03 * span], [value], **mark)
    for number, height in zip(labelled, heights, strict=True):
        words: dict[str, Any] = {"color": colours[number], "va": "center", "fontsize": 9}
        axes.text(max(steps) + 0.02 * span, height, f"layer {number + 1}", **words)
    axes.set_xlim(min(steps) - 0.05 * span, max(steps) + 0.2 * span)
    return figure


def asked_positions(example: AttentionExample) -> list[int]:
    """The positions of keys that are asked for, which stand behind all needles; the marked query is one of them."""
    keys = (position for position, token in enumerate(example.tokens) if token.startswith("k"))
    return sorted({example.query_position, *keys} - set(example.needle_positions))


@styled
def attention_map(rows: Sequence[Sequence[float]], example: AttentionExample, *, title: str, largest: float) -> Figure:
    """The rows of a causal map (N, N) at `asked_positions`, on a scale from −`largest` to `largest`, growing as the
    square root; zero is the page. Needles are named below it, a key with its value, and queries left of it; the marked
    query and its answer stand out.
    """
    figure, axes = axes_of("", "attends to: pairs in noise, then the queries", height=2.7)
    signed_root = (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x))
    norm = FuncNorm(signed_root, vmin=-largest, vmax=largest)
    asked, size = asked_positions(example), len(rows)
    shown = [[weight if at <= row else math.nan for at, weight in enumerate(rows[row])] for row in asked]
    image = axes.imshow(shown, cmap=_SIGNED, norm=norm, interpolation="nearest", aspect="auto")
    ticks = [share * largest for share in (-1, -0.25, 0, 0.25, 1)]
    bar = figure.colorbar(image, ax=axes, ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:.2f}".replace("-", "−") for tick in ticks])
    marked = asked.index(example.query_position)
    mark: dict[str, Any] = {"linestyle": "", "color": INK, "markersize": 5, "clip_on": False}
    answers = example.answer_positions
    axes.plot(answers, [1.04] * len(answers), marker="v", transform=axes.get_xaxis_transform(), **mark)
    for answer in answers:
        around = Rectangle((answer - 0.5, marked - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.2)
        axes.add_patch(around)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(len(asked) - 0.5, -0.5))
    axes.set_title(title, pad=12)
    axes.grid(visible=False)
    needles = sorted(example.needle_positions)
    keys = [at for at, after in itertools.pairwise(needles) if after == at + 1 and example.tokens[at].startswith("k")]
    axes.set_xticks([key + 0.5 for key in keys])
    axes.set_xticklabels([f"{example.tokens[key]} {example.tokens[key + 1]}" for key in keys], rotation=90)
    axes.set_yticks(range(len(asked)))
    axes.set_yticklabels([f"{'▸ ' if row == marked else ''}{example.tokens[at]}?" for row, at in enumerate(asked)])
    stands_out = [key + 1 in answers for key in keys], [row == marked for row in range(len(asked))]
    for along, which in zip((axes.xaxis, axes.yaxis), stands_out, strict=True):
        for label, is_marked in zip(along.get_ticklabels(), which, strict=True):
            label.set(fontsize=8, color=INK if is_marked else MUTED, fontweight="bold" if is_marked else "normal")
    return figure


@styled
def attention_row(
    weights: Mapping[str, Sequence[float]], example: AttentionExample, *, title: str, limits: tuple[float, float]
) -> Figure:
    """What one query attends to: a line per map over the positions up to it; needles shaded, the answer marked."""
    figure, axes = axes_of(title, "position attended to", "weight")
    for position in example.needle_positions:
        axes.axvspan(position - 0.5, position + 0.5, color=RULE, linewidth=0, zorder=0)
    for label, values in weights.items():
        width = 1.6 if label == list(weights)[-1] else 0.9
        axes.plot(range(len(values)), values, color=_MAP_COLOURS[label], linewidth=width, label=label)
    axes.set_ylim(*limits)
    mark: dict[str, Any] = {"linestyle": "", "marker": "v", "color": INK, "clip_on": False, "label": "answer"}
    axes.plot(example.answer_positions, [limits[1]] * len(example.answer_positions), **mark)
    legend(axes)
    return figure


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of a window of a twentieth of the curve around each point, narrower at the ends."""
    half = max(1, len(values) // 40)
    return [fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def svg(figure: Figure) -> str:
    """The figure as an <svg> element: text stays text, theme colours become CSS variables, nothing names a network."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context({**_STYLE, "svg.hashsalt": "diff-transformer"}):
        # Text is set by the browser, which has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # Of a place that took a second to find: the machine was busy, as the curves have few points.
        warnings.filterwarnings("ignore", message="Creating legend with loc=")
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


def axes_of(title: str, xlabel: str, ylabel: str = "", height: float = 3.1) -> tuple[Figure, Axes]:
    """A figure of the width that all have, whole on a phone with legible text, and its axes. Long titles wrap."""
    figure = Figure(figsize=(4.8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=textwrap.fill(title, 48, break_long_words=False), xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def legend(axes: Axes, shown_by: Axes | Figure | None = None, **more: Any) -> None:
    """The legend of `axes`, inside them or where `more` says in the figure that shows it."""
    handles, labels = axes.get_legend_handles_labels()
    (shown_by or axes).legend(handles, [short(label, 32) for label in labels], fontsize=9, **more)


def short(label: str, most: int) -> str:
    """The end of a label that would crowd the figure out: of a path, its end tells the most."""
    return label if len(label) <= most else "…" + label[1 - most :]


def colours_of(series: Sequence[Series]) -> list[str]:
    return [line.colour or CYCLE[number % len(CYCLE)] for number, line in enumerate(series)]


def apart(values: Sequence[float], everything: Sequence[float]) -> list[float]:
    """Heights for labels at `values`, moved apart where they would cover each other."""
    gap = 0.06 * ((max(everything) - min(everything)) or 1)
    order = sorted(range(len(values)), key=lambda index: values[index])
    heights = list(values)
    for lower, upper in itertools.pairwise(order):
        heights[upper] = max(heights[upper], heights[lower] + gap)
    return heights


def svg_file(element: str, description: str, *, width: int | None = None) -> str:
    """An element that `figures.svg` made as the text of a file, `width` pixels wide or as wide as it was drawn.

    The page's own colour lies behind it: a host may be dark where the browser is told to be light.
    """
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', element)
    assert box is not None  # matplotlib's own
    drawn_width, drawn_height = (float(side) * _PIXELS_PER_POINT for side in box.groups())
    height = round(drawn_height * (width or drawn_width) / drawn_width)
    text = element.replace("'DejaVu Sans'", _FONTS)
    size = f'width="{width or round(drawn_width)}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} {size}>'
    inside = text[text.index(">") + 1 :]
    described = f"<desc>{escape(description)}</desc>"
    behind = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    return f"{opening}\n{FIGURE_MARK}\n{described}\n{_FILE_STYLE}\n{behind}{inside}"
