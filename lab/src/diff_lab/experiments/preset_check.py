"""Checks a preset of an experiment before its first training, so that nothing known beforehand fails hours later."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from diff_lab.experiments.experiment import (
    ParameterCounts,
    Variant,
    check_counts,
    check_recipes,
    count,
    text_notes,
)
from diff_lab.experiments.request import ExperimentRequest
from diff_lab.train import Data, Recipe, build_config, build_data


class DatasetCache:
    """The data of recipes, built once for all that have the same data and seed."""

    def __init__(self) -> None:
        self._built: dict[str, Data] = {}

    def of(self, recipe: Recipe) -> Data:
        key = json.dumps([recipe.data.model_dump(mode="json"), recipe.train.seed])
        if key not in self._built:
            self._built[key] = build_data(recipe)
        return self._built[key]


@dataclass(frozen=True)
class CheckedPreset:
    """A preset that can be carried out: the recipe and the parameters of each variant, and what a reader must know of
    the text.
    """

    recipes: Mapping[Variant, Recipe]
    counts: Mapping[Variant, ParameterCounts]
    notes: tuple[str, ...]


def check_preset(request: ExperimentRequest, data: DatasetCache) -> CheckedPreset:
    """Check that the variants are alike, that their data are there, and that these serve the measurements.

    Raises ValueError or OSError for what is not so.
    """
    preset = request.preset
    recipes = {variant: preset.variant_recipe(variant) for variant in preset.variants}
    check_recipes(recipes)
    counts = {}
    for variant, recipe in recipes.items():
        built = data.of(recipe)
        counts[variant] = count(build_config(recipe, built.batches.vocab_size, built.tokenizer))
    check_counts(counts, preset)
    check_measurements(request, data)
    notes = (note for recipe in recipes.values() for note in text_notes(recipe, data.of(recipe).batches))
    return CheckedPreset(recipes, counts, tuple(dict.fromkeys(notes)))


def check_measurements(request: ExperimentRequest, data: DatasetCache) -> None:
    """Raises ValueError where the data of the last stage hold no batch, or cannot serve the measurements."""
    preset = request.preset
    last = [preset.variant_recipe(variant, "train.seed=0", *preset.extension) for variant in preset.variants]
    for built in {id(built): built for built in map(data.of, last)}.values():
        built.batches.train_batch(1)
        for requested in request.experiment.requests(preset):
            requested.check(built.batches, built.tokenizer)
