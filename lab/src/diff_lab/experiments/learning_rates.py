"""Chooses the learning rate of a variant among those that were tried, and says where more have to be tried."""

import math
from collections.abc import Mapping, Sequence

from diff_lab.experiments.experiment import Preset
from diff_lab.record import Better


def choose_rate(tried: Mapping[float, float], better: Better) -> tuple[float, list[str]]:
    """The best of learning rates by their validation (NaN where a run diverged), the lowest of equals; and a sentence
    each where it was at the edge of what was tried or not alone.
    """
    sign = 1 if better == "higher" else -1
    rates = sorted(tried)
    score = {rate: sign * tried[rate] if math.isfinite(tried[rate]) else -math.inf for rate in rates}
    best = [rate for rate in rates if score[rate] == max(score.values())]
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


def next_rate(tried: Mapping[float, float], better: Better) -> float | None:
    """The rate to try next where the best of two or more is the smallest or the largest and no other is as good.

    Its ratio to the best is that of the best to its neighbour, rounded to two digits. None where the best lies inside,
    and where rates are so close that rounding leaves none beyond it.
    """
    sign = 1 if better == "higher" else -1
    ranked = sorted(tried, key=lambda rate: sign * tried[rate] if math.isfinite(tried[rate]) else -math.inf)
    rates = sorted(tried)
    if len(rates) < 2 or not math.isfinite(tried[ranked[-1]]) or tried[ranked[-1]] == tried[ranked[-2]]:
        return None
    for edge, neighbour in ((rates[0], rates[1]), (rates[-1], rates[-2])):
        if ranked[-1] == edge:
            further = float(f"{edge * edge / neighbour:.1e}")
            return further if further < edge < neighbour or neighbour < edge < further else None
    return None


def sweep_notes(preset: Preset, remarks: Mapping[str, Sequence[str]]) -> list[str]:
    """What a reader must know of how learning rates were chosen: each remark of `choose_rate` once, with the variants
    that it is about, with how many seeds rates were tried, and whether in shorter runs than those that are compared.
    """
    notes = [f"{'; '.join(variants)}: {remark}" for remark, variants in remarks.items()]
    if preset.tries_rates and preset.trials_per_rate > 1:
        notes.append(f"Learning rates were chosen by the mean validation of {preset.trials_per_rate} seeds.")
    if preset.tries_rates and preset.variants:
        tried, trained = (preset.variant_recipe(preset.variants[0], *more).train.steps for more in (preset.sweep, ()))
        if tried < trained:
            notes.append(
                f"Learning rates were chosen by runs of {tried:,} steps for runs of {trained:,}, whose best may differ."
            )
    return notes
