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
ANSWERS: dict[Verdict, str] = {
    "reproduced": "yes",
    "inconclusive": "inconclusive",
    "contrary": "no",
    "not comparable": "not comparable",
}
LEVELS = (
    "Chance: by guessing among all answers. Floor: by knowing which answers occur in the context and how often, but "
    "not which belongs to which question; by elimination, by leaving out those already given as well. A variant whose "
    "95 % interval is not above them has not begun to learn the task: where that is so of both, or of one where the "
    "measure is no accuracy, nothing can be compared. In contexts longer than in training, the accuracy in the "
    "shortest one says whether a variant has learned the task."
)
UNCORRECTED = (
    "No verdict is corrected for the number of comparisons: where there is no difference, one in twenty decides for "
    "one side or the other by chance."
)

# A longer name of a variant does not stand behind a verdict in a figure.
_SHORT = 12


def verdict_table(results: ResultsFile) -> Table:
    """One row for each comparison, whichever way it came out."""
    caption = Text(
        "↑ higher is better, ↓ lower is better. Difference: first − second, mean over paired seeds, 95 % interval; all "
        "of it on the claim's side of 0: reproduced, all on the other: contrary, else inconclusive; of a question that "
        f"is ours and no claim of the paper's: yes, no. {UNCORRECTED}\n"
        f"{LEVELS + chr(10) if has_levels(results.comparisons) else ''}"
        f"Measured on {results.device}."
    )
    table = Table(title=Text(results.title), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("measure", overflow="fold")
    table.add_column("arms", overflow="fold")
    leveled = has_levels(results.comparisons)
    for column in ("paper", "here", *(["chance / floor"] if leveled else []), "difference"):
        table.add_column(column, no_wrap=column != "chance / floor")
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
            *([f"{chance_cell(row)} / {floor_cell(row)}"] if leveled else []),
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


def chance_cell(row: Comparison) -> str:
    """The accuracy of guessing; "–" where the measure is no accuracy, or it is not known."""
    known = row.baseline is not None and row.baseline.is_accuracy
    return format_number(row.baseline.chance) if known and row.baseline is not None else "–"


def floor_cell(row: Comparison) -> str:
    """The accuracy of one that binds nothing, "0.531; 0.766 by elimination"; "–" as in `chance_cell`."""
    baseline = row.baseline
    if baseline is None or not baseline.is_accuracy:
        return "–"
    eliminated = baseline.by_elimination
    return format_number(baseline.floor) + (
        "" if eliminated is None else f"; {format_number(eliminated)} by elimination"
    )


def levels_mark(row: Comparison) -> str:
    """Chance and the highest level that takes no binding, for a figure: " (0.06, 0.77)"; "" as in `chance_cell`."""
    baseline = row.baseline
    if baseline is None or not baseline.is_accuracy:
        return ""
    return f" ({baseline.chance:.2f},\N{NO-BREAK SPACE}{max(baseline.floor, baseline.by_elimination or 0.0):.2f})"


def floor_mark(row: Comparison) -> str:
    """`floor_remark` for a figure: "Transformer at floor"; "" where the verdict says it already."""
    at_floor = [*row.at_floor, *row.at_elimination]
    if row.verdict in (None, "not comparable") or not at_floor:
        return ""
    if len(at_floor) == 2:
        return "both at floor"
    label = arm_label(at_floor[0])
    short = label if len(label) <= _SHORT else "first" if at_floor[0] == row.arm else "second"
    return f"{short} at floor"


def has_levels(comparisons: Sequence[Comparison]) -> bool:
    """Whether chance and floor are known for any of them."""
    return any(row.baseline is not None and row.baseline.is_accuracy for row in comparisons)


def floor_remark(row: Comparison) -> str:
    """Which of the two has not begun to learn; "" where both have, or nothing is claimed."""
    if row.baseline is None or row.verdict is None or not (row.at_floor or row.at_elimination):
        return ""
    when = f"at {row.baseline.steps:,} steps"
    if len(row.at_floor) == 2:
        return f"neither has begun to learn {when}"
    if len(row.at_elimination) == 2:
        return f"neither has learned more than elimination {when}"
    parts = [f"{_named(arm)} has not begun to learn" for arm in row.at_floor]
    parts += [f"{_named(arm)} has learned no more than elimination" for arm in row.at_elimination]
    return f"{' and '.join(parts)} {when}"


def _named(arm: str) -> str:
    label = arm_label(arm)
    return f"the {label}" if label.startswith("Transformer") else label


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


def judged_word(row: Comparison) -> str:
    """The verdict with what keeps it from meaning more: "reproduced; the Transformer has not begun to learn …"."""
    remark = floor_remark(row)
    separator = ": " if row.verdict == "not comparable" else "; "
    return verdict_word(row.verdict, row.claimed_by) + (separator + remark if remark else "")


def verdict_text(row: Comparison) -> str:
    """The verdict in words; where it is open, with what it would not be."""
    if row.verdict != "inconclusive":
        return judged_word(row)
    remark = floor_remark(row)
    return _open_verdict(row) + (f"; {remark}" if remark else "")


def _open_verdict(row: Comparison) -> str:
    word = verdict_word(row.verdict, row.claimed_by)
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
