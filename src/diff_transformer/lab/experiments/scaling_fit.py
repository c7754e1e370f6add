"""Fits the loss of two variants by size, and computes how much smaller one of them may be at equal loss."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from diff_transformer.lab.record import Interval
from diff_transformer.lab.statistics import t_quantile

# Exponents that are tried. With few sizes the best one is poorly known, and matters little between the sizes.
EXPONENTS = tuple(step / 20 for step in range(31))
# Ratios beyond this factor are of no size that was trained: one of the twins does not get there at all.
FURTHEST = 1000.0


@dataclass(frozen=True)
class Fit:
    """loss(N) = c − a·φ(N) for each of two variants, a > 0, with φ(N) = (1 − (N/N₀)^−b)/b, which is ln(N/N₀) for b = 0.

    That is a·N^−b + c with other constants, or log-linear. The exponent is shared by the variants.

    Attributes:
        middle: N₀, the geometric mean of the smallest and the largest size.
        exponent: b.
        levels, slopes: c and a of each variant; where a ≤ 0 the variant does not improve with size.
    """

    middle: float
    exponent: float
    levels: tuple[float, float]
    slopes: tuple[float, float]

    def loss(self, variant: int, size: float) -> float:
        """What a variant's loss would be at a size."""
        return self.levels[variant] - self.slopes[variant] * float(
            _basis(np.array([size / self.middle]), self.exponent)[0]
        )

    def equal_loss_ratio(self, size: float | None = None) -> float:
        """The size of the first variant, or else the middle, over that of the second at which both have the same loss.

        Below 1 where the first variant needs less. NaN where one gets worse with size, or where the two do not meet
        within a factor of 1000.
        """
        if min(self.slopes) <= 0:
            return math.nan
        size = self.middle if size is None else size
        place = (self.levels[1] - self.loss(0, size)) / self.slopes[1]  # φ of the second variant's size
        if self.exponent * place >= 1:  # below the loss that the second variant tends to
            return math.nan
        other = place if self.exponent == 0 else -math.log1p(-self.exponent * place) / self.exponent  # ln(N/N₀)
        ratio = math.log(size / self.middle) - other
        return math.exp(ratio) if abs(ratio) < math.log(FURTHEST) else math.nan


def fit(sizes: np.ndarray, losses: np.ndarray) -> Fit:
    """The least-squares fit to losses (2, sizes) of two variants at sizes (sizes,), three or more different ones.
    Raises ValueError for fewer sizes, or other shapes.
    """
    if losses.shape != (2, len(sizes)) or len(set(sizes.tolist())) < 3:
        raise ValueError(
            f"A fit needs the losses of two variants at three sizes or more, got losses {losses.shape} at "
            f"{sizes.tolist()}."
        )
    return _fits(sizes, losses[None])[0]


def ratio_interval(sizes: np.ndarray, losses: np.ndarray, *, seed: int = 0, resamples: int = 1000) -> Interval | None:
    """The 95 % interval of :meth:`Fit.equal_loss_ratio` by a bootstrap over the seeds of losses (K, 2, S) at sizes
    (S,).

    Seeds are drawn for each size by itself, the same for both variants, as those share their data. Few seeds vary less
    among themselves than all would, so what is drawn is spread by √(K/(K − 1)), and by Student's t over the normal
    quantile for the S·(K − 1) degrees of freedom that S sizes of K seeds have. None for one seed, or where more than
    one in forty of the drawn fits has no ratio.
    """
    seeds = len(losses)
    if seeds < 2:
        return None
    random = np.random.default_rng(seed)
    mean = losses.mean(0)
    freedom = len(sizes) * (seeds - 1)
    spread = math.sqrt(seeds / (seeds - 1)) * t_quantile(freedom) / NormalDist().inv_cdf(0.975)
    drawn = random.integers(seeds, size=(resamples, seeds, len(sizes)))
    deviations = (losses - mean)[drawn, :, np.arange(len(sizes))].mean(1).swapaxes(1, 2)  # (resamples, 2, S)
    ratios = [one.equal_loss_ratio() for one in _fits(sizes, mean + spread * deviations)]
    finite = [ratio for ratio in ratios if not math.isnan(ratio)]
    if len(finite) < 0.975 * resamples:
        return None
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


def tokens_ratio(first: dict[int, float], second: dict[int, float]) -> float:
    """The tokens of training with which one variant reaches the other's last loss, over all: two curves, tokens → loss.

    Below 1 where the first variant ends lower: then it is the tokens with which it reached the second's last loss, over
    all of the second's. Else all of the first's over those with which the second reached the first's last loss.
    Between two points a curve is a line in ln(tokens).
    """
    end, other_end = first[max(first)], second[max(second)]
    if end <= other_end:
        return _reached(first, other_end) / max(second)
    return max(first) / _reached(second, end)


def _reached(curve: dict[int, float], loss: float) -> float:
    """With how many tokens a curve first is as low as `loss`."""
    before: tuple[int, float] | None = None
    for tokens, here in sorted(curve.items()):
        if here <= loss:
            if before is None or before[1] == here:
                return float(tokens)
            share = (before[1] - loss) / (before[1] - here)
            return math.exp(math.log(before[0]) + share * (math.log(tokens) - math.log(before[0])))
        before = tokens, here
    raise ValueError(f"The curve never falls to {loss:g}.")


def _fits(sizes: np.ndarray, losses: np.ndarray) -> list[Fit]:
    """The fit to each of losses (fits, 2, S)."""
    middle = math.sqrt(float(sizes.min()) * float(sizes.max()))
    errors, found = [], []
    for exponent in EXPONENTS:
        columns = np.stack([np.ones(len(sizes)), -_basis(sizes / middle, exponent)], axis=1)
        both = losses @ np.linalg.pinv(columns).T  # (fits, 2, level and slope)
        found.append(both)
        errors.append(((both @ columns.T - losses) ** 2).sum((1, 2)))
    best = np.argmin(errors, axis=0)
    fits = []
    for number, index in enumerate(best):
        (level, slope), (other_level, other_slope) = found[index][number].tolist()
        fits.append(Fit(middle, EXPONENTS[index], (level, other_level), (slope, other_slope)))
    return fits


def _basis(ratio: np.ndarray, exponent: float) -> np.ndarray:
    return np.log(ratio) if exponent == 0 else (1 - ratio**-exponent) / exponent
