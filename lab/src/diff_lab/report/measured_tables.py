"""Sets out single measurements as tables: values with their intervals, the variants side by side.

No table here says which variant is better. That takes paired seeds and is the verdict of `lab.statistics.compare`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diff_lab.coordinates import NOWHERE, Coordinates
from diff_lab.learning import ACCURACY_CURVE, CURVES, LOSS_CURVE
from diff_lab.record import Result, ResultsFile
from diff_lab.report import wording
from diff_lab.report.documents import Table

LABELS = {
    "retrieval/accuracy": "accuracy",
    "retrieval/first_query_accuracy": "accuracy, first query only",
    "retrieval/accuracy_by_depth": "accuracy by depth",
    "retrieval/attention_to_answer_signed": "attention to the answer, signed",
    "retrieval/attention_to_answer_share": "attention to the answer, share",
    "retrieval/attention_noise_signed": "attention noise, signed",
    "retrieval/attention_noise_share": "attention noise, share",
    "retrieval/seconds": "training time",
    "retrieval/parameters": "parameters",
    "language/bits_per_byte": "bits per byte",
    "language/validation_loss": "validation loss",
    "language/seconds": "training time",
    "language/parameters": "parameters",
    "validation/accuracy": "accuracy of the labels",
    ACCURACY_CURVE: "validation accuracy",
    LOSS_CURVE: "validation loss",
}
NOTE = f"{wording.DIRECTIONS} [low, high]: 95 % interval"
UNPAIRED = (
    "No verdict: only a difference over several paired seeds, as diff-lab reproduce measures it, tells which "
    "variant is better."
)
PAPERS_NUMBERS = (
    "The paper's numbers (Table 1) are for 3B parameters after 1T tokens, without examples. Its version of the harness "
    "and its prompts are not known, nor which accuracy it reports: acc_norm is assumed for HellaSwag and acc for all "
    "other tasks, as OpenLLaMA published its own row. A small model cannot be compared with them."
)


@dataclass(frozen=True)
class MeasuredRow:
    """The results of one measure and seed by variant: at one place on its axes, or at all of them together."""

    name: str
    label: str
    coordinates: Coordinates
    results: Mapping[str, Sequence[Result]]

    @property
    def section(self) -> str:
        """What the measure belongs to, "retrieval" of "retrieval/accuracy"."""
        return self.name.split("/", 1)[0]

    def texts(self, variants: Sequence[str]) -> list[str]:
        """Of each variant the value with its interval, or the range of several values; "–" where there is none."""
        texts = []
        for results in (self.results.get(variant, ()) for variant in variants):
            values = sorted(result.value for result in results)
            ends = [wording.format_number(value) for value in (values[0], values[-1])] if len(values) > 1 else []
            texts.append(" … ".join(ends or map(wording.format_result, results)) or "–")
        return texts


def rows_of(records: Sequence[Result], *, by_coordinates: bool = True) -> list[MeasuredRow]:
    """Records paired by measure, seed and coordinates, or with those of all coordinates together, in their order."""
    groups: dict[tuple[Any, ...], dict[str, list[Result]]] = {}
    for record in records:
        # A measure may have a direction at some of its coordinates alone.
        key = (record.name, record.coordinates if by_coordinates else NOWHERE, record.better, record.seed)
        groups.setdefault(key, {}).setdefault(record.variant, []).append(record)
    seeds = Counter(key[:-1] for key in groups)
    rows = []
    for (name, coordinates, better, seed), results in groups.items():
        label = LABELS.get(name, name.split("/", 1)[-1].replace("_", " "))
        unit = next(iter(results.values()))[0].unit
        if unit and unit.replace("/", " per ") != label:
            label += f" ({unit})"
        label += wording.ARROWS[better] + (f", seed {seed}" if seeds[name, coordinates, better] > 1 else "")
        rows.append(MeasuredRow(name, label, coordinates, results))
    return rows


# What the demo's table has in a terminal, where the page is to be looked at next.
_SHORT = ("accuracy", "first_query_accuracy", "bits_per_byte", "validation_loss", "parameters", "seconds")


def demo_table(results: ResultsFile, *, short: bool = False) -> Table:
    """All measures but the validation curves, the variants side by side, accuracies with their levels; several depths
    are a row with a range. A `short` one has no measures of parts and of attention."""
    records = [
        record
        for record in results.records
        if record.name not in CURVES and (not short or record.name.partition("/")[2] in _SHORT)
    ]
    variants = wording.variants_of(records)
    levels = {level.name: f" ({wording.levels_text(level)})" for level in results.baselines if level.is_accuracy}
    rows: list[list[str]] = []
    for section, block in groupby(rows_of(records, by_coordinates=False), key=lambda row: row.section):
        rows.append([section.capitalize()])
        rows += [[row.label + levels.get(row.name, ""), *row.texts(variants)] for row in block]
    names = list(map(wording.variant_label, variants))
    notes = [f"{NOTE}.", *([UNPAIRED] if len(variants) > 1 else [])]
    notes += [wording.LEVELS] if results.baselines and not short else []
    caption = "\n".join([*notes, f"Measured on {results.device}."])
    return Table.of_rows(["Measure", *names], rows, title=results.title, caption=caption, one_line=tuple(names))


def every_number(results: ResultsFile) -> Table:
    """Every record, the variants side by side, with its count and the method of its interval."""
    variants = wording.variants_of(results.records)
    rows = []
    for row in rows_of(results.records):
        records = [record for of_variant in row.results.values() for record in of_variant]
        counts = ", ".join(dict.fromkeys(str(record.n) for record in records if record.n is not None))
        label = f"{row.section}: {row.label}"
        rows.append([label, row.coordinates.label, *row.texts(variants), counts, records[0].method])
    return Table.of_rows(["Measure", "Depth or part", *map(wording.variant_label, variants), "n", "Interval by"], rows)


def measure_table(results: ResultsFile) -> Table:
    """Every record in a row of its own: what was measured of which part, its value and interval, of how many."""
    variants = wording.variants_of(results.records)
    value = wording.variant_label(variants[0]) if len(variants) == 1 else "value"
    columns: dict[str, list[str]] = {
        "measure": [record.name + wording.ARROWS[record.better] for record in results.records],
        "part": [record.coordinates.label for record in results.records],
        "variant": [wording.variant_label(record.variant) for record in results.records] if len(variants) > 1 else [],
        value: [wording.format_result(record, separate_digits=True) for record in results.records],
        "unit": [record.unit for record in results.records],
        "n": ["" if record.n is None else f"{record.n:,}" for record in results.records],
    }
    shown = {name: [cell or "–" for cell in cells] for name, cells in columns.items() if any(cells)}
    caption = f"{NOTE}.\nMeasured on {results.device}."
    return Table.of_columns(shown, title=results.title, caption=caption, one_line=(value, "n"), right=("n",))


def harness_table(results: ResultsFile) -> Table:
    """A row for each measure: its value with its interval, on how many questions, and what the paper gives."""
    records = results.records
    published = results.settings.get("published") or {}
    here = ", ".join(map(wording.variant_label, wording.variants_of(records))) + " here"
    columns = {
        "task": [_task(record) for record in records],
        "measure": [
            record.name.removeprefix("harness/").partition("/")[2] + wording.ARROWS[record.better] for record in records
        ],
        here: [wording.format_result(record) for record in records],
        "questions": ["–" if record.n is None else f"{record.n:,}" for record in records],
    }
    for model, row in published.items():
        values = [row.get(record.name, math.nan) for record in records]
        columns[f"{model} (paper)"] = [wording.format_number(value, missing="–") for value in values]
    notes = [f"{NOTE} over questions.", *([PAPERS_NUMBERS] if published else []), *results.settings.get("notes", [])]
    harness = f"lm_eval {results.versions.get('lm_eval', 'of unknown version')}. Measured on {results.device}."
    caption = "\n".join([*notes, harness])
    narrow = (here, "questions")
    return Table.of_columns(columns, title=results.title, caption=caption, one_line=narrow, right=("questions",))


def _task(record: Result) -> str:
    task = record.name.removeprefix("harness/").partition("/")[0]
    shots = record.method.partition(";")[0]
    return f"{task} ({shots})" if shots.endswith("-shot") and shots != "0-shot" else task
