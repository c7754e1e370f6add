"""Figures 3 and 4, Table 6, DIFF V2, learning rates and longer contexts: run small, and compared on made-up numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpora import written
from diff_lab.coordinates import Coordinates
from diff_lab.experiments import language_experiments, run_store, scaling_experiments
from diff_lab.experiments.experiment import (
    count,
    equal_feed_forward,
    find_experiment,
)
from diff_lab.experiments.language_experiments import FIXED_TEXT
from diff_lab.experiments.paper_preset import check_paper
from diff_lab.experiments.request import ExperimentRequest, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.learning import LOSS_CURVE
from diff_lab.record import Comparison, Result, ResultsFile
from diff_lab.train import DivergenceError
from diff_transformer.model import DiffTransformerConfig
from full_run import short_run
from small_experiment import SMALL

STEPS = ("train.steps=2", "train.evaluate_every=1", "train.warmup_steps=0", "train.log_every=2")
TEXT = (*STEPS, "data.tokenizer=bytes", "data.vocab_size=null", "data.length=32", "data.batch_size=2")
TEXT += ("data.validation_tokens=512",)
RECALL = (*STEPS, "train.evaluate_every=2", "data.length=48", "data.batch_size=4")
EXTENSION = (
    "data.length=128",
    "data.batch_size=1",
    "train.steps=2",
    "train.evaluate_every=2",
    "model.rope_theta=640000",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    written([" ".join(f"{n * m} sheep jump the fence." for m in range(7 + n % 5)) for n in range(60)], folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


def tiny(name: str, text: Path, seeds: int = 1, **options: Any) -> ExperimentRequest:
    """The cpu preset made small, with its variants and one learning rate."""
    experiment = find_experiment(name)
    request = request_experiment(
        experiment, "cpu", seeds=seeds, text=[text] if experiment.presets["cpu"].trains_on_text else []
    )
    preset, data = request.preset, RECALL if request.preset.recipe == "retrieval" else TEXT
    preset = replace(
        preset,
        overrides=(*preset.overrides, *data),
        learning_rates=preset.learning_rates[:1],
        extension=EXTENSION if preset.extension else (),
        options={**preset.options, **options},
    )
    return replace(request, preset=preset)


def by_key(results: ResultsFile) -> dict[tuple[str, str, str, str], Comparison]:
    return {(c.name, c.variant, c.against, c.coordinates.label): c for c in results.comparisons}


@pytest.mark.parametrize(
    ("name", "variants"),
    short_run([("fig3", 12), ("fig4", 2), ("table6", 7), ("v2", 3), ("lr_sensitivity", 10)], [("v2", 3)]),
)
def test_the_papers_own_configuration(name: str, variants: int) -> None:
    checked = check_paper(find_experiment(name))
    assert len(checked) == variants
    if name == "fig3":
        for one in checked:
            size = one.variant.coordinates.label.removesuffix("B")
            assert one.counts.total == pytest.approx(3.48e9 if "tokens" in size else float(size) * 1e9, rel=0.015)
        rates = [one.trainings[0].recipe.train.learning_rate for one in checked]
        assert rates == [1.5e-4] * 6 + [7.5e-5] * 4 + [3.2e-4] * 2


@pytest.mark.all
def test_figure_3(text: Path, output: Path) -> None:
    results = run_experiment(tiny("fig3", text, frequent=1000), output)
    comparisons = by_key(results)
    sizes = ["0.02M", "0.04M", "0.06M", "0.13M"]
    assert list(comparisons) == [
        (scaling_experiments.PARAMETERS, "diff", "softmax", ""),
        *((scaling_experiments.WHOLE, "diff", "softmax", size) for size in sizes),
        *((f"repeats/{name}", "diff", "softmax", "0.13M") for name in ("ar_hit", "other")),
    ]
    assert comparisons[scaling_experiments.PARAMETERS, "diff", "softmax", ""].paper == (0.622, 1.0)
    by_size = [c for c in results.comparisons if c.name == scaling_experiments.WHOLE]
    assert all("paired documents" in c.method for c in by_size), "one seed: the interval is of the documents"
    points = {r.coordinates.label for r in results.records if r.name == LOSS_CURVE and "0.13M" in r.coordinates.label}
    assert points == {"0.13M, step 1", "0.13M, step 2"}
    name = scaling_experiments.LANGUAGE_LOSS
    last = next(r for r in results.records if (r.name, r.variant, r.coordinates.label) == (name, "diff", "0.13M"))
    end = "0.13M, step 2"
    assert last.value in [
        r.value for r in results.records if (r.name, r.variant, r.coordinates.label) == (LOSS_CURVE, "diff", end)
    ]


def made_up(share: float, tokens_share: float, seeds: int, noise: float = 0.002) -> list[Result]:
    """A scaling law in which DIFF of N·share parameters is as good as a Transformer of N, and curves likewise."""
    random = np.random.default_rng(0)
    records = []
    sizes = {20_000: 19_000.0, 40_000: 38_000.0, 60_000: 57_000.0, 130_000: 132_000.0}
    for size, parameters in sizes.items():
        coordinates = Coordinates(parameters=size)
        for variant, factor, tokens_factor in (("diff", 1 / share, 1 / tokens_share), ("softmax", 1.0, 1.0)):
            records.append(
                Result(name=scaling_experiments.SIZE, variant=variant, coordinates=coordinates, value=parameters)
            )
            for seed in range(seeds):
                loss = 2 + 10 * (parameters * factor) ** -0.2 + random.normal(0, noise)
                shared: dict[str, Any] = {"variant": variant, "seed": seed, "better": "lower"}
                records.append(
                    Result(name=scaling_experiments.LANGUAGE_LOSS, coordinates=coordinates, value=loss, **shared)
                )
                for name in ("loss", "ar_hit", "other"):
                    records.append(Result(name=f"repeats/{name}", coordinates=coordinates, value=loss, **shared))
                for step in range(400, 8001, 400):
                    point = 9 - 0.5 * math.log(step * tokens_factor) + random.normal(0, noise)
                    records.append(
                        Result(
                            name=LOSS_CURVE,
                            coordinates=Coordinates(coordinates, step=step),
                            value=point,
                            **shared,
                        )
                    )
    return records


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "reproduced"), (1.7, "contrary"), (1.0, "inconclusive")], ids=str)
def test_figure_3_on_made_up_numbers(share: float, verdict: str) -> None:
    experiment = find_experiment("fig3")
    results = experiment.compare(made_up(share, share, seeds=3), experiment.presets["cpu"])
    by_size = results[0]
    assert by_size.ours == (pytest.approx(share, rel=0.05), 1.0)
    assert by_size.difference == pytest.approx(by_size.ours[0] - 1)
    assert by_size.interval is not None
    assert by_size.interval[0] < share - 1 < by_size.interval[1] or verdict != "inconclusive"
    assert by_size.verdict == verdict
    assert len(by_size.differences) == 3
    assert by_size.reason == ""
    # The interval is a bootstrap: the spread of the seeds' ratios does not tell how many would decide it.
    assert by_size.seeds_needed is None
    single = experiment.compare(made_up(share, share, seeds=1), experiment.presets["cpu"])[0]
    assert (single.verdict, single.interval) == ("inconclusive", None)


def test_figure_3_where_a_run_diverged() -> None:
    """Nothing is concluded from what a run that diverged has a part in."""
    experiment = find_experiment("fig3")
    of_size = (scaling_experiments.LANGUAGE_LOSS, "diff", 1, "0.06M")
    records = [
        replace(r, value=math.nan) if (r.name, r.variant, r.seed, r.coordinates.label) == of_size else r
        for r in made_up(0.6, 0.6, seeds=4)
    ]
    by_size = experiment.compare(records, experiment.presets["cpu"])[0]
    assert [math.isnan(one) for one in by_size.differences] == [False, True, False, False]
    assert (by_size.verdict, by_size.seeds_needed) == ("inconclusive", None)
    assert all(map(math.isnan, (by_size.difference, *by_size.interval)))


@pytest.mark.parametrize(("shift", "slope"), [(10.0, 1.0), (-10.0, 1.0), (0.0, -1.0)])
def test_figure_3_where_the_fits_do_not_meet(shift: float, slope: float) -> None:
    """DIFF far above or below the other at every size, or worse the larger it is: no ratio, and why not."""
    experiment = find_experiment("fig3")
    records = [
        replace(r, value=4 + slope * (r.value - 4) + shift)
        if (r.name, r.variant) == (scaling_experiments.LANGUAGE_LOSS, "diff")
        else r
        for r in made_up(1.0, 0.6, seeds=3)
    ]
    by_size = experiment.compare(records, experiment.presets["cpu"])[0]
    assert (by_size.verdict, by_size.seeds_needed, by_size.reason) == ("inconclusive", None, scaling_experiments.APART)
    assert all(map(math.isnan, (by_size.difference, by_size.ours[0], *by_size.differences, *by_size.interval)))


def test_figure_3_where_too_many_drawn_fits_have_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = find_experiment("fig3")
    monkeypatch.setattr(scaling_experiments, "ratio_interval", lambda *_: None)
    by_size = experiment.compare(made_up(0.6, 0.6, seeds=3), experiment.presets["cpu"])[0]
    assert (by_size.verdict, by_size.seeds_needed, by_size.reason) == (
        "inconclusive",
        None,
        scaling_experiments.UNSTEADY,
    )
    assert math.isnan(by_size.difference)
    one = experiment.compare(made_up(0.6, 0.6, seeds=1), experiment.presets["cpu"])[0]
    assert (one.ours[0], one.reason) == (pytest.approx(0.6, rel=0.05), "")


def test_a_rate_whose_validation_is_not_finite_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """metrics.jsonl has null for it; the run itself did not diverge."""
    read = run_store.FinishedRun.metrics

    def with_null(run: run_store.FinishedRun) -> list[dict[str, Any]]:
        *earlier, last = read(run)
        of_trial = f"learning_rate: {1e-3}" in (run.folder / "recipe.yaml").read_text(encoding="utf-8")
        accuracy = None if of_trial else last["validation/accuracy"]
        return [*earlier, {**last, "validation/accuracy": accuracy}]

    monkeypatch.setattr(run_store.FinishedRun, "metrics", with_null)
    results = run_experiment(request_experiment(SMALL, seeds=1), tmp_path)
    for variant in results.settings["variants"]:
        assert variant["tried"]["0.001"] is None
        assert variant["learning_rate"] == 2e-3


@pytest.mark.all
def test_version_2_and_table_6_share_their_twins(text: Path, output: Path) -> None:
    runs = []
    for name in ("table6", "v2"):
        results = run_experiment(tiny(name, text, frequent=1000), output, resume=True)
        runs.append({variant["name"]: variant["runs"] for variant in results.settings["variants"]})
        assert all(math.isfinite(one.difference) for one in results.comparisons)
        sizes = {variant["name"]: variant["parameters"] for variant in results.settings["variants"]}
        heads = 4 * 16  # four layers with a headwise norm of 16 channels; λ of 4 vectors of 8
        if name == "v2":
            assert sizes["diff_v2"] == sizes["softmax"]
        else:
            assert sizes["diff"] - sizes[language_experiments.NO_NORM] == heads
            assert sizes[language_experiments.HALF_NORM] - sizes[language_experiments.HALF] == heads
            assert sizes["softmax"] == sizes["diff"] - heads - 4 * 32
    for kind in ("diff", "softmax"):
        assert runs[0][kind] == runs[1][kind]


def test_the_feed_forward_network_gives_what_the_attention_takes_more() -> None:
    def config(kind: str, heads: int, feed_forward: int, **sizes: int) -> DiffTransformerConfig:
        return DiffTransformerConfig(
            **{"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 3, "head_dim": 16, **sizes},
            attention_type=kind,
            num_attention_heads=heads,
            intermediate_size=feed_forward,
        )

    like = config("softmax", 4, 172)
    for variant in (config("diff_v2", 4, 172), config("softmax", 6, 172), config("diff", 2, 172, head_dim=8)):
        width = equal_feed_forward(variant, like)
        variant.intermediate_size = width
        # Rounding leaves at most half a column of three matrices in each layer.
        leftover = sum(
            sign * (count(one).shared + (3 * 64 * 4 if one.attention_type == "diff_v2" else 0))
            for sign, one in ((1, variant), (-1, like))
        )
        assert abs(leftover) <= 3 * 3 * 64 / 2, variant.attention_type
    assert equal_feed_forward(config("diff", 4, 10), like) == 172
    with pytest.raises(ValueError, match=r"of 'diff_v2' has 13,056 parameters more than that of 'softmax', which is"):
        equal_feed_forward(config("diff_v2", 4, 20), config("softmax", 4, 20))


@pytest.mark.all
@pytest.mark.parametrize(("name", "at_fault"), [("lr_sensitivity", "learning rate 0.1"), ("fig3", "0.13M")])
def test_where_all_runs_of_a_size_diverged(
    name: str, at_fault: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with what it has: nothing is concluded of that size, and a rate at which all diverged is a guess."""
    request = tiny(name, text, frequent=1000) if name == "fig3" else tiny(name, text)
    width = next(
        request.preset.variant_recipe(variant).model.hidden_size
        for variant in request.preset.variants
        if variant.coordinates.label == at_fault
    )
    train = run_store.train

    def train_or_diverge(recipe: Any, *arguments: Any, **settings: Any) -> Any:
        if recipe.model.hidden_size == width and (name == "fig3" or recipe.train.learning_rate == 0.1):
            raise DivergenceError("The loss is not finite at step 2.")
        return train(recipe, *arguments, **settings)

    monkeypatch.setattr(run_store, "train", train_or_diverge)
    results = run_experiment(request, tmp_path)
    lost = [c for c in results.comparisons if c.coordinates.label == at_fault]
    assert lost
    assert all(math.isnan(c.difference) and c.verdict == "inconclusive" for c in lost)
    others = [c for c in results.comparisons if c.coordinates.label not in (at_fault, "")]
    assert others
    assert all(math.isfinite(c.difference) for c in others)
    derived = {c.name: c.ours for c in results.comparisons if not c.coordinates}
    if name == "fig3":
        assert math.isnan(derived[scaling_experiments.PARAMETERS][0])
        return
    guess = next(r.value for r in results.records if r.name == scaling_experiments.GUESS)
    for variant, side in (("diff", 0), ("softmax", 1)):
        values = [
            r.value for r in results.records if (r.name, r.variant) == (scaling_experiments.LANGUAGE_LOSS, variant)
        ]
        assert len(values) == 5
        known = [min(value, guess) if math.isfinite(value) else guess for value in values]
        assert derived[scaling_experiments.EXCESS][side] == pytest.approx(sum(known) / 5 - min(known))


def test_what_a_wrong_learning_rate_costs() -> None:
    """The best rate is the best on average; a run that diverged counts as a guess, as does one that is worse."""
    losses = {
        "diff": {"0.1": (2.0, 2.2), "0.2": (2.1, 1.9), "0.4": (math.nan, 9.0)},
        "softmax": {"0.1": (2.3, 2.5), "0.2": (2.5, 2.7), "0.4": (3.0, 3.2)},
    }
    guess = 4.0
    records = [Result(name=scaling_experiments.GUESS, variant="diff", value=guess, seed=0)]
    for variant, rates in losses.items():
        for rate, values in rates.items():
            for seed, value in enumerate(values):
                record = Result(
                    name=scaling_experiments.LANGUAGE_LOSS,
                    variant=variant,
                    coordinates=Coordinates(learning_rate=float(rate)),
                    value=value,
                    seed=seed,
                    better="lower",
                )
                records.append(record)
    derived = {(r.name, r.variant, r.seed): r.value for r in scaling_experiments.derived(records)}
    best, excess = scaling_experiments.BEST, scaling_experiments.EXCESS
    assert [derived[best, "diff", seed] for seed in (0, 1)] == [2.1, 1.9]
    assert [derived[best, "softmax", seed] for seed in (0, 1)] == [2.3, 2.5]
    assert derived[excess, "diff", 0] == pytest.approx((2.0 + 2.1 + guess) / 3 - 2.1)
    assert derived[excess, "diff", 1] == pytest.approx((2.2 + 1.9 + guess) / 3 - 1.9)
    assert derived[excess, "softmax", 0] == pytest.approx((2.3 + 2.5 + 3.0) / 3 - 2.3)


@pytest.mark.parametrize("name", ["fig3", "lr_sensitivity", "table5", "fig8"])
def test_where_no_other_text_is_allowed_for_it_is_said(name: str) -> None:
    """Their records carry no documents."""
    assert any(FIXED_TEXT in note for note in find_experiment(name).notes)
