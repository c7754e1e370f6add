"""Computes intervals of measured values, comparisons of two variants over paired seeds, and fits of losses by size."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
from scipy import stats

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.record import Better, Comparison, Interval, Result, Verdict

SEEDS = "Student's t over paired seeds"
DOCUMENTS = "bootstrap over paired documents"
BOTH = f"{SEEDS} and {DOCUMENTS}, half widths added in squares"
MOST_SEEDS = 10_000  # more than anyone will train
_POWER = 0.8  # the share of experiments in which `seeds_needed` is to find a difference
# Resamples of documents, and how many are held in memory together.
_RESAMPLES, _RESAMPLES_AT_A_TIME = 10_000, 500
_MOST_EMPTY = 0.01  # the share of them that may hold no document with a count
# Exponents that are tried. With few sizes the best one matters little between them.
EXPONENTS = tuple(step / 20 for step in range(31))
# Ratios beyond this factor are of no size that was trained: one of the two does not get there at all.
FURTHEST = 1000.0


def proportion_interval(successes: int, n: int) -> Interval:
    """Return Wilson's 95 % score interval of a proportion: `successes` out of `n` independent trials."""
    low, high = stats.binomtest(successes, n).proportion_ci(method="wilson")
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's 95 % interval of the mean of independent `values`; None for one, whose spread is unknown."""
    if len(values) == 1:
        return None
    if not all(map(math.isfinite, values)):
        return (math.nan, math.nan)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (fmean(values) - half, fmean(values) + half)


def bootstrap_interval(
    documents: Sequence[tuple[float, float]] | np.ndarray,
    against: Sequence[tuple[float, float]] | np.ndarray | None = None,
) -> Interval | None:
    """Return the 95 % interval of Σ sum / Σ count of documents, resampled with replacement from a fixed seed.

    The halves of the percentile interval are widened as Student's t is wider than the normal distribution, and by
    √(n / (n − 1)) for n documents with a count. With `against`, the same documents measured otherwise, it is the
    interval of the difference of the two ratios. None if one draw in a hundred has no document with a count.
    """
    sides = [documents] if against is None else [documents, against]
    columns = np.concatenate([np.asarray(side, dtype=float) for side in sides], axis=1)

    def difference(totals: np.ndarray) -> np.ndarray:
        ratios = totals[:, ::2] / totals[:, 1::2]
        return ratios[:, 0] - (ratios[:, 1] if against is not None else 0.0)

    random, size, resampled = np.random.default_rng(0), len(documents), []
    for _ in range(_RESAMPLES // _RESAMPLES_AT_A_TIME):
        totals = random.multinomial(size, [1 / size] * size, size=_RESAMPLES_AT_A_TIME) @ columns
        resampled.append(difference(totals[(totals[:, 1::2] > 0).all(axis=1)]))
    known = np.concatenate(resampled)
    if len(known) < _RESAMPLES * (1 - _MOST_EMPTY):
        return None
    (found,) = difference(columns.sum(axis=0, keepdims=True))
    counted = max(2, int((columns[:, 1::2] > 0).sum(axis=0).min()))  # documents without a count tell nothing
    wider = t_quantile(counted - 1) / stats.norm.ppf(0.975) * math.sqrt(counted / (counted - 1))
    low, high = found + wider * (np.quantile(known, [0.025, 0.975]) - found)
    return float(low), float(high)


def variance_beyond_chance(shares: Sequence[float], trials: int) -> float:
    """Return the variance of shares of right answers beyond that of counting `trials` answers alone.

    A share p of n independent answers varies by p (1 − p) / n without any cause, of which p (1 − p) / (n − 1) is the
    unbiased estimate. The rest is unbiased, and so below 0 now and then.
    """
    chance = fmean(share * (1 - share) / (trials - 1) for share in shares)
    return variance(shares) - chance


def t_quantile(df: int) -> float:
    """Return the 0.975 quantile of Student's t with `df` degrees of freedom."""
    return float(stats.t.ppf(0.975, df))


def compare(
    records: Sequence[Result],
    name: str,
    variant: str,
    against: str,
    *,
    coordinates: Coordinates = NO_COORDINATES,
    claimed: bool = True,
    **fields: Any,
) -> Comparison:
    """Compare two variants in a measure, over the seeds for which both have a record.

    The interval of the mean difference is Student's over seeds. If the records carry documents, a bootstrap over them
    is added in squares, a little too wide. With one seed it is the bootstrap alone, and the verdict stays open.

    `variant` is the one that is claimed to be better; if nothing is `claimed`, there is a difference and no verdict.
    `fields` are more of the comparison's: `exploratory`, `quality` and `paper`. Raises ValueError if the variants have
    no seed in common, two records are of one seed, or a claim has no direction.
    """
    compared = [one for one in records if (one.name, one.coordinates) == (name, coordinates)]
    for (measured, seed), count in Counter((one.variant, one.seed) for one in compared).items():
        if count > 1 and measured in (variant, against):
            raise ValueError(f"{name} of {measured!r} was measured twice for seed {seed}")
    first, second = ({one.seed: one for one in compared if one.variant == side} for side in (variant, against))
    pairs = [(one, second[seed]) for seed, one in first.items() if seed in second]
    if not pairs:
        part = f" of {coordinates.label}" if coordinates else ""
        raise ValueError(f"{name}{part} was not measured in both {variant!r} and {against!r} for any seed")
    better = pairs[0][0].better if claimed else None
    if claimed and better is None:
        raise ValueError(f"{name} has no better direction, so nothing can be claimed of it")
    differences = tuple(one.value - other.value for one, other in pairs)
    difference, over_seeds = fmean(differences), mean_interval(differences)
    interval, method, other_documents = over_seeds, SEEDS if over_seeds else "", 0.0
    if all(record.documents for pair in pairs for record in pair):
        documents = [np.sum([pair[side].documents for pair in pairs], axis=0) for side in (0, 1)]
        drawn = bootstrap_interval(*documents)
        if drawn is None:
            interval, method, other_documents = None, "", math.inf
        elif over_seeds is None:
            interval, method = drawn, DOCUMENTS
        else:
            low, high = (math.hypot(over_seeds[end] - difference, drawn[end] - difference) for end in (0, 1))
            interval, method = (difference - low, difference + high), BOTH
            other_documents = abs(drawn[0 if difference > 0 else 1] - difference)  # the half that may reach 0
    judged = None if better is None else verdict(interval, better, seeds=len(pairs))
    needed, too_few_documents = None, False
    if judged == "inconclusive" and better is not None and over_seeds is not None:
        by_seeds = verdict(over_seeds, better, seeds=len(pairs))
        too_few_documents = other_documents > 0 and (by_seeds != judged or other_documents >= abs(difference))
        needed = None if too_few_documents else seeds_needed(differences, other_documents)
    return Comparison(
        name=name,
        variant=variant,
        against=against,
        coordinates=coordinates,
        unit=pairs[0][0].unit,
        better=better,
        ours=(fmean(one.value for one, _ in pairs), fmean(other.value for _, other in pairs)),
        differences=differences,
        difference=difference,
        interval=interval,
        method=method,
        verdict=judged,
        seeds_needed=needed,
        documents_needed=too_few_documents,
        **fields,
    )


def p_value(row: Comparison) -> float | None:
    """Return the two-sided p of no difference, by the Student's t over seeds that has the comparison's interval.

    For an interval of a bootstrap that is an approximation. None if nothing is known of the spread.
    """
    seeds, (low, high) = len(row.differences), row.interval or (math.nan, math.nan)
    if seeds < 2 or not math.isfinite(high - low):
        return None
    # Seeds that agree to the last bit have an interval without a width.
    statistic = 2 * abs(row.difference) / max(high - low, 1e-300) * t_quantile(seeds - 1)
    return float(2 * stats.t.sf(statistic, seeds - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p of each test after Holm's correction for their number (Scand. J. Statist. 6, 65, 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = largest
    return corrected


def remark_on_seeds(comparisons: Sequence[Comparison]) -> str | None:
    """Return a remark on verdicts over one or two seeds; None if every verdict is over more."""
    fewest = min((len(row.differences) for row in comparisons if row.verdict is not None), default=MOST_SEEDS)
    if fewest == 1:
        return "Verdicts on one seed are inconclusive by the rule, whatever came out: it tells nothing of other seeds."
    return "With two seeds Student's t is 12.7, so hardly anything can be decided." if fewest == 2 else None


def verdict(interval: Interval | None, better: Better, *, seeds: int) -> Verdict:
    """Decide by the 95 % interval of a difference, claimed better − other, whether it lies on the claim's side of 0.
    With one seed, or without a known spread (None), the verdict is "inconclusive".
    """
    if interval is None or seeds < 2:
        return "inconclusive"
    low, high = interval if better == "higher" else (-interval[1], -interval[0])
    return "reproduced" if low > 0 else "contrary" if high < 0 else "inconclusive"


def seeds_needed(differences: Sequence[float], other: float = 0.0) -> int | None:
    """Return how many paired seeds a t-test at 5 % (two sides) needs to find such a difference in 80 % of experiments.

    The mean and the standard deviation of `differences`, one for each seed so far, are taken for the true ones.
    `other` is half the width of an interval, added in squares, that more seeds do not make narrower. None if the number
    cannot be told, or is above 10,000.
    """
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    mean, spread = abs(fmean(differences)), stdev(differences)
    if mean <= other:
        return None
    if spread == 0:
        return 2

    def power(seeds: int) -> float:
        """Return how often the test finds the difference: to first order a noncentral t exceeds the quantile."""
        rest = math.sqrt(mean**2 - other**2)  # what √(half² + other²) leaves for the half width over seeds
        threshold = t_quantile(seeds - 1) * rest / mean
        return float(stats.nct.sf(threshold, seeds - 1, rest**2 / mean * math.sqrt(seeds) / spread))

    needed = bisect_left(range(MOST_SEEDS + 1), _POWER, lo=2, key=power)
    return needed if needed <= MOST_SEEDS else None


@dataclass(frozen=True)
class Fit:
    """loss(N) = c − a·φ(N) for each of two variants, a > 0, with φ(N) = (1 − (N/N₀)^−b)/b, which is ln(N/N₀) for b = 0.

    That is a·N^−b + c with other constants, or log-linear.
    """

    exponent: float  # b, which the variants share
    levels: Sequence[float]  # c of each
    slopes: Sequence[float]  # a of each; where it is not above 0, a variant does not improve with size
    middle: float = 1.0  # N₀, the geometric mean of the smallest and the largest size

    def losses(self, variant: int, sizes: np.ndarray) -> np.ndarray:
        """Return the losses of one of the two variants at sizes."""
        return np.asarray(self.levels[variant] - self.slopes[variant] * _basis(self.exponent, sizes / self.middle))

    def equal_loss_ratio(self) -> float:
        """Return the middle, as the first variant's size, over the second's size of the same loss; NaN for none."""
        if min(self.slopes) <= 0:
            return math.nan
        level, other_level = self.levels
        distance = (other_level - level) / self.slopes[1]  # φ of the second variant's size
        if self.exponent * distance >= 1:  # below the loss that the second variant tends to
            return math.nan
        log_ratio = -distance if self.exponent == 0 else math.log1p(-self.exponent * distance) / self.exponent
        return math.exp(log_ratio) if abs(log_ratio) < math.log(FURTHEST) else math.nan


def _basis(exponent: float, ratios: np.ndarray) -> np.ndarray:
    return np.log(ratios) if exponent == 0 else (1 - ratios**-exponent) / exponent


def fits(sizes: np.ndarray, losses: np.ndarray) -> list[Fit]:
    """Fit each of losses (fits, 2, S) by least squares: of two variants at sizes (S,), three or more different."""
    middle = math.sqrt(float(sizes.min()) * float(sizes.max()))
    errors, coefficients = [], []
    for exponent in EXPONENTS:
        columns = np.stack([np.ones(len(sizes)), -_basis(exponent, sizes / middle)], axis=1)
        solutions = losses @ np.linalg.pinv(columns).T  # (fits, 2, level and slope)
        coefficients.append(solutions)
        errors.append(((solutions @ columns.T - losses) ** 2).sum((1, 2)))
    best = np.argmin(errors, axis=0)
    chosen = np.stack(coefficients)[best, np.arange(len(losses))].swapaxes(1, 2)  # (fits, level and slope, 2)
    return [
        Fit(EXPONENTS[index], levels, slopes, middle)
        for index, (levels, slopes) in zip(best, chosen.tolist(), strict=True)
    ]
