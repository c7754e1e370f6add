"""Reads validation curves, and judges differences by what the two variants have learned.

Guessing is not learning, nor is knowing which answers occur without knowing where they belong; and where training ended
while one of the two was still improving, the difference is one of a moment, which is remarked.

Every run of an experiment has its curve among the results: a record of `ACCURACY_CURVE` or `LOSS_CURVE` for each
validation, at the coordinates of its variant and the `step` of training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Comparison, Result, ResultsFile
from diff_lab.statistics import mean_interval, verdict

ACCURACY_CURVE, LOSS_CURVE = "training/validation_accuracy", "training/validation_loss"
CURVES = (ACCURACY_CURVE, LOSS_CURVE)
# A variant is still training where it improves, in this last part, by more accuracy or by more of its final loss.
LAST_PART = 0.2
MOST_ACCURACY, MOST_LOSS = 0.02, 0.02
_ROUNDING = 1e-9  # what it leaves of a difference between two numbers that are written with few digits
# Withdrawn after version 0.2.0: a ratio of the steps to one loss is as much of two learning rates as of two variants.
_WITHDRAWN = "scaling/tokens_for_equal_loss"


@dataclass(frozen=True)
class Curve:
    """The validation of one run: values at ascending steps, NaN where one is not finite or the run diverged."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, step: float) -> float:
        """Return the value at a step, on a line between two validations; NaN if none is known before or after."""
        return float(np.interp(step, self.steps, self.values, left=math.nan, right=math.nan))


@dataclass(frozen=True)
class VariantCurves:
    """The validation curves of one variant by seed, of runs that were trained alike."""

    name: str  # of the records
    variant: str
    coordinates: Coordinates  # of the variant, a size for example
    by_seed: Mapping[int | None, Curve]

    @property
    def steps(self) -> int:
        """Steps of training."""
        return max(curve.steps[-1] for curve in self.by_seed.values())

    @property
    def is_still_training(self) -> bool:
        """Whether the mean over seeds improved by more than a little in the last part of training, as far as known."""
        start = self.steps - LAST_PART * self.steps
        before = fmean(curve.at(start) for curve in self.by_seed.values())
        after = fmean(curve.values[-1] for curve in self.by_seed.values())
        if self.name == ACCURACY_CURVE:
            return after - before > MOST_ACCURACY + _ROUNDING
        return before - after > (MOST_LOSS + _ROUNDING) * after


def curves_of(records: Sequence[Result]) -> list[VariantCurves]:
    """Return the curves among the records of an experiment, in their order; empty if it has none."""
    points: dict[tuple[str, str, Coordinates], dict[int | None, dict[int, float]]] = {}
    for record in records:
        if record.name in CURVES and "step" in record.coordinates:
            key = (record.name, record.variant, record.coordinates.without("step"))
            by_step = points.setdefault(key, {}).setdefault(record.seed, {})
            by_step[round(record.coordinates.position("step"))] = record.value
    return [
        VariantCurves(*key, {seed: Curve(*zip(*sorted(one.items()), strict=True)) for seed, one in by_seed.items()})
        for key, by_seed in points.items()
    ]


def judge(file: ResultsFile) -> ResultsFile:
    """Put each comparison beside its baseline and its curves, and take back the verdicts that mean nothing.

    A variant is above a level where all of the 95 % interval of its accuracy is. A comparison with a baseline becomes
    "not comparable" where one of the two variants is not above every level of it; `at_floor` and `at_elimination` name
    those. `still_learning` names the variants that were still training at the end, which changes no verdict.
    """
    known = {(baseline.name, baseline.coordinates): baseline for baseline in file.baselines}
    curves = curves_of(file.records)
    judged = []
    for row in file.comparisons:
        if row.name == _WITHDRAWN:
            lost: dict[str, Any] = {"difference": math.nan, "interval": (math.nan, math.nan), "seeds_needed": None}
            lost |= {"ours": (math.nan, row.ours[1]), "differences": (math.nan,) * len(row.differences)}
            row = replace(row, **lost, reason="withdrawn, as it compares learning rates as well")
        row = _with_curves(_with_levels(row, known.get((row.name, row.coordinates)), file.records), curves)
        if row.better is not None and (row.at_floor or row.at_elimination):
            row = replace(row, verdict="not comparable", seeds_needed=None, documents_needed=False)
        elif row.better is not None:
            row = replace(row, verdict=verdict(row.interval, row.better, seeds=len(row.differences)))
        judged.append(row)
    return replace(file, comparisons=tuple(judged))


def _with_levels(row: Comparison, baseline: Baseline | None, records: Sequence[Result]) -> Comparison:
    """Name the variants whose accuracy is not above the levels of the baseline."""
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
    """Say how long the variants were trained, and name those that were still training.

    The curves are those at the comparison's coordinates; if a variant has none there, as for a fit over sizes, all but
    those of other sizes or rates.
    """
    followed: list[VariantCurves] = []
    for variant in (row.variant, row.against):
        fitting = [
            one
            for one in curves
            if one.variant == variant
            and all(row.coordinates.get(name, value) == value for name, value in one.coordinates.items())
        ]
        followed += [one for one in fitting if one.coordinates.keys() <= row.coordinates.keys()] or fitting
    if not followed:
        return row
    still = [one.variant for one in followed if one.is_still_training and math.isfinite(row.difference)]
    return replace(row, steps=max(one.steps for one in followed), still_learning=tuple(dict.fromkeys(still)))


def lower_end(records: Sequence[Result]) -> float | None:
    """Return the lower end of the 95 % interval of one variant's mean over seeds; None if it is not known.

    It allows for other seeds (Student's t) and, if every record has an interval of its own, for other questions: the
    half widths are added in squares, as `compare` does.
    """
    values = [record.value for record in records]
    over_seeds = mean_interval(values) if values and all(map(math.isfinite, values)) else None
    if over_seeds is None:
        return None
    halves = [record.value - record.interval[0] for record in records if record.interval is not None]
    other_questions = math.hypot(*halves) / len(halves) if len(halves) == len(values) else 0.0
    return fmean(values) - math.hypot(fmean(values) - over_seeds[0], other_questions)
