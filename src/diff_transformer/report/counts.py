"""How often each verdict came out in each experiment, as bars."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from diff_transformer.report.figures import INK, MUTED, PAGE, RULE, THEME, short, styled
from diff_transformer.results import Verdict

# Verdict → (what it is called, fill, edge and hatching): each is told from the others without colour, and the two that
# decide are equally strong.
_FILLS: dict[Verdict | None, tuple[str, str, str, str]] = {
    "reproduced": ("reproduced, or yes", THEME["diff"][0], THEME["diff"][0], ""),
    "inconclusive": ("inconclusive", RULE, INK, ""),
    "contrary": ("contrary, or no", THEME["softmax"][0], PAGE, "////"),
    "not comparable": ("not comparable", PAGE, INK, "xxxx"),
    None: ("nothing claimed", PAGE, MUTED, "...."),
}


@styled
def counted(rows: Sequence[tuple[str, Mapping[Verdict | None, int]]]) -> Figure:
    """A bar for each experiment, by name, with a part for each verdict as long as it is frequent, and its number."""
    # As wide as other figures, so that a phone shows it whole with legible text: names stand above their bars.
    figure = Figure(figsize=(4.8, 1.5 + 0.36 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title="Verdicts by experiment", xlabel="comparisons")
    longest = max(sum(counts.values()) for _, counts in rows) or 1
    for place, (name, counts) in enumerate(rows):
        start = 0
        axes.text(0, place - 0.43, short(name, 56), color=INK, fontsize=9, va="center")
        for verdict, (_, fill, edge, hatch) in _FILLS.items():
            count = counts.get(verdict, 0)
            if not count:
                continue
            axes.barh(place, count, left=start, height=0.5, facecolor=fill, edgecolor=edge, hatch=hatch, linewidth=1)
            if count >= 0.025 * longest:
                box = {"facecolor": fill, "edgecolor": "none", "pad": 1.0} if hatch else None
                colour = PAGE if verdict in ("reproduced", "contrary") else INK
                axes.text(
                    start + count / 2, place, str(count), ha="center", va="center", fontsize=9, color=colour, bbox=box
                )
            start += count
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    parts = [
        Patch(facecolor=fill, edgecolor=edge, hatch=hatch, label=word) for word, fill, edge, hatch in _FILLS.values()
    ]
    figure.legend(handles=parts, loc="outside lower center", ncols=2, fontsize=9)
    return figure
