"""Draws lines with matplotlib as SVG, in colours for a light and for a dark page.

Each figure of a report is a `Drawing`: the figure with a description in words, for those who do not see it.
"""

import io
import itertools
import math
import textwrap
import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import matplotlib
import pandas as pd  # type: ignore[import-untyped, unused-ignore]  # its types are a package apart
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from diff_lab.report.wording import format_number
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
PAGE, INK, MUTED, RULE = (THEME[name][0] for name in ("page", "ink", "muted", "rule"))
CYCLE = [THEME[name][0] for name in ("diff", "softmax", "diff_v2", "dex", "fifth", "sixth")]
_DASHES = ("-", "--", "-.", ":")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diff-transformer",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "legend.fontsize": 9,
    "figure.facecolor": PAGE,
    "axes.facecolor": "none",
    "savefig.facecolor": PAGE,
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
_LIGHT, _DARK = ("".join(f"--{name}: {shades[side]}; " for name, shades in THEME.items()) for side in (0, 1))
_FILE_STYLE = f"<style>svg {{ {_LIGHT}}} @media (prefers-color-scheme: dark) {{ svg {{ {_DARK}}} }}</style>"
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

    A line of many points without intervals is drawn faintly, with its running mean. The legend, below the plot, leaves
    out labels that begin with "_". The figure is whole on a phone with legible text.
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
        known = [(at, *ends) for at, ends in zip(x, line.intervals, strict=False) if math.isfinite(sum(ends))]
        if known:
            places, low, high = zip(*known, strict=True)
            axes.fill_between(places, low, high, color=colour, alpha=0.17, linewidth=0)
        lost = [at for at, y in zip(x, line.y, strict=True) if not math.isfinite(y)]
        if lost:
            place: dict[str, Any] = {
                "transform": axes.get_xaxis_transform(),
                "linestyle": "",
                "markersize": 7,
                "markeredgewidth": 1.6,
            }
            axes.plot(lost, [0.97 - 0.05 * number] * len(lost), color=colour, marker="x", **place)
    for (label, height), dash in zip((levels or {}).items(), itertools.cycle(("--", "-.", ":"))):
        axes.axhline(height, label=label, color=MUTED, linestyle=dash, linewidth=1.2, zorder=1)
    if limits:
        axes.set_ylim(*limits)
    if max((max(line.x, default=0) for line in lines), default=0) >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, labels = axes.get_legend_handles_labels()
    # A label that would crowd the figure out is cut: of a path, its end tells the most.
    labels = [label if len(label) <= 60 else "…" + label[-59:] for label in labels]
    columns = 1 if any(len(label) > 24 for label in labels) else 2
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def ends_in_words(line: Series) -> str:
    """Return the ends of a line, for those who do not see it."""
    return f"{line.label} goes from {format_number(line.y[0])} to {format_number(line.y[-1])}"
