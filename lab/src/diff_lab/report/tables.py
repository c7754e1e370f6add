"""Sets out results as tables: comparisons and their verdicts, trained variants, and measurements.

Verdicts stand in the tables of comparisons alone. A single measurement does not tell which variant is better: that
takes paired seeds, and is the verdict of `diff_lab.statistics.compare`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.learning import CURVES
from diff_lab.record import Comparison, Result, ResultsFile
from diff_lab.report import wording
from diff_lab.report.documents import Table
from diff_lab.report.wording import format_number
from diff_lab.results_files import number_of

NOTE = f"{wording.DIRECTIONS} [low, high]: 95 % interval"
UNPAIRED = (
    "No verdict: only a difference over several paired seeds, as diff-lab reproduce measures it, tells which "
    "variant is better."
)
_PAPERS_NUMBERS = (
    "The paper's numbers (Table 1) are for 3B parameters after 1T tokens, without examples. Which accuracy it reports "
    "is not known: acc_norm is assumed for HellaSwag and acc for all other tasks, as OpenLLaMA published its own row."
)


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row for each comparison: the paper's values, if any, beside ours."""
    columns: dict[str, list[str]] = {
        "Measure": list(map(wording.measure_label, comparisons)),
        "First − second": [wording.pair_label(row.variant, row.against) for row in comparisons],
    }
    if any(row.paper is not None for row in comparisons):
        columns["Paper"] = [
            # With the paper's own digits.
            " / ".join(f"{value:,.6g}" if math.isfinite(value) else "–" for value in row.paper or (math.nan,))
            for row in comparisons
        ]
    columns["Here"] = [" / ".join(map(format_number, row.ours)) for row in comparisons]
    if any(map(wording.levels_of, comparisons)):
        columns["Chance / floor"] = [" / ".join(wording.level_cells(row)) for row in comparisons]
    columns["Difference"] = list(map(wording.format_difference, comparisons))
    columns["Seeds"] = [str(len(row.differences)) for row in comparisons]
    columns["Verdict"] = list(map(wording.verdict_text, comparisons))
    return Table.of_columns(columns, one_line=("Paper", "Here", "Difference"))


def interval_methods(comparisons: Sequence[Comparison]) -> str:
    """Return the methods of the intervals, the most frequent first; "" if there are no intervals."""
    counts = Counter(row.method for row in comparisons if row.interval is not None and row.method)
    methods = [f"{method} ({count})" if len(counts) > 1 else method for method, count in counts.most_common()]
    return f"Intervals by: {'; '.join(methods)}." if methods else ""


def verdict_table(results: ResultsFile) -> Table:
    """Return the comparisons of an experiment with notes on their verdicts, for a terminal."""
    rows = results.comparisons
    caption = [
        f"{wording.DIRECTIONS} Difference: first − second, the mean over paired seeds, with its 95 % interval. The "
        "claim is reproduced when the whole interval lies on its side of 0, contrary when it lies on the other side, "
        f"else inconclusive; a question that the paper leaves open is answered with yes or no. {wording.UNCORRECTED}"
    ]
    if any(map(wording.levels_of, rows)):
        caption.append(wording.LEVELS)
    caption.append(f"Measured on {results.device}.")
    return replace(comparison_table(rows), title=results.title, caption="\n".join(caption))


def variants_table(settings: Mapping[str, Any]) -> Table:
    """Return the trained variants of a results file's settings: sizes, rates, and the validation at those tried."""
    trained = settings["variants"]
    columns = {
        "Variant": [
            # With its size or rate, if there are several.
            ", ".join(filter(None, (wording.variant_label(one["name"]), Coordinates(one["coordinates"]).label)))
            for one in trained
        ],
        "Parameters": [f"{variant['parameters']:,}" for variant in trained],
        "Without λ and norms": [f"{variant['shared_parameters']:,}" for variant in trained],
        # Results of early versions do not tell the heads.
        "Heads × d": [
            f"{variant['heads']} × {variant['head_dim']}" if "heads" in variant else "–" for variant in trained
        ],
        "Learning rate": [f"{variant['learning_rate']:g}" for variant in trained],
        "Validation at the rates tried": [
            "; ".join(
                f"{rate}: {format_number(number_of(value), missing=wording.DIVERGED)}"
                for rate, value in variant["tried"].items()
            )
            or "–"
            for variant in trained
        ],
        "Diverged seeds": [", ".join(map(str, variant["diverged"])) or "none" for variant in trained],
    }
    return Table.of_columns(columns)


@dataclass(frozen=True)
class MeasuredRow:
    """The results of one measure and seed by variant, at one place on its axes or at all of them together."""

    name: str
    place: Coordinates
    label: str
    results: Mapping[str, Sequence[Result]]

    @property
    def section(self) -> str:
        """The section of the measure, "retrieval" of "retrieval/accuracy"."""
        return self.name.split("/", 1)[0]

    def texts(self, variants: Sequence[str]) -> list[str]:
        """Return each variant's value with its interval, or the range of several values; "–" if there is none."""
        texts = []
        for results in (self.results.get(variant, ()) for variant in variants):
            values = sorted(result.value for result in results)
            ends = [format_number(value) for value in (values[0], values[-1])] if len(values) > 1 else []
            texts.append(" … ".join(ends or map(wording.format_result, results)) or "–")
        return texts


def rows_of(records: Sequence[Result], *, apart: bool = False) -> list[MeasuredRow]:
    """Pair records by measure and seed, in their order; if `apart`, also by their place."""
    groups: dict[tuple[Any, ...], dict[str, list[Result]]] = {}
    for record in records:
        # A measure may have a direction at some of its coordinates alone.
        key = (record.name, record.better, record.coordinates if apart else NO_COORDINATES, record.seed)
        groups.setdefault(key, {}).setdefault(record.variant, []).append(record)
    seeds = Counter(key[:-1] for key in groups)
    rows = []
    for (name, better, place, seed), results in groups.items():
        label = wording.measure_words(name) + (f", {place.label}" if place else "")
        unit = next(iter(results.values()))[0].unit
        if unit and unit.replace("/", " per ") != label:
            label += f" ({unit})"
        label += wording.ARROWS[better] + (f", seed {seed}" if seeds[name, better, place] > 1 else "")
        rows.append(MeasuredRow(name, place, label, results))
    return rows


def demo_table(results: ResultsFile, *, apart: bool = False) -> Table:
    """Return all measures but the validation curves, the variants side by side, accuracies with their levels. Several
    places of a measure, such as depths, are a row with a range, or rows of their own if `apart`.
    """
    records = [record for record in results.records if record.name not in CURVES]
    variants = wording.variants_of(records)
    levels = {
        (one.name, one.coordinates if apart else NO_COORDINATES): f" ({wording.levels_text(one)})"
        for one in results.baselines
        if one.is_accuracy
    }
    rows: list[list[str]] = []
    for section, block in groupby(rows_of(records, apart=apart), key=lambda row: row.section):
        rows.append([section.capitalize()])
        rows += [[row.label + levels.get((row.name, row.place), ""), *row.texts(variants)] for row in block]
    names = list(map(wording.variant_label, variants))
    notes = [f"{NOTE}.", *([UNPAIRED] if len(variants) > 1 else []), *([wording.FLOOR] if results.baselines else [])]
    caption = "\n".join([*notes, f"Measured on {results.device}."])
    return Table(head=("Measure", *names), rows=rows, title=results.title, caption=caption, one_line=tuple(names))


def measure_table(results: ResultsFile) -> Table:
    """Return every record in a row of its own: the measure and its part, its value and interval, and of how many.

    Beside the tasks of lm-evaluation-harness, whose methods are told, stand the paper's values.
    """
    records, variants = results.records, wording.variants_of(results.records)
    value = wording.variant_label(variants[0]) if len(variants) == 1 else "value"
    columns: dict[str, list[str]] = {
        "measure": [record.name.removeprefix("harness/") + wording.ARROWS[record.better] for record in records],
        "part": [record.coordinates.label for record in records],
        "variant": [wording.variant_label(record.variant) for record in records] if len(variants) > 1 else [],
        value: list(map(wording.format_result, records)),
        "unit": [record.unit for record in records],
        "n": ["" if record.n is None else f"{record.n:,}" for record in records],
        "by": [record.method if record.name.startswith("harness/") else "" for record in records],
    }
    published = results.settings.get("published") or {}
    for model, row in published.items():
        values = [row.get(record.name, math.nan) for record in records]
        columns[f"{model} (paper)"] = [format_number(number, missing="") for number in values]
    shown = {name: [cell or "–" for cell in cells] for name, cells in columns.items() if any(cells)}
    notes = [f"{NOTE}.", *([_PAPERS_NUMBERS] if published else []), *results.settings.get("notes", [])]
    harness = f"lm_eval {version}. " if (version := results.versions.get("lm_eval")) else ""
    caption = "\n".join([*notes, f"{harness}Measured on {results.device}."])
    return Table.of_columns(shown, title=results.title, caption=caption, one_line=(value, "n"), right=("n",))
