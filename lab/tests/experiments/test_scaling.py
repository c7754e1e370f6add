"""The fit through sizes and what follows from it, on made-up numbers whose answer is known."""

import math

import numpy as np
import pytest

from diff_lab.experiments.scaling_experiments import ratio_interval
from diff_lab.statistics import Fit, fits

SIZES = np.array([1e5, 3e5, 1e6, 4e6, 1e7])
SHARE = 0.62  # the first variant at N is as good as the second at N / 0.62


def law(size: np.ndarray, exponent: float) -> np.ndarray:
    """c + a·N^−b, or c − a·ln N."""
    return 4.0 - 0.2 * np.log(size / 1e5) if exponent == 0 else 1.5 + 40 * size**-exponent


def phi(ratio: np.ndarray, exponent: float) -> np.ndarray:
    """What the losses of a fit fall with, by the ratio of a size to the middle of the sizes."""
    return np.log(ratio) if exponent == 0 else (1 - ratio**-exponent) / exponent


@pytest.mark.parametrize("exponent", [0, 0.1, 0.35, 0.8])
def test_the_ratio_of_exact_laws_is_found(exponent: float) -> None:
    losses = np.stack([law(SIZES / SHARE, exponent), law(SIZES, exponent)])
    fit, inverse = fits(SIZES, np.stack([losses, losses[::-1]]))
    assert fit.exponent == pytest.approx(exponent)
    basis = phi(SIZES / 1e6, exponent)
    for level, slope, variant_losses in zip(fit.levels, fit.slopes, losses, strict=True):
        assert level - slope * basis == pytest.approx(variant_losses)
    assert fit.equal_loss_ratio() == pytest.approx(SHARE)
    assert inverse.equal_loss_ratio() == pytest.approx(1 / SHARE)


@pytest.mark.parametrize("exponent", [0.0, 0.3])
def test_the_size_that_the_ratio_names_has_that_loss(exponent: float) -> None:
    """Also where the ratio is not the same at all sizes."""
    fit = Fit(exponent=exponent, levels=(3.0, 3.2), slopes=(0.25, 0.2))
    loss = 3.2 - 0.2 * phi(np.array(1 / fit.equal_loss_ratio()), exponent)
    assert loss == pytest.approx(3.0)


def test_a_variant_that_never_gets_there() -> None:
    """The second variant's loss tends to 3 − 0.2 / 0.5 = 2.6, and the first one is at 2.5 already."""
    assert math.isnan(Fit(0.5, (2.5, 3.0), (0.2, 0.2)).equal_loss_ratio())
    assert math.isnan(Fit(0.0, (3.0, 3.0), (0.1, -0.1)).equal_loss_ratio())


def test_a_ratio_of_no_size_that_was_trained_is_none() -> None:
    """Log-linear and apart by ln of the ratio: a little within a factor of 1000, and a little beyond."""
    for apart, known in ((6.9, True), (6.91, False), (90.0, False)):
        for levels, ratio in (((3.0, 3.0 + apart), math.exp(-apart)), ((3.0 + apart, 3.0), math.exp(apart))):
            equal_loss_ratio = Fit(0.0, levels, (1.0, 1.0)).equal_loss_ratio()
            assert equal_loss_ratio == pytest.approx(ratio) if known else math.isnan(equal_loss_ratio)


def measured(random: np.random.Generator, seeds: int, share: float, noise: float) -> np.ndarray:
    """(seeds, 2, sizes) losses: what a seed does to both variants alike, and to each."""
    truth = np.stack([law(SIZES / share, 0.2), law(SIZES, 0.2)])
    shared = random.normal(0, 3 * noise, size=(seeds, 1, len(SIZES)))
    return truth + shared + random.normal(0, noise, size=(seeds, 2, len(SIZES)))


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_interval_holds_the_truth_as_often_as_it_says(seeds: int) -> None:
    """95 % of experiments with noise; of 100, fewer than 88 would be a wonder."""
    random = np.random.default_rng(seeds)
    intervals = [ratio_interval(SIZES, measured(random, seeds, SHARE, 0.01), resamples=200) for _ in range(100)]
    inside = sum(low <= SHARE <= high for low, high in intervals)
    assert inside >= 88
    widths = [high - low for low, high in intervals]
    assert 0.01 < np.median(widths) < 0.5


def test_the_noise_that_both_variants_share_does_not_widen_the_interval() -> None:
    random = np.random.default_rng(0)
    quiet = ratio_interval(SIZES, measured(random, 3, SHARE, 1e-9))
    assert quiet == pytest.approx((SHARE, SHARE), rel=1e-3)
    truth = np.stack([law(SIZES / SHARE, 0.0), law(SIZES, 0.0)])
    common = truth + random.normal(0, 0.05, size=(3, 1, len(SIZES)))
    low, high = ratio_interval(SIZES, common)
    separate = truth + random.normal(0, 0.05, size=(3, 2, len(SIZES)))
    wide_low, wide_high = ratio_interval(SIZES, separate)
    assert high - low < 0.5 * (wide_high - wide_low)


def test_no_interval_without_spread_or_trend() -> None:
    random = np.random.default_rng(0)
    assert ratio_interval(SIZES, measured(random, 1, SHARE, 0.01)) is None
    level = 3 + random.normal(0, 0.1, size=(2, 2, len(SIZES)))
    assert ratio_interval(SIZES, level, resamples=200) is None
