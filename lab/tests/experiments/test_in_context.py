"""Table 2, Figure 5, Table 3, Figures 6 and 7 at the size of a test: runs are shared, the paper's values told."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import in_context_experiments
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Experiment, find_experiment
from diff_lab.experiments.request import ExperimentRequest, as_defined, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.measure import many_shot
from diff_lab.record import Comparison, Result, ResultsFile
from diff_lab.results_files import capture_results

NAMES = ("table2", "fig5", "table3", "fig6", "fig7")
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


def test_of_tokens(folder: Path) -> None:
    """The three share their runs: two variants, two seeds."""
    table = run("table2", "cpu", folder, samples=4)
    trained = runs(folder / "results-cpu")
    assert len(trained) == 4
    comparisons = by_coordinates(table, "needles/accuracy")
    assert list(comparisons) == [
        "1 needle, 1 queried",
        "2 needles, 1 queried",
        "2 needles, 2 queried",
        "4 needles, 1 queried",
        "4 needles, 2 queried",
        "6 needles, 2 queried",
    ]
    assert comparisons["4 needles, 2 queried"].paper == (0.84, 0.62)
    assert comparisons["1 needle, 1 queried"].verdict is None
    assert comparisons["2 needles, 2 queried"].verdict is not None
    pairs = [f"{needles} needles, 2 queried" for needles in (2, 4, 6)]
    assert list(by_coordinates(table, "needles/joint_accuracy")) == pairs
    joint = {record.coordinates.label for record in table.records if record.name == "needles/joint_accuracy"}
    assert joint == set(pairs), "of one needle asked for it is the accuracy"

    figure = run("fig5", "cpu", folder, samples=4)
    comparisons = by_coordinates(figure, "needles/accuracy")
    assert list(comparisons) == ["all lengths", "14 tokens", "28 tokens", "42 tokens", "56 tokens"]
    assert comparisons["all lengths"].paper == pytest.approx((0.886, 0.72), abs=1e-3)
    means = [comparisons[f"{length} tokens"].ours[0] for length in (14, 28, 42, 56)]
    assert comparisons["all lengths"].ours[0] == pytest.approx(sum(means) / 4)
    assert "56 tokens, depth 50 %" in by_coordinates(figure, "needles/accuracy_by_depth")

    masses = run("table3", "cpu", folder, samples=10)
    comparisons = by_coordinates(masses, "needles/attention_noise_share")
    assert comparisons["depth 100 %"].paper == (0.01, 0.49)
    assert comparisons["depth 100 %"].better == "lower"
    assert {c.verdict for c in by_coordinates(masses, "needles/attention_to_answer_share").values()} != {None}
    # Where a model looks that does not find the answers means nothing.
    accuracy = Coordinates(needles=4, queries=1)
    assert [r.name for r in masses.records if r.coordinates == accuracy] == ["needles/attention_task_accuracy"] * 4
    follows = {c.baseline.accuracy_coordinates for c in comparisons.values() if c.baseline is not None}
    assert follows == {accuracy}
    for kind in ("noise", "to_answer"):
        of_sums = by_coordinates(masses, f"needles/attention_{kind}_signed")
        assert {c.verdict for c in of_sums.values()} == {None}, "rows that add up to 1 − λ decide it before training"
        assert of_sums.keys() == comparisons.keys()
    assert all(0 <= value <= 1 for comparison in comparisons.values() for value in comparison.ours)
    assert runs(folder / "results-cpu") == trained


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


def test_of_many_shots(folder: Path) -> None:
    figure = run("fig6", "cpu", folder, shots=[4, 8], noises=[0.0, 0.3], episodes=3, queries=4)
    assert list(by_coordinates(figure, "many_shot/accuracy")) == [
        "noise 0, 4 shots",
        "noise 0, 8 shots",
        "noise 0.3, 4 shots",
        "noise 0.3, 8 shots",
    ]
    before = runs(folder / "results-cpu")
    orders = run("fig7", "cpu", folder, shots=8, noises=[0.1], orders=3, queries=6, sets=2)
    ranges = by_coordinates(orders, "many_shot/order_range")
    assert {label: comparison.paper for label, comparison in ranges.items()} == {
        "random orders, noise 0.1": (0.04, 0.19),
        "alternating orders, noise 0.1": (0.134, 0.567),
    }
    # After two steps of training both guess, and what does not depend on the demonstrations does not on their order.
    for name, verdict in (("variance", "not comparable"), ("range", None), ("spread", None), ("mean", None)):
        assert [comparison.verdict for comparison in by_coordinates(orders, f"many_shot/order_{name}").values()] == [
            verdict,
            verdict,
        ]
    for means in by_coordinates(orders, many_shot.ORDER_MEAN).values():
        assert means.baseline is not None
        assert (means.baseline.chance, means.baseline.floor) == (0.25, 0.25)
        assert means.at_floor == ("diff", "softmax")
    spread = by_coordinates(orders, "many_shot/order_spread")
    assert all(0 <= value <= 1 for comparison in spread.values() for value in comparison.ours)
    assert runs(folder / "results-cpu") == before


@pytest.mark.parametrize(
    ("means", "verdict"),
    [
        ({"diff": (0.5, 0.6, 0.55), "softmax": (0.3, 0.31, 0.33)}, "reproduced"),
        ({"diff": (0.17, 0.18, 0.16), "softmax": (0.5, 0.6, 0.55)}, "not comparable"),
        ({"diff": (0.5, 0.6, 0.55), "softmax": (0.17, 0.18, 0.5)}, "not comparable"),
        ({"diff": (0.5, 0.6, math.nan), "softmax": (0.5, 0.6, 0.55)}, "inconclusive"),
        ({"diff": (0.17,), "softmax": (0.5,)}, "inconclusive"),
    ],
)
def test_orders_do_not_matter_to_one_that_guesses(means: dict[str, tuple[float, ...]], verdict: str | None) -> None:
    """A verdict on the order effect takes two variants that answer better than by chance, which is 1/6 here."""
    experiment = find_experiment("fig7")
    preset = replace(experiment.presets["cpu"], options={**experiment.presets["cpu"].options, "noises": [0.1]})
    records = []
    for variant, values in means.items():
        for seed, mean in enumerate(values):
            shared: dict[str, Any] = {"variant": variant, "seed": seed}
            effect = math.nan if math.isnan(mean) else 0.01 + 0.001 * seed + (0.1 if variant == "softmax" else 0.0)
            for kind in ("random", "alternating"):
                coordinates = Coordinates(orders=kind, noise=0.1)
                records.append(
                    Result(name=many_shot.ORDER_MEAN, value=mean, better="higher", coordinates=coordinates, **shared)
                )
                for name in (
                    many_shot.ORDER_VARIANCE,
                    in_context_experiments.RANGE,
                    in_context_experiments.SPREAD,
                ):
                    records.append(Result(name=name, value=effect, better="lower", coordinates=coordinates, **shared))
    settings = {"request": request_experiment(replace(experiment, presets={"cpu": preset})).settings()}
    comparisons = as_defined(
        capture_results("t", settings, records, "cpu", comparisons=experiment.compare(records, preset))
    ).comparisons
    assert [c.verdict for c in comparisons if c.name == many_shot.ORDER_VARIANCE] == [verdict, verdict]
    assert {c.verdict for c in comparisons if c.name != many_shot.ORDER_VARIANCE} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_valid_recipes(name: str) -> None:
    for preset in ("cpu", "gpu"):
        settings = find_experiment(name).presets[preset]
        for variant in settings.variants:
            assert settings.variant_recipe(variant, *settings.sweep).train.steps >= 500
