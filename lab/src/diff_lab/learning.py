"""Reads validation curves: how many steps a variant needs, and whether it has levelled off; and judges differences.

The interval of a difference tells which variant is ahead. What that says of the variants depends on what they have
learned. Guessing is not learning, nor is knowing which answers occur without knowing where they belong; and where
training ended while one of the two was still improving, the difference is one of a moment, which is remarked.

Every run of an experiment has its curve among the results: a record of `ACCURACY_CURVE` or `LOSS_CURVE` for each
validation, at the coordinates of its variant and the `step` of training.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Better, Comparison, Interval, Result, ResultsFile
from diff_lab.statistics import mean_interval, verdict

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
    """The validation of one run: values at ascending steps, NaN if one was not finite, and at the last step of a run
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
        """Return the value at a step, on a line between two validations; NaN if none is known before or after."""
        if not self.steps[0] - _ROUNDING <= step <= self.steps[-1] + _ROUNDING:
            return math.nan
        after = next(number for number, one in enumerate(self.steps) if one >= step - _ROUNDING)
        if after == 0 or abs(self.steps[after] - step) <= _ROUNDING:
            return self.values[after]
        share = (step - self.steps[after - 1]) / (self.steps[after] - self.steps[after - 1])
        return self.values[after - 1] + share * (self.values[after] - self.values[after - 1])

    def steps_to(self, level: float) -> float:
        """Return the first step as good as `level`, on a line between two validations; NaN if there is none.

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
        """Return the mean over seeds with Student's 95 % interval, at every step that all of them have."""
        curves = list(self.by_seed.values())
        steps = [step for step in curves[0].steps if all(step in curve.steps for curve in curves)]
        values = [[curve.values[curve.steps.index(step)] for curve in curves] for step in steps]
        return steps, list(map(fmean, values)), list(map(mean_interval, values))

    def last_change(self) -> float | None:
        """Return how much the mean over seeds improved in the last part of training; below 0 if it got worse.

        An accuracy as it is, a loss as a share of the final one. None if that is not known: there is no validation
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
        """Whether the last part of training improved it no more than a little; None if that is not known."""
        change = self.last_change()
        most = MOST_ACCURACY if self.name == ACCURACY_CURVE else MOST_LOSS
        return None if change is None else change <= most + _ROUNDING


def curves_of(records: Sequence[Result]) -> list[VariantCurves]:
    """Return the curves among the records of an experiment, in their order; empty if it has none."""
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
    """Return the curves of every two compared variants, at the same coordinates; the pairs once each, in order."""
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
    """Return the `ACCURACIES` above every known level of the validation accuracy: chance, floor and elimination."""
    levels = [level for one in baselines if one.name == ACCURACY_CURVE for level in one.levels().values()]
    return [accuracy for accuracy in ACCURACIES if accuracy > max(levels, default=0.0)]


@dataclass(frozen=True)
class StepsRatio:
    """The steps that one variant needs to reach a level over those of another, over the seeds that both have.

    `bound` is "below" if the ratio is known to be less than `ratio`: with some seed the first variant alone reaches the
    level, or is there at its first validation. It is "above" if that is so of the second. `ratio` is NaN if it is so of
    both, if neither reaches the level with some seed, or if a run that diverged had not reached it.
    """

    level: float  # the mean over seeds, where each seed has its own
    # The variant whose final value the level is; "" where it is now one's and now the other's, None for a given level.
    level_of: str | None
    steps: tuple[tuple[float, ...], tuple[float, ...]]  # of either variant with each seed; NaN where it is not reached
    ratio: float  # the geometric mean over seeds
    interval: Interval | None = None  # Student's, 95 %, of the logarithms; None for one seed and for a bound
    bound: Literal["below", "above"] | None = None


def steps_ratio(first: VariantCurves, second: VariantCurves, level: float | None = None) -> StepsRatio | None:
    """Return the ratio of steps in which two variants reach a level: below 1 if the first one needs fewer.

    Without a level it is, with each seed, the worse one of the two final values. Who ends with it has needed all of its
    training, also if it was as good before and got worse: the ratio is then the share of the second's training after
    which the first is as good as the second ends, or the inverse of the share of the first's if the first ends worse.
    None if the two have no seed in common.
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
    """Return which of two runs ends with the worse validation: 0, or 1 (also if alike); None if one diverged."""
    if not (math.isfinite(first.final) and math.isfinite(second.final)):
        return None
    return int(first.final >= second.final if first.better == "higher" else first.final <= second.final)


def _mean_ratio(
    first: Sequence[float], second: Sequence[float], end: int, is_early: Sequence[bool]
) -> tuple[float, Interval | None, Literal["below", "above"] | None]:
    """Return the ratio over seeds with its interval, or a bound of it.

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


# --- Whether a difference means anything ---


def judge(file: ResultsFile) -> ResultsFile:
    """Put each comparison beside its baseline and its curves, and take back the verdicts that mean nothing.

    A variant is above a level where all of the 95 % interval of its accuracy is. A comparison with a baseline becomes
    "not comparable" where one of the two variants is not above every level of it; `at_floor` and `at_elimination` name
    those. `still_learning` names the variants that had not levelled off at the end of their training, which changes no
    verdict. Nothing is concluded from what the file does not tell: an accuracy of one seed, a run that diverged, no
    validation curves. Where nothing is claimed there is no verdict. A ratio of steps of two variants with different
    learning rates is not known.
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
    return replace(row, verdict=verdict(row.interval, row.better, seeds=len(row.differences)))


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
    """Say how long the variants were trained, and name those that had not levelled off.

    A difference that is not known, since a run diverged, is no moment of learning.
    """
    followed = [one for variant in (row.variant, row.against) for one in _curves_of_comparison(variant, row, curves)]
    if not followed:
        return row
    still = [one.variant for one in followed if one.has_levelled_off is False and math.isfinite(row.difference)]
    names = tuple(variant for variant in (row.variant, row.against) if variant in still)
    return replace(row, steps=max(one.steps for one in followed), still_learning=names)


def _curves_of_comparison(variant: str, row: Comparison, curves: Sequence[VariantCurves]) -> list[VariantCurves]:
    """Return the curves of a variant at a comparison's coordinates. If the variant has none there, as for a fit over
    sizes, they are all but those of other sizes or rates.
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
    """Return the lower end of the 95 % interval of one variant's mean over seeds; None if it is not known.

    It allows for other seeds (Student's t) and, if every record has an interval of its own, for other questions than
    those of the measurement: the half widths are added in squares, as `compare` does. One seed tells nothing of others.
    """
    values = [record.value for record in records]
    over_seeds = mean_interval(values) if values and all(map(math.isfinite, values)) else None
    if over_seeds is None:
        return None
    halves = [record.value - record.interval[0] for record in records if record.interval is not None]
    other_questions = math.hypot(*halves) / len(halves) if len(halves) == len(values) else 0.0
    return fmean(values) - math.hypot(fmean(values) - over_seeds[0], other_questions)
