"""Validation curves: how many steps it takes to get somewhere, and whether a variant has levelled off."""

import math
from collections.abc import Sequence

import pytest

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.learning import (
    ACCURACY_CURVE,
    LOSS_CURVE,
    Curve,
    VariantCurves,
    curves_of,
    reported_accuracies,
    steps_ratio,
)
from diff_lab.measure.standard import curve_baselines, curve_records
from diff_lab.record import Baseline, Result
from diff_lab.statistics import mean_interval
from diff_lab.train import load_recipe

NAN = math.nan


def accuracies(*values: float, steps: Sequence[int] = ()) -> Curve:
    """A curve with a validation at every hundredth step."""
    return Curve(tuple(steps) or tuple(100 * number for number in range(1, len(values) + 1)), values, "higher")


def losses(*values: float) -> Curve:
    return Curve(tuple(100 * number for number in range(1, len(values) + 1)), values, "lower")


def variant(name: str, *curves: Curve, seeds: Sequence[int] = ()) -> VariantCurves:
    kind = ACCURACY_CURVE if curves[0].better == "higher" else LOSS_CURVE
    return VariantCurves(kind, name, NO_COORDINATES, dict(zip(seeds or range(len(curves)), curves, strict=True)))


@pytest.mark.parametrize(
    ("curve", "level", "steps"),
    [
        (accuracies(0.2, 0.4, 0.8), 0.6, 250),
        (accuracies(0.2, 0.4, 0.8), 0.4, 200),
        (accuracies(0.2, 0.4, 0.8), 0.8, 300),
        (accuracies(0.2, 0.4, 0.8), 0.81, NAN),
        # At the first validation already, and again after a setback: the first time counts.
        (accuracies(0.9, 0.4, 0.9), 0.5, 100),
        (accuracies(0.2, 0.6, 0.3, 0.9), 0.5, 175),
        # What stands before a jump is not known.
        (accuracies(0.2, NAN, 0.8), 0.6, 300),
        (accuracies(NAN, NAN), 0.1, NAN),
        (losses(5.0, 4.0, 3.0), 3.5, 250),
        (losses(5.0, 4.0, 3.0), 2.9, NAN),
        (losses(5.0, 4.0, 3.0), 6.0, 100),
        (losses(5.0, 4.0, 3.0), NAN, NAN),
        # 0.1 + 0.2 is as good as 0.3.
        (accuracies(0.1, 0.3), 0.1 + 0.2, 200),
        (accuracies(0.2, 0.8, steps=(30, 90)), 0.5, 60),
    ],
)
def test_the_steps_to_a_level(curve: Curve, level: float, steps: float) -> None:
    assert curve.steps_to(level) == pytest.approx(steps, nan_ok=True)


def test_the_value_between_two_validations() -> None:
    curve = accuracies(0.2, 0.4, 0.8)
    assert [curve.at(step) for step in (100, 150, 200, 275, 300)] == pytest.approx([0.2, 0.3, 0.4, 0.7, 0.8])
    assert math.isnan(curve.at(99))
    assert math.isnan(curve.at(301))


@pytest.mark.parametrize(
    ("curves", "change", "levelled_off"),
    [
        # The last fifth of 500 steps begins at the validation of 400.
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.92)], 0.02, True),
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.921)], 0.021, False),
        # It may get worse.
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.85)], -0.05, True),
        # The mean over seeds counts.
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.91), accuracies(0.1, 0.3, 0.5, 0.90, 0.95)], 0.03, False),
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.88), accuracies(0.1, 0.3, 0.5, 0.90, 0.95)], 0.015, True),
        # Between two validations.
        ([accuracies(0.5, 0.8, steps=(500, 1000))], 0.12, False),
        # A loss as a share of the final one.
        ([losses(5.0, 4.0, 3.5, 3.06, 3.0)], 0.02, True),
        ([losses(5.0, 4.0, 3.5, 3.07, 3.0)], 0.07 / 3, False),
        # Nothing is known of the beginning of that part, or of a run that diverged.
        ([accuracies(0.9)], None, None),
        ([accuracies(0.5, 0.9, steps=(900, 1000))], None, None),
        ([accuracies(0.1, 0.3, 0.5, 0.90, 0.92), accuracies(0.1, NAN, steps=(100, 500))], None, None),
        ([losses(NAN, NAN)], None, None),
    ],
)
def test_whether_a_variant_has_levelled_off(
    curves: list[Curve], change: float | None, levelled_off: bool | None
) -> None:
    of_variant = variant("diff", *curves)
    assert of_variant.last_change() == (None if change is None else pytest.approx(change))
    assert of_variant.has_levelled_off is levelled_off


def test_the_mean_at_the_steps_that_all_seeds_have() -> None:
    steps, means, intervals = variant(
        "diff", accuracies(0.2, 0.4, 0.8), accuracies(0.4, 0.6, steps=(100, 300)), accuracies(0.3, 0.5, 0.7)
    ).means()
    assert steps == [100, 300]
    assert means == pytest.approx([0.3, 0.7])
    assert intervals == [mean_interval((0.2, 0.4, 0.3)), mean_interval((0.8, 0.6, 0.7))]
    assert variant("diff", accuracies(0.2)).means()[2] == [None]


def ratio(first: Sequence[Curve], second: Sequence[Curve], level: float | None = None) -> tuple[object, ...]:
    found = steps_ratio(variant("diff", *first), variant("softmax", *second), level)
    assert found is not None
    interval = None if found.interval is None else pytest.approx(found.interval)
    return pytest.approx(found.ratio, nan_ok=True), interval, found.bound


# Reaches .5 at its first validation.
EARLY = accuracies(0.6, 0.8, 0.9, 0.9)
FAST, SLOW, NEVER = accuracies(0.2, 0.8, 0.9, 0.9), accuracies(0.1, 0.2, 0.4, 0.8), accuracies(0.1, 0.1, 0.2, 0.3)
LOST = accuracies(0.1, NAN, steps=(100, 400))


def test_the_ratio_of_steps_over_paired_seeds() -> None:
    assert ratio([FAST], [SLOW], 0.5) == (150 / 325, None, None)
    faster = accuracies(0.4, 0.65, 0.9, 0.9)
    logs = [math.log(150 / 325), math.log(140 / 325)]
    low, high = mean_interval(logs) or (NAN, NAN)
    expected = (math.exp(sum(logs) / 2), (math.exp(low), math.exp(high)), None)
    assert ratio([FAST, faster], [SLOW, SLOW], 0.5) == expected


@pytest.mark.parametrize(
    ("first", "second", "value", "bound"),
    [
        # Only one gets there, within 400 steps: the other would need more than all of them.
        ([FAST], [NEVER], 150 / 400, "below"),
        ([NEVER], [FAST], 400 / 150, "above"),
        ([FAST, FAST], [NEVER, SLOW], math.sqrt(150 / 400 * 150 / 325), "below"),
        # Neither does, or now one and now the other.
        ([NEVER], [NEVER], NAN, None),
        ([FAST, NEVER], [FAST, NEVER], NAN, None),
        ([FAST, NEVER], [NEVER, FAST], NAN, None),
        # A run that diverged might have.
        ([FAST], [LOST], NAN, None),
        ([LOST], [FAST], NAN, None),
        # One that had come there before it diverged is known.
        ([FAST], [accuracies(0.1, 0.9, NAN, steps=(50, 150, 400))], 1.5, None),
        # One that is there at its first validation may have needed fewer steps.
        ([EARLY], [FAST], 100 / 150, "below"),
        ([FAST], [EARLY], 150 / 100, "above"),
        ([EARLY, FAST], [NEVER, SLOW], math.sqrt(100 / 400 * 150 / 325), "below"),
        ([EARLY], [EARLY], NAN, None),
        ([EARLY, FAST], [FAST, EARLY], NAN, None),
        ([EARLY, NEVER], [FAST, FAST], NAN, None),
    ],
)
def test_a_ratio_of_what_is_not_reached_is_a_bound_or_not_known(
    first: list[Curve], second: list[Curve], value: float, bound: str | None
) -> None:
    assert ratio(first, second, 0.5) == (pytest.approx(value, nan_ok=True), None, bound)


def test_the_ratio_for_the_loss_that_the_worse_one_ends_with() -> None:
    better, worse = losses(4.0, 3.0, 2.0), losses(5.0, 4.0, 3.0)
    for first, second, value, level_of in ((better, worse, 200 / 300, "softmax"), (worse, better, 300 / 200, "diff")):
        found = steps_ratio(variant("diff", first), variant("softmax", second))
        assert found is not None
        assert (found.level, found.level_of) == (3.0, level_of)
        assert found.ratio == pytest.approx(value)
        assert sorted((found.steps[0][0], found.steps[1][0])) == [200, 300]
    alike = steps_ratio(variant("diff", worse), variant("softmax", worse))
    assert alike is not None
    assert alike.ratio == 1.0


def test_who_ends_with_the_loss_has_needed_all_of_its_training() -> None:
    """Also where its loss was as low before, and rose again, as on text that is read many times."""
    first, second = losses(2.9, 2.3, 2.2, 2.1), losses(3.0, 2.2, 2.35, 2.5)
    for pair, value in (((first, second), (100 + 100 * 0.4 / 0.6) / 400), ((second, first), 400 / (100 + 40 / 0.6))):
        found = steps_ratio(variant("diff", pair[0]), variant("softmax", pair[1]))
        assert found is not None
        assert found.level == 2.5
        assert found.ratio == pytest.approx(value)


def test_each_seed_has_the_loss_of_its_own_worse_run() -> None:
    better, worse = losses(4.0, 3.0, 2.0), losses(5.0, 4.0, 3.0)
    found = steps_ratio(variant("diff", better, worse), variant("softmax", worse, better))
    assert found is not None
    assert found.ratio == pytest.approx(1.0)
    assert found.level_of == ""


def test_a_diverged_run_leaves_the_ratio_of_losses_open_and_that_of_other_seeds_known() -> None:
    better, worse, lost = losses(4.0, 3.0, 2.0), losses(5.0, 4.0, 3.0), losses(5.0, 4.0, NAN)
    found = steps_ratio(variant("diff", better, lost), variant("softmax", worse, worse))
    assert found is not None
    assert (math.isnan(found.ratio), found.interval, found.bound) == (True, None, None)
    assert found.steps[0] == pytest.approx((200, NAN), nan_ok=True)


def test_only_seeds_that_both_have_are_paired() -> None:
    first, second = variant("diff", FAST, NEVER, seeds=(3, 5)), variant("softmax", SLOW, NEVER, seeds=(4, 3))
    found = steps_ratio(first, second, 0.5)
    assert found is not None
    assert (found.ratio, found.bound) == (pytest.approx(150 / 400), "below")
    assert steps_ratio(variant("diff", FAST, seeds=(1,)), variant("softmax", SLOW, seeds=(2,)), 0.5) is None


def test_curves_are_read_from_the_validation_lines_of_a_run() -> None:
    """metrics.jsonl has null for a number that is not finite; lines between validations have none."""
    size = Coordinates(parameters=1_000_000)
    lines = [
        {"step": 10, "loss": 5.0},
        {"step": 20, "loss": 4.0, "validation/loss": 4.5, "validation/bits_per_byte": 2.0},
        {"step": 40, "validation/loss": None},
    ]
    records = curve_records(lines, variant="diff", seed=1, coordinates=size)
    assert {(one.name, one.unit, one.better, one.seed) for one in records} == {(LOSS_CURVE, "nats/token", "lower", 1)}
    assert [one.coordinates for one in records] == [Coordinates(size, step=20), Coordinates(size, step=40)]
    (curves,) = curves_of([*records, Result(name="other", variant="diff", value=1.0)])
    assert (curves.variant, curves.coordinates, curves.steps) == ("diff", size, 40)
    assert curves.by_seed[1].values == pytest.approx((4.5, NAN), nan_ok=True)
    (accuracy,) = curve_records([{"step": 5, "validation/accuracy": 0.5}], variant="diff", seed=0)
    assert (accuracy.name, accuracy.better, accuracy.unit) == (ACCURACY_CURVE, "higher", "")
    assert curve_records([{"step": 5, "loss": 0.5}], variant="diff", seed=0) == []


def test_accuracies_are_reported_where_guessing_does_not_come() -> None:
    baseline = Baseline(name=ACCURACY_CURVE, chance=0.1, floor=0.3, by_elimination=0.7, steps=100)
    assert reported_accuracies([baseline]) == [0.9]
    assert reported_accuracies([]) == [0.5, 0.7, 0.9]
    assert reported_accuracies([Baseline(name="other", chance=0.1, floor=0.8, steps=1)]) == [0.5, 0.7, 0.9]


def test_the_levels_of_a_validation_accuracy() -> None:
    task = ["data.num_pairs=4", "data.num_queries=8", "data.repeats=true", "data.num_values=16"]
    (levels,) = curve_baselines(load_recipe("retrieval", task))
    assert (levels.name, levels.chance) == (ACCURACY_CURVE, 1 / 16)
    assert levels.by_elimination is None, "the first query has no answer before it"
    assert levels.chance < 1 / 4 < levels.floor
    many_shot = "data={kind: many_shot, shots: 8, classes: 6, labels: 16, words: 12}"
    assert [one.floor for one in curve_baselines(load_recipe("retrieval", [many_shot]))] == [1 / 6]
    assert curve_baselines(load_recipe("language")) == []
