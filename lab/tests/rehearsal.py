"""Rehearses an experiment: everything that its preset does, on its own data, with models and samples of seconds.

The smaller sizes follow from the preset, so an experiment is rehearsed as soon as it is registered. First the preset
itself is checked, as it would be before its first training.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from diff_lab.experiments.experiment import Experiment, Preset, Variant, section
from diff_lab.experiments.request import (
    DatasetCache,
    ExperimentRequest,
    check_measurements,
    check_preset,
    request_experiment,
)
from diff_lab.experiments.runner import run_experiment
from diff_lab.record import ResultsFile
from diff_lab.train import Progress, Recipe, build_config
from diff_transformer.attention_types import head_dim

# Of the models: the width of the narrowest variant's heads, to which all widths are in proportion, and the layers.
HEAD_DIM, LAYERS = 4, 2
SEQUENCES = 2  # in the batch of a step, or of each of its parts
# Steps, and of shorter runs that try learning rates. Evaluations and checkpoints that a run has in its midst come after
# every second one.
STEPS, TRIAL_STEPS, EVERY = 3, 2, 2
SEEDS, RATES, MORE_RATES = 2, 2, 1
VALIDATION_TOKENS, VALIDATION_SEQUENCES = 4096, 8
# The parts of their length to which sequences are cut: the smallest that the data and the measurements take.
PARTS = (16, 8, 4, 2, 1)
# Options that count tokens of a sequence, or what it is made of: cut as sequences are.
LENGTHS = ("characters", "first", "length", "lengths", "longest", "pairs", "shots")
# Options that say how much is measured, and how much is enough to see that it can be.
ENOUGH = dict.fromkeys(("episodes", "samples", "sets", "windows"), 2)
ENOUGH |= dict.fromkeys(("documents", "orders", "problems", "queries"), 4)
ENOUGH |= {"new_tokens": 8, "questions": 12, "sequences": 16, "tokens": 1024}
# Of an experiment that trains nothing: options with which it takes seconds.
TIMED = {"device": "cpu", "dtypes": ("bfloat16",), "batch": 1, "layers": 1, "rounds": 5, "hidden_size": 64}
TIMED |= {"intermediate_size": 64, "head_dim": 32, "vocabulary": 256, "check_layers": 1, "check_vocabulary": 256}


def request_anywhere(experiment: Experiment, preset: str, text: Sequence[Path]) -> ExperimentRequest:
    """Request an experiment as on a machine with a GPU."""
    with patch.object(torch.accelerator, "is_available", return_value=True):
        return request_experiment(experiment, preset, text=text)


def rehearse(request: ExperimentRequest, folder: Path, progress: Progress) -> ResultsFile:
    """Check an experiment's preset, and carry it out in a small size in a folder for that. Raises as the experiment."""
    for note in check_preset(request, DatasetCache())[1]:
        progress.tell(f"At full size: {note}")
    return run_experiment(rehearsed(request), folder, progress=progress, resume=True)


def rehearsed(request: ExperimentRequest) -> ExperimentRequest:
    """Return the request with models, data, training and measurements as small as they can be.

    The trainings and measurements stay: the variants, the kinds of data, precision, the choice among learning rates, a
    second stage, and all of the options but those that say how long or how much. Raises ValueError if the preset itself
    cannot be carried out.
    """
    if not request.preset.variants:
        options = {**request.preset.options, **TIMED}
        return replace(request, preset=replace(request.preset, options=options, seeds=min(SEEDS, request.preset.seeds)))
    data = DatasetCache()
    for part in PARTS:
        small = replace(request, preset=_small(request.preset, part))
        try:
            check_measurements(small, data)
        except ValueError:
            if part == PARTS[-1]:
                raise
            continue
        break
    return small


def _small(preset: Preset, part: int) -> Preset:
    """Return a preset with sequences of so small a part of their length."""
    first = preset.variants[0]
    narrowest = min(width_of_heads(preset.variant_recipe(variant)) for variant in preset.variants)
    factor = max(1, narrowest // HEAD_DIM)
    rates = preset.learning_rates
    return replace(
        preset,
        variants=tuple(_small_variant(preset, variant, part, factor) for variant in preset.variants),
        learning_rates=rates if len(rates) <= RATES else (rates[0], rates[-1]),
        sweep=_small_stage(preset, first, preset.sweep, part, TRIAL_STEPS),
        extension=_small_stage(preset, first, preset.extension, part, STEPS),
        more_rates=min(MORE_RATES, preset.more_rates),
        seeds=min(SEEDS, preset.seeds),
        # Widths that are cut in proportion may leave a remainder.
        parameter_tolerance=None if preset.parameter_tolerance is None else max(0.02, preset.parameter_tolerance),
        options={name: _small_option(name, value, part) for name, value in preset.options.items()},
    )


def width_of_heads(recipe: Recipe) -> int:
    return head_dim(build_config(recipe, vocab_size=1))


def _small_option(name: str, value: Any, part: int) -> Any:
    if name in LENGTHS and isinstance(value, list | tuple):
        return [max(1, one // part) for one in value]
    if name in LENGTHS and value is not None:
        return max(1, value // part)
    return min(value, ENOUGH[name]) if name in ENOUGH else value


def _small_variant(preset: Preset, variant: Variant, part: int, factor: int) -> Variant:
    recipe = preset.variant_recipe(variant)
    model = recipe.model
    sizes = section(
        "model",
        hidden_size=max(1, model.hidden_size // factor),
        intermediate_size=max(1, model.intermediate_size // factor),
        num_hidden_layers=min(LAYERS, model.num_hidden_layers),
        num_attention_heads=model.heads,
        head_dim=max(1, width_of_heads(recipe) // factor),
    )
    return variant.changed(*sizes, *_less(recipe, part, STEPS))


def _small_stage(
    preset: Preset, variant: Variant, overrides: tuple[str, ...], part: int, steps: int
) -> tuple[str, ...]:
    """Return the overrides of another stage; none if there is none."""
    return (*overrides, *_less(preset.variant_recipe(variant, *overrides), part, steps)) if overrides else ()


def _less(recipe: Recipe, part: int, steps: int) -> tuple[str, ...]:
    """Return the overrides by which a recipe has less data and fewer steps."""
    data, train = recipe.data, recipe.train
    fields = {name: getattr(data, name) for name in type(data).model_fields}
    settings: dict[str, Any] = {"batch_size": SEQUENCES * train.accumulation}
    settings |= {name: max(1, fields[name] // part) for name in ("length", "pairs", "shots") if name in fields}
    for name, value in fields.items():
        if name.startswith("validation_") and (value is None or isinstance(value, int)):
            enough = VALIDATION_TOKENS if name == "validation_tokens" else VALIDATION_SEQUENCES
            settings[name] = enough if value is None else min(value, enough)
    rhythm = {
        name: EVERY if every < train.steps else steps
        for name in ("evaluate_every", "checkpoint_every")
        if (every := getattr(train, name)) is not None
    }
    if train.decay_steps is not None:
        rhythm["decay_steps"] = 1
    return (
        *section("data", **settings),
        *section("train", steps=steps, warmup_steps=min(1, train.warmup_steps), log_every=1, **rhythm),
    )
