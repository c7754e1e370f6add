import math

import numpy as np
import pytest

from diff_lab.statistics import bootstrap_interval, mean_interval, proportion_interval, variance_beyond_chance


# Wilson 1927 as tabulated by Newcombe (1998, Table I, method 3), to the four digits given there.
@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
        (29, 29, (0.8830, 1.0)),
    ],
)
def test_proportion_interval_is_wilsons(successes: int, n: int, interval: tuple[float, float]) -> None:
    assert proportion_interval(successes, n) == pytest.approx(interval, abs=5e-5)


# The 0.975 quantiles of Student's t as every table has them.
@pytest.mark.parametrize(("df", "quantile"), [(1, 12.7062), (2, 4.3027), (9, 2.2622), (120, 1.9799)])
def test_mean_interval_is_students(df: int, quantile: float) -> None:
    values = [float(value) for value in range(df + 1)]
    low, high = mean_interval(values) or (math.nan, math.nan)
    spread = math.sqrt(sum((value - df / 2) ** 2 for value in values) / df / (df + 1))
    assert (low + high) / 2 == pytest.approx(df / 2)
    assert (high - low) / 2 / spread == pytest.approx(quantile, abs=6e-5)


def test_mean_interval_of_one_value_and_of_a_diverged_run() -> None:
    assert mean_interval([3.0]) is None
    low, high = mean_interval([1.0, math.inf, 2.0]) or (0.0, 0.0)
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_bootstrap_of_many_documents_is_the_normal_interval() -> None:
    random = np.random.default_rng(0)
    values = random.normal(2.0, 1.0, size=400)
    low, high = bootstrap_interval([(float(value) * 7, 7.0) for value in values])
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.006)
    assert bootstrap_interval([(float(value) * 7, 7.0) for value in values]) == (low, high), "the draws are seeded"


@pytest.mark.parametrize(("count", "others"), [(2, 0), (5, 0), pytest.param(5, 55, marks=pytest.mark.all)])
def test_an_interval_of_few_documents_holds_the_truth(count: int, others: int) -> None:
    """Also among others without a count."""
    random = np.random.default_rng(3)
    held, draws = 0, 50
    for _ in range(draws):
        hard, shift = random.normal(0.0, 5.0, size=count), random.normal(1.0, 0.5, size=count)
        first, second = ([(float(one), 1.0) for one in side] for side in (hard + shift, hard))
        low, high = bootstrap_interval(*(side + [(0.0, 0.0)] * others for side in (first, second)))
        held += low <= 1.0 <= high
    assert held >= 0.88 * draws  # 95 of them, ± 2 standard errors, and a bootstrap is no t-test


def test_a_paired_bootstrap_draws_the_same_documents_for_both() -> None:
    """What documents share goes: the interval is that of the differences, not of two independent means."""
    random = np.random.default_rng(1)
    hard = random.normal(0.0, 5.0, size=200)
    shift = random.normal(0.3, 0.5, size=200)
    first = [(float(one), 1.0) for one in hard + shift]
    second = [(float(one), 1.0) for one in hard]
    low, high = bootstrap_interval(first, second)
    half = 1.96 * shift.std(ddof=1) / math.sqrt(200)
    assert (low, high) == pytest.approx((shift.mean() - half, shift.mean() + half), abs=0.006)


def test_long_documents_weigh_as_much_as_they_hold() -> None:
    documents = [(0.0, 1.0)] * 50 + [(2.0 * 99, 99.0)] * 50
    low, high = bootstrap_interval(documents)
    assert 1.9 < low < high < 2.0


@pytest.mark.parametrize(("with_counts", "is_known"), [(1, False), (4, False), (5, True), (60, True)])
def test_a_bootstrap_of_documents_of_which_few_have_a_count(with_counts: int, is_known: bool) -> None:
    """Of 60, a draw has none of four in 1.6 % of cases, and none of five in .5 %."""
    documents = [(float(number), 2.0) if number < with_counts else (0.0, 0.0) for number in range(60)]
    interval = bootstrap_interval(documents)
    assert (interval is not None) is is_known
    assert interval is None or interval[0] < interval[1] < math.inf
    assert (bootstrap_interval(documents, documents) is not None) is is_known


def test_documents_without_a_count_make_no_interval_narrower() -> None:
    five = [(float(number), 2.0) for number in range(5)]
    (low, high), (low_among, high_among) = map(bootstrap_interval, (five, [*five, *([(0.0, 0.0)] * 55)]))
    assert high_among - low_among >= high - low


@pytest.mark.parametrize("accuracy", [0.95, 0.7])
def test_what_is_left_of_a_variance_does_not_follow_the_accuracy(accuracy: float) -> None:
    """Without any cause its mean is 0 at every accuracy: a mean of roots, or of what is above 0, would not be."""
    random = np.random.default_rng(3)
    sets = random.binomial(200, accuracy, size=(2000, 30)) / 200
    excesses = np.array([variance_beyond_chance(row.tolist(), 200) for row in sets])
    assert abs(excesses.mean()) < 4 * excesses.std() / math.sqrt(len(excesses))
    assert (excesses < 0).mean() > 0.4
    cause = np.clip(random.normal(0.7, 0.1, size=2000), 0, 1)
    excess = variance_beyond_chance((random.binomial(100, cause) / 100).tolist(), 100)
    assert math.sqrt(excess) == pytest.approx(0.1, abs=0.01)
    assert variance_beyond_chance([0.5, 0.5], 100) == pytest.approx(-0.25 / 99)


def test_the_interval_of_two_documents_is_widened_by_both_factors() -> None:
    """Draws of two are one of them in a quarter of the cases, so the percentiles are the two themselves."""
    t, normal = 12.706204736, 1.959963985  # 97.5 % quantiles, Student's of one degree of freedom
    half = 0.5 * t / normal * math.sqrt(2)
    assert bootstrap_interval([(0.0, 1.0), (1.0, 1.0)]) == pytest.approx((0.5 - half, 0.5 + half))
