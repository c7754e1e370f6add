"""A difference means something where one of the two has learned something."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_transformer.lab.record import Baseline, Result
from diff_transformer.lab.results_files import capture_results
from diff_transformer.lab.statistics import compare
from diff_transformer.lab.verdicts import judge, lower_end

NAME = "task/accuracy"
ABOVE, AT_ELIMINATION, AT_FLOOR = (0.90, 0.91, 0.92), (0.60, 0.61, 0.62), (0.48, 0.49, 0.50)


def records(name: str, variant: str, values: Sequence[float], half: float | None = None) -> list[Result]:
    return [
        Result(
            name=name,
            variant=variant,
            value=value,
            seed=seed,
            better="higher",
            interval=None if half is None else (value - half, value + half),
        )
        for seed, value in enumerate(values)
    ]


def judged(first: Sequence[float], second: Sequence[float], *, claimed: bool = True, **more: Any) -> Any:
    """The comparison of two variants beside a floor of 0.5 and elimination of 0.7."""
    measured = [*records(NAME, "diff", first), *records(NAME, "softmax", second)]
    row = compare(measured, NAME, "diff", "softmax", claimed=claimed)
    levels = {"name": NAME, "chance": 0.1, "floor": 0.5, "by_elimination": 0.7, "steps": 100, **more}
    file = capture_results("t", {}, measured, "cpu", comparisons=[row])
    (result,) = judge(replace(file, baselines=(Baseline(**levels),))).comparisons
    return result


@pytest.mark.parametrize(
    ("first", "second", "verdict", "at_floor", "at_elimination"),
    [
        (ABOVE, (0.80, 0.81, 0.82), "reproduced", (), ()),
        (ABOVE, AT_FLOOR, "reproduced", ("softmax",), ()),
        (ABOVE, AT_ELIMINATION, "reproduced", (), ("softmax",)),
        (AT_FLOOR, ABOVE, "contrary", ("diff",), ()),
        (AT_ELIMINATION, AT_FLOOR, "not comparable", ("softmax",), ("diff",)),
        (AT_FLOOR, (0.30, 0.31, 0.32), "not comparable", ("diff", "softmax"), ()),
        # Above it on average, and not by the interval.
        (ABOVE, (0.68, 0.75, 0.72), "reproduced", (), ("softmax",)),
        # Of a run that diverged nothing is known.
        (ABOVE, (0.48, math.nan, 0.50), "inconclusive", (), ()),
    ],
)
def test_who_is_not_above_the_floor(
    first: Sequence[float], second: Sequence[float], verdict: str, at_floor: tuple[str], at_elimination: tuple[str]
) -> None:
    row = judged(first, second)
    assert (row.verdict, row.at_floor, row.at_elimination) == (verdict, at_floor, at_elimination)


def test_what_is_no_accuracy_takes_two_that_are_above() -> None:
    assert judged(ABOVE, AT_FLOOR, is_accuracy=False).verdict == "not comparable"
    # Results of earlier versions claim nothing there.
    row = judged(ABOVE, AT_FLOOR, is_accuracy=False, claimed=False)
    assert (row.verdict, row.better) == ("not comparable", "higher")
    assert judged(ABOVE, (0.80, 0.81, 0.82), is_accuracy=False).verdict == "reproduced"


def test_nothing_is_judged_where_nothing_is_claimed_or_known() -> None:
    row = judged(AT_FLOOR, AT_FLOOR, claimed=False)
    assert (row.verdict, row.baseline.floor) == (None, 0.5)
    assert judged(AT_FLOOR, AT_FLOOR, name="task/other").baseline is None


def test_another_accuracy_may_tell() -> None:
    assert judged(ABOVE, AT_FLOOR, accuracy="task/other").at_floor == ()


def test_the_interval_allows_for_other_seeds_and_other_questions() -> None:
    values = (0.20, 0.21, 0.22)
    over_seeds, both = (lower_end(records(NAME, "diff", values, half)) for half in (None, 0.06))
    assert over_seeds is not None
    assert both == pytest.approx(0.21 - math.hypot(0.21 - over_seeds, 0.06 / math.sqrt(3)))
    assert lower_end(records(NAME, "diff", (0.2,), half=0.06)) is None
    assert lower_end([]) is None
