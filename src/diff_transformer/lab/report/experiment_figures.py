"""Chooses and describes the figures of an experiment: forest plots of its differences, lines of its measures."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from diff_transformer.lab.record import Better, Comparison
from diff_transformer.lab.report.experiment_tables import ExperimentResults, slug, tallies, verdict_counts
from diff_transformer.lab.report.figures import Drawing, drawing
from diff_transformer.lab.report.result_figures import ForestRow, bands, counted, forest
from diff_transformer.lab.report.series import Panel, panels
from diff_transformer.lab.report.wording import (
    ARROWS,
    DIVERGED,
    NOT_KNOWN,
    floor_mark,
    format_difference,
    format_number,
    has_levels,
    levels_mark,
    measure_words,
    missing_word,
    pair_label,
    verdict_text,
)

# Rows of one forest plot, and how much larger the differences of one measure in it may be than those of another.
MOST_ROWS = 24
MOST_RATIO = 10
_FOREST_CAPTION = (
    "Mean difference over paired seeds, with its 95 % interval where there is one. An arrow at the edge marks an "
    "interval that goes on. Where the paper's difference lies beyond the edge, its value is written there."
)
_LEVELS_CAPTION = (
    " In brackets behind an accuracy: chance, and the floor without any binding, or what elimination gives if that is "
    "higher."
)


def overview_figure(all_results: Sequence[ExperimentResults]) -> Drawing:
    """How often each verdict came out."""
    rows = [
        (f"{one.results.title}, {one.results.preset}{', our questions' if one.exploratory else ''}", one.counts)
        for one in tallies(all_results)
    ]
    counts = "; ".join(f"{one.title}, {one.preset}: {verdict_counts(one.file.comparisons)}" for one in all_results)
    title = "Verdicts by experiment"
    return drawing(counted(rows), f"{title}. {counts}", f"{title}.", title=title, name="overview", wide=True)


def figures_of(results: ExperimentResults, called: str) -> list[Drawing]:
    """All figures of an experiment; each comparison is a row of one of them.

    Args:
        results: of the experiment with one preset.
        called: what titles and descriptions begin with: the experiment's title, with its preset where the report has
            several.
    """
    return [*_forests(results, called), *_lines(results, called)]


def _forests(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    sheets = list(_sheets(results.file.comparisons))
    for number, rows in enumerate(sheets, start=1):
        several_sheets = len(sheets) > 1
        pairs = {(row.variant, row.against) for row in rows}
        names = list(dict.fromkeys(row.name for row in rows))
        better = _direction(rows)
        pair = pair_label(rows[0]) if len(pairs) == 1 else "first − second"
        unit = f" ({rows[0].unit})" if rows[0].unit else ""
        figure = forest(
            list(_rows(rows, results.variants, several=len(names) > 1, pairs=len(pairs) > 1)),
            title=f"{called}: {measure_words(names[0]) if len(names) == 1 else 'differences'}{ARROWS[better]}",
            xlabel=f"{pair}{unit}{'; shaded: the first is better' if better else ''}",
            better=better,
        )
        part = f", part {number} of {len(sheets)}" if several_sheets else ""
        differences = "; ".join(
            f"{_label(row)}: {format_difference(row, missing_word(row, results.variants))}, {verdict_text(row)}"
            for row in rows
        )
        yield drawing(
            figure,
            f"{called}, differences{part}: {differences}.",
            _FOREST_CAPTION + (_LEVELS_CAPTION if has_levels(rows) else ""),
            title=f"{called}: {', '.join(map(measure_words, names[:3]))}{' …' * (len(names) > 3)}, differences",
            name=f"{results.anchor}-differences" + (f"-{number}" if several_sheets else ""),
            wide=True,
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
    rows: Sequence[Comparison], trained: Sequence[Mapping[str, Any]], *, several: bool, pairs: bool
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
                exploratory=row.exploratory,
                paper=paper if paper is not None and math.isfinite(paper) else None,
                missing=missing_word(row, trained),
                remark=floor_mark(row),
            )


def _label(row: Comparison, *, measure: bool = True, pairs: bool = True) -> str:
    """What a row compares: its measure unless that stands above, its part, and the variants where they differ."""
    parts = [measure_words(row.name) if measure else "", row.coordinates.label, pair_label(row) if pairs else ""]
    return (", ".join(filter(None, parts)) or pair_label(row)) + levels_mark(row)


def _lines(results: ExperimentResults, called: str) -> Iterator[Drawing]:
    file = results.file
    found = list(panels(file.records, file.comparisons, file.baselines))
    often = Counter((panel.name, panel.part) for panel in found)
    missing = DIVERGED if any(one["diverged"] for one in results.variants) else NOT_KNOWN
    used: set[str] = set()
    for panel in found:
        part = f", {panel.part}" if panel.part else ""
        axis = panel.places.label
        name = slug(f"{results.anchor}-{panel.name}{part}" + (f"-{axis}" if often[panel.name, panel.part] > 1 else ""))
        name = next(one for one in (name, *(f"{name}-{n}" for n in range(2, 1000))) if one not in used)
        used.add(name)
        ends = "; ".join(
            "{} goes from {} to {}".format(line.label, *(format_number(line.y[at], missing=missing) for at in (0, -1)))
            for line in (*panel.lines, *panel.paper, *panel.levels)
        )
        title = f"{called}: {measure_words(panel.name)}{part}"
        figure = bands(
            panel.lines, panel.places, title=title, ylabel=panel.label, paper=panel.paper, levels=panel.levels
        )
        alt = f"{called}, {panel.label}{part} by {axis}: {ends}."
        yield drawing(figure, alt, _lines_caption(panel, missing), title=f"{title} by {axis}", name=name)


def _lines_caption(panel: Panel, missing: str) -> str:
    if panel.seeds > 1:
        caption = f"Mean of {panel.seeds} seeds; bands from the lowest to the highest."
    else:
        caption = "One seed; bands are 95 % intervals of the measurement." if panel.own_intervals else "One seed."
    if panel.paper:
        caption += " Dotted, hollow: the paper."
    if any(not math.isfinite(value) for line in panel.lines for value in line.y):
        caption += f" A cross above: {'a run diverged' if missing == DIVERGED else missing}."
    return caption
