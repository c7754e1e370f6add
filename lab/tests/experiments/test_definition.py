"""What the definitions say of the results in this repository, which were written by an earlier version."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment
from diff_lab.experiments.request import as_defined
from diff_lab.learning import CURVES, judge
from diff_lab.record import Comparison, ResultsFile
from diff_lab.report.wording import verdict_text
from diff_lab.results_files import read_results
from made_up_results import measured

RESULTS = Path(__file__).resolve().parents[2] / "results" / "cpu"


def committed(name: str) -> ResultsFile:
    return as_defined(read_results(RESULTS / f"{name}.json"))


def row(name: str, measure: str, coordinates: str = "", against: str = "softmax") -> Comparison:
    (comparison,) = [
        one
        for one in committed(name).comparisons
        if (one.name, one.coordinates.label, one.variant, one.against) == (measure, coordinates, "diff", against)
    ]
    return comparison


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.parent.glob("*/*.json")) if path.stem in EXPERIMENTS],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_what_is_compared_is_what_was_published(path: Path) -> None:
    """Which two, where, beside which values of the paper, and what follows seed by seed, from the published records.

    Comparisons that the definition has got since then come after the published ones.
    """
    file = read_results(path)
    # Comparisons of version 0.2.0 that are withdrawn: of learning rates as well, and of equations, which tests compare.
    withdrawn = ("scaling/tokens_for_equal_loss", "closed_form/error")
    compared = tuple(row for row in file.comparisons if row.name not in withdrawn)
    file = replace(file, comparisons=compared)
    request = file.settings["request"]
    experiment = find_experiment(request["experiment"])
    made = {place(row): row for row in experiment.compare(file.records, experiment.presets[request["preset"]])}
    defined = {place(row): row for row in as_defined(file).comparisons}
    assert list(made) == list(defined) == list(made | {place(row): row for row in file.comparisons})
    for where, row in made.items():
        told = ("unit", "better", "exploratory", "quality")
        assert [getattr(row, key) for key in told] == [getattr(defined[where], key) for key in told]
    # Intervals over documents cannot be had anew: results leave the documents out.
    for published in file.comparisons:
        row = made[place(published)]
        assert row.reason == published.reason
        for key in ("paper", "ours", "difference", "differences"):
            value = getattr(published, key)
            assert getattr(row, key) == (value if value is None else pytest.approx(value, nan_ok=True, rel=1e-9))


def place(row: Comparison) -> tuple[object, ...]:
    return (row.name, row.variant, row.against, row.coordinates)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if (RESULTS / f"{name}.json").is_file()])
def test_a_headline_is_one_of_the_comparisons_that_are_judged(name: str) -> None:
    file = committed(name)
    if file.headline is None:
        # Nothing is claimed of two variants, or what they are compared with is a limit.
        pairs = {(one.variant, one.against) for one in file.comparisons if one.verdict is not None}
        assert ("diff", "softmax") not in pairs
    else:
        assert [one.verdict is not None for one in file.comparisons if file.headline.names(one)] == [True]


def without(file: ResultsFile, label: str) -> ResultsFile:
    """Results of a preset that has not measured one of the places."""
    records = tuple(one for one in file.records if one.coordinates.label != label)
    comparisons = tuple(one for one in file.comparisons if one.coordinates.label != label)
    return as_defined(replace(file, records=records, comparisons=comparisons))


def test_a_comparison_in_the_headlines_place_goes_without_its_claim() -> None:
    file = as_defined(read_results(RESULTS.parent / "night_models" / "fig8.json"))
    other = without(file, "6 bits, per tensor")
    assert file.headline is not None
    assert other.headline is not None
    assert "6 bits" in file.headline.claim
    assert (other.headline.name, other.headline.claim) == (file.headline.name, "")
    assert any(map(other.headline.names, other.comparisons))


def test_a_claim_that_came_after_the_file_has_the_published_numbers() -> None:
    """Appendix C was published without one, and with a note that says so."""
    published = read_results(RESULTS / "appendix_c.json")
    now = as_defined(published)
    assert {one.better for one in published.comparisons} == {None}
    found = row("appendix_c", "arithmetic/exact_match")
    assert (found.verdict, found.exploratory, found.quality) == ("contrary", True, True)
    same = [(one.difference, one.interval) for one in now.comparisons]
    assert same == [(one.difference, one.interval) for one in published.comparisons]
    assert any("No verdict" in note for note in published.notes)
    assert not any("No verdict" in note for note in now.notes)
    assert as_defined(now) == now


@pytest.mark.parametrize(
    ("name", "measure", "coordinates", "levels", "verdict"),
    [
        ("fig6", "many_shot/accuracy", "noise 0, 4 shots", (1 / 4, 1 / 4, None), "inconclusive"),
        ("table1", "harness/held_out_text/acc", "0-shot", (1 / 4, 1 / 4, None), None),
    ],
)
def test_chance_and_floor_follow_from_the_recorded_settings(
    name: str, measure: str, coordinates: str, levels: tuple[float | None, ...], verdict: str | None
) -> None:
    comparison = row(name, measure, coordinates)
    assert comparison.baseline is not None
    baseline = (comparison.baseline.chance, comparison.baseline.floor, comparison.baseline.by_elimination)
    assert baseline == pytest.approx(levels, abs=5e-5)
    assert comparison.verdict == verdict


def test_an_order_effect_of_one_that_guesses_is_not_comparable() -> None:
    file = committed("fig7")
    guessing = [
        replace(one, value=0.25) if (one.name, one.variant) == ("many_shot/order_mean", "softmax") else one
        for one in file.records
    ]
    for records, comparable in ((file.records, True), (guessing, False)):
        effects = [
            one for one in judge(replace(file, records=records)).comparisons if one.name == "many_shot/order_variance"
        ]
        assert len(effects) == 4
        assert {one.better for one in effects} == {"lower"}
        begins = {
            verdict_text(one).startswith("not comparable: the Transformer is not shown to be above the floor")
            for one in effects
        }
        assert begins == {not comparable}


def test_every_accuracy_of_a_synthetic_task_has_its_levels() -> None:
    file = committed("fig6")
    known = {(one.name, one.coordinates) for one in file.baselines}
    measured = [one for one in file.records if one.name not in CURVES]
    accuracies = {(one.name, one.coordinates) for one in measured if "accuracy" in one.name.split("/")[1]}
    assert accuracies <= known


@pytest.mark.parametrize("name", ["table1", "noise", "fig6", "fig7", "table8"])
def test_baselines_are_told_at_every_size(name: str) -> None:
    experiment = find_experiment(name)
    for preset in (experiment.presets[size] for size in ("cpu", "gpu")):
        recipe = preset.variant_recipe(preset.variants[0])
        baselines = [baseline for requested in experiment.requests(preset) for baseline in requested.baselines(recipe)]
        assert baselines
        for baseline in baselines:
            assert 0 < baseline.chance <= baseline.floor <= (baseline.by_elimination or 1.0) <= 1


def test_results_of_an_unknown_experiment_are_judged_alone() -> None:
    """As those of experiments that another has replaced."""
    file = read_results(RESULTS / "noise.json")
    old = {"request": file.settings["request"] | {"experiment": "recall"}}
    assert find_experiment("table2") is find_experiment("recall") is EXPERIMENTS["noise"]
    for settings in (
        {},
        {"request": {"experiment": "nobody's"}},
        {"request": {"experiment": "fig6", "preset": "cpu"}},
        old,
    ):
        other = replace(file, settings=settings)
        assert as_defined(other) == judge(other)


def test_the_paper_s_tasks_stand_beside_the_paper_s_values() -> None:
    names = {"harness/boolq/acc": 0.5, "harness/table1/average": 0.6, "harness/mine/acc": 0.7}
    records = []
    for (name, value), shots in itertools.product(names.items(), (0, 5)):
        alike = dict.fromkeys(("diff", "softmax"), (value, value))
        records += measured(name, alike, coordinates=Coordinates(examples=shots), better="higher")
    values = {}
    for experiment in map(find_experiment, ("table1", "table8")):
        for comparison in experiment.compare(records, experiment.presets["cpu"]):
            values[experiment.name, comparison.name, comparison.coordinates.label] = comparison.paper
    assert values["table8", "harness/boolq/acc", "0-shot"] == (0.601, 0.629)
    assert values["table8", "harness/boolq/acc", "5-shot"] is None
    assert values["table8", "harness/table1/average", "5-shot"] == (0.58, 0.564)
    assert values["table8", "harness/mine/acc", "0-shot"] is None
    for name, value in {"harness/boolq/acc": 0.69, "harness/table1/average": 0.606}.items():
        ours, theirs = values["table1", name, "0-shot"] or (0, 0)
        assert ours == value
        assert math.isnan(theirs)  # the paper trained no Transformer alike
