"""The figures of an experiment's results: differences as forest plots, measures over numbers as lines."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diff_transformer.report.bands import bands
from diff_transformer.report.counts import counted
from diff_transformer.report.experiment_files import ExperimentResults, slug
from diff_transformer.report.experiment_tables import tallies, verdict_counts
from diff_transformer.report.figures import svg
from diff_transformer.report.forest import ForestRow, forest
from diff_transformer.report.rows import DIVERGED, NOT_KNOWN, arm_label, format_number
from diff_transformer.report.series import Panel, measure_words, panels
from diff_transformer.report.verdicts import (
    ARROWS,
    floor_mark,
    format_difference,
    has_levels,
    levels_mark,
    missing_word,
    verdict_text,
)
from diff_transformer.results import Better, Comparison

# Rows of one forest plot, and how much larger the differences of one measure in it may be than those of another.
MOST_ROWS = 24
MOST_RATIO = 10


@dataclass(frozen=True)
class Drawn:
    """A figure of a report.

    Attributes:
        name: for its file, the only one of a report.
        title: one line.
        svg: the figure, as an <svg> element.
        alt: what it shows in words.
        caption: what a reader must know to read it.
        wide: whether it takes the width of a page, or stands beside others.
    """

    name: str
    title: str
    svg: str
    alt: str
    caption: str
    wide: bool


def overview_figure(all_results: Sequence[ExperimentResults]) -> Drawn:
    """How often each verdict came out."""
    rows = [
        (
            f"{tally.results.title}, {tally.results.preset}" + (", our questions" if tally.claimed_by == "us" else ""),
            tally.counts,
        )
        for tally in tallies(all_results)
    ]
    told = "; ".join(f"{one.title}, {one.preset}: {verdict_counts(one.file.comparisons)}" for one in all_results)
    title = "Verdicts by experiment"
    return Drawn(
        name="overview", title=title, svg=svg(counted(rows)), alt=f"{title}. {told}", caption=f"{title}.", wide=True
    )


def figures_of(results: ExperimentResults, called: str) -> list[Drawn]:
    """All figures of an experiment; each comparison is a row of one of them.

    Args:
        results: of the experiment with one preset.
        called: what titles and descriptions begin with: the experiment's title, with its preset where the report has
            several.
    """
    return [*_forests(results, called), *_lines(results, called)]


def _forests(results: ExperimentResults, called: str) -> Iterator[Drawn]:
    sheets = list(_sheets(results.file.comparisons))
    for number, rows in enumerate(sheets, start=1):
        pairs = {(row.arm, row.against) for row in rows}
        names = list(dict.fromkeys(row.name for row in rows))
        first = rows[0]
        better = _direction(rows)
        pair = f"{arm_label(first.arm)} − {arm_label(first.against)}" if len(pairs) == 1 else "first − second"
        unit = f" ({first.unit})" if first.unit else ""
        side = "; shaded: the first is better" if better else ""
        title = measure_words(names[0]) if len(names) == 1 else "differences"
        part = f", part {number} of {len(sheets)}" if len(sheets) > 1 else ""
        told = "; ".join(
            f"{_label(row)}: {format_difference(row, missing_word(row, results.arms))}, {verdict_text(row)}"
            for row in rows
        )
        yield Drawn(
            name=f"{results.anchor}-differences" + (f"-{number}" if len(sheets) > 1 else ""),
            title=f"{called}: {', '.join(map(measure_words, names[:3]))}{' …' * (len(names) > 3)}, differences",
            svg=svg(
                forest(
                    list(_rows(rows, results.arms, several=len(names) > 1, pairs=len(pairs) > 1)),
                    title=f"{called}: {title}{ARROWS[better]}",
                    xlabel=f"{pair}{unit}{side}",
                    better=better,
                )
            ),
            alt=f"{called}, differences{part}: {told}.",
            caption=_FOREST_CAPTION + (_LEVELS_CAPTION if has_levels(rows) else ""),
            wide=True,
        )


_FOREST_CAPTION = (
    "Mean difference over paired seeds, with its 95 % interval where there is one. An arrow at the edge: the interval "
    "goes on; where the paper's difference lies beyond the edge, it is written there."
)
_LEVELS_CAPTION = (
    " In brackets behind an accuracy: chance, and the floor that takes no binding, or what elimination gives where "
    "that is more."
)


def _sheets(comparisons: Sequence[Comparison]) -> Iterator[list[Comparison]]:
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
    yield from sheets


def _fits(sheet: Sequence[Comparison], part: Sequence[Comparison]) -> bool:
    first, other = sheet[0], part[0]
    directions = {_direction(sheet), _direction(part)} - {None}
    if first.unit != other.unit or len(directions) > 1 or len(sheet) + len(part) > MOST_ROWS:
        return False
    one, two = (_size(rows) for rows in (sheet, part))
    return one == 0 or two == 0 or max(one, two) <= MOST_RATIO * min(one, two)


def _direction(rows: Sequence[Comparison]) -> Better | None:
    """That of the claims among them."""
    return next((row.better for row in rows if row.better), None)


def _size(rows: Sequence[Comparison]) -> float:
    return max((abs(row.difference) for row in rows if math.isfinite(row.difference)), default=0.0)


def _rows(
    rows: Sequence[Comparison], arms: Sequence[Mapping[str, Any]], *, several: bool, pairs: bool
) -> Iterator[ForestRow]:
    """Headings where there are several measures of several rows, and a row for each comparison."""
    counts = Counter(row.name for row in rows)
    for name, block in groupby(rows, key=lambda row: row.name):
        headed = several and (counts[name] > 1 or max(counts.values()) > 1)
        if headed:
            yield ForestRow(measure_words(name))
        for row in block:
            paper = None if row.paper is None else row.paper[0] - row.paper[1]
            yield ForestRow(
                label=_label(row, measure=several and not headed, pairs=pairs),
                difference=row.difference,
                interval=row.interval if row.interval is not None and all(map(math.isfinite, row.interval)) else None,
                verdict=row.verdict,
                claimed_by=row.claimed_by,
                paper=paper if paper is not None and math.isfinite(paper) else None,
                missing=missing_word(row, arms),
                remark=floor_mark(row),
            )


def _label(row: Comparison, *, measure: bool = True, pairs: bool = True) -> str:
    """What a row compares: the measure unless it stands above or in the title, the part, and the arms if they vary."""
    arms = f"{arm_label(row.arm)} − {arm_label(row.against)}"
    parts = [*([measure_words(row.name)] if measure else []), row.group or "", arms if pairs else ""]
    return (", ".join(part for part in parts if part) or arms) + levels_mark(row)


def _lines(results: ExperimentResults, called: str) -> Iterator[Drawn]:
    file = results.file
    rates = {arm["group"]: arm["learning_rate"] for arm in results.arms if arm["group"] is not None}
    found = list(panels(file.records, file.comparisons, rates, file.baselines))
    often = Counter((panel.name, panel.part) for panel in found)
    used: set[str] = set()
    for panel in found:
        part = f", {panel.part}" if panel.part else ""
        words = f"-{panel.places.label}" if often[panel.name, panel.part] > 1 else ""
        name = slug(f"{results.anchor}-{panel.name}{part}{words}")
        name = next(one for one in (name, *(f"{name}-{n}" for n in range(2, 1000))) if one not in used)
        used.add(name)
        missing = DIVERGED if any(arm["diverged"] for arm in results.arms) else NOT_KNOWN
        ends = "; ".join(
            "{} goes from {} to {}".format(line.label, *(format_number(line.y[at], missing=missing) for at in (0, -1)))
            for line in (*panel.lines, *panel.paper, *panel.levels)
        )
        yield Drawn(
            name=name,
            title=f"{called}: {measure_words(panel.name)}{part} by {panel.places.label}",
            svg=svg(
                bands(
                    panel.lines,
                    panel.places,
                    title=f"{called}: {measure_words(panel.name)}{part}",
                    ylabel=panel.label,
                    paper=panel.paper,
                    levels=panel.levels,
                )
            ),
            alt=f"{called}, {panel.label}{part} by {panel.places.label}: {ends}.",
            caption=_lines_caption(panel, missing),
            wide=False,
        )


def _lines_caption(panel: Panel, missing: str) -> str:
    lost = any(not math.isfinite(value) for line in panel.lines for value in line.y)
    crosses = f" A cross above: {'a run diverged' if missing == DIVERGED else missing}." if lost else ""
    paper = " Dotted, hollow: the paper." if panel.paper else ""
    if panel.seeds > 1:
        return f"Mean of {panel.seeds} seeds; bands from the lowest to the highest.{paper}{crosses}"
    return ("One seed; bands are 95 % intervals of the measurement." if panel.own_intervals else "One seed.") + (
        paper + crosses
    )
