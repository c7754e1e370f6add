"""The table that an experiment ends with in the terminal: the paper beside what was found here, and the verdict."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from diff_transformer.report.head_counts import few_heads, heads_cell
from diff_transformer.report.rows import DIVERGED, NOT_KNOWN, arm_label, format_number
from diff_transformer.results import Claimant, Comparison, Interval, ResultsFile, Verdict

ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
# Of a question that is ours: there is nothing to reproduce, and nothing to be contrary to.
ANSWERS: dict[Verdict, str] = {"reproduced": "yes", "inconclusive": "inconclusive", "contrary": "no"}
UNCORRECTED = (
    "No verdict is corrected for the number of comparisons: where there is no difference, one in twenty decides for "
    "one side or the other by chance."
)


def verdict_table(results: ResultsFile) -> Table:
    """One row for each comparison, whichever way it came out."""
    caption = Text(
        "↑ higher is better, ↓ lower is better. Difference: first − second, mean over paired seeds, 95 % interval; all "
        "of it on the claim's side of 0: reproduced, all on the other: contrary, else inconclusive; of a question that "
        f"is ours and no claim of the paper's: yes, no. {UNCORRECTED}\n"
        f"Measured on {results.device}."
    )
    table = Table(title=Text(results.title), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("measure", overflow="fold")
    table.add_column("arms", overflow="fold")
    for column in ("paper", "here", "difference"):
        table.add_column(column, no_wrap=True)
    table.add_column("verdict", overflow="fold")
    arms = results.settings.get("arms", ())
    for row in results.comparisons:
        missing = missing_word(row, arms)
        paper = "–" if row.paper is None else " / ".join(_number(value) for value in row.paper)
        table.add_row(
            Text(measure_label(row)),
            Text(f"{arm_label(row.arm)} / {arm_label(row.against)}"),
            paper,
            " / ".join(format_number(value, missing=missing) for value in row.ours),
            format_difference(row, missing),
            Text(verdict_text(row), style="bold" if row.verdict in ("reproduced", "contrary") else ""),
        )
    return table


def arms_table(results: ResultsFile) -> Table:
    """What was trained: each arm with its sizes and its learning rate, and what the others came to."""
    caption = Text(few_heads(results.settings["arms"]))
    table = Table(title_justify="left", caption=caption or None, caption_justify="left")
    columns = (
        "arm",
        "parameters",
        "without λ and norms",
        "heads × d",
        "learning rate",
        "validation at the rates tried",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for arm in results.settings["arms"]:
        group = "" if arm["group"] is None else f", {arm['group']}"
        tried = ", ".join(
            f"{rate}: {'diverged' if value is None else format_number(value)}" for rate, value in arm["tried"].items()
        )
        table.add_row(
            Text(arm_label(arm["name"]) + group),
            f"{arm['parameters']:,}",
            f"{arm['shared_parameters']:,}",
            heads_cell(arm),
            f"{arm['learning_rate']:g}",
            tried or "none tried",
        )
    return table


def measure_label(row: Comparison) -> str:
    """The measure with its part, its unit and its direction."""
    part = "" if row.group is None else f", {row.group}"
    unit = f" ({row.unit})" if row.unit else ""
    return f"{row.name}{part}{unit}{ARROWS[row.better]}"


def missing_word(row: Comparison, arms: Sequence[Mapping[str, Any]]) -> str:
    """What to call a number of a comparison that is not finite: "diverged" where a run of its arms did.

    Args:
        row: the comparison.
        arms: what was trained, as the settings of a results file tell it; of arms in groups, those of the comparison's
            group where it has one.
    """
    own = [arm for arm in arms if arm["name"] in (row.arm, row.against)]
    of_group = [arm for arm in own if arm["group"] is not None and arm["group"] == row.group]
    lost = not row.reason and any(arm["diverged"] for arm in of_group or own)
    return DIVERGED if lost else NOT_KNOWN


def format_difference(row: Comparison, missing: str = NOT_KNOWN) -> str:
    """The difference and its interval, to the decimals that tell them from each other: "−0.021 [−0.043, +0.001]".

    `missing` is for a difference that is not finite.
    """
    if not math.isfinite(row.difference):
        return missing
    ends: Interval | tuple[()] = row.interval or ()
    sizes = [abs(value) for value in (row.difference, *ends) if math.isfinite(value) and value]
    digits = max(0, 2 - math.floor(math.log10(max(sizes)))) if sizes else 3
    # More decimals than can be counted at a glance are written as a power of ten.
    form = f"+.{digits}f" if digits <= 6 else "+.2e"
    numbers = [f"{value:{form}}".replace("-", "−") for value in (row.difference, *ends)]
    return numbers[0] + (f" [{numbers[1]}, {numbers[2]}]" if ends else ", no interval")


def verdict_word(verdict: Verdict | None, claimed_by: Claimant) -> str:
    """What a verdict is called: on a claim of the paper's, or on a question that is ours."""
    if verdict is None:
        return "nothing claimed"
    return verdict if claimed_by == "paper" else f"our question: {ANSWERS[verdict]}"


def verdict_text(row: Comparison) -> str:
    """The verdict in words; where it is open, with what it would not be."""
    word = verdict_word(row.verdict, row.claimed_by)
    if row.verdict != "inconclusive":
        return word
    if row.reason:
        return f"{word}: {row.reason}"
    if len(row.differences) < 2:
        return f"{word}: one seed"
    if row.documents_needed:
        return f"{word}: needs more documents"
    if row.seeds_needed is None:
        return word
    return f"{word}: 80 % power needs {row.seeds_needed:,} seeds"


def _number(value: float) -> str:
    return format_number(value) if math.isfinite(value) else "–"
