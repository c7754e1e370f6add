"""A difference means something where both have learned something; who was still training is told beside it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, judge, lower_end
from diff_lab.record import Baseline, Result
from diff_lab.results_files import capture_results
from diff_lab.statistics import compare
from made_up_results import measured

NAME = "task/accuracy"
ABOVE, AT_ELIMINATION, AT_FLOOR = (0.90, 0.91, 0.92), (0.60, 0.61, 0.62), (0.48, 0.49, 0.50)


def records(name: str, variant: str, values: Sequence[float], half: float | None = None) -> list[Result]:
    found = measured(name, {variant: values}, better="higher")
    return found if half is None else [replace(one, interval=(one.value - half, one.value + half)) for one in found]


def judged(first: Sequence[float], second: Sequence[float], *, claimed: bool = True, **more: Any) -> Any:
    """The comparison of two variants beside a floor of 0.5 and elimination of 0.7."""
    numbers = measured(NAME, {"diff": first, "softmax": second}, better="higher")
    row = compare(numbers, NAME, "diff", "softmax", claimed=claimed)
    levels = {"name": NAME, "chance": 0.1, "floor": 0.5, "by_elimination": 0.7, "steps": 100, **more}
    file = capture_results("t", {}, numbers, "cpu", comparisons=[row])
    (result,) = judge(replace(file, baselines=(Baseline(**levels),))).comparisons
    return result


@pytest.mark.parametrize(
    ("first", "second", "verdict", "at_floor", "at_elimination"),
    [
        (ABOVE, (0.80, 0.81, 0.82), "reproduced", (), ()),
        ((0.80, 0.81, 0.82), ABOVE, "contrary", (), ()),
        (ABOVE, AT_ELIMINATION, "not comparable", (), ("softmax",)),
        (AT_FLOOR, ABOVE, "not comparable", ("diff",), ()),
        (AT_ELIMINATION, AT_FLOOR, "not comparable", ("softmax",), ("diff",)),
        (AT_FLOOR, (0.30, 0.31, 0.32), "not comparable", ("diff", "softmax"), ()),
        # Above it on average, and not by the interval.
        (ABOVE, (0.68, 0.75, 0.72), "not comparable", (), ("softmax",)),
        # One seed tells nothing of others.
        (ABOVE[:1], AT_FLOOR[:1], "inconclusive", (), ()),
        # Of a run that diverged nothing is known.
        (ABOVE, (0.48, math.nan, 0.50), "inconclusive", (), ()),
    ],
)
def test_who_is_not_above_the_floor(
    first: Sequence[float], second: Sequence[float], verdict: str, at_floor: tuple[str], at_elimination: tuple[str]
) -> None:
    row = judged(first, second)
    assert (row.verdict, row.at_floor, row.at_elimination) == (verdict, at_floor, at_elimination)


def test_nothing_is_judged_where_nothing_is_claimed_or_known() -> None:
    row = judged(AT_FLOOR, AT_FLOOR, claimed=False)
    assert (row.verdict, row.baseline.floor) == (None, 0.5)
    assert judged(AT_FLOOR, AT_FLOOR, name="task/other").baseline is None
    # Another accuracy tells, and what is no accuracy follows the one that it belongs to.
    assert judged(ABOVE, AT_FLOOR, accuracy="task/other").at_floor == ()
    assert judged(ABOVE, AT_FLOOR, is_accuracy=False).verdict == "not comparable"


# Validation at each fifth of 500 steps, ending in a curve that is level or one that still rises.
LEVEL, RISING = (0.2, 0.5, 0.8, 0.9, 0.91), (0.2, 0.3, 0.4, 0.6, 0.8)


def curve(
    variant: str, values: Sequence[float], *, seeds: int = 3, name: str = ACCURACY_CURVE, **at: float
) -> list[Result]:
    return [
        Result(name=name, variant=variant, value=value, seed=seed, coordinates=Coordinates(at, step=100 * number))
        for seed in range(seeds)
        for number, value in enumerate(values, start=1)
    ]


def with_curves(
    first: Sequence[float],
    second: Sequence[float],
    *curves: Sequence[Result],
    quality: bool = True,
    floor: float | None = None,
    better: str = "higher",
    at: Coordinates = NO_COORDINATES,
) -> Any:
    """The comparison of two variants whose runs have these curves."""
    numbers = measured(NAME, {"diff": first, "softmax": second}, better=better, coordinates=at)
    row = compare(numbers, NAME, "diff", "softmax", coordinates=at, quality=quality)
    file = capture_results("t", {}, [*numbers, *(one for part in curves for one in part)], "cpu", comparisons=[row])
    if floor is not None:
        levels = (Baseline(name=NAME, coordinates=at, chance=0.1, floor=floor, steps=500),)
        file = replace(file, baselines=levels)
    once = judge(file)
    assert judge(once) == once, "what was judged is not judged otherwise"
    return once.comparisons[0]


@pytest.mark.parametrize(
    ("first", "second", "curves", "more", "verdict", "still_learning"),
    [
        (ABOVE, AT_FLOOR, [LEVEL, LEVEL], {}, "reproduced", ()),
        (ABOVE, AT_FLOOR, [LEVEL, RISING], {}, "reproduced", ("softmax",)),
        (AT_FLOOR, ABOVE, [RISING, LEVEL], {}, "contrary", ("diff",)),
        # A flat curve at the floor is level too.
        (ABOVE, AT_FLOOR, [RISING, LEVEL], {"floor": 0.5}, "not comparable", ("diff",)),
        (ABOVE, AT_FLOOR, [RISING, RISING], {"quality": False}, "reproduced", ("diff", "softmax")),
        # Of too few validations nothing is known, nor of none.
        (ABOVE, AT_FLOOR, [LEVEL[:1], RISING[:1]], {}, "reproduced", ()),
        (ABOVE, AT_FLOOR, [(), ()], {}, "reproduced", ()),
        # It is known of one.
        (ABOVE, AT_FLOOR, [RISING, ()], {}, "reproduced", ("diff",)),
        # Nothing is concluded of a run that diverged.
        (ABOVE, (0.48, math.nan, 0.50), [RISING, LEVEL], {}, "inconclusive", ()),
    ],
)
def test_a_verdict_is_by_the_interval_and_says_who_was_still_training(
    first: Sequence[float],
    second: Sequence[float],
    curves: list[Sequence[float]],
    more: dict[str, Any],
    verdict: str,
    still_learning: tuple[str, ...],
) -> None:
    row = with_curves(first, second, curve("diff", curves[0]), curve("softmax", curves[1]), **more)
    assert (row.verdict, row.still_learning) == (verdict, still_learning)
    assert row.seeds_needed is None or verdict == "inconclusive"
    assert row.steps == max((100 * len(values) for values in curves if values), default=None)


def test_losses_level_off_by_a_share() -> None:
    level, falling = (5.0, 4.0, 3.5, 3.05, 3.0), (5.0, 4.5, 4.0, 3.6, 3.3)
    for second, still in ((level, ()), (falling, ("softmax",))):
        curves = (curve("diff", level, name=LOSS_CURVE), curve("softmax", second, name=LOSS_CURVE))
        row = with_curves((3.0, 3.01, 3.02), (3.3, 3.31, 3.32), *curves, better="lower")
        assert row.still_learning == still


BOTH = ("diff", "softmax")


def test_the_curves_are_those_of_the_comparisons_own_size() -> None:
    """One of several sizes follows its own curves; what is made of all sizes, all of them."""
    curves = [
        curve(variant, values, parameters=size) for size, values in ((1e6, LEVEL), (2e6, RISING)) for variant in BOTH
    ]
    for at, still in (
        (Coordinates(parameters=1_000_000, depth=0.5), ()),
        (Coordinates(parameters=2_000_000), BOTH),
        (Coordinates(), BOTH),
    ):
        assert with_curves(ABOVE, AT_FLOOR, *curves, at=at).still_learning == still


def test_the_curves_of_another_kind_of_the_same_size_are_not_followed() -> None:
    own = [curve(variant, LEVEL, parameters=1e6) for variant in BOTH]
    others = [curve(variant, RISING, parameters=1e6, part="other") for variant in BOTH]
    at = Coordinates(parameters=1_000_000)
    assert with_curves(ABOVE, AT_FLOOR, *own, *others, at=at).still_learning == ()
    assert with_curves(ABOVE, AT_FLOOR, *others, at=at).still_learning == BOTH
    assert with_curves(ABOVE, AT_FLOOR, *own, *others, at=Coordinates(at, part="other")).still_learning == BOTH


def test_the_interval_allows_for_other_seeds_and_other_questions() -> None:
    values = (0.20, 0.21, 0.22)
    over_seeds, both = (lower_end(records(NAME, "diff", values, half)) for half in (None, 0.06))
    assert over_seeds is not None
    assert both == pytest.approx(0.21 - math.hypot(0.21 - over_seeds, 0.06 / math.sqrt(3)))
    assert lower_end(records(NAME, "diff", (0.2,), half=0.06)) is None
    assert lower_end([]) is None


def test_verdicts_of_version_0_2_0_give_place_and_a_ratio_of_steps_is_withdrawn() -> None:
    row = with_curves(ABOVE, AT_FLOOR, curve("diff", LEVEL), curve("softmax", RISING))
    old = replace(row, verdict="still learning")
    assert judge(capture_results("t", {}, [], "cpu", comparisons=[old])).comparisons[0].verdict == "reproduced"
    name = "scaling/tokens_for_equal_loss"
    numbers = measured(name, {"diff": ABOVE, "softmax": AT_FLOOR}, better="higher")
    row = compare(numbers, name, "diff", "softmax")
    (found,) = judge(capture_results("t", {}, numbers, "cpu", comparisons=[row])).comparisons
    assert (found.verdict, found.ours[1]) == ("inconclusive", row.ours[1])
    assert "withdrawn" in found.reason
    assert all(map(math.isnan, (found.difference, found.ours[0])))
