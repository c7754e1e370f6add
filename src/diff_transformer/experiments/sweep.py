"""The choice of an arm's learning rate among those that were tried."""

import math
from collections.abc import Mapping, Sequence

from diff_transformer.experiments.framework import Preset, Validation


def choose_rate(tried: Mapping[float, float], validation: Validation) -> tuple[float, list[str]]:
    """The best learning rate and what is to be said about the choice.

    Args:
        tried: rate → validation, NaN where the run diverged, which is worse than any number.
        validation: which direction is better.

    Returns:
        The rate, the lowest of equals, and a sentence each where it was at the edge of what was tried or not alone.
    """
    sign = 1 if validation.better == "higher" else -1
    rates = sorted(tried)
    score = {rate: sign * tried[rate] if math.isfinite(tried[rate]) else -math.inf for rate in rates}
    best = [rate for rate in rates if score[rate] == max(score.values())]
    if len(rates) == 1:
        return rates[0], []
    if score[best[0]] == -math.inf:
        return best[0], ["it diverged at every learning rate tried."]
    remarks, all_rates = [], ", ".join(f"{rate:g}" for rate in rates)
    if len(best) > 1:
        equal = ", ".join(f"{rate:g}" for rate in best)
        remarks.append(f"the learning rates {equal} validated equally well; the lowest was taken.")
    for edge, word in ((rates[0], "smallest"), (rates[-1], "largest")):
        if best[0] == edge:
            remarks.append(f"the best learning rate, {edge:g}, was the {word} tried ({all_rates}).")
    return best[0], remarks


def sweep_notes(preset: Preset, remarks: Mapping[str, Sequence[str]]) -> list[str]:
    """What a reader must know of how learning rates were chosen.

    Args:
        preset: whose rates were tried.
        remarks: of `choose_rate`, with the names of the arms that each is about.

    Returns:
        Each remark once, and a sentence where rates were tried in runs of fewer steps than those that are compared.
    """
    notes = [f"{'; '.join(arms)}: {remark}" for remark, arms in remarks.items()]
    if len(preset.learning_rates) > 1 and preset.arms:
        tried, trained = (preset.arm_recipe(preset.arms[0], *more).train.steps for more in (preset.sweep, ()))
        if tried < trained:
            notes.append(
                f"Learning rates were chosen by runs of {tried:,} steps for runs of {trained:,}, whose best may differ."
            )
    return notes
