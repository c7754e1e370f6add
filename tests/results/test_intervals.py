import math

import pytest

from diff_transformer.results import (
    mean_interval,
    proportion_interval,
)
from diff_transformer.results.intervals import t_quantile


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


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_proportion_interval_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
        proportion_interval(successes, n)


# The 0.975 quantiles of Student's t as every table has them, both sides of where the expansion takes over.
@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (120, 1.9799)],
)
def test_mean_interval_is_students(df: int, quantile: float) -> None:
    values = [float(value) for value in range(df + 1)]
    low, high = mean_interval(values) or (math.nan, math.nan)
    spread = math.sqrt(sum((value - df / 2) ** 2 for value in values) / df / (df + 1))
    assert (low + high) / 2 == pytest.approx(df / 2)
    assert (high - low) / 2 / spread == pytest.approx(quantile, abs=6e-5)


def test_t_quantile_is_continuous_where_the_formula_changes() -> None:
    exact = [t_quantile(df) for df in (198, 199, 200)]
    step = exact[1] - exact[2]
    assert t_quantile(201) == pytest.approx(exact[2] - step, abs=1e-6)


def test_mean_interval_of_one_value_of_none_and_of_a_diverged_run() -> None:
    assert mean_interval([3.0]) is None
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    low, high = mean_interval([1.0, math.inf, 2.0]) or (0.0, 0.0)
    assert math.isnan(low)
    assert math.isnan(high)
