"""Table 2, Figure 5 and Table 3 at the size of a test: on tokens, where runs are shared, and on text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Experiment, find_experiment
from diff_lab.experiments.request import ExperimentRequest
from diff_lab.experiments.runner import run_experiment
from diff_lab.record import Comparison, ResultsFile

SMALL = (
    "model.hidden_size=16",
    "model.intermediate_size=16",
    "model.num_hidden_layers=1",
    "model.head_dim=8",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.precision=no",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in-context")
    (folder / "text").mkdir()
    for number in range(40):
        sentences = [f"In chapter {number} sentence {n} says {n * n % 97} at most. " for n in range(60)]
        (folder / "text" / f"{number}.txt").write_text("".join(sentences), encoding="utf-8")
    return folder


def run(name: str, preset: str, folder: Path, *overrides: str, seeds: int = 2, **options: Any) -> ResultsFile:
    """A preset with a tiny model and one rate; models are shared between experiments."""
    experiment: Experiment = find_experiment(name)
    settings = experiment.presets[preset]
    small = replace(
        settings,
        overrides=(*settings.overrides, *SMALL, *overrides),
        learning_rates=(),
        sweep=(),
        variants=DIFF_AND_SOFTMAX,  # the control's sizes are the preset's own
        seeds=seeds,
        options={**settings.options, **options},
    )
    return run_experiment(ExperimentRequest(experiment, preset, small), folder / f"results-{preset}")


def by_coordinates(results: ResultsFile, name: str) -> dict[str, Comparison]:
    return {comparison.coordinates.label: comparison for comparison in results.comparisons if comparison.name == name}


def runs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs").iterdir()}


@pytest.mark.all
def test_of_tokens(folder: Path) -> None:
    """The three share their runs: two variants, two seeds. What they compare is in `test_definition.py`."""
    table = run("table2", "cpu", folder, samples=4)
    trained = runs(folder / "results-cpu")
    assert len(trained) == 4
    joint = {record.coordinates.label for record in table.records if record.name == "needles/joint_accuracy"}
    assert joint == {f"{needles} needles, 2 queried" for needles in (2, 4, 6)}, "of one needle it is the accuracy"
    figure = by_coordinates(run("fig5", "cpu", folder, samples=4), "needles/accuracy")
    means = [figure[f"{length} tokens"].ours[0] for length in (14, 28, 42, 56)]
    assert figure["all lengths"].ours[0] == pytest.approx(sum(means) / 4)
    masses = run("table3", "cpu", folder, samples=10)
    # Where a model looks that does not find the answers means nothing.
    accuracy = Coordinates(needles=4, queries=1)
    assert [r.name for r in masses.records if r.coordinates == accuracy] == ["needles/attention_task_accuracy"] * 4
    assert {c.baseline.accuracy_coordinates for c in masses.comparisons if c.baseline is not None} == {accuracy}
    assert runs(folder / "results-cpu") == trained


@pytest.mark.all
def test_of_text(folder: Path) -> None:
    """The template from end to end: text and documents to train on, answers by generation, attention to spans."""
    text = (
        f"data.paths={json.dumps([str(folder / 'text')])}",
        "data.tokenizer=bytes",
        "data.vocab_size=null",
        "data.length=700",
        "data.batch_size=3",
        "data.needles=2",
        "data.turns=1",
        "data.digits=3",
        "data.validation_tokens=2000",
        "data.validation_documents=2",
        "data.validation_fraction=0.4",
    )
    table = run("table2", "gpu", folder, *text, seeds=1, cells=[[2, 2]], samples=1, batch_size=5)
    (comparison,) = by_coordinates(table, "needles/accuracy").values()
    assert comparison.paper == (0.92, 0.85)
    record = next(record for record in table.records if record.name == "needles/accuracy")
    assert record.n == 2 * 5
    figure = run("fig5", "gpu", folder, *text, seeds=1, needles=2, lengths=[500, 700], samples=1, batch_size=5)
    assert list(by_coordinates(figure, "needles/accuracy")) == ["all lengths", "500 tokens", "700 tokens"]
    masses = run("table3", "gpu", folder, *text, seeds=1, needles=2, samples=1)
    assert list(by_coordinates(masses, "needles/attention_to_answer_signed")) == [
        "depth 0 %",
        "depth 25 %",
        "depth 50 %",
        "depth 75 %",
        "depth 100 %",
    ]
    assert len(runs(folder / "results-gpu")) == 2
