"""Recall among distractors at the size of a test: five variants, of which one never subtracts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.request import request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.train import build_data, load_recipe, train

SMALL = (
    "model.hidden_size=32",
    "train.steps=3",
    "train.evaluate_every=1",
    "data.pairs=4",
    "data.questions=3",
    "data.batch_size=4",
    "data.validation_sequences=8",
)


def test_all_variants_are_measured_and_compared(tmp_path: Path) -> None:
    request = request_experiment(find_experiment("noise"), "cpu", seeds=1)
    options = {**request.preset.options, "pairs": [2, 4], "sequences": 8, "factors": [0, 1]}
    small = replace(
        request.preset,
        overrides=(*request.preset.overrides, *SMALL),
        learning_rates=(),
        parameter_tolerance=0.5,
        options=options,
    )
    results = run_experiment(replace(request, preset=small), tmp_path)
    variants = {variant.name for variant in small.variants}
    hardest = [one for one in results.records if one.name == "noise/accuracy" and one.coordinates["pairs"] == 4]
    assert {one.variant for one in hardest} == variants
    assert results.headline is not None
    (headline,) = [one for one in results.comparisons if results.headline.names(one)]
    assert (headline.coordinates, headline.exploratory) == (Coordinates(pairs=4), False)
    # Of attention one number is for DIFF and the other against it: none is judged alone.
    assert {one.verdict for one in results.comparisons if "attention" in one.name} == {None}
    by_lambda = {one.variant for one in results.records if one.name == "noise/accuracy_by_lambda"}
    assert by_lambda == {"diff", "diff_v2", "diff, λ 0"}


@pytest.mark.parametrize(("kind", "lam"), [("diff", 0.25), ("diff_v2", 0.5)])
def test_a_fixed_lambda_stays(kind: str, lam: float, tmp_path: Path) -> None:
    settings = ["model.fixed_lambda=true", "model.lambda_init=0.25", f"model.attention_type={kind}"]
    recipe = load_recipe("recall", [*SMALL, *settings, "train.learning_rate=0.1"])
    run = train(recipe, tmp_path / "run", data=build_data(recipe))
    weights = [weight for name, weight in run.model.named_parameters() if ".lam" in name]
    assert weights
    assert not any(weight.any() for weight in weights)
    if kind == "diff":
        assert run.model.lambdas() == pytest.approx([lam, lam])
    else:
        assert torch.equal(
            run.model.model.layers[0].self_attn.lambdas(torch.ones(1, 1, 32)).unique(), torch.tensor([lam])
        )
