"""What an experiment found, as tables of text: its comparisons, its arms, and the count of its verdicts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diff_transformer.report.experiment_files import ExperimentResults
from diff_transformer.report.head_counts import heads_cell
from diff_transformer.report.rows import arm_label, format_number
from diff_transformer.report.verdicts import (
    ANSWERS,
    ARROWS,
    UNCORRECTED,
    chance_cell,
    floor_cell,
    format_difference,
    has_levels,
    judged_word,
    missing_word,
)
from diff_transformer.results import Claimant, Comparison, Verdict

# Verdict → what it is called, in the order of the columns.
VERDICTS: dict[Verdict | None, str] = {
    "reproduced": "reproduced",
    "inconclusive": "inconclusive",
    "contrary": "contrary",
    "not comparable": "not comparable",
    None: "nothing claimed",
}
RULE = (
    "The rule for a difference was fixed before anything was run: it is taken over paired seeds, in the direction that "
    "the claim says is better. Where all of its 95 % interval lies on the claim's side of 0, the claim is reproduced; "
    "where all of it lies on the other side, what was found is contrary to it; else it is inconclusive, as it is with "
    "one seed. For what is inconclusive, the seeds needed are those with which a difference of this size and spread "
    "would come out in 80 % of such experiments, unless it is other documents that leave it open. Some questions are "
    "ours and no claim of the paper's: by the same rule they are answered with yes, inconclusive or no, and counted "
    f"apart. {UNCORRECTED} Comparisons of one experiment are of the same runs and not independent of each other, so "
    "their counts are no score."
)
CHANGED = (
    "Not everything was fixed beforehand. Sizes, learning rates and the judged measure of Figure 7 were changed after "
    "a look at results, and the rule about chance and floor was added after one: docs/log.md says what was seen before "
    "each change."
)
READING = (
    "↑ higher is better, ↓ lower is better. Brackets hold 95 % intervals of the difference, first − second. “–”: not "
    "given, or not applicable."
)


@dataclass(frozen=True)
class Table:
    """A table of text: the columns' heads, and rows of as many cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.head) for row in self.rows)


@dataclass(frozen=True)
class Tally:
    """How often each verdict came out in an experiment: on the paper's claims, or on our own questions."""

    results: ExperimentResults
    claimed_by: Claimant
    counts: Counter[Verdict | None]


def tallies(all_results: Sequence[ExperimentResults]) -> list[Tally]:
    """One or two for each experiment. What nothing is claimed of stands with the paper's claims where there are any."""
    found = []
    for results in all_results:
        comparisons = results.file.comparisons
        claimants = {row.claimed_by for row in comparisons if row.verdict is not None} or {"paper"}
        rest: Claimant = "paper" if "paper" in claimants else "us"
        for claimant in ("paper", "us"):
            if claimant in claimants:
                own = [row.verdict for row in comparisons if (row.claimed_by if row.verdict else rest) == claimant]
                found.append(Tally(results, claimant, Counter(own)))
    return found


def overview(counted: Sequence[Tally]) -> Table:
    """A row for each count of verdicts. There is no sum: comparisons are not independent of each other."""
    rows = [
        (
            tally.results.title,
            tally.results.preset,
            "the paper's" if tally.claimed_by == "paper" else "our questions",
            *(str(tally.counts[verdict]) for verdict in VERDICTS),
            str(tally.results.seeds),
            tally.results.file.title,
            tally.results.file.device,
        )
        for tally in counted
    ]
    verdicts = ("Reproduced, or yes", "Inconclusive", "Contrary, or no", "Not comparable", "Nothing claimed")
    return Table(("Experiment", "Preset", "Claims", *verdicts, "Seeds", "What it shows", "Device"), tuple(rows))


def comparison_table(comparisons: Sequence[Comparison], arms: Sequence[Mapping[str, Any]] = ()) -> Table:
    """A row for each comparison, in the order in which they were made: the paper's values beside ours.

    Columns in which no row has anything (the part, the paper's values) are left out; both arms stand in the heads
    where all rows have the same, else in a column. `arms` are what was trained, which tells what diverged.
    """
    pairs = {(row.arm, row.against) for row in comparisons}
    first, second = map(arm_label, next(iter(pairs))) if len(pairs) == 1 else ("first", "second")
    columns: dict[str, list[str]] = {"Measure": [_measure(row) for row in comparisons]}
    if any(row.group is not None for row in comparisons):
        columns["Part"] = [row.group or "–" for row in comparisons]
    if len(pairs) > 1:
        columns["First − second"] = [f"{arm_label(row.arm)} − {arm_label(row.against)}" for row in comparisons]
    if any(row.paper is not None for row in comparisons):
        papers = [row.paper or (math.nan, math.nan) for row in comparisons]
        columns[f"Paper, {first}"] = [_paper(one) for one, _ in papers]
        columns[f"Paper, {second}"] = [_paper(other) for _, other in papers]
        columns["Paper, difference"] = [_paper_difference(*pair) for pair in papers]
    words = [missing_word(row, arms) for row in comparisons]
    for side, name in enumerate((first, second)):
        found = zip(comparisons, words, strict=True)
        columns[f"Here, {name}"] = [format_number(row.ours[side], missing=word) for row, word in found]
    if has_levels(comparisons):
        columns["Chance"] = [chance_cell(row) for row in comparisons]
        columns["Floor"] = [floor_cell(row) for row in comparisons]
    columns["Here, difference"] = [format_difference(*pair) for pair in zip(comparisons, words, strict=True)]
    columns["Seeds"] = [str(len(row.differences)) for row in comparisons]
    columns["Verdict"] = [judged_word(row) for row in comparisons]
    if any(row.verdict == "inconclusive" for row in comparisons):
        columns["Seeds needed"] = [_needed(row) for row in comparisons]
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))


def arm_table(results: ExperimentResults) -> Table:
    """What was trained: each arm with its sizes, its learning rate, and what became of the others that were tried."""
    rows = []
    for arm in results.arms:
        group = "" if arm["group"] is None else f", {arm['group']}"
        tried = "; ".join(
            f"{rate}: {'diverged' if value is None else format_number(value)}" for rate, value in arm["tried"].items()
        )
        diverged = ", ".join(map(str, arm["diverged"])) or "none"
        sizes = (f"{arm['parameters']:,}", f"{arm['shared_parameters']:,}", heads_cell(arm))
        rows.append((arm_label(arm["name"]) + group, *sizes, f"{arm['learning_rate']:g}", tried or "–", diverged))
    head = (
        "Arm",
        "Parameters",
        "Without λ and norms",
        "Heads × d",
        "Learning rate",
        "Validation at the rates tried",
        "Diverged seeds",
    )
    return Table(head, tuple(rows))


def verdict_counts(comparisons: Sequence[Comparison]) -> str:
    """How often each verdict came out, those that did not among them."""
    if not comparisons:
        return "Nothing could be compared."
    counts = Counter((row.verdict, row.claimed_by if row.verdict else None) for row in comparisons)
    by = {claimant for _, claimant in counts}
    parts = []
    if "paper" in by or "us" not in by:
        parts.append(_counted(counts, "paper", {verdict: word for verdict, word in VERDICTS.items() if verdict}))
    if "us" in by:
        parts.append(f"to our own questions {_counted(counts, 'us', ANSWERS)}")
    if counts[None, None]:
        parts.append(f"{counts[None, None]} {VERDICTS[None]}")
    return f"Of {len(comparisons)} comparisons: {('; ' if 'us' in by else ', ').join(parts)}."


def _counted(
    counts: Counter[tuple[Verdict | None, Claimant | None]], claimed_by: Claimant, words: Mapping[Any, str]
) -> str:
    """Each verdict with its number, 0 too; "not comparable" where there is any."""
    shown = [verdict for verdict in words if verdict != "not comparable" or counts[verdict, claimed_by]]
    return ", ".join(f"{counts[verdict, claimed_by]} {words[verdict]}" for verdict in shown)


def interval_methods(comparisons: Sequence[Comparison]) -> str:
    """How the intervals came about, the most frequent way first; "" where there are none."""
    counts = Counter(row.method for row in comparisons if row.interval is not None and row.method)
    if not counts:
        return ""
    if len(counts) == 1:
        return f"Intervals by: {next(iter(counts))}."
    return f"Intervals by: {'; '.join(f'{method} ({count})' for method, count in counts.most_common())}."


def unknown(comparisons: Sequence[Comparison]) -> str:
    """Why differences are not known, where that is not that a run diverged; "" where there are none."""
    told = [f"{row.name}{'' if row.group is None else f', {row.group}'}: {row.reason}" for row in comparisons]
    reasons = [text for text, row in zip(told, comparisons, strict=True) if row.reason]
    return f"Not known: {'; '.join(reasons)}." if reasons else ""


def _measure(row: Comparison) -> str:
    return row.name + (f" ({row.unit})" if row.unit else "") + ARROWS[row.better]


def _paper(value: float) -> str:
    """With the paper's own digits."""
    return f"{value:,.6g}" if math.isfinite(value) else "–"


def _paper_difference(first: float, second: float) -> str:
    """With the paper's own digits, and not what is left of rounding."""
    difference = round(first - second, 6)
    return f"{difference:+,.6g}".replace("-", "−") if math.isfinite(difference) else "–"


def _needed(row: Comparison) -> str:
    if row.verdict != "inconclusive":
        return "–"
    if len(row.differences) < 2:
        return "not known from one seed"
    if row.documents_needed:
        return "more documents"
    return "not known" if row.seeds_needed is None else f"{row.seeds_needed:,}"
