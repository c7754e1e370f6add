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
    None: ("nothing claimed", PAGE, MUTED, "...."),
}


@styled
def counted(rows: Sequence[tuple[str, Mapping[Verdict | None, int]]]) -> Figure:
    """A bar for each experiment, by name, with a part for each verdict as long as it is frequent, and its number."""
    figure = Figure(figsize=(7.2, 1.3 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title="Verdicts by experiment", xlabel="comparisons")
    longest = max(sum(counts.values()) for _, counts in rows) or 1
    for place, (_, counts) in enumerate(rows):
        start = 0
        for verdict, (_, fill, edge, hatch) in _FILLS.items():
            count = counts.get(verdict, 0)
            if not count:
                continue
            axes.barh(place, count, left=start, height=0.66, facecolor=fill, edgecolor=edge, hatch=hatch, linewidth=1)
            if count >= 0.025 * longest:
                box = {"facecolor": fill, "edgecolor": "none", "pad": 1.0} if hatch else None
                colour = PAGE if verdict in ("reproduced", "contrary") else INK
                axes.text(
                    start + count / 2, place, str(count), ha="center", va="center", fontsize=9, color=colour, bbox=box
                )
            start += count
    axes.set_yticks(range(len(rows)), [short(name, 48) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    parts = [
        Patch(facecolor=fill, edgecolor=edge, hatch=hatch, label=word) for word, fill, edge, hatch in _FILLS.values()
    ]
    figure.legend(handles=parts, loc="outside lower center", ncols=4, fontsize=9)
    return figure
