"""Appendix G and Table 7 at the size of a test, and which experiments share their runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diff_lab.bench.benchmark import BASELINE, FORWARD, STEP, BenchRow
from diff_lab.bench.model_bench import DIFF
from diff_lab.coordinates import Coordinates
from diff_lab.experiments import inside_experiments
from diff_lab.experiments.experiment import Experiment, Preset, find_experiment
from diff_lab.experiments.request import ExperimentRequest
from diff_lab.experiments.runner import run_experiment
from diff_lab.record import Result, ResultsFile

TIED = ("train.evaluate_every=4", "model.tie_word_embeddings=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    sentences = [f"sentence number {n} says {n * n % 97} and nothing else.\n" for n in range(4000)]
    (folder / "text.txt").write_text("".join(sentences), encoding="utf-8")
    return folder


def run(experiment: Experiment, folder: Path, *overrides: str, output: str = "results", **options: Any) -> ResultsFile:
    """The experiment's CPU preset at the size of a test; trained models are shared within an output."""
    cpu = experiment.presets["cpu"]
    settings = ("train.steps=4", "train.warmup_steps=1", "data.validation_tokens=1024", *overrides)
    preset = replace(
        cpu,
        recipe="tiny",
        overrides=(f"data.paths={folder / 'text.txt'}", *settings),
        learning_rates=(),
        sweep=(),
        seeds=2,
        options={**cpu.options, **options},
    )
    return run_experiment(ExperimentRequest(experiment, "cpu", preset), folder / output)


@pytest.mark.all
def test_appendix_g(folder: Path) -> None:
    results = run(find_experiment("appendix_g"), folder, "train.evaluate_every=2")
    steps = {r.coordinates.label for r in results.records if r.name == "gradient/q"}
    assert steps == {"step 0", "step 2", "step 4"}
    assert {r.name for r in results.records} >= {"gradient/lambda", "gradient/q2", "gradient/head norm"}
    assert {c.exploratory for c in results.comparisons if c.verdict is not None} == {True}
    equations = [c for c in results.comparisons if c.name == inside_experiments.ERROR]
    assert [(c.variant, c.verdict) for c in equations] == [("diff", "reproduced"), ("softmax", "reproduced")]
    assert all(0 < c.ours[0] < 1e-12 for c in equations)
    # Twins begin with the same numbers, and so with gradients of one size in what does not attend.
    outputs = next(c for c in results.comparisons if c.name == "gradient/output_distance")
    assert (outputs.coordinates.label, outputs.verdict) == ("before training", "reproduced")
    # Tied weights are one parameter, the embedding.
    tied = run(find_experiment("appendix_g"), folder, *TIED, output="tied")
    assert {c.name for c in results.comparisons} - {c.name for c in tied.comparisons} == {
        "gradient/output",
        "gradient/output_distance",
    }
    assert len([r for r in results.records if r.name == "gradient/q" and r.coordinates.label == "step 4"]) == 4


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
        (r.coordinates.label, r.seed, r.variant): r.value for r in inside_experiments.distance_records(records, "q")
    }
    assert distances["before training", 0, "diff"] == pytest.approx(2.0)
    assert distances["in training", 0, "diff"] == pytest.approx(math.log10(2))
    assert math.isnan(distances["before training", 1, "diff"])
    assert distances["in training", 0, inside_experiments.LIMIT_VARIANT] == 1.0


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
        records += inside_experiments.throughput_records(rows, seed)
    comparisons = {c.name: c for c in inside_experiments.TABLE_7.compare(records, Preset())}
    share = comparisons["throughput/training_share"]
    assert share.verdict == verdict
    assert share.exploratory
    assert share.ours == pytest.approx((sum(1 / r for r in ratios) / 3, 6635 / 7247))
    assert comparisons["throughput/forward"].paper == (46811.0, 51228.0)
    assert comparisons["throughput/forward"].verdict is None


def test_what_could_not_be_timed_is_said() -> None:
    with pytest.raises(ValueError, match=r"^diff could not be timed \(training step, .*2048\): out of memory\.$"):
        inside_experiments.throughput_records([row(DIFF, STEP, None, None)], 0)


@pytest.mark.all
def test_table7_runs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "head_dim": 8, "vocabulary": 32}
    experiment = find_experiment("table7")
    options = {**experiment.presets["cpu"].options, **sizes, "lengths": (32,), "check_vocabulary": 32}
    preset = replace(experiment.presets["cpu"], options=options, seeds=2)
    results = run_experiment(ExperimentRequest(experiment, "cpu", preset), tmp_path)
    names = {(r.name, r.variant, r.coordinates.label) for r in results.records}
    assert {("throughput/training", variant, "32 tokens") for variant in ("diff", "softmax")} <= names
    assert all(r.value > 0 for r in results.records)
    assert results.comparisons == ()  # the paper has no such length


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
