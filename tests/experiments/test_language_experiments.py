"""Figures 3 and 4, Table 6, DIFF V2, learning rates and longer contexts: run small, and compared on made-up numbers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corpora import written
from diff_transformer.experiments import fig3, lr_sensitivity, store, table6, v2
from diff_transformer.experiments.asked import Asked, ask
from diff_transformer.experiments.fairness import check_counts, check_recipes, count
from diff_transformer.experiments.language import FIXED_TEXT
from diff_transformer.experiments.paper import check_paper
from diff_transformer.experiments.registry import find_experiment
from diff_transformer.experiments.runs import run_experiment
from diff_transformer.results import Comparison, Result, ResultsFile, seeds_needed
from diff_transformer.train import DivergenceError, build_config
from small_experiment import SMALL

NAMES = ("fig3", "fig4", "table6", "v2", "lr_sensitivity", "length_generalisation")
STEPS = ("train.steps=2", "train.evaluate_every=1", "train.warmup_steps=0", "train.log_every=2")
TEXT = (*STEPS, "data.tokenizer=bytes", "data.vocab_size=null", "data.length=32", "data.batch_size=2")
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


def tiny(name: str, text: Path, seeds: int = 1, **options: Any) -> Asked:
    """The cpu preset made small, with its arms and one learning rate."""
    experiment = find_experiment(name)
    asked = ask(experiment, "cpu", seeds=seeds, text=[text] if experiment.presets["cpu"].trains_on_text else [])
    preset, data = asked.preset, RECALL if asked.preset.recipe == "retrieval" else TEXT
    preset = replace(
        preset,
        overrides=(*preset.overrides, *data),
        learning_rates=preset.learning_rates[:1],
        extension=EXTENSION if preset.extension else (),
        options={**preset.options, **options},
    )
    return replace(asked, preset=preset)


def found(results: ResultsFile) -> dict[tuple[str, str, str, str | None], Comparison]:
    return {(c.name, c.arm, c.against, c.group): c for c in results.comparisons}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_arms_are_alike(name: str, preset: str) -> None:
    settings = find_experiment(name).presets[preset]
    recipes = {arm: settings.arm_recipe(arm) for arm in settings.arms}
    check_recipes(recipes)
    check_counts({arm: count(build_config(recipe, 1024)) for arm, recipe in recipes.items()}, settings)
    assert settings.minutes is not None
    assert settings.minutes <= {"cpu": 10, "gpu": 25}[preset]


@pytest.mark.parametrize(
    ("name", "arms"), [("fig3", 12), ("fig4", 2), ("table6", 7), ("v2", 3), ("lr_sensitivity", 10)]
)
def test_the_papers_own_configuration(name: str, arms: int) -> None:
    checked = check_paper(find_experiment(name))
    assert len(checked) == arms
    if name == "fig3":
        for one in checked:
            assert one.arm.group is not None
            size = one.arm.group.removesuffix("B")
            assert one.counts.total == pytest.approx(3.48e9 if "tokens" in size else float(size) * 1e9, rel=0.015)
        rates = [one.trainings[0].recipe.train.learning_rate for one in checked]
        assert rates == [1.5e-4] * 6 + [7.5e-5] * 4 + [3.2e-4] * 2


def test_figure_3(text: Path, output: Path) -> None:
    results = run_experiment(tiny("fig3", text, frequent=1000), output)
    comparisons = found(results)
    sizes = ["0.02M", "0.04M", "0.06M", "0.13M"]
    assert list(comparisons) == [
        *((name, "diff", "softmax", None) for name in (fig3.PARAMETERS, fig3.TOKENS)),
        *((fig3.WHOLE, "diff", "softmax", size) for size in sizes),
        *((f"repeats/{name}", "diff", "softmax", "0.13M") for name in ("ar_hit", "other")),
    ]
    assert comparisons[fig3.PARAMETERS, "diff", "softmax", None].paper == (0.622, 1.0)
    assert comparisons[fig3.TOKENS, "diff", "softmax", None].paper == (0.637, 1.0)
    whole = [c for c in results.comparisons if c.name == fig3.WHOLE]
    assert all("paired documents" in c.method for c in whole), "one seed: the interval is of the documents"
    points = {r.group for r in results.records if r.name == fig3.CURVE and "0.13M" in (r.group or "")}
    assert points == {fig3.curve_group("0.13M", tokens) for tokens in (64, 128)}
    last = next(r for r in results.records if (r.name, r.arm, r.group) == (fig3.LOSS, "diff", "0.13M"))
    end = fig3.curve_group("0.13M", 128)
    assert last.value in [r.value for r in results.records if (r.name, r.arm, r.group) == (fig3.CURVE, "diff", end)]


def made_up(share: float, tokens_share: float, seeds: int, noise: float = 0.002) -> list[Result]:
    """A scaling law in which DIFF of N·share parameters is as good as a Transformer of N, and curves likewise."""
    random = np.random.default_rng(0)
    records = []
    sizes = {"0.02M": 19_000.0, "0.04M": 38_000.0, "0.06M": 57_000.0, "0.13M": 132_000.0}
    for size, parameters in sizes.items():
        for arm, factor, tokens_factor in (("diff", 1 / share, 1 / tokens_share), ("softmax", 1.0, 1.0)):
            records.append(Result(name=fig3.SIZE, arm=arm, group=size, value=parameters))
            for seed in range(seeds):
                loss = 2 + 10 * (parameters * factor) ** -0.2 + random.normal(0, noise)
                shared: dict[str, Any] = {"arm": arm, "seed": seed, "better": "lower"}
                records.append(Result(name=fig3.LOSS, group=size, value=loss, **shared))
                for name in ("loss", "ar_hit", "other"):
                    records.append(Result(name=f"repeats/{name}", group=size, value=loss, **shared))
                for tokens in (1000, 2000, 4000, 8000):
                    point = 9 - 0.5 * math.log(tokens * tokens_factor) + random.normal(0, noise)
                    group = fig3.curve_group(size, tokens)
                    records.append(Result(name=fig3.CURVE, group=group, value=point, **shared))
    return records


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "reproduced"), (1.7, "contrary"), (1.0, "inconclusive")], ids=str)
def test_figure_3_on_made_up_numbers(share: float, verdict: str) -> None:
    experiment = find_experiment("fig3")
    results = experiment.compare(made_up(share, share, seeds=3), experiment.presets["cpu"])
    by_size, by_tokens = results[:2]
    for comparison in (by_size, by_tokens):
        assert comparison.ours == (pytest.approx(share, rel=0.05), 1.0)
        assert comparison.difference == pytest.approx(comparison.ours[0] - 1)
        assert comparison.interval is not None
        assert comparison.interval[0] < share - 1 < comparison.interval[1] or verdict != "inconclusive"
        assert comparison.verdict == verdict
        assert len(comparison.differences) == 3
        assert comparison.reason == ""
    # The interval by size is a bootstrap: the spread of the seeds' ratios does not tell how many would decide it.
    assert by_size.seeds_needed is None
    assert (by_tokens.seeds_needed is None) is (verdict != "inconclusive")
    single = experiment.compare(made_up(share, share, seeds=1), experiment.presets["cpu"])[:2]
    assert [(c.verdict, c.interval) for c in single] == [("inconclusive", None)] * 2


def test_figure_3_where_runs_diverged() -> None:
    """Nothing is concluded from what a run that diverged has a part in; the other ratio stands."""
    experiment = find_experiment("fig3")
    records = made_up(0.6, 0.6, seeds=4)

    def ratios(lost: Callable[[Result], bool]) -> list[Comparison]:
        found = [replace(r, value=math.nan) if r.arm == "diff" and r.seed == 1 and lost(r) else r for r in records]
        return experiment.compare(found, experiment.presets["cpu"])[:2]

    def is_nothing(comparison: Comparison) -> bool:
        ends = comparison.interval or (0.0, 0.0)
        assert [math.isnan(one) for one in comparison.differences] == [False, True, False, False]
        told = (comparison.verdict, comparison.seeds_needed) == ("inconclusive", None)
        return told and all(map(math.isnan, (comparison.difference, *ends)))

    by_size, by_tokens = ratios(lambda r: False)
    assert (by_size.verdict, by_tokens.verdict) == ("reproduced", "reproduced")
    by_size, by_tokens = ratios(lambda r: (r.name, r.group) == (fig3.LOSS, "0.06M"))
    assert is_nothing(by_size)
    assert by_tokens.verdict == "reproduced"
    by_size, by_tokens = ratios(lambda r: r.name == fig3.CURVE and "0.13M" in (r.group or ""))
    assert is_nothing(by_tokens)
    assert by_size.verdict == "reproduced"


@pytest.mark.parametrize(("shift", "slope"), [(10.0, 1.0), (-10.0, 1.0), (0.0, -1.0)])
def test_figure_3_where_the_fits_do_not_meet(shift: float, slope: float) -> None:
    """DIFF far above or below the other at every size, or worse the larger it is: no ratio, and why not."""
    experiment = find_experiment("fig3")
    records = [
        replace(r, value=4 + slope * (r.value - 4) + shift) if (r.name, r.arm) == (fig3.LOSS, "diff") else r
        for r in made_up(1.0, 0.6, seeds=3)
    ]
    by_size, by_tokens = experiment.compare(records, experiment.presets["cpu"])[:2]
    assert (by_size.verdict, by_size.seeds_needed, by_size.reason) == ("inconclusive", None, fig3.APART)
    assert all(map(math.isnan, (by_size.difference, by_size.ours[0], *by_size.differences, *by_size.interval)))
    assert (by_tokens.verdict, by_tokens.reason) == ("reproduced", "")


def test_figure_3_where_too_many_drawn_fits_have_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = find_experiment("fig3")
    monkeypatch.setattr(fig3, "ratio_interval", lambda *_: None)
    by_size = experiment.compare(made_up(0.6, 0.6, seeds=3), experiment.presets["cpu"])[0]
    assert (by_size.verdict, by_size.seeds_needed, by_size.reason) == ("inconclusive", None, fig3.UNSTEADY)
    assert math.isnan(by_size.difference)
    one = experiment.compare(made_up(0.6, 0.6, seeds=1), experiment.presets["cpu"])[0]
    assert (one.ours[0], one.reason) == (pytest.approx(0.6, rel=0.05), "")


def test_a_validation_that_is_not_finite_is_a_missing_number(text: Path) -> None:
    """metrics.jsonl has null for it."""
    line = {"step": 2, "validation/loss": None}
    asked = tiny("fig3", text)
    arm = asked.preset.arms[0]
    run = SimpleNamespace(arm=arm, seed=0, recipe=asked.preset.arm_recipe(arm), metrics=[{"step": 1}, line])
    (point,) = fig3.curve_records(run)
    assert math.isnan(point.value)
    assert point.group == fig3.curve_group("0.02M", 2 * 2 * 32)


def test_a_rate_whose_validation_is_not_finite_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """metrics.jsonl has null for it; the run itself did not diverge."""
    read = store.Stored.metrics

    def with_null(run: store.Stored) -> list[dict[str, Any]]:
        *earlier, last = read(run)
        of_trial = f"learning_rate: {1e-3}" in (run.folder / "recipe.yaml").read_text(encoding="utf-8")
        return [*earlier, {**last, SMALL.validation.name: None if of_trial else last[SMALL.validation.name]}]

    monkeypatch.setattr(store.Stored, "metrics", with_null)
    results = run_experiment(ask(SMALL, seeds=1), tmp_path)
    for arm in results.settings["arms"]:
        assert arm["tried"]["0.001"] is None
        assert arm["learning_rate"] == 2e-3


def test_figure_3_needs_seeds_by_the_logarithms_that_its_interval_is_of() -> None:
    experiment = find_experiment("fig3")
    by_tokens = experiment.compare(made_up(1.0, 1.0, seeds=3, noise=0.05), experiment.presets["cpu"])[1]
    assert by_tokens.verdict == "inconclusive"
    assert by_tokens.seeds_needed == seeds_needed([math.log(1 + one) for one in by_tokens.differences])
    assert by_tokens.seeds_needed != seeds_needed(by_tokens.differences)


def test_figure_4(text: Path, output: Path) -> None:
    results = run_experiment(tiny("fig4", text, 2, length=128, first=32, documents=10), output)
    groups = [group for _, _, _, group in found(results)]
    assert groups == ["first 32", "first 64", "first 128"]
    assert {c.method for c in results.comparisons if c.method} == {results.comparisons[0].method}
    assert "bootstrap over paired documents" in results.comparisons[0].method


def test_table_6(text: Path, output: Path) -> None:
    results = run_experiment(tiny("table6", text, frequent=1000), output, resume=True)
    comparisons = found(results)
    assert len(comparisons) == 3 * len(table6.PAIRS)
    norm = comparisons[table6.AR_HIT, "diff", table6.NO_NORM, None]
    assert norm.paper == (0.880, 0.911)
    assert norm.verdict is not None
    assert norm.claimed_by == "paper"
    assert norm.ours[0] != norm.ours[1]
    assert comparisons[table6.AR_HIT, "diff", table6.CONSTANTS[0], None].verdict is None
    shapes = {r.arm: r.value for r in results.records if r.name == "training/parameters"}
    # Four layers with a headwise norm of 16 channels; λ of 4 vectors of 8.
    assert shapes["diff"] - shapes[table6.NO_NORM] == 4 * 16
    assert shapes[table6.HALF_NORM] - shapes[table6.HALF] == 4 * 16
    assert shapes[table6.HALF] == shapes["softmax"] == shapes["diff"] - 4 * (16 + 32)


def test_table_6_on_the_papers_numbers() -> None:
    """Each column beside its own; the rows that are said to be alike get no verdict."""
    experiment = find_experiment("table6")
    records = [
        Result(name=name, arm=arm, value=value + 0.001 * seed, seed=seed, better="lower")
        for arm, values in table6.PAPER.items()
        for name, value in zip(table6.COLUMNS, values, strict=True)
        for seed in (0, 1)
    ]
    comparisons = experiment.compare(records, experiment.presets["gpu"])
    assert len(comparisons) == 3 * len(table6.PAIRS)
    for comparison in comparisons:
        assert comparison.paper is not None
        assert comparison.difference == pytest.approx(comparison.paper[0] - comparison.paper[1])
        claimed = comparison.arm == "diff" and comparison.against not in table6.CONSTANTS
        assert comparison.verdict == ("reproduced" if claimed else None)


def test_version_2_and_table_6_share_their_twins(text: Path, output: Path) -> None:
    runs = []
    for name in ("table6", "v2"):
        results = run_experiment(tiny(name, text, frequent=1000), output, resume=True)
        runs.append({arm["name"]: arm["runs"] for arm in results.settings["arms"]})
    for twin in ("diff", "softmax"):
        assert runs[0][twin] == runs[1][twin]


def test_version_2(text: Path, output: Path) -> None:
    results = run_experiment(tiny("v2", text, frequent=1000), output, resume=True)
    assert [(a, b) for name, a, b, _ in found(results) if name == v2.WHOLE] == list(v2.PAIRS)
    assert {c.claimed_by for c in results.comparisons} == {"us"}
    sizes = {arm["name"]: arm["parameters"] for arm in results.settings["arms"]}
    assert sizes["diff_v2"] == sizes["softmax"]
    with pytest.raises(ValueError, match=r"multiple of 3, got 4·\(16 \+ 1\)\.$"):
        v2.arms(64, 4, 16, 172)


def test_learning_rates(text: Path, output: Path) -> None:
    results = run_experiment(tiny("lr_sensitivity", text), output)
    names = [(name, group) for name, _, _, group in found(results)]
    rates = ["0.001", "0.003", "0.01", "0.03", "0.1"]
    assert names == [
        (lr_sensitivity.BEST, None),
        (lr_sensitivity.EXCESS, None),
        *((lr_sensitivity.LOSS, rate) for rate in rates),
    ]
    assert {c.claimed_by for c in results.comparisons} == {"us"}
    assert [arm["learning_rate"] for arm in results.settings["arms"]][::2] == [float(rate) for rate in rates]


@pytest.mark.parametrize(("name", "at_fault"), [("lr_sensitivity", "0.1"), ("fig3", "0.13M")])
def test_where_all_runs_of_a_group_diverged(
    name: str, at_fault: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with what it has: nothing is concluded of that group, and a rate at which all diverged is a guess."""
    asked = tiny(name, text, frequent=1000) if name == "fig3" else tiny(name, text)
    width = next(asked.preset.arm_recipe(arm).model.hidden_size for arm in asked.preset.arms if arm.group == at_fault)
    train = store.train

    def train_or_diverge(recipe: Any, *arguments: Any, **settings: Any) -> Any:
        if recipe.model.hidden_size == width and (name == "fig3" or recipe.train.learning_rate == float(at_fault)):
            raise DivergenceError("The loss is not finite at step 2.")
        return train(recipe, *arguments, **settings)

    monkeypatch.setattr(store, "train", train_or_diverge)
    results = run_experiment(asked, tmp_path)
    lost = [c for c in results.comparisons if c.group == at_fault]
    assert lost
    assert all(math.isnan(c.difference) and c.verdict == "inconclusive" for c in lost)
    others = [c for c in results.comparisons if c.group not in (at_fault, None)]
    assert others
    assert all(math.isfinite(c.difference) for c in others)
    derived = {c.name: c.ours for c in results.comparisons if c.group is None}
    if name == "fig3":
        assert all(math.isnan(derived[ratio][0]) for ratio in (fig3.PARAMETERS, fig3.TOKENS))
        return
    guess = next(r.value for r in results.records if r.name == lr_sensitivity.UNIFORM)
    for arm, place in (("diff", 0), ("softmax", 1)):
        values = [r.value for r in results.records if (r.name, r.arm) == (lr_sensitivity.LOSS, arm)]
        assert len(values) == 5
        known = [min(value, guess) if math.isfinite(value) else guess for value in values]
        assert derived[lr_sensitivity.EXCESS][place] == pytest.approx(sum(known) / 5 - min(known))


def test_what_a_wrong_learning_rate_costs() -> None:
    """The best rate is the best on average; a run that diverged counts as a guess, as does one that is worse."""
    losses = {
        "diff": {"0.1": (2.0, 2.2), "0.2": (2.1, 1.9), "0.4": (math.nan, 9.0)},
        "softmax": {"0.1": (2.3, 2.5), "0.2": (2.5, 2.7), "0.4": (3.0, 3.2)},
    }
    guess = 4.0
    records = [Result(name=lr_sensitivity.UNIFORM, arm="diff", value=guess, seed=0)]
    for arm, rates in losses.items():
        for rate, values in rates.items():
            for seed, value in enumerate(values):
                record = Result(name=lr_sensitivity.LOSS, arm=arm, group=rate, value=value, seed=seed, better="lower")
                records.append(record)
    derived = {(r.name, r.arm, r.seed): r.value for r in lr_sensitivity.derived(records)}
    best, excess = lr_sensitivity.BEST, lr_sensitivity.EXCESS
    assert [derived[best, "diff", seed] for seed in (0, 1)] == [2.1, 1.9]
    assert [derived[best, "softmax", seed] for seed in (0, 1)] == [2.3, 2.5]
    assert derived[excess, "diff", 0] == pytest.approx((2.0 + 2.1 + guess) / 3 - 2.1)
    assert derived[excess, "diff", 1] == pytest.approx((2.2 + 1.9 + guess) / 3 - 1.9)
    assert derived[excess, "softmax", 0] == pytest.approx((2.3 + 2.5 + 3.0) / 3 - 2.3)


@pytest.mark.parametrize("name", ["fig3", "lr_sensitivity", "table5", "fig8"])
def test_where_no_other_text_is_allowed_for_it_is_said(name: str) -> None:
    """Their records carry no documents."""
    assert any(FIXED_TEXT in note for note in find_experiment(name).notes)


def test_longer_contexts(text: Path, output: Path) -> None:
    results = run_experiment(tiny("length_generalisation", text, sequences=64), output)
    assert [group for _, _, _, group in found(results)] == ["context × 1", "context × 2", "context × 4"]
    assert {c.claimed_by for c in results.comparisons} == {"us"}
    assert all(r.n == 64 for r in results.records if r.name == "length/accuracy")
