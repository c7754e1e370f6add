"""Beyond the paper: recall in contexts that are longer than any that was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.data import RetrievalBatches
from diff_transformer.eval.floors import token_levels
from diff_transformer.eval.lengths import LENGTH_ACCURACY, length_records, times
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.needles import CPU
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Recipe
from diff_transformer.train.recipe import RetrievalData


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, RetrievalBatches)  # the presets' recipes
    return length_records(run.model, run.data.batches, run.arm.name, seed=run.seed, **preset.options)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    groups = map(times, preset.options["factors"])
    return [compare(records, LENGTH_ACCURACY, "diff", "softmax", group=group, claimed_by="us") for group in groups]


def _headline(options: Mapping[str, Any]) -> Headline:
    """The longest context: what was trained on is Table 2's and Figure 5's."""
    return Headline(name=LENGTH_ACCURACY, group=times(max(options["factors"])))


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    assert isinstance(recipe.data, RetrievalData)  # the presets' recipes
    levels = token_levels(recipe.data.num_pairs, 1, recipe.data.num_values)
    # Whether a model has learned the task is told by the shortest contexts, whatever is left of it in longer ones.
    told: dict[str, Any] = {"accuracy": LENGTH_ACCURACY, "accuracy_group": times(min(options["factors"]))}
    return [
        Baseline(name=LENGTH_ACCURACY, group=times(factor), steps=recipe.train.steps, **levels, **told)
        for factor in options["factors"]
    ]


LENGTH_GENERALISATION = Experiment(
    name="length_generalisation",
    shows="recall in contexts once, twice and four times as long as in training (beyond the paper)",
    presets={
        # The runs are those of `table2`: what it has trained is measured here.
        "cpu": replace(CPU, minutes=7.5, options={"factors": [1, 2, 4], "sequences": 2048}),
        "gpu": Preset(
            recipe="retrieval",
            overrides=(
                "model.hidden_size=256",
                "model.intermediate_size=680",
                "model.head_dim=16",
                "data.length=512",
                "data.num_pairs=16",
                "data.num_queries=16",
                "data.repeats=true",
                "data.batch_size=64",
                "train.steps=3000",
                "train.warmup_steps=100",
                "train.evaluate_every=1500",
                "train.checkpoint_every=1500",
                "train.inspect_every=null",
                "train.precision=bf16",
            ),
            arms=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=1000", "train.evaluate_every=1000"),
            seeds=3,
            options={"factors": [1, 2, 4], "sequences": 4096},
            minutes=20,
        ),
    },
    measure=_measure,
    compare=_compare,
    validation=ACCURACY,
    headline=_headline,
    baselines=_baselines,
    notes=(
        "Whether DIFF recalls more than its twin is our question here: the paper says so of contexts that were trained "
        "on (× 1; Table 2 and Figure 5 ask that), and of longer ones nothing.",
    ),
)
