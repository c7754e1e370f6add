"""Validation curves, and whether a variant was still training at their end."""

import math
from collections.abc import Sequence

import pytest

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, Curve, VariantCurves, curves_of
from diff_lab.measure.retrieval import Noise
from diff_lab.measure.standard import Standard, curve_baselines, curve_records
from diff_lab.record import Result
from diff_lab.train import load_recipe

NAN = math.nan


def accuracies(*values: float, steps: Sequence[int] = ()) -> Curve:
    """A curve with a validation at every hundredth step."""
    return Curve(tuple(steps) or tuple(100 * number for number in range(1, len(values) + 1)), values)


def test_the_value_between_two_validations() -> None:
    curve = accuracies(0.2, 0.4, 0.8)
    assert [curve.at(step) for step in (100, 150, 200, 275, 300)] == pytest.approx([0.2, 0.3, 0.4, 0.7, 0.8])
    assert math.isnan(curve.at(99))
    assert math.isnan(curve.at(301))


@pytest.mark.parametrize(
    ("name", "curves", "is_still_training"),
    [
        # The last fifth of 500 steps begins at the validation of 400.
        (ACCURACY_CURVE, [accuracies(0.1, 0.3, 0.5, 0.90, 0.92)], False),
        (ACCURACY_CURVE, [accuracies(0.1, 0.3, 0.5, 0.90, 0.921)], True),
        # The mean over seeds counts.
        (ACCURACY_CURVE, [accuracies(0.1, 0.3, 0.5, 0.90, 0.91), accuracies(0.1, 0.3, 0.5, 0.90, 0.95)], True),
        (ACCURACY_CURVE, [accuracies(0.1, 0.3, 0.5, 0.90, 0.88), accuracies(0.1, 0.3, 0.5, 0.90, 0.95)], False),
        # Between two validations.
        (ACCURACY_CURVE, [accuracies(0.5, 0.8, steps=(500, 1000))], True),
        # A loss as a share of the final one.
        (LOSS_CURVE, [accuracies(5.0, 4.0, 3.5, 3.06, 3.0)], False),
        (LOSS_CURVE, [accuracies(5.0, 4.0, 3.5, 3.07, 3.0)], True),
        # Nothing is known of the beginning of that part, or of a run that diverged.
        (ACCURACY_CURVE, [accuracies(0.5, 0.9, steps=(900, 1000))], False),
        (ACCURACY_CURVE, [accuracies(0.1, 0.3, 0.5, 0.80, 0.92), accuracies(0.1, NAN, steps=(100, 500))], False),
        (LOSS_CURVE, [accuracies(NAN, NAN)], False),
    ],
)
def test_whether_a_variant_was_still_training(name: str, curves: list[Curve], is_still_training: bool) -> None:
    by_seed = dict(enumerate(curves))
    assert VariantCurves(name, "diff", NO_COORDINATES, by_seed).is_still_training is is_still_training


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


def test_the_levels_of_a_validation_accuracy() -> None:
    task = ["data.num_pairs=4", "data.num_queries=8", "data.repeats=true", "data.num_values=16"]
    (levels,) = curve_baselines(load_recipe("retrieval", task))
    assert (levels.name, levels.chance) == (ACCURACY_CURVE, 1 / 16)
    assert levels.by_elimination is None, "the first query has no answer before it"
    assert levels.chance < 1 / 4 < levels.floor
    many_shot = "data={kind: many_shot, shots: 8, classes: 6, labels: 16, words: 12}"
    assert [one.floor for one in curve_baselines(load_recipe("retrieval", [many_shot]))] == [1 / 6]
    recall = load_recipe("recall", ["data.tokens=64"])
    (noise,) = Noise(pairs=(recall.data.pairs,), factors=()).baselines(recall)[:1]
    (curve,), (standard,) = curve_baselines(recall), Standard().baselines(recall)
    for levels in (curve, standard):
        assert (levels.chance, levels.floor) == (noise.chance, noise.floor) == (1 / 64, most_frequent(12, 64))
    assert curve_baselines(load_recipe("language")) == []
