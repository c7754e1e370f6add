"""Judges whether a difference means anything: the two variants must have begun to learn, and have levelled off.

The interval of a difference tells which variant is ahead. What that says of the variants depends on what they have
learned. Guessing is not learning, nor is knowing which answers occur without knowing where they belong; and where
training ended while one of the two was still improving, the difference is one of a moment.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from diff_lab.learning import (
    TOKENS_FOR_EQUAL_LOSS,
    VariantCurves,
    are_equal_and_known,
    curves_of,
    learning_rates,
)
from diff_lab.record import Baseline, Comparison, Result, ResultsFile
from diff_lab.statistics import mean_interval, verdict


def judge(file: ResultsFile) -> ResultsFile:
    """Put each comparison beside its baseline and its curves, and take back the verdicts that mean nothing.

    A variant is above a level where all of the 95 % interval of its accuracy is. A comparison with a baseline becomes
    "not comparable" where one of the two variants is not above every level of it; `at_floor` and `at_elimination` name
    those. Else a comparison of quality becomes "still learning" where one of the two had not levelled off at the end
    of its training. Nothing is concluded from what the file does not tell: an accuracy of one seed, a run that
    diverged, no validation curves. Where nothing is claimed there is no verdict. A ratio of steps of two variants with
    different learning rates is not known.
    """
    known = {(baseline.name, baseline.coordinates): baseline for baseline in file.baselines}
    curves = curves_of(file.records)
    # Of the largest size, which comes last.
    rates = {variant: rate for (variant, _), rate in learning_rates(file).items()}
    comparisons = (
        row
        if row.name != TOKENS_FOR_EQUAL_LOSS
        or are_equal_and_known(rates.get(variant) for variant in (row.variant, row.against))
        else _without_ratio(row)
        for row in file.comparisons
    )
    judged = (_judged(row, known.get((row.name, row.coordinates)), curves, file.records) for row in comparisons)
    return replace(file, comparisons=tuple(judged))


def _without_ratio(row: Comparison) -> Comparison:
    """Remove the numbers of a ratio of steps, which is one of learning rates as well."""
    return replace(
        row,
        ours=(math.nan, row.ours[1]),
        difference=math.nan,
        differences=(math.nan,) * len(row.differences),
        interval=(math.nan, math.nan),
        seeds_needed=None,
        reason="the two have different learning rates",
    )


def _judged(
    row: Comparison, baseline: Baseline | None, curves: Sequence[VariantCurves], records: Sequence[Result]
) -> Comparison:
    row = _with_levels(row, baseline, records)
    row = _with_curves(row, curves)
    is_low = bool(row.at_floor or row.at_elimination)
    if row.better is None:
        return row
    if is_low:
        return replace(row, verdict="not comparable", seeds_needed=None, documents_needed=False)
    if row.quality and row.still_learning:
        return replace(row, verdict="still learning", seeds_needed=None, documents_needed=False)
    return replace(row, verdict=verdict(row.interval, row.better, seeds=len(row.differences)))


def _with_levels(row: Comparison, baseline: Baseline | None, records: Sequence[Result]) -> Comparison:
    """Names the variants whose accuracy is not above the levels of the baseline."""
    if baseline is None:
        return row
    accuracy = (baseline.name, baseline.coordinates)
    if baseline.accuracy is not None:
        accuracy = (baseline.accuracy, baseline.accuracy_coordinates)
    at_floor, at_elimination = [], []
    for variant in (row.variant, row.against):
        low = lower_end([one for one in records if (one.variant, one.name, one.coordinates) == (variant, *accuracy)])
        if low is not None and low <= baseline.floor:
            at_floor.append(variant)
        elif low is not None and baseline.by_elimination is not None and low <= baseline.by_elimination:
            at_elimination.append(variant)
    return replace(row, baseline=baseline, at_floor=tuple(at_floor), at_elimination=tuple(at_elimination))


def _with_curves(row: Comparison, curves: Sequence[VariantCurves]) -> Comparison:
    """Says how long the variants were trained, and names those that had not levelled off.

    A difference that is not known, since a run diverged, is no moment of learning.
    """
    followed = [one for variant in (row.variant, row.against) for one in _curves_of_comparison(variant, row, curves)]
    if not followed:
        return row
    still = [one.variant for one in followed if one.has_levelled_off is False and math.isfinite(row.difference)]
    names = tuple(variant for variant in (row.variant, row.against) if variant in still)
    return replace(row, steps=max(one.steps for one in followed), still_learning=names)


def _curves_of_comparison(variant: str, row: Comparison, curves: Sequence[VariantCurves]) -> list[VariantCurves]:
    """The curves of a variant that a comparison is about: those at its own coordinates, or, where the variant has none
    there, as for what is fitted over sizes, all but those of other sizes or rates.
    """
    fitting = [
        one
        for one in curves
        if one.variant == variant
        and all(row.coordinates.get(name, value) == value for name, value in one.coordinates.items())
    ]
    own = [one for one in fitting if one.coordinates.keys() <= row.coordinates.keys()]
    return own or fitting


def lower_end(records: Sequence[Result]) -> float | None:
    """The lower end of the 95 % interval of one variant's mean over seeds; None where it is not known.

    It allows for other seeds (Student's t) and, where every record has an interval of its own, for other questions than
    those of the measurement: the half widths are added in squares, as `compare` does. One seed tells nothing of others.
    """
    values = [record.value for record in records]
    over_seeds = mean_interval(values) if values and all(map(math.isfinite, values)) else None
    if over_seeds is None:
        return None
    halves = [record.value - record.interval[0] for record in records if record.interval is not None]
    other_questions = math.hypot(*halves) / len(halves) if len(halves) == len(values) else 0.0
    return fmean(values) - math.hypot(fmean(values) - over_seeds[0], other_questions)
