"""Reads validation curves: how many steps of training a variant needs, and whether it has levelled off by their end.

Every run of an experiment has its curve among the results: a record of `ACCURACY_CURVE` or `LOSS_CURVE` for each
validation, at the coordinates of its variant and the `step` of training.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Better, Comparison, Interval, Result, ResultsFile
from diff_lab.statistics import mean_interval

ACCURACY_CURVE, LOSS_CURVE = "training/validation_accuracy", "training/validation_loss"
CURVES = (ACCURACY_CURVE, LOSS_CURVE)
# The comparison that is a ratio of steps, at the largest size of the scaling experiment.
TOKENS_FOR_EQUAL_LOSS = "scaling/tokens_for_equal_loss"
# The accuracies of which reports tell how soon they are reached, where guessing or elimination does not reach them.
ACCURACIES = (0.5, 0.7, 0.9)
# A variant has levelled off when, in this last part of its training, it improves by no more than so much accuracy, or
# by no more than this share of its final loss.
LAST_PART = 0.2
MOST_ACCURACY, MOST_LOSS = 0.02, 0.02
# What rounding leaves of a difference between two numbers that are written with few digits.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Curve:
    """The validation of one run: values at ascending steps, NaN where one was not finite, and at the last step of a run
    that diverged.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    better: Better

    @property
    def final(self) -> float:
        """The value at the end of training."""
        return self.values[-1]

    def at(self, step: float) -> float:
        """The value at a step, on a line between two validations; NaN where none is known before or after."""
        if not self.steps[0] - _ROUNDING <= step <= self.steps[-1] + _ROUNDING:
            return math.nan
        after = next(number for number, one in enumerate(self.steps) if one >= step - _ROUNDING)
        if after == 0 or abs(self.steps[after] - step) <= _ROUNDING:
            return self.values[after]
        share = (step - self.steps[after - 1]) / (self.steps[after] - self.steps[after - 1])
        return self.values[after - 1] + share * (self.values[after] - self.values[after - 1])

    def steps_to(self, level: float) -> float:
        """The step at which it first is as good as `level`, on a line between two validations; NaN where it never is.

        A run that is as good at its first validation already has needed that many steps at most.
        """
        sign = 1 if self.better == "higher" else -1
        for number, (step, value) in enumerate(zip(self.steps, self.values, strict=True)):
            if sign * value >= sign * level - _ROUNDING:
                earlier = self.values[number - 1] if number else math.nan
                if not math.isfinite(earlier) or value == earlier:
                    return float(step)
                share = min(1.0, (level - earlier) / (value - earlier))
                return self.steps[number - 1] + share * (step - self.steps[number - 1])
        return math.nan


@dataclass(frozen=True)
class VariantCurves:
    """The validation curves of one variant by seed, of runs that were trained alike."""

    name: str  # of the records
    variant: str
    coordinates: Coordinates  # of the variant, a size for example
    by_seed: Mapping[int | None, Curve]

    @property
    def better(self) -> Better:
        """The direction in which the validation improves."""
        return next(iter(self.by_seed.values())).better

    @property
    def steps(self) -> int:
        """Of training."""
        return max(curve.steps[-1] for curve in self.by_seed.values())

    @property
    def finals(self) -> list[float]:
        """The value of each seed at the end of training."""
        return [curve.final for curve in self.by_seed.values()]

    def means(self) -> tuple[list[int], list[float], list[Interval | None]]:
        """The mean over seeds with Student's 95 % interval, at every step that all of them have."""
        curves = list(self.by_seed.values())
        steps = [step for step in curves[0].steps if all(step in curve.steps for curve in curves)]
        values = [[curve.values[curve.steps.index(step)] for curve in curves] for step in steps]
        return steps, list(map(fmean, values)), list(map(mean_interval, values))

    def last_change(self) -> float | None:
        """By how much the mean over seeds improved in the last part of training; below 0 where it got worse.

        An accuracy as it is, a loss as a share of the final one. None where that is not known: there is no validation
        at the beginning of that part or before it, or a run diverged.
        """
        start = self.steps - LAST_PART * self.steps
        ends = [(curve.at(start), curve.final) for curve in self.by_seed.values()]
        before, after = (fmean(values) for values in zip(*ends, strict=True))
        if not (math.isfinite(before) and math.isfinite(after)):
            return None
        if self.name == ACCURACY_CURVE:
            return after - before
        return (before - after) / after if after else None

    @property
    def has_levelled_off(self) -> bool | None:
        """Whether the last part of training improved it no more than a little; None where that is not known."""
        change = self.last_change()
        most = MOST_ACCURACY if self.name == ACCURACY_CURVE else MOST_LOSS
        return None if change is None else change <= most + _ROUNDING


def curves_of(records: Sequence[Result]) -> list[VariantCurves]:
    """The curves among the records of an experiment, in their order; empty where it has none."""
    points: dict[tuple[str, str, Coordinates], dict[int | None, dict[int, Result]]] = {}
    for record in records:
        if record.name in CURVES and "step" in record.coordinates:
            key = (record.name, record.variant, record.coordinates.without("step"))
            by_step = points.setdefault(key, {}).setdefault(record.seed, {})
            by_step[round(record.coordinates.position("step"))] = record
    return [
        VariantCurves(name, variant, coordinates, {seed: _curve(by_step) for seed, by_step in by_seed.items()})
        for (name, variant, coordinates), by_seed in points.items()
    ]


def compared_curves(
    records: Sequence[Result], comparisons: Sequence[Comparison]
) -> list[tuple[VariantCurves, VariantCurves]]:
    """The curves of every two variants that are compared, at the same coordinates; the pairs once each, in order."""
    curves = curves_of(records)
    return [
        (first, second)
        for variant, against in dict.fromkeys((row.variant, row.against) for row in comparisons)
        for first in curves
        for second in curves
        if (first.variant, second.variant) == (variant, against)
        and (first.name, first.coordinates) == (second.name, second.coordinates)
    ]


def learning_rates(file: ResultsFile) -> dict[tuple[str, Coordinates], float]:
    """Look up the rate with which each variant was trained, by its name and coordinates."""
    trained = file.settings.get("variants", [])
    return {(one["name"], Coordinates(one["coordinates"])): one["learning_rate"] for one in trained}


def are_equal_and_known(rates: Iterable[float | None]) -> bool:
    """Tell whether the steps of variants trained with these learning rates say something of the variants.

    A lower rate alone is ahead in one part of the training and behind in another.
    """
    different = set(rates)
    return len(different) == 1 and None not in different


def curves_of_one_rate(file: ResultsFile) -> list[tuple[VariantCurves, VariantCurves]]:
    """Find the compared curves that say who is sooner: those of two variants with the same learning rate."""
    rates = learning_rates(file)
    return [
        pair
        for pair in compared_curves(file.records, file.comparisons)
        if are_equal_and_known(rates.get((one.variant, one.coordinates)) for one in pair)
    ]


def _curve(by_step: Mapping[int, Result]) -> Curve:
    steps = tuple(sorted(by_step))
    name = by_step[steps[0]].name
    values = tuple(by_step[step].value for step in steps)
    return Curve(steps, values, "higher" if name == ACCURACY_CURVE else "lower")


def reported_accuracies(baselines: Sequence[Baseline]) -> list[float]:
    """Those of `ACCURACIES` above every known level of the validation accuracy: chance, floor and elimination."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().values()]
    return [accuracy for accuracy in ACCURACIES if accuracy > max(levels, default=0.0)]


@dataclass(frozen=True)
class StepsRatio:
    """The steps that one variant needs to reach a level over those of another, over the seeds that both have.

    `bound` is "below" where the ratio is known to be less than `ratio`: with some seed the first variant alone reaches
    the level, or is there at its first validation. It is "above" where that is so of the second. `ratio` is NaN where
    it is so of both, where neither reaches the level with some seed, or where a run that diverged had not reached it.
    """

    level: float  # the mean over seeds, where each seed has its own
    # The variant whose final value the level is; "" where it is now one's and now the other's, None for a given level.
    level_of: str | None
    steps: tuple[tuple[float, ...], tuple[float, ...]]  # of either variant with each seed; NaN where it is not reached
    ratio: float  # the geometric mean over seeds
    interval: Interval | None = None  # Student's, 95 %, of the logarithms; None for one seed and for a bound
    bound: Literal["below", "above"] | None = None


def steps_ratio(first: VariantCurves, second: VariantCurves, level: float | None = None) -> StepsRatio | None:
    """The ratio of steps in which two variants reach a level: below 1 where the first one needs fewer.

    Without a level it is, with each seed, the worse one of the two final values. Who ends with it has needed all of its
    training, also where it was as good before and got worse: the ratio is then the share of the second's training
    after which the first is as good as the second ends, or the inverse of the share of the first's where the first
    ends worse. None where the two have no seed in common.
    """
    shared = [seed for seed in first.by_seed if seed in second.by_seed]
    if not shared:
        return None
    pairs = [(first.by_seed[seed], second.by_seed[seed]) for seed in shared]
    levels, level_of = [math.nan if level is None else level] * len(pairs), None
    worse: list[int | None] = [None] * len(pairs)
    if level is None:
        worse = [_side_of_worse(*pair) for pair in pairs]
        levels = [math.nan if side is None else pair[side].final for pair, side in zip(pairs, worse, strict=True)]
        sides = set(worse) - {None}
        level_of = (first.variant, second.variant)[sides.pop() or 0] if len(sides) == 1 else ""
    steps = [
        [float(curve.steps[-1]) if number == side else curve.steps_to(one) for number, curve in enumerate(pair)]
        for pair, one, side in zip(pairs, levels, worse, strict=True)
    ]
    of_first, of_second = map(tuple, zip(*steps, strict=True))
    ratio, interval, bound = math.nan, None, None
    has_ended = all(math.isfinite(curve.final) for pair in pairs for curve in pair)
    # Of a run that diverged nobody knows whether it would have come there.
    if has_ended or not any(map(math.isnan, (*of_first, *of_second))):
        is_early = [
            any(needed == curve.steps[0] for needed, curve in zip(side, curves, strict=True))
            for side, curves in zip((of_first, of_second), zip(*pairs, strict=True), strict=True)
        ]
        ratio, interval, bound = _mean_ratio(of_first, of_second, max(first.steps, second.steps), is_early)
    return StepsRatio(fmean(levels), level_of, (of_first, of_second), ratio, interval, bound)


def _side_of_worse(first: Curve, second: Curve) -> int | None:
    """Which of two runs ends with the worse validation: 0, or 1 also where they end alike; None where one diverged."""
    if not (math.isfinite(first.final) and math.isfinite(second.final)):
        return None
    return int(first.final >= second.final if first.better == "higher" else first.final <= second.final)


def _mean_ratio(
    first: Sequence[float], second: Sequence[float], end: int, is_early: Sequence[bool]
) -> tuple[float, Interval | None, Literal["below", "above"] | None]:
    """The ratio over seeds with its interval, or a bound of it.

    Who does not get there would need more steps than all, and who is there at the first validation (`is_early`, of
    either) may have needed fewer.
    """
    lacks_first, lacks_second = any(map(math.isnan, first)), any(map(math.isnan, second))
    is_below, is_above = lacks_second or is_early[0], lacks_first or is_early[1]
    if (lacks_first and lacks_second) or (is_below and is_above):
        return math.nan, None, None
    filled = ([end if math.isnan(needed) else needed for needed in side] for side in (first, second))
    logs = [math.log(one / other) for one, other in zip(*filled, strict=True)]
    ratio = math.exp(fmean(logs))
    if is_below or is_above:
        return ratio, None, "below" if is_below else "above"
    interval = mean_interval(logs)
    return ratio, None if interval is None else (math.exp(interval[0]), math.exp(interval[1])), None
