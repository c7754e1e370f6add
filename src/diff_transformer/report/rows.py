"""Twins side by side: records become rows with a cell for each arm and a verdict that favours neither."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diff_transformer.results import Baseline, Result

# An arm by its attention type; the order of the columns.
ARMS = {"diff": "DIFF", "diff_v2": "DIFF V2", "softmax": "Transformer"}

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
UNCLEAR = "no clear difference"
# A number that is not finite; "diverged" where that is known to be why.
NOT_KNOWN, DIVERGED = "not known", "diverged"


@dataclass(frozen=True)
class Verdict:
    """Which arm came out better beyond its interval, if one did, and the words that say what came out."""

    arm: str | None
    text: str


NONE = Verdict(None, "–")


@dataclass(frozen=True)
class Row:
    """The results of one measure (of one group and seed) in every arm that has one."""

    name: str
    label: str
    group: str | None
    cells: Mapping[str, Result]

    @property
    def section(self) -> str:
        return self.name.split("/", 1)[0]

    def verdict(self) -> Verdict:
        """The better arm; nobody where the 95 % intervals overlap or are missing, as of a single timing, or where the
        measure has no better direction.
        """
        results = list(self.cells.values())
        directions = {result.better for result in results}
        if len(results) < 2 or len(directions) > 1 or None in directions:
            return NONE
        if not all(math.isfinite(result.value) for result in results):
            return Verdict(None, "not comparable")
        sign = 1 if "higher" in directions else -1
        first, second = sorted(results, key=lambda result: sign * result.value, reverse=True)[:2]
        if first.value == second.value:
            return Verdict(None, "equal")
        if first.interval is None or second.interval is None:
            return Verdict(None, f"{arm_label(first.arm)}, no interval")
        if first.interval[0] <= second.interval[1] and second.interval[0] <= first.interval[1]:
            return Verdict(None, UNCLEAR)
        return Verdict(first.arm, arm_label(first.arm))


@dataclass(frozen=True)
class Line:
    """A row as it is printed: one measure, all its groups together."""

    section: str
    label: str
    cells: Mapping[str, str]
    verdict: Verdict


def arm_label(arm: str) -> str:
    """An arm for a reader; of a variant, "softmax, half the heads", the attention type stands first."""
    kind, comma, variant = arm.partition(",")
    return ARMS.get(kind, kind) + comma + variant


def arms_of(records: Sequence[Result]) -> list[str]:
    """The arms that occur, the known ones first, in the order of the columns."""
    present = dict.fromkeys(record.arm for record in records)
    return [arm for arm in ARMS if arm in present] + [arm for arm in present if arm not in ARMS]


def rows_of(records: Sequence[Result]) -> list[Row]:
    """Records paired by measure, group and seed, in the order in which they were written."""
    cells: dict[tuple[str, str | None, int | None], dict[str, Result]] = {}
    for record in records:
        cells.setdefault((record.name, record.group, record.seed), {})[record.arm] = record
    seeds = Counter((name, group) for name, group, _ in cells)
    return [
        Row(name, _label(name, arms) + (f", seed {seed}" if seeds[name, group] > 1 else ""), group, arms)
        for (name, group, seed), arms in cells.items()
    ]


def lines_of(records: Sequence[Result], baselines: Sequence[Baseline] = ()) -> list[Line]:
    """One line for every measure: its value, or the range of its values over the groups; an accuracy's chance and floor
    stand behind its label, where they are known.
    """
    levels = {baseline.name: f" ({levels_text(baseline)})" for baseline in baselines if baseline.is_accuracy}
    together: dict[tuple[str, str], list[Row]] = {}
    for row in rows_of(records):
        together.setdefault((row.name, row.label), []).append(row)
    arms = arms_of(records)
    return [
        Line(
            rows[0].section,
            label + levels.get(rows[0].name, ""),
            {arm: _cell(rows, arm) for arm in arms},
            _overall(rows),
        )
        for (_, label), rows in together.items()
    ]


def levels_text(baseline: Baseline) -> str:
    """ "chance 0.016, floor 0.273, by elimination 0.560", of which a floor that is chance is left out."""
    parts = {"chance": baseline.chance, "floor": baseline.floor, "by elimination": baseline.by_elimination}
    shown = {name: value for name, value in parts.items() if name == "chance" or value not in (None, baseline.chance)}
    return ", ".join(f"{name} {format_number(value)}" for name, value in shown.items() if value is not None)


def format_result(result: Result) -> str:
    """The value, and its interval with as many decimals: `0.547 [0.512, 0.582]`."""
    digits = _digits(result.value)
    text = format_number(result.value, digits)
    if result.interval is not None:
        text += f" [{', '.join(format_number(end, digits) for end in result.interval)}]"
    return text


def format_number(value: float, digits: int | None = None, *, missing: str = NOT_KNOWN) -> str:
    """A number with three or so telling digits; `missing` for what is not finite."""
    if not math.isfinite(value):
        return missing
    if digits is None and 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    text = f"{value:,.{_digits(value) if digits is None else digits}f}"
    return text if text.strip("-0.") else text.removeprefix("-")  # what is rounded to 0 has no sign


def _digits(value: float) -> int:
    if not math.isfinite(value):
        return 3
    if abs(value) >= 100:
        return 0
    return 3 if abs(value) < 10 else 1


def _label(name: str, arms: Mapping[str, Result]) -> str:
    label = LABELS.get(name, name.split("/", 1)[-1].replace("_", " "))
    result = next(iter(arms.values()))
    if result.unit and result.unit.replace("/", " per ") != label:
        label += f" ({result.unit})"
    return label + {"higher": " ↑", "lower": " ↓", None: ""}[result.better]


def _cell(rows: Sequence[Row], arm: str) -> str:
    results = [row.cells[arm] for row in rows if arm in row.cells]
    if not results:
        return "–"
    if len(results) == 1:
        return format_result(results[0])
    values = [result.value for result in results]
    return f"{format_number(min(values))} … {format_number(max(values))}"


def _overall(rows: Sequence[Row]) -> Verdict:
    verdicts = [row.verdict() for row in rows]
    if len(set(verdicts)) == 1:
        return (
            verdicts[0]
            if len(rows) == 1 or verdicts[0] == NONE
            else Verdict(verdicts[0].arm, f"{verdicts[0].text} (all {len(rows)})")
        )
    counts = Counter(verdict.text for verdict in verdicts)
    return Verdict(None, ", ".join(f"{text} ({count} of {len(rows)})" for text, count in counts.most_common()))
