"""Appendix G and Table 7 on made-up numbers, and which experiments share their runs."""

import math

import pytest

from diff_lab.bench.benchmark import BASELINE, FORWARD, STEP, BenchRow
from diff_lab.bench.model_bench import DIFF
from diff_lab.coordinates import Coordinates
from diff_lab.experiments import gradients_and_speed
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.experiment import Preset
from diff_lab.record import Result


def sized(values: dict[str, float], step: int, seed: int) -> list[Result]:
    return [
        Result(name="gradient/q", variant=variant, value=v, seed=seed, coordinates=Coordinates(step=step))
        for variant, v in values.items()
    ]


def test_a_distance_is_in_powers_of_ten() -> None:
    """Twice as large and half as large do not cancel, and 0 has no size."""
    records = sized({"diff": 20.0, "softmax": 0.2}, 0, 0)
    records += sized({"diff": 2.0, "softmax": 1.0}, 5, 0) + sized({"diff": 1.0, "softmax": 2.0}, 9, 0)
    records += sized({"diff": 0.0, "softmax": 1.0}, 0, 1)
    distances = {
        (r.coordinates.label, r.seed, r.variant): r.value for r in gradients_and_speed.distance_records(records, "q")
    }
    assert distances["before training", 0, "diff"] == pytest.approx(2.0)
    assert distances["in training", 0, "diff"] == pytest.approx(math.log10(2))
    assert math.isnan(distances["before training", 1, "diff"])
    assert distances["in training", 0, gradients_and_speed.LIMIT_VARIANT] == 1.0


def row(candidate: str, pass_: str, speed: float | None, ratio: float | None) -> BenchRow:
    return BenchRow(
        candidate=candidate,
        pass_=pass_,
        dtype="float32",
        shape={"batch": 1, "length": 2048},
        ratio=ratio,
        tokens_per_second=speed,
        rounds=5,
        reason=None if speed else "out of memory",
    )


@pytest.mark.parametrize(("ratios", "verdict"), [((1.01, 1.02, 1.0), "reproduced"), ((1.3, 1.31, 1.32), "contrary")])
def test_table7s_share_is_held_against_the_papers(ratios: tuple[float, ...], verdict: str) -> None:
    records = []
    for seed, ratio in enumerate(ratios):
        rows = [row(name, pass_, 100.0, r) for pass_ in (STEP, FORWARD) for name, r in ((BASELINE, 1.0), (DIFF, ratio))]
        records += gradients_and_speed.throughput_records(rows, seed)
    comparisons = {c.name: c for c in find_experiment("table7").compare(records, Preset())}
    share = comparisons["throughput/training_share"]
    assert share.verdict == verdict
    assert share.exploratory
    assert share.ours == pytest.approx((sum(1 / r for r in ratios) / 3, 6635 / 7247))
    assert comparisons["throughput/forward"].paper == (46811.0, 51228.0)
    assert comparisons["throughput/forward"].verdict is None


def test_what_could_not_be_timed_is_said() -> None:
    with pytest.raises(ValueError, match=r"^diff could not be timed \(training step, .*2048\): out of memory\.$"):
        gradients_and_speed.throughput_records([row(DIFF, STEP, None, None)], 0)


@pytest.mark.parametrize("names", [("fig4", "table5", "fig8"), ("fig6", "fig7")])
def test_experiments_share_their_runs(names: tuple[str, ...]) -> None:
    """They measure what the first of them trains, and choose the learning rates as it does."""
    for preset in ("cpu", "gpu"):
        first, *others = (find_experiment(name).presets[preset] for name in names)
        for other in others:
            assert [other.variant_recipe(variant, *other.sweep) for variant in other.variants] == [
                first.variant_recipe(variant, *first.sweep) for variant in first.variants
            ]
            assert (other.learning_rates, other.seeds, other.extension) == (first.learning_rates, first.seeds, ())
