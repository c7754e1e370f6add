"""The verdict rule and what leads to it, on made-up numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_rel

from diff_lab.record import Comparison, Result
from diff_lab.statistics import (
    BOTH,
    DOCUMENTS,
    SEEDS,
    compare,
    holm,
    mean_interval,
    p_value,
    remark_on_seeds,
    seeds_needed,
    t_quantile,
    verdict,
)
from made_up_results import measured


def losses(variant: str, values: list[float]) -> list[Result]:
    return measured("loss", {variant: values}, unit="nats", better="lower")


SOFTMAX = losses("softmax", [3.0, 3.1, 2.9, 3.05])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.9, 3.01, 2.8, 2.94], "reproduced"),  # lower by about .1 with every seed
        ([3.1, 3.19, 3.0, 3.16], "contrary"),  # higher by about .1 with every seed
        ([2.9, 3.2, 2.8, 3.0], "inconclusive"),
        ([3.0, 3.1, 2.9, 3.05], "inconclusive"),  # equal
    ],
)
def test_the_verdict_follows_the_interval_of_the_paired_difference(values: list[float], expected: str) -> None:
    comparison = compare([*losses("diff", values), *SOFTMAX], "loss", "diff", "softmax", paper=(3.062, 3.087))
    assert comparison.verdict == expected
    differences = [one - other.value for one, other in zip(values, SOFTMAX, strict=True)]
    assert comparison.differences == pytest.approx(differences)
    assert comparison.interval == pytest.approx(mean_interval(differences))
    assert comparison.difference == pytest.approx(sum(differences) / 4)
    assert comparison.ours == pytest.approx((sum(values) / 4, 3.0125))
    assert (comparison.method, comparison.unit, comparison.paper) == (SEEDS, "nats", (3.062, 3.087))
    assert (comparison.seeds_needed is None) == (expected != "inconclusive" or comparison.difference == 0)


def test_the_direction_of_the_measure_decides_the_side() -> None:
    better = [replace(record, better="higher") for record in [*losses("diff", [3.1, 3.19, 3.0, 3.16]), *SOFTMAX]]
    assert compare(better, "loss", "diff", "softmax").verdict == "reproduced"
    assert compare(better, "loss", "softmax", "diff").verdict == "contrary"


@pytest.mark.parametrize(
    ("interval", "better", "seeds", "expected"),
    [
        ((0.1, 0.2), "higher", 2, "reproduced"),
        ((-0.2, -0.1), "higher", 2, "contrary"),
        ((-0.2, -0.1), "lower", 2, "reproduced"),
        ((0.1, 0.2), "lower", 2, "contrary"),
        ((-0.1, 0.2), "higher", 9, "inconclusive"),
        ((0.0, 0.2), "higher", 9, "inconclusive"),
        ((0.1, 0.2), "higher", 1, "inconclusive"),
        (None, "higher", 5, "inconclusive"),
        ((math.nan, math.nan), "higher", 5, "inconclusive"),
    ],
)
def test_the_rule_itself(interval: tuple[float, float] | None, better, seeds: int, expected: str) -> None:
    assert verdict(interval, better, seeds=seeds) == expected


def test_pairing_takes_out_what_seeds_share() -> None:
    """Seeds that differ by far more than the variants do: the paired interval does not see it."""
    easy = [1.0, 5.0, 9.0, 2.0]
    comparison = compare(
        [*losses("diff", [v - 0.1 for v in easy]), *losses("softmax", easy)], "loss", "diff", "softmax"
    )
    assert comparison.verdict == "reproduced"
    assert comparison.interval == pytest.approx((-0.1, -0.1))


def test_only_seeds_that_both_have_are_compared() -> None:
    comparison = compare([*losses("diff", [2.0, 2.1]), *SOFTMAX], "loss", "diff", "softmax")
    assert comparison.differences == pytest.approx((-1.0, -1.0))
    # By their numbers, whichever seeds a variant has and in whatever order they were measured.
    comparison = compare([*reversed(losses("diff", [2.0, 2.1, 1.7])[1:]), *SOFTMAX], "loss", "diff", "softmax")
    assert comparison.differences == pytest.approx((-1.2, -1.0))


def test_one_seed_and_a_diverged_one_leave_the_verdict_open() -> None:
    one = compare([*losses("diff", [2.0]), *SOFTMAX], "loss", "diff", "softmax")
    assert (one.verdict, one.interval, one.method, one.seeds_needed) == ("inconclusive", None, "", None)
    broken = compare([*losses("diff", [2.0, math.nan, 2.0, 2.0]), *SOFTMAX], "loss", "diff", "softmax")
    assert (broken.verdict, broken.seeds_needed) == ("inconclusive", None)
    assert math.isnan(broken.difference)


def test_without_a_claim_there_is_a_difference_and_no_verdict() -> None:
    comparison = compare([*losses("diff", [2.0, 2.1]), *SOFTMAX], "loss", "diff", "softmax", claimed=False)
    assert (comparison.verdict, comparison.better) == (None, None)
    assert comparison.interval is not None
    assert compare([*losses("diff", [2.0]), *SOFTMAX], "loss", "diff", "softmax", exploratory=True).exploratory


def of_documents(differences: tuple[float, ...], spread: float, counted: int = 30) -> Comparison:
    """Variants so far apart, seed by seed, on documents in each of which they are up to `spread` further apart."""
    records = []
    for seed, apart in enumerate(differences):
        for variant, shift in (("diff", apart), ("softmax", 0.0)):
            deviations = [(index % 3 - 1) * spread * (variant == "diff") for index in range(30)]
            documents = tuple(
                (10.0 * (3 + shift + more), 10.0) if index < counted else (0.0, 0.0)
                for index, more in enumerate(deviations)
            )
            shared = {"name": "loss", "variant": variant, "seed": seed, "documents": documents}
            records.append(Result(value=3 + shift, better="lower", **shared))
    return compare(records, "loss", "diff", "softmax")


def test_documents_widen_the_interval_and_alone_decide_nothing() -> None:
    differences = (-0.1, -0.101, -0.102)
    comparison, over_seeds = of_documents(differences, spread=0.1), mean_interval(differences)
    assert (comparison.method, comparison.verdict) == (BOTH, "reproduced")
    assert comparison.interval is not None
    assert over_seeds is not None
    assert comparison.interval[0] < over_seeds[0]
    assert over_seeds[1] < comparison.interval[1] < 0
    alone = of_documents(differences[:1], spread=0.1)
    assert (alone.method, alone.verdict) == (DOCUMENTS, "inconclusive")
    assert alone.interval is not None
    assert alone.interval[1] < 0
    # Too few of them have what is measured.
    row = of_documents((-0.3, -0.301, -0.302), spread=0.0, counted=2)
    assert (row.difference, row.interval) == (pytest.approx(-0.301), None)
    assert (row.verdict, row.documents_needed, row.seeds_needed) == ("inconclusive", True, None)


def test_where_documents_leave_it_open_no_number_of_seeds_is_told() -> None:
    """Three seeds that agree, and documents that do not: more of the same seeds would not decide it."""
    agreed = of_documents((-0.030, -0.031, -0.032), spread=0.12)
    assert (agreed.verdict, agreed.documents_needed, agreed.seeds_needed) == ("inconclusive", True, None)
    # The seeds do not agree either, and the documents alone would leave it open.
    neither = of_documents((-0.01, -0.05, -0.03), spread=0.3)
    assert (neither.verdict, neither.documents_needed, neither.seeds_needed) == ("inconclusive", True, None)
    # The documents allow a verdict, and the seeds are too few: more than they alone would need.
    seeds = of_documents((-0.01, -0.05, -0.03), spread=0.07)
    alone = seeds_needed(seeds.differences)
    assert (seeds.verdict, seeds.documents_needed) == ("inconclusive", False)
    assert seeds.seeds_needed is not None
    assert alone is not None
    assert seeds.seeds_needed > alone
    decided = of_documents((-0.030, -0.031, -0.032), spread=0.01)
    assert (decided.verdict, decided.documents_needed, decided.seeds_needed) == ("reproduced", False, None)
    one = of_documents((-0.030,), spread=0.12)
    assert (one.verdict, one.documents_needed) == ("inconclusive", False)


def test_seeds_needed_beside_what_they_do_not_make_narrower() -> None:
    """Against draws: with the number told four in five intervals leave 0 out, with one seed less fewer."""
    differences, other = [0.01, 0.05, 0.03], 0.02
    needed = seeds_needed(differences, other)
    assert needed is not None

    def power(count: int) -> float:
        drawn = np.random.default_rng(0).normal(0.03, 0.02, size=(20_000, count))
        half = t_quantile(count - 1) * drawn.std(1, ddof=1) / math.sqrt(count)
        return float((drawn.mean(1) > np.hypot(half, other)).mean())

    assert power(needed) > 0.79
    assert power(needed - 1) < 0.81
    assert seeds_needed(differences, 0.03) is None


def test_what_few_seeds_can_decide_is_told() -> None:
    def over(seeds: int, *, claimed: bool = True) -> Comparison:
        records = [*losses("diff", [2.0 + 0.01 * seed for seed in range(seeds)]), *losses("softmax", [2.5] * seeds)]
        return compare(records, "loss", "diff", "softmax", claimed=claimed)

    assert remark_on_seeds([]) is None
    assert remark_on_seeds([over(3), over(1, claimed=False)]) is None
    assert "one seed" in (remark_on_seeds([over(3), over(1)]) or "")
    assert "two seeds" in (remark_on_seeds([over(3), over(2)]) or "")


# By scipy 1.17: the smallest n at which nct.sf(t.ppf(.975, n − 1), n − 1, effect · √n) ≥ .8.
@pytest.mark.parametrize(
    ("differences", "seeds"),
    [
        ([1.0, 2.0, 3.0], 5),
        ([-0.020, -0.022, -0.022, 0.017, -0.038], 14),
        ([0.1, 0.5], 10),
        ([1.0, -0.9, 0.5, 0.2], 129),
        ([1.0, 1.0], 2),
        ([1.0], None),
        ([1.0, -1.0], None),
        ([1.0, -0.9999], None),
        ([1.0, math.nan], None),
    ],
)
def test_seeds_for_80_percent_power_are_those_of_the_noncentral_t(differences: list[float], seeds: int | None) -> None:
    assert seeds_needed(differences) == seeds
    assert seeds_needed([-one for one in differences]) == seeds


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(ValueError, match="loss was not measured in both 'diff' and 'softmax' for any seed"):
        compare(SOFTMAX, "loss", "diff", "softmax")
    with pytest.raises(ValueError, match="loss of 'softmax' was measured twice for seed 1"):
        compare([*SOFTMAX, SOFTMAX[1], *losses("diff", [1.0])], "loss", "diff", "softmax")
    undirected = [replace(record, better=None) for record in [*SOFTMAX, *losses("diff", [1.0])]]
    with pytest.raises(ValueError, match="no better direction"):
        compare(undirected, "loss", "diff", "softmax")


def test_p_is_students_over_paired_seeds() -> None:
    values = [2.9, 3.02, 2.8, 2.94]
    row = compare([*losses("diff", values), *SOFTMAX], "loss", "diff", "softmax")
    against = [one.value for one in SOFTMAX]
    assert p_value(row) == pytest.approx(ttest_rel(values, against).pvalue, rel=1e-9)
    assert p_value(replace(row, interval=(row.difference * 2, 0.0))) == pytest.approx(0.05)
    assert p_value(replace(row, interval=None)) is None


def test_holm_is_as_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
