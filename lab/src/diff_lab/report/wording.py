"""Puts numbers, differences, variants and verdicts into words, the same in every table, figure and page."""

import math
from collections.abc import Sequence

from diff_lab.record import Baseline, Comparison, Interval, Result, ResultsFile, Verdict
from diff_transformer.attention_types import ATTENTION_TYPES

ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
DIRECTIONS = "↑ higher is better, ↓ lower is better."
# A number that is not finite; "diverged" where that is known to be why.
NOT_KNOWN, DIVERGED = "not known", "diverged"
# What follows the "/" in the name of a record → its words for a reader, where these are others.
_WORDS = {
    "first_query_accuracy": "accuracy, first query only",
    "joint_accuracy": "accuracy of whole answers",
    "accuracy_by_lambda": "accuracy by λ",
    "attention_to_answer_signed": "attention to the answer, signed",
    "attention_to_answer_share": "attention to the answer, share",
    "attention_noise_signed": "attention noise, signed",
    "attention_noise_share": "attention noise, share",
    "seconds": "training time",
    "ar_hit": "loss on repeated pairs (AR-Hit)",
    "other": "loss on all other tokens (Others)",
    "share": "share of repeated pairs",
    "parameters_for_equal_loss": "parameters for an equal loss",
    "tokens_for_equal_loss": "tokens for an equal loss",
    "best_loss": "loss at the best learning rate",
    "excess_loss": "loss above that of the best learning rate",
    "order_variance": "variance over orders, beyond chance",
    "order_range": "range over orders",
    "order_spread": "spread over orders, beyond chance",
    "order_mean": "mean accuracy over orders",
    "exact_match": "sums worked out right",
}
# Verdict → what it is called on a question that the paper leaves open, which is no claim to reproduce.
ANSWERS: dict[Verdict | None, str] = {
    "reproduced": "yes",
    "inconclusive": "inconclusive",
    "contrary": "no",
    "not comparable": "not comparable",
    None: "nothing claimed",
}
FLOOR = (
    "Chance is the accuracy of guessing among all answers. The floor is the accuracy of knowing which answers occur in "
    "the context, and how often, but not which answer belongs to which question; elimination also leaves out the "
    "answers already given."
)
LEVELS = (
    f"{FLOOR} A variant is called at chance unless its whole 95 % interval lies above these levels. Where one of the "
    "two is at chance, because it guesses or because its seeds differ too much, they cannot be compared. For contexts "
    "longer than in training, the accuracy at the shortest length decides this, and for attention and the order of "
    "demonstrations the accuracy in the same task."
)
UNCORRECTED = (
    "No verdict is corrected for the number of comparisons: without any true difference, one comparison in twenty "
    "comes out for one side or the other by chance."
)


def variant_label(variant: str) -> str:
    """Return a variant's name for a reader; of "softmax, half the heads" the attention type stands first."""
    kind, comma, change = variant.partition(",")
    return (ATTENTION_TYPES[kind].label if kind in ATTENTION_TYPES else kind) + comma + change


def pair_label(variant: str, against: str) -> str:
    """Return two variants as they are subtracted."""
    return f"{variant_label(variant)} − {variant_label(against)}"


def variants_of(records: Sequence[Result]) -> list[str]:
    """Return the variants that occur, the known ones first, in the order of the columns."""
    present = dict.fromkeys(record.variant for record in records)
    return list(dict.fromkeys([*(name for name in ATTENTION_TYPES if name in present), *present]))


def measure_words(name: str) -> str:
    """Return a measure's name for a reader: "accuracy by depth" for "needles/accuracy_by_depth"."""
    if name == "validation/accuracy":
        return "accuracy of the labels"
    word = name.split("/", 1)[-1]
    return _WORDS.get(word, word.replace("_", " "))


def note_words(file: ResultsFile, note: str) -> str:
    """Return a note of a results file with words for the names of records in it."""
    names = {*(record.name for record in file.records), *(row.name for row in file.comparisons)}
    for name in sorted((name for name in names if "/" in name), key=len, reverse=True):
        note = note.replace(name, measure_words(name))
    return note[:1].upper() + note[1:]


def measure_label(row: Comparison) -> str:
    """Return the measure of a comparison with its part, unit and direction."""
    part = f", {row.coordinates.label}" if row.coordinates else ""
    return measure_words(row.name) + part + unit_and_direction(row)


def unit_and_direction(row: Comparison | Result) -> str:
    """Return the text after the name of a measure: " (nats) ↓"."""
    return (f" ({row.unit})" if row.unit else "") + ARROWS[row.better]


def format_number(value: float, digits: int | None = None, *, missing: str = NOT_KNOWN) -> str:
    """Write a number with about three significant digits; `missing` for one that is not finite."""
    if not math.isfinite(value):
        return missing
    if digits is None and 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    text = f"{value:,.{_digits(value) if digits is None else digits}f}"
    return text if text.strip("-0.") else text.removeprefix("-")  # a number that is rounded to 0 has no sign


def format_result(result: Result) -> str:
    """Return the value, and its interval with as many decimals: `0.547 [0.512, 0.582]`."""
    digits = None if 0 < abs(result.value) < 0.001 else _digits(result.value)
    ends = "" if result.interval is None else ", ".join(format_number(end, digits) for end in result.interval)
    return format_number(result.value, digits) + (f" [{ends}]" if ends else "")


def format_difference(row: Comparison) -> str:
    """Return the difference with its interval and telling decimals: "−0.02 [−0.04, +0.00]"; a word if not finite."""
    if not math.isfinite(row.difference):
        return NOT_KNOWN
    ends: Interval | tuple[()] = row.interval or ()
    sizes = [abs(value) for value in (row.difference, *ends) if math.isfinite(value) and value]
    digits = max(0, 2 - math.floor(math.log10(max(sizes)))) if sizes else 3
    # More decimals than can be counted at a glance are written as a power of ten.
    form = f"+.{digits}f" if digits <= 6 else "+.2e"
    numbers = [f"{value:{form}}".replace("-", "−") for value in (row.difference, *ends)]
    return numbers[0] + (f" [{numbers[1]}, {numbers[2]}]" if ends else ", no interval")


def levels_text(baseline: Baseline) -> str:
    """Write "chance 0.016, floor 0.273, by elimination 0.560", without a level that equals chance."""
    levels = baseline.levels()
    shown = {name: value for name, value in levels.items() if name == "chance" or value != levels["chance"]}
    return ", ".join(f"{name} {format_number(value)}" for name, value in shown.items())


def levels_of(row: Comparison) -> dict[str, float]:
    """Return the levels to read an accuracy against; none if the measure is no accuracy, or they are not known."""
    return row.baseline.levels() if row.baseline is not None and row.baseline.is_accuracy else {}


def level_cells(row: Comparison) -> tuple[str, str]:
    """Return chance, and the accuracy without any binding ("0.531; 0.766 by elimination"); "–" without levels."""
    levels = {name: format_number(value) for name, value in levels_of(row).items()}
    chance = levels.pop("chance", "–")
    floor = [number + (" by elimination" if name == "by elimination" else "") for name, number in levels.items()]
    return chance, "; ".join(floor) or "–"


def _not_begun(row: Comparison) -> str:
    """Return which of the two is not above the levels, as far as its seeds show; "" if both are, or unknown."""
    if row.baseline is None:
        return ""
    parts = []
    for level, below in (("the floor", row.at_floor), ("elimination", row.at_elimination)):
        names = ["neither"] if len(below) == 2 else map(with_article, below)
        parts += [f"{name} is not shown to be above {level}" for name in names]
    text = " and ".join(parts).replace("neither is not", "neither is")
    return f"{text} at {row.baseline.steps:,} steps" if text else ""


def verdict_text(row: Comparison) -> str:
    """Return the verdict with its remarks: "open question: yes", "reproduced: both still training at 180 steps"."""
    answers = row.exploratory or row.verdict is None
    verdict = ANSWERS[row.verdict] if answers else row.verdict
    return ": ".join(filter(None, ("open question" if row.exploratory and row.verdict else "", verdict, remarks(row))))


def remarks(row: Comparison) -> str:
    """Why a verdict does not decide, or what it would take, and who was still training; "" where there is nothing."""
    parts = [_limits(row)]
    if row.quality and row.still_learning and row.verdict is not None:
        name = "both" if len(row.still_learning) == 2 else with_article(row.still_learning[0])
        parts.append(f"{name} still training at {row.steps:,} steps")
    return "; ".join(filter(None, parts))


def _limits(row: Comparison) -> str:
    if row.verdict == "not comparable":
        return _not_begun(row)
    if row.verdict != "inconclusive" or row.reason:
        return row.reason
    if len(row.differences) < 2:
        return "one seed"
    if row.documents_needed:
        return "needs more documents"
    seeds = row.seeds_needed
    return f"{seeds:,} seeds would find such a difference in 80 % of repetitions" if seeds else ""


def with_article(variant: str) -> str:
    """Name a variant in a sentence: "the Transformer", "DIFF"."""
    label = variant_label(variant)
    return f"the {label}" if label.startswith("Transformer") else label


def _digits(value: float) -> int:
    if not math.isfinite(value):
        return 3
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
