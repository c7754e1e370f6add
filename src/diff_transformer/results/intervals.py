"""95 % intervals, by closed formulas and by resampling."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev, variance

from diff_transformer.results.records import Interval

# Resamples that are held in memory together.
_AT_A_TIME = 500


def proportion_interval(successes: int, n: int) -> Interval:
    """Wilson's 95 % score interval of a proportion: `successes` out of `n` independent trials."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0 … n with n ≥ 1, got successes={successes}, n={n}")
    z = NormalDist().inv_cdf(0.975)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding must not push an end past the share itself when all or none succeed.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean of independent `values`; None for one value, whose spread is unknown."""
    if not values:
        raise ValueError("the mean of no values has no interval")
    if len(values) == 1:
        return None
    if not all(map(math.isfinite, values)):
        return (math.nan, math.nan)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (fmean(values) - half, fmean(values) + half)


def bootstrap_interval(
    documents: Sequence[tuple[float, float]],
    against: Sequence[tuple[float, float]] | None = None,
    *,
    seed: int = 0,
    resamples: int = 10_000,
) -> Interval:
    """The 95 % percentile interval of Σ sum / Σ count under resampling of documents with replacement.

    Args:
        documents: the (sum, count) of each.
        against: the same documents measured otherwise: the interval is that of the difference of the two ratios, with
            the same documents drawn for both.
        seed: of the draws.
        resamples: how many.

    Raises:
        ValueError: fewer than two documents, or not the same number on both sides.
    """
    # Here and not above: reading a results file must not cost an import of numpy.
    import numpy as np

    if len(documents) < 2 or (against is not None and len(against) != len(documents)):
        sides = str(len(documents)) if against is None else f"{len(documents)} and {len(against)}"
        raise ValueError(f"a bootstrap needs two documents or more, the same for both arms, got {sides}")
    columns = np.concatenate(
        [np.asarray(side, dtype=float) for side in (documents, against) if side is not None], axis=1
    )
    random = np.random.default_rng(seed)
    size = len(documents)
    found = []
    for start in range(0, resamples, _AT_A_TIME):
        draws = random.multinomial(size, [1 / size] * size, size=min(_AT_A_TIME, resamples - start))
        totals = draws @ columns
        ratios = totals[:, ::2] / totals[:, 1::2]
        found.append(ratios[:, 0] - (ratios[:, 1] if against is not None else 0.0))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)


def variance_beyond_chance(shares: Sequence[float], trials: int) -> float:
    """The variance of shares of right answers without what counting `trials` answers alone would give.

    A share p of n independent answers varies by p (1 − p) / n without any cause; its unbiased estimate,
    p (1 − p) / (n − 1), is taken from the variance of the shares. What is left is unbiased, and so below 0 now and
    then: cut off at 0, or its root, it would be the larger the nearer p is to one half.

    Args:
        shares: of right answers, two or more; the questions of each are drawn anew.
        trials: questions behind each share, two or more.
    """
    if len(shares) < 2 or trials < 2:
        raise ValueError(f"a spread needs two shares and two trials or more, got {len(shares)} and {trials}")
    chance = fmean(share * (1 - share) / (trials - 1) for share in shares)
    return variance(shares) - chance


def t_quantile(df: int) -> float:
    """The 0.975 quantile of Student's t with `df` degrees of freedom."""
    z = NormalDist().inv_cdf(0.975)
    if df > 200:  # Cornish–Fisher; the next term is below 1e-6
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    low, high = z, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, df) < 0.95 else (low, middle)
    return high


def _t_mass(t: float, df: int) -> float:
    """P(|T| < t): the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2 == 1
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    inner = math.sin(angle) * total
    return (angle + inner) * 2 / math.pi if odd else inner
