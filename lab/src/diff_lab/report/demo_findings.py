"""Says what the demo's curves show, by one rule whichever variant is ahead: steps to an accuracy, and losses.

Everything here is of one seed. The sentences describe these two trainings and conclude nothing from them.
"""

import math
from collections.abc import Sequence

from diff_lab.learning import (
    ACCURACY_CURVE,
    LOSS_CURVE,
    Curve,
    VariantCurves,
    curves_of,
    reported_accuracies,
)
from diff_lab.record import Baseline, Result
from diff_lab.report.documents import Table
from diff_lab.report.wording import variant_label
from diff_transformer.variants import ATTENTION_TYPES

# Two values that are no further apart than this count as equal: about what another validation would change.
_SAME_ACCURACY, _SAME_LOSS = 0.01, 0.01
_TOLD_RATIO = 1.05  # a smaller ratio would be written as 1.0


def steps_table(records: Sequence[Result], baselines: Sequence[Baseline]) -> Table | None:
    """After how many steps each variant has reached an accuracy of the validation; None where no curve is known."""
    curves = _curves(records, ACCURACY_CURVE)
    if not curves:
        return None
    head = ["Accuracy", *(f"Steps of {_label(of_variant)}" for of_variant, _ in curves)]
    highest = _beyond(baselines)
    levels = {level: f"{_round_percent(level)} (the floor)" for level in highest}
    levels |= {level: _round_percent(level) for level in reported_accuracies(baselines)}
    rows = [[words, *(_steps(curve, level) for _, curve in curves)] for level, words in levels.items()]
    rows.append(["at the end", *(f"{_percent(curve.final)} after {curve.steps[-1]:,}" for _, curve in curves)])
    return Table.of_rows(head, rows)


def learning_sentences(records: Sequence[Result], baselines: Sequence[Baseline]) -> list[str]:
    """Which of two variants reaches the lowest and the highest accuracy of `steps_table` first, and how they end."""
    curves = _curves(records, ACCURACY_CURVE)
    levels = reported_accuracies(baselines)
    if len(curves) != 2 or not levels:
        return []
    (of_first, first), (of_second, second) = curves
    labels = _label(of_first), _label(of_second)
    reached = [level for level in levels if not all(math.isnan(curve.steps_to(level)) for _, curve in curves)]
    sentences = [_who_reaches(level, first, second, labels) for level in dict.fromkeys((*reached[:1], *reached[-1:]))]
    if not reached:
        sentences.append(f"Neither reaches {_round_percent(levels[0])} within {first.steps[-1]:,} steps.")
    ends = first.final - second.final
    if not math.isfinite(ends):
        return sentences
    both = f"{labels[0]} has {_percent(first.final)} and {_in_sentence(labels[1])} {_percent(second.final)}"
    if abs(ends) <= _SAME_ACCURACY:
        sentences.append(f"At the end they are equal within a point: {both}.")
        return sentences
    ahead = labels[0] if ends > 0 else labels[1]
    early = _earlier(first, second, reached[0]) if reached else 0
    crossed = " The curves have crossed." if early and (early < 0) != (ends > 0) else ""
    sentences.append(f"At the end {_in_sentence(ahead)} is ahead: {both}.{crossed}")
    return sentences


def loss_sentences(records: Sequence[Result], tokens_per_step: int | None = None) -> list[str]:
    """How the first variant's validation loss stands to the second's at the first validation and at the end."""
    curves = _curves(records, LOSS_CURVE)
    if len(curves) != 2:
        return []
    (of_first, first), (of_second, second) = curves
    steps, differences = loss_differences(first, second)
    if not steps:
        return []
    begin, end = (
        _compared(difference, _label(of_first), _label(of_second)) for difference in (differences[0], differences[-1])
    )
    sentences = [
        f"After {_extent(steps[0], tokens_per_step)}, {begin}.",
        f"At the end, after {_extent(steps[-1], tokens_per_step)}, {end}.",
    ]
    return sentences if len(steps) > 1 else sentences[1:]


def loss_curves(records: Sequence[Result]) -> tuple[Curve, Curve] | None:
    """The validation losses of DIFF and of the Transformer, or None where they are not two."""
    curves = _curves(records, LOSS_CURVE)
    return (curves[0][1], curves[1][1]) if len(curves) == 2 else None


def loss_differences(first: Curve, second: Curve) -> tuple[list[int], list[float]]:
    """The steps at which both have a finite loss, and the first one's loss less the second's."""
    shared = [step for step in first.steps if step in second.steps]
    pairs = [(step, first.at(step) - second.at(step)) for step in shared]
    finite = [(step, difference) for step, difference in pairs if math.isfinite(difference)]
    return [step for step, _ in finite], [difference for _, difference in finite]


def _curves(records: Sequence[Result], name: str) -> list[tuple[VariantCurves, Curve]]:
    """The curve of each variant, of the first seed that it has; DIFF stands before the Transformer."""
    found = [one for one in curves_of(records) if one.name == name]
    return [(one, next(iter(one.by_seed.values()))) for one in sorted(found, key=_is_plain)]


def _is_plain(curves: VariantCurves) -> bool:
    return not ATTENTION_TYPES[curves.variant].differential


def _beyond(baselines: Sequence[Baseline]) -> list[float]:
    """The highest of the accuracies that need no learning; none where they are not known."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().values()]
    return [max(levels)] if levels else []


def _label(curves: VariantCurves) -> str:
    return variant_label(curves.variant)


def _in_sentence(label: str) -> str:
    return f"the {label}" if label == "Transformer" else label


def _round_percent(level: float) -> str:
    return f"{100 * level:.0f} %"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "no number"


def _steps(curve: Curve, level: float) -> str:
    steps = curve.steps_to(level)
    return f"not within {curve.steps[-1]:,}" if math.isnan(steps) else f"{steps:,.0f}"


def _earlier(first: Curve, second: Curve, level: float) -> int:
    """−1 where the first curve is earlier at a level, 1 where the second is, 0 where they are alike."""
    one, other = (curve.steps_to(level) for curve in (first, second))
    if math.isnan(one) and math.isnan(other):
        return 0
    if math.isnan(one) or math.isnan(other):
        return 1 if math.isnan(one) else -1
    return 0 if round(one) == round(other) else -1 if one < other else 1


def _who_reaches(level: float, first: Curve, second: Curve, labels: tuple[str, str]) -> str:
    """One sentence on a level that at least one of the two reaches."""
    side = _earlier(first, second, level)
    if side == 0:
        return f"Both reach {_round_percent(level)} after {first.steps_to(level):,.0f} steps."
    order = (0, 1) if side < 0 else (1, 0)
    soon, late = ((first, second)[number].steps_to(level) for number in order)
    names = [labels[number] for number in order]
    begins = names[0] if names[0] != "Transformer" else "The Transformer"
    sentence = f"{begins} reaches {_round_percent(level)} after {soon:,.0f} steps"
    if math.isnan(late):
        end = (first, second)[order[1]].steps[-1]
        return f"{sentence}; {_in_sentence(names[1])} does not within {end:,}."
    times = f" ({late / soon:.1f} times as many)" if late / soon >= _TOLD_RATIO else ""
    return f"{sentence}, {_in_sentence(names[1])} after {late:,.0f}{times}."


def _extent(steps: int, tokens_per_step: int | None) -> str:
    return f"{steps:,} steps" + (f" ({steps * tokens_per_step / 1e6:.2g} million tokens)" if tokens_per_step else "")


def _compared(difference: float, first: str, second: str) -> str:
    losses = f"{first}'s validation loss"
    if abs(difference) <= _SAME_LOSS:
        return f"{losses} equals that of {_in_sentence(second)} within {_SAME_LOSS} nats"
    side = "above" if difference > 0 else "below"
    return f"{losses} is {abs(difference):.2f} nats {side} that of {_in_sentence(second)}"
