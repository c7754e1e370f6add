"""Experiments whose trainings run at the same time, and sweeps of learning rates that widen."""

import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Preset
from diff_lab.experiments.request import request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.experiments.variant_training import TrainedVariant, TrainingOfVariant
from diff_lab.record import Result, ResultsFile
from diff_lab.train import TrainingInterrupted
from diff_lab.train.progress import Progress
from small_experiment import SMALL, TINY, trainings
from small_runs import Watcher

STAGES = replace(TINY, extension=("data.length=40", "train.steps=1"), seeds=2)


def small(preset: Preset = TINY) -> Any:
    return request_experiment(replace(SMALL, presets={"cpu": preset}))


def numbers(results: ResultsFile) -> list[Result]:
    """All but times."""
    return [record for record in results.records if record.name != "training/seconds"]


def weights(folder: Path) -> dict[str, bytes]:
    """Run → the model's file."""
    return {path.parents[2].name: path.read_bytes() for path in (folder / "runs").glob("*/run/model/model.safetensors")}


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_weights_and_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    heard = Watcher()
    beside = run_experiment(small(STAGES), tmp_path / "beside", workers=2, progress=heard)
    alone = run_experiment(small(STAGES), tmp_path / "alone")
    assert weights(tmp_path / "beside") == weights(tmp_path / "alone")
    assert len(weights(tmp_path / "beside")) == 10
    assert numbers(beside) == numbers(alone)
    assert beside.notes == alone.notes
    assert [variant["runs"] for variant in beside.settings["variants"]] == [
        variant["runs"] for variant in alone.settings["variants"]
    ]
    assert sum("trying the learning rate" in run for run in heard.runs[:4]) == 4, "all trials come first"
    assert "10 trainings, 2 at a time." in heard.messages
    trained, _ = trainings(tmp_path / "beside", small(STAGES), overwrite=True, workers=2)
    assert trained == []


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_an_interrupted_experiment_resumes_in_parallel(tmp_path: Path) -> None:
    long = replace(TINY, overrides=(*TINY.overrides, "train.steps=40"), seeds=1)

    class Stops(Progress):
        begun = 0

        def start(self, total: int, description: str) -> None:
            self.begun += 1
            if self.begun == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TrainingInterrupted, match=r"trying the learning rate.*--resume"):
        run_experiment(small(long), tmp_path / "twice", progress=Stops(), workers=2)
    assert list((tmp_path / "twice").glob("runs/*/run/checkpoints/step-*"))
    again = run_experiment(small(long), tmp_path / "twice", resume=True, workers=2)
    once = run_experiment(small(long), tmp_path / "once")
    assert weights(tmp_path / "twice") == weights(tmp_path / "once")
    assert numbers(again) == numbers(once)


class Run:
    """A trained run that has a validation accuracy, NaN for one that diverged."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.key, self.model_folder = accuracy, "key", Path("model")
        self.diverged = "The loss is not finite." if math.isnan(accuracy) else None

    def metrics(self) -> list[dict[str, float]]:
        return [{"validation/accuracy": self.accuracy}]


def outcome_of(preset: Preset, accuracy_at: Mapping[Any, float]) -> tuple[TrainedVariant, list[list[str]], list[int]]:
    """What comes of a variant whose runs validate so, by rate or (rate, seed), what it asked for at a time, and how
    many trainings were expected then.
    """
    training = TrainingOfVariant(preset, DIFF_AND_SOFTMAX[0], "validation/accuracy", "higher")
    plan, runs = training.plan(), None
    asked, expected = [], []
    while True:
        try:
            wanted = next(plan) if runs is None else plan.send(runs)
        except StopIteration as end:
            return end.value, asked, expected
        asked.append([training.name for training in wanted])
        expected.append(training.expected)
        settings = [training.recipe.train for training in wanted]
        keys: list[Any] = [((one.learning_rate, one.seed), one.learning_rate) for one in settings]
        runs: Any = [Run(accuracy_at.get(both, accuracy_at.get(rate, 0.0))) for both, rate in keys]


@pytest.mark.parametrize(
    ("accuracies", "tried", "best", "remark"),
    [
        ({1e-3: 0.2, 3e-3: 0.5, 1e-2: 0.3}, [1e-3, 3e-3, 1e-2], 3e-3, ""),
        ({1e-3: 0.4, 3e-3: 0.3, 1e-2: 0.2, 3.3e-4: 0.5, 1.1e-4: 0.1}, [1.1e-4, 3.3e-4, 1e-3, 3e-3, 1e-2], 3.3e-4, ""),
        ({3e-3: 0.3, 1e-2: 0.4, 3.3e-2: 0.3}, [1e-3, 3e-3, 1e-2, 3.3e-2], 1e-2, ""),
        ({3e-3: 0.3, 1e-2: 0.4, 3.3e-2: math.nan}, [1e-3, 3e-3, 1e-2, 3.3e-2], 1e-2, ""),
        (
            {1e-3: 0.1, 3e-3: 0.2, 1e-2: 0.3, 3.3e-2: 0.4, 0.11: 0.5, 0.37: 0.6, 1.2: 0.7, 3.9: 0.8},
            [1e-3, 3e-3, 1e-2, 3.3e-2, 0.11, 0.37, 1.2],
            1.2,
            "was the largest tried",
        ),
    ],
)
def test_a_sweep_widens_until_the_best_rate_lies_inside(
    accuracies: dict[float, float], tried: list[float], best: float, remark: str
) -> None:
    preset = replace(TINY, learning_rates=(1e-3, 3e-3, 1e-2), more_rates=4)
    outcome, asked, _ = outcome_of(preset, accuracies)
    assert sorted(outcome.tried) == tried
    assert outcome.learning_rate == best
    assert remark in " ".join(outcome.remarks)
    assert bool(outcome.remarks) == bool(remark)
    assert len(asked[0]) == 3, "the planned rates at a time"
    assert [len(one) for one in asked[1:-1]] == [1] * (len(tried) - 3), "each further one when the best is known"
    assert asked[-1] == [f"diff · seed {seed} · learning rate {best:g}" for seed in (0, 1)]


def test_the_mean_over_several_seeds_decides_where_rates_are_tried_with_them() -> None:
    accuracies = {(1e-3, 0): 0.99, (1e-3, 1): 0.3, 3e-3: 0.9, (1e-2, 0): 0.95, (1e-2, 1): math.nan}
    preset = replace(TINY, learning_rates=(1e-3, 3e-3, 1e-2), sweep_seeds=2, seeds=3)
    outcome, asked, _ = outcome_of(preset, accuracies)
    assert outcome.learning_rate == 3e-3
    assert outcome.tried[1e-3] == pytest.approx(0.645)
    assert math.isnan(outcome.tried[1e-2])
    assert asked[0][:2] == [f"diff · trying the learning rate 0.001 with seed {seed}" for seed in (0, 1)]
    assert len(asked[0]) == 6
    assert len(asked[1]) == 3
    one = replace(preset, seeds=1)
    assert outcome_of(one, accuracies)[0].learning_rate == 1e-3, "no more seeds than are compared"


def test_a_variant_may_have_fewer_seeds_than_the_others(tmp_path: Path) -> None:
    preset = replace(TINY, learning_rates=(), seeds=2, most_seeds={"softmax": 1})
    results = run_experiment(small(preset), tmp_path)
    measured = {(one.variant, one.seed) for one in results.records if one.seed is not None}
    assert measured == {("diff", 0), ("diff", 1), ("softmax", 0)}
    assert {len(one.differences) for one in results.comparisons} == {1}
    again, _ = trainings(tmp_path, small(preset), resume=True)
    assert again == []
    assert replace(preset, most_seeds={}).seeds_of(preset.variants[1]) == 2
    assert replace(preset, seeds=1, most_seeds={"softmax": 2}).seeds_of(preset.variants[1]) == 1


@pytest.mark.parametrize(("sweep", "total"), [((), 7), (("train.steps=1",), 9)])
def test_the_trainings_that_are_expected_are_counted(sweep: tuple[str, ...], total: int) -> None:
    """Trials of full length are runs of the first seeds; a rate that is added has two trainings more."""
    preset = replace(TINY, learning_rates=(1e-3, 3e-3, 1e-2), sweep_seeds=2, seeds=3, sweep=sweep, more_rates=4)
    assert outcome_of(preset, {3e-3: 0.5})[2] == [total, total]
    assert outcome_of(preset, {3e-3: 0.3, 1e-2: 0.4, 3.3e-2: 0.3})[2] == [total, total + 2, total + 2]


def test_one_rate_is_not_swept_and_a_diverged_run_has_no_second_stage() -> None:
    outcome, asked, expected = outcome_of(replace(STAGES, learning_rates=(1e-3,)), {1e-3: math.nan})
    assert expected == [4, 2]
    assert asked == [["diff · seed 0 · learning rate 0.001", "diff · seed 1 · learning rate 0.001"], []]
    assert [len(stages) for stages in outcome.stages] == [1, 1]
    outcome, asked, _ = outcome_of(replace(STAGES, learning_rates=(1e-3,)), {})
    assert asked[1] == [f"diff · seed {seed} · learning rate 0.001 · extension" for seed in (0, 1)]
    assert [len(stages) for stages in outcome.stages] == [2, 2]
