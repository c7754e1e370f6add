"""Sets out single measurements as tables: values with their intervals, the variants side by side.

No table here says which variant is better. That takes paired seeds and is the verdict of `lab.statistics.compare`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.record import Baseline, Result, ResultsFile
from diff_transformer.lab.report.documents import Cell, Table
from diff_transformer.lab.report.wording import (
    ARROWS,
    DIRECTIONS,
    LEVELS,
    format_number,
    format_result,
    levels_text,
    variant_label,
    variants_of,
)

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
}
NOTE = f"{DIRECTIONS} [low, high]: 95 % interval"
UNPAIRED = (
    "No verdict: only a difference over several paired seeds, as diff-transformer reproduce measures it, tells which "
    "variant is better."
)
PAPERS_NUMBERS = (
    "The paper's numbers (Table 1) are for 3B parameters after 1T tokens, without examples. Its version of the harness "
    "and its prompts are not known, nor which accuracy it reports: acc_norm is assumed for HellaSwag and acc for all "
    "other tasks, as OpenLLaMA published its own row. A small model cannot be compared with them."
)


@dataclass(frozen=True)
class MeasuredRow:
    """The results of one measure, at one place and of one seed, in every variant that has one."""

    name: str
    label: str
    coordinates: Coordinates
    cells: Mapping[str, Result]

    @property
    def section(self) -> str:
        return self.name.split("/", 1)[0]

    def texts(self, variants: Sequence[str]) -> list[str]:
        """The value of each variant with its interval; "–" where there is none."""
        return [format_result(self.cells[variant]) if variant in self.cells else "–" for variant in variants]


@dataclass(frozen=True)
class MeasureLine:
    """One measure as a line of a table, all of its places together."""

    section: str
    label: str
    cells: tuple[str, ...]


def rows_of(records: Sequence[Result]) -> list[MeasuredRow]:
    """Records paired by measure, coordinates and seed, in the order in which they were written."""
    cells: dict[tuple[str, Coordinates, int | None], dict[str, Result]] = {}
    for record in records:
        cells.setdefault((record.name, record.coordinates, record.seed), {})[record.variant] = record
    seeds = Counter((name, place) for name, place, _ in cells)
    return [
        MeasuredRow(name, _label(name, found) + (f", seed {seed}" if seeds[name, place] > 1 else ""), place, found)
        for (name, place, seed), found in cells.items()
    ]


def lines_of(records: Sequence[Result], baselines: Sequence[Baseline] = ()) -> list[MeasureLine]:
    """One line for every measure: its value, or the range of its values over the places.

    The chance and floor of an accuracy, where they are known, stand behind its label. The cells follow `variants_of`.
    """
    levels = {baseline.name: f" ({levels_text(baseline)})" for baseline in baselines if baseline.is_accuracy}
    by_measure: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in rows_of(records):
        by_measure.setdefault((row.name, row.label), []).append(row)
    variants = variants_of(records)
    return [
        MeasureLine(rows[0].section, label + levels.get(name, ""), tuple(_range(rows, one) for one in variants))
        for (name, label), rows in by_measure.items()
    ]


def demo_table(results: ResultsFile) -> Table:
    """All measures, the variants side by side; one that was taken at several depths is a row with its range."""
    variants = variants_of(results.records)
    rows: list[list[str | Cell]] = []
    section = None
    for line in lines_of(results.records, results.baselines):
        if line.section != section:
            section = line.section
            rows.append([section.capitalize()])
        rows.append([line.label, *line.cells])
    names = list(map(variant_label, variants))
    notes = [f"{NOTE}.", *([UNPAIRED] if len(variants) > 1 else []), *([LEVELS] if results.baselines else [])]
    caption = "\n".join([*notes, f"Measured on {results.device}."])
    return Table.of_rows(["Measure", *names], rows, title=results.title, caption=caption, one_line=tuple(names))


def every_number(results: ResultsFile) -> Table:
    """Every record, the variants side by side, with its count and the method of its interval."""
    variants = variants_of(results.records)
    rows = []
    for row in rows_of(results.records):
        counts = ", ".join(dict.fromkeys(str(one.n) for one in row.cells.values() if one.n is not None))
        method = next(iter(row.cells.values())).method
        rows.append([f"{row.section}: {row.label}", row.coordinates.label, *row.texts(variants), counts, method])
    return Table.of_rows(["Measure", "Depth or part", *map(variant_label, variants), "n", "Interval by"], rows)


def measure_table(results: ResultsFile) -> Table:
    """Every record in a row of its own: what was measured of which part, its value and interval, of how many."""
    variants = variants_of(results.records)
    value = variant_label(variants[0]) if len(variants) == 1 else "value"
    columns: dict[str, list[str]] = {
        "measure": [record.name + ARROWS[record.better] for record in results.records],
        "part": [record.coordinates.label for record in results.records],
        "variant": [variant_label(record.variant) for record in results.records] if len(variants) > 1 else [],
        value: [_own_digits(record) for record in results.records],
        "unit": [record.unit for record in results.records],
        "n": ["" if record.n is None else f"{record.n:,}" for record in results.records],
    }
    shown = {name: [cell or "–" for cell in cells] for name, cells in columns.items() if any(cells)}
    caption = f"{NOTE}.\nMeasured on {results.device}."
    return Table.of_columns(shown, title=results.title, caption=caption, one_line=(value, "n"), right=("n",))


def harness_table(results: ResultsFile) -> Table:
    """A row for each measure: its value with its interval, on how many questions, and what the paper gives.

    The published numbers are those under "published" in the settings of the results, model → measure → value.
    """
    records = results.records
    published = results.settings.get("published") or {}
    here = ", ".join(map(variant_label, variants_of(records))) + " here"
    columns = {
        "task": [_task(record) for record in records],
        "measure": [
            record.name.removeprefix("harness/").partition("/")[2] + ARROWS[record.better] for record in records
        ],
        here: [format_result(record) for record in records],
        "questions": ["–" if record.n is None else f"{record.n:,}" for record in records],
    }
    for model, row in published.items():
        columns[f"{model} (paper)"] = [format_number(row[one.name]) if one.name in row else "–" for one in records]
    caption = "\n".join(_harness_notes(results, bool(published)))
    whole = (here, "questions")
    return Table.of_columns(columns, title=results.title, caption=caption, one_line=whole, right=("questions",))


def _harness_notes(results: ResultsFile, beside_the_paper: bool) -> Iterator[str]:
    yield f"{NOTE} over questions."
    if beside_the_paper:
        yield PAPERS_NUMBERS
    yield from results.settings.get("notes", [])
    yield f"lm_eval {results.versions.get('lm_eval', 'of unknown version')}. Measured on {results.device}."


def _task(record: Result) -> str:
    task = record.name.removeprefix("harness/").partition("/")[0]
    shots = record.method.partition(";")[0]
    return f"{task} ({shots})" if shots.endswith("-shot") and shots != "0-shot" else task


def _label(name: str, cells: Mapping[str, Result]) -> str:
    label = LABELS.get(name, name.split("/", 1)[-1].replace("_", " "))
    result = next(iter(cells.values()))
    if result.unit and result.unit.replace("/", " per ") != label:
        label += f" ({result.unit})"
    return label + ARROWS[result.better]


def _range(rows: Sequence[MeasuredRow], variant: str) -> str:
    results = [row.cells[variant] for row in rows if variant in row.cells]
    if len(results) < 2:
        return format_result(results[0]) if results else "–"
    values = [result.value for result in results]
    return f"{format_number(min(values))} … {format_number(max(values))}"


def _own_digits(record: Result) -> str:
    """The value and the ends of its interval, each with digits of its own."""
    value = format_number(record.value)
    return value if record.interval is None else f"{value} [{', '.join(map(format_number, record.interval))}]"
