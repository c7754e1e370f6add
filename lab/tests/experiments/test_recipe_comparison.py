"""A comparison by a recipe of the user's: which variants there are, what they share, what is measured and compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corpora import written
from diff_lab.experiments.experiment import Experiment
from diff_lab.experiments.recipe_comparison import compare_recipe, variant_of
from diff_lab.experiments.request import DatasetCache, as_defined, check_preset, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.measure.document_losses import REPEAT_COLUMNS
from diff_lab.record import OWN, ResultsFile
from diff_lab.results_files import read_results
from diff_lab.train import load_recipe
from small_experiment import trainings

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
TRAIN = {"steps": 4, "learning_rate": 2e-3, "inspect_every": None}
RETRIEVAL: dict[str, Any] = {
    "name": "mine",
    "model": SIZES,
    "data": {"kind": "retrieval", "length": 32, "num_pairs": 2, "batch_size": 2, "validation_sequences": 4},
    "train": TRAIN,
}


def comparison(
    *variants: str, settings: dict[str, Any] = RETRIEVAL, overrides: tuple[str, ...] = (), **more: Any
) -> Experiment:
    return compare_recipe(load_recipe(settings, overrides), variants or ("diff", "softmax"), **more)


def small(experiment: Experiment) -> Experiment:
    """The same with fewer sequences to measure on."""
    preset = replace(experiment.presets[OWN], options={"sequences": 8})
    return replace(experiment, presets={OWN: preset})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("diff", "diff"),
        ("diff:model.lambda_init=0.8", "diff, λ_init 0.8"),
        ("diff_v2:model.headwise_norm=true", "diff_v2, headwise norm"),
        ("diff:model.headwise_norm=false:model.head_dim=16", "diff, no headwise norm, head dim 16"),
    ],
)
def test_a_variant_is_called_by_its_type_and_what_is_changed(text: str, name: str) -> None:
    kind, *changes = text.split(":")
    assert variant_of(text).name == name
    assert variant_of(text).overrides == (f"model.attention_type={kind}", *changes)


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (("diff",), r"^A comparison needs two variants or more, got diff\.$"),
        (("diff", "sofmax"), r"^There is no variant 'sofmax'; did you mean 'softmax'\?$"),
        (
            ("diff", "x"),
            r"^There is no variant 'x'; there are diff, diff_grouped, diff_v2, diff_v3, diff_v2_g.*, gdla, softmax\.$",
        ),
        (("diff", "dex"), r"^'dex' corrects a trained Transformer; no recipe trains it from the start\.$"),
        (("diff", "diff:model.lambda_int=1"), r"not by 'model\.lambda_int=1'; did you mean 'model\.lambda_init'\?$"),
        (("diff", "diff:train.steps=1"), r"^'diff:train\.steps=1' changes settings of 'diff', by model\.KEY"),
        (("diff", "diff_v2:model.lambda_init=0.8"), r"settings of 'diff_v2', .* not by 'model\.lambda_init=0\.8'"),
        (("diff", "diff:lambda_init=1"), r"not by 'lambda_init=1'; did you mean 'model\.lambda_init'\?$"),
        (("diff", "diff:model.attention_type=softmax"), "not by 'model.attention_type=softmax'"),
        (("diff", "diff:model.lambda_init=much"), r"^the recipe 'mine': 'model\.lambda_init' is 'much'; allowed are"),
        (("diff", "softmax", "diff"), r"^The variants 'diff' and 'diff' are the same model\.$"),
        (("diff", "diff:model.lambda_init=schedule"), "are the same model"),
        (
            ("softmax", "diff:model.num_attention_heads=20"),
            r"of .diff. has 9,216 parameters more than that of .softmax., which is more than its feed-forward",
        ),
    ],
)
def test_variants_that_cannot_be_compared_are_refused(variants: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comparison(*variants)


def test_variants_of_other_sizes_are_refused_before_training_unless_unmatched() -> None:
    variants = ("diff", "diff:model.hidden_size=32")
    with pytest.raises(ValueError, match=r"are not of equal size: .* may differ by 2%"):
        check_preset(request_experiment(comparison(*variants), OWN), DatasetCache())
    check_preset(request_experiment(comparison(*variants, unmatched=True), OWN), DatasetCache())


def test_what_cannot_be_compared_by_a_recipe() -> None:
    with pytest.raises(ValueError, match=r"^The recipe 'mine' starts from the model 'runs/a', which is of one variant"):
        comparison(overrides=("model.init_from=runs/a",))
    for rates, given in (((1e-3, 0.0), "0, 0.001"), ((1e-3, 1e-3), "0.001, 0.001")):
        with pytest.raises(ValueError, match=rf"^Learning rates are above 0, each given once, got {given}\.$"):
            comparison(learning_rates=rates)


def test_all_variants_are_as_large_as_the_transformer_by_their_feed_forward_networks() -> None:
    names = ("diff_v2", "diff", "diff:model.num_attention_heads=4")
    experiment = comparison(*names)
    preset = experiment.presets[OWN]
    widths = [preset.variant_recipe(variant).model.intermediate_size for variant in preset.variants]
    # W_Q has 16 rows more and W_λ 2, of three matrices; four heads of 8 in place of two take 4 · 16 rows more.
    assert widths == [32 - 18 // 3, 32, 32 - round(64 / 3)]
    assert preset.parameter_tolerance == 0.02
    note = next(note for note in experiment.notes if "diff_v2" in note)
    assert "has more parameters than the Transformer's" in note
    assert "26 wide, not 32" in note
    experiment = comparison(*names, unmatched=True)
    unmatched = experiment.presets[OWN]
    assert [unmatched.variant_recipe(variant).model.intermediate_size for variant in unmatched.variants] == [32] * 3
    assert unmatched.parameter_tolerance is None
    # A width that the user gives is kept.
    chosen = comparison("softmax", "diff_v2:model.intermediate_size=26").presets[OWN]
    assert chosen.variant_recipe(chosen.variants[1]).model.intermediate_size == 26


def test_rates_and_evaluations_that_the_recipe_leaves_open() -> None:
    def preset(*overrides: str, **more: Any) -> Any:
        return comparison(overrides=overrides, **more).presets[OWN]

    assert preset().learning_rates == (0.00067, 0.002, 0.006)
    exact = preset("train.learning_rate=1.25e-3").learning_rates
    assert exact == (0.00042, 0.00125, 0.0037)  # the recipe's own is not rounded
    assert preset(learning_rates=(1e-2, 1e-3)).learning_rates == (1e-3, 1e-2)
    one = preset(learning_rates=(1e-2,))
    assert one.learning_rates == ()
    assert {one.variant_recipe(variant).train.learning_rate for variant in one.variants} == {1e-2}
    for steps, given, every in (
        (400, "null", 20),
        (400, "200", 20),
        (400, "40", 40),
        (30, "null", 1),
        (4, "1", 1),
        (4, "2", 1),
    ):
        chosen = preset(f"train.steps={steps}", f"train.evaluate_every={given}")
        assert chosen.variant_recipe(chosen.variants[0]).train.evaluate_every == every


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ResultsFile, list[str]]:
    folder = tmp_path_factory.mktemp("compared")
    experiment = small(comparison(seeds=2, learning_rates=(2e-3,)))
    trained, results = trainings(folder, request_experiment(experiment, OWN))
    return folder, results, trained


def test_a_recipe_is_compared_as_an_experiment_is(done: tuple[Path, ResultsFile, list[str]]) -> None:
    folder, results, trained = done
    assert len(trained) == 4
    main = [row for row in results.comparisons if row.name in ("retrieval/first_query_accuracy", "retrieval/accuracy")]
    assert [(row.variant, row.against, row.exploratory, len(row.differences)) for row in main] == [
        ("diff", "softmax", True, 2)
    ] * 2
    assert all(row.verdict == "not comparable" for row in main)
    by_depth = [row for row in results.comparisons if row.name == "retrieval/accuracy_by_depth"]
    assert by_depth
    assert {row.verdict for row in by_depth} == {None}
    assert results.headline is not None
    assert results.headline.names(results.comparisons[0])
    assert {baseline.name for baseline in results.baselines} >= {"retrieval/first_query_accuracy", "retrieval/accuracy"}
    request = results.settings["request"]
    assert (request["experiment"], request["preset"], request["recipe"]["name"]) == ("recipe_mine", OWN, "mine")
    assert load_recipe(request["recipe"]).data == load_recipe(RETRIEVAL).data
    assert [variant["learning_rate"] for variant in results.settings["variants"]] == [2e-3, 2e-3]
    assert [variant["tried"] for variant in results.settings["variants"]] == [{}, {}]
    # The file alone tells what the definition says of it.
    file = read_results(folder / "recipe_mine.json")
    assert as_defined(replace(file, headline=None, baselines=())) == file


def of_text(folder: Path, documents: list[str]) -> dict[str, Any]:
    corpus = folder / "text"
    corpus.mkdir()
    written(documents, corpus)
    data = {"kind": "text", "paths": [str(corpus)], "length": 16, "batch_size": 2, "validation_fraction": 0.3}
    return {**RETRIEVAL, "data": {**data, "validation_tokens": 64, "cache": str(folder / "cache")}}


@pytest.mark.all
def test_text_is_measured_by_document(tmp_path: Path) -> None:
    documents = [
        f"Chapter {number}. It was a dark and stormy night, {number} times {number}. " * 3 for number in range(12)
    ]
    experiment = comparison(settings=of_text(tmp_path, documents), seeds=2, learning_rates=(2e-3,))
    results = run_experiment(request_experiment(experiment, OWN), tmp_path / "out")
    rows = {row.name: row for row in results.comparisons}
    assert list(rows) == [*REPEAT_COLUMNS, "language/validation_loss", "language/bits_per_byte"]
    assert "documents" in rows["repeats/loss"].method
    assert rows["language/bits_per_byte"].verdict is None
    assert results.headline is not None
    assert results.headline.name == "repeats/loss"
    assert as_defined(replace(results, headline=None)) == results


@pytest.mark.all
def test_other_data_are_measured_by_what_is_measured_of_them(tmp_path: Path) -> None:
    def compared(kind: str, **data: int) -> ResultsFile:
        settings = {**RETRIEVAL, "data": {"kind": kind, "batch_size": 2, **data}}
        experiment = comparison(settings=settings, seeds=1, learning_rates=(2e-3,))
        return run_experiment(request_experiment(experiment, OWN), tmp_path / kind)

    labels = compared("many_shot", shots=4, validation_sequences=4)
    assert [row.name for row in labels.comparisons] == ["validation/accuracy"]
    assert labels.comparisons[0].baseline is not None
    assert labels.headline is not None
    assert labels.headline.names(labels.comparisons[0])
    sums = compared("arithmetic", operations=2, validation_problems=8)
    assert [(row.name, row.coordinates.label, row.verdict is None) for row in sums.comparisons] == [
        ("arithmetic/exact_match", "", False),
        ("arithmetic/exact_match", "1 operation", True),
        ("arithmetic/exact_match", "2 operations", True),
    ]
