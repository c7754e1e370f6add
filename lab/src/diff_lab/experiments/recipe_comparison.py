"""Makes an experiment of a user's recipe: attention types, and changes of them, trained by it and compared.

`runner.py` carries it out like every other. Its results hold the recipe, so that a report needs nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import TextBatches
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    ParameterCounts,
    Preset,
    Variant,
    check_counts,
    compared_by,
    count,
    equal_feed_forward,
    section,
)
from diff_lab.measure.arithmetic import EXACT_MATCH
from diff_lab.measure.document_losses import REPEAT_COLUMNS, Repeats
from diff_lab.measure.measurement import MeasurementRequest, Options, refuse_unknown
from diff_lab.measure.retrieval import ACCURACY, BY_DEPTH, FIRST_QUERY
from diff_lab.measure.standard import LABEL_ACCURACY, LANGUAGE_LOSS, MASKED_LOSS, Standard
from diff_lab.record import OWN, Headline
from diff_lab.train import Data, Recipe, build_config, load_recipe
from diff_lab.train.data_kinds import ArithmeticData, MaskedTextData, RetrievalData, TextData
from diff_lab.train.recipe import ModelRecipe, read_yaml
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.utils.suggestions import did_you_mean

TRANSFORMER = "softmax"
# The share by which the parameters without λ and norms may differ: W_λ of DIFF V2, and what rounding leaves.
TOLERANCE = 0.02
# Evaluations of a run that has none of its own, and how few are too few for a curve.
EVALUATIONS, FEWEST_EVALUATIONS = 20, 10
SEQUENCES = 2048
# How often a bigram may stand in the text and be left in the hits of AR-hit: so often, or once in so many tokens.
FREQUENT, TOKENS_OF_FREQUENT = 100, 20_000
BITS_PER_BYTE = "language/bits_per_byte"
# The options of what is measured, of retrieval and by document.
_SEQUENCES, _OF_DOCUMENTS = "sequences", ("documents", "frequent", "longest")
# Settings of a model that no variant may change: they are the type, the data's, or another model's.
_FIXED = ("attention_type", "vocab_size", "max_position_embeddings", "init_from")
_WORDS = {"lambda_init": "λ_init"}
_ONE_TEXT = (
    f"Intervals of {LANGUAGE_LOSS} and {BITS_PER_BYTE} are over seeds on one validation text, and say nothing of other "
    "text."
)


def variant_of(text: str) -> Variant:
    """Return the variant that a user names: an attention type, with changes of the model after colons.

    "diff" is DIFF, "diff:model.lambda_init=0.8" is called "diff, λ_init 0.8". Raises ValueError for a type that no
    recipe trains, and for a setting that is none of the model's.
    """
    kind, *changes = text.split(":")
    trained = [name for name, described in ATTENTION_TYPES.items() if not described.corrects_heads]
    if kind not in trained:
        if kind in ATTENTION_TYPES:
            raise ValueError(f"{kind!r} corrects a trained Transformer; no recipe trains it from the start.")
        hint = did_you_mean(kind, trained, f"; there are {', '.join(trained)}.")
        raise ValueError(f"There is no variant {kind!r}{hint}")
    settings = [name for name in ModelRecipe.model_fields if name not in _FIXED]
    names, overrides = [kind], [f"model.attention_type={kind}"]
    for change in changes:
        key, equals, value = change.partition("=")
        name = key.removeprefix("model.")
        if not equals or name == key or name not in settings:
            known = [f"model.{setting}" for setting in settings]
            hint = did_you_mean(key, known, f"; there are {', '.join(known)}.")
            raise ValueError(f"What {text!r} changes is the model, by model.KEY=VALUE, not by {change!r}{hint}")
        names.append(_described(name, value))
        overrides.append(change)
    return Variant(name=", ".join(names), overrides=tuple(overrides))


def _described(name: str, value: str) -> str:
    """Write a change as a part of a variant's name: "λ_init 0.8", "no headwise norm"."""
    words, read = _WORDS.get(name, name.replace("_", " ")), read_yaml(value)
    if isinstance(read, bool):
        return words if read else f"no {words}"
    return f"{words} {value}"


def comparison_name(recipe: Recipe) -> str:
    """Return the name of a recipe's comparison, and of its results file."""
    return "recipe_" + (re.sub(r"[^\w.-]+", "-", recipe.name).strip("-.") or "unnamed")


def compare_recipe(
    recipe: Recipe,
    variants: Sequence[str] = ("diff", TRANSFORMER),
    *,
    seeds: int = 3,
    learning_rates: Sequence[float] = (),
    unmatched: bool = False,
) -> Experiment:
    """Return the experiment that compares variants of a recipe, whose preset is called "own"; `with_data` completes it.

    Args:
        variants: two or more, as `variant_of` reads them. The others are compared with "softmax", or with the first if
            that is not among them.
        learning_rates: those that are tried for each variant, or the one that all have; unless given, the recipe's, a
            third and three times of it.
        unmatched: whether to leave the sizes of variants as they are. Otherwise the feed-forward networks of a variant
            whose attention has more or fewer parameters than the Transformer's make up for it.

    Raises ValueError for variants that do not exist, are the same, or cannot be made equal; a recipe that starts from
    another model; a learning rate that is not above 0 or is given twice.
    """
    if recipe.model.init_from is not None:
        raise ValueError(
            f"The recipe {recipe.name!r} starts from the model {recipe.model.init_from!r}, which is of one variant; "
            "variants are compared from their first weights on (model.init_from=null)."
        )
    settings = recipe.model_dump(mode="json")
    if (every := evaluation_interval(recipe)) is not None:
        settings["train"]["evaluate_every"] = every
    if len(variants) < 2:
        raise ValueError(f"A comparison needs two variants or more, got {', '.join(variants) or 'none'}.")
    own = recipe.train.learning_rate
    rates = sorted(learning_rates or {own, _rounded(own / 3), _rounded(own * 3)})
    for rate in rates:
        if not 0 < rate < float("inf") or rates.count(rate) > 1:
            given = ", ".join(f"{one:g}" for one in rates)
            raise ValueError(f"Learning rates are above 0, each given once, got {given}.")
    if len(rates) == 1:  # no choice
        settings["train"]["learning_rate"] = rates.pop()
    preset = Preset(
        recipe=settings,
        variants=tuple(map(variant_of, variants)),
        learning_rates=tuple(rates),
        seeds=seeds,
        parameter_tolerance=None if unmatched else TOLERANCE,
    )
    _refuse_the_same(preset)
    preset, notes = (preset, []) if unmatched else _matched(preset)
    experiment = own_experiment(preset)
    return replace(experiment, notes=(*experiment.notes, *notes))


def check_options(recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that no data of the recipe's kind take, before any are read."""
    known: tuple[str, ...] = ()
    if isinstance(recipe.data, RetrievalData):
        known = (_SEQUENCES,)
    elif isinstance(recipe.data, TextData) and recipe.data.kind == "text":
        known = _OF_DOCUMENTS
    refuse_unknown(options, known, repr(comparison_name(recipe)))


def with_data(experiment: Experiment, data: Data) -> Experiment:
    """Complete the experiment of `compare_recipe` with measurements of the recipe's data, which `build_data` makes.

    Raises ValueError for variants that are not of one size, unless they need not be.
    """
    preset = experiment.presets[OWN]
    notes = []
    if preset.parameter_tolerance is None:
        notes = _unequal(preset, data)
    else:
        try:
            check_counts({one: _sizes(preset.variant_recipe(one), data) for one in preset.variants}, preset)
        except ValueError as error:
            raise ValueError(f"{error} They may differ by {TOLERANCE:.0%}; --unmatched leaves sizes alone.") from None
    options, note = _measured(load_recipe(preset.recipe), data)
    measured = own_experiment(replace(preset, options=options))
    return replace(measured, notes=(*experiment.notes, *notes, *note))


def evaluation_interval(recipe: Recipe) -> int | None:
    """Return the steps between evaluations that give a curve of a run; None if the recipe's own do."""
    steps, every = recipe.train.steps, recipe.train.evaluate_every
    if every is not None and steps // every >= min(FEWEST_EVALUATIONS, steps):
        return None
    return max(1, steps // EVALUATIONS)


def _rounded(rate: float) -> float:
    """Round a rate to two digits, as one writes it."""
    return float(f"{rate:.2g}")


def _sizes(recipe: Recipe, data: Data) -> ParameterCounts:
    return count(build_config(recipe, data.batches.vocab_size, data.tokenizer))


def _refuse_the_same(preset: Preset) -> None:
    """Raise ValueError for two variants that are one model."""
    seen: dict[str, str] = {}
    for variant in preset.variants:
        model = preset.variant_recipe(variant).model.model_dump_json()
        if model in seen:
            raise ValueError(f"The variants {seen[model]!r} and {variant.name!r} are the same model.")
        seen[model] = variant.name


def _transformer(preset: Preset) -> Recipe:
    """Return the Transformer with the sizes of the recipe."""
    return load_recipe(preset.recipe, [f"model.attention_type={TRANSFORMER}"])


def _unequal(preset: Preset, data: Data) -> list[str]:
    """Return a sentence for each variant that has more or fewer parameters than the Transformer, and keeps them."""
    size, notes = _sizes(_transformer(preset), data).shared, []
    for variant in preset.variants:
        more = _sizes(preset.variant_recipe(variant), data).shared / size - 1
        if more:
            notes.append(
                f"{variant.name} has {abs(more):.1%} {'more' if more > 0 else 'fewer'} parameters without λ and norms "
                "than the Transformer with the sizes of the recipe, and keeps them (--unmatched)."
            )
    return notes


def _matched(preset: Preset) -> tuple[Preset, list[str]]:
    """Return the preset with feed-forward networks that make all variants as large as the Transformer, and notes."""
    like = build_config(_transformer(preset), vocab_size=1)
    variants, notes = [], []
    for variant in preset.variants:
        config = build_config(preset.variant_recipe(variant), vocab_size=1)
        is_free = not any(setting.startswith("model.intermediate_size=") for setting in variant.overrides)
        same_sizes = all(getattr(config, size) == getattr(like, size) for size in ("hidden_size", "num_hidden_layers"))
        width = equal_feed_forward(config, like) if is_free and same_sizes else config.intermediate_size
        if width != config.intermediate_size:
            more = "more" if width < config.intermediate_size else "fewer"
            notes.append(
                f"The attention of {variant.name} has {more} parameters than the Transformer's with the sizes of the "
                f"recipe: its feed-forward networks are {width:,} wide, not {config.intermediate_size:,}, so that all "
                f"variants are of one size (within {TOLERANCE:.0%}; --unmatched leaves sizes alone)."
            )
            variants.append(variant.changed(*section("model", intermediate_size=width)))
        else:
            variants.append(variant)
    return replace(preset, variants=tuple(variants)), notes


def _measured(recipe: Recipe, data: Data) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the measurements, and a sentence on those that the data do not allow."""
    if isinstance(recipe.data, RetrievalData):
        return {_SEQUENCES: SEQUENCES}, []
    if isinstance(recipe.data, TextData) and isinstance(data.batches, TextBatches):
        # A bigram is frequent from the same share of the text on, whatever its size.
        repeats = Repeats(frequent=max(FREQUENT, data.batches.train_tokens // TOKENS_OF_FREQUENT))
        try:
            repeats.check(data.batches, data.tokenizer)
        except ValueError as error:
            return {}, [f"Nothing is measured by document, so intervals are over seeds alone. {error}"]
        return repeats.model_dump(mode="json", include=set(_OF_DOCUMENTS)), []
    return {}, []


def own_experiment(preset: Preset) -> Experiment:
    """Return the experiment of a preset that `compare_recipe` has made, or that its results file records."""
    recipe = load_recipe(preset.recipe)
    names = [variant.name for variant in preset.variants]
    against = TRANSFORMER if TRANSFORMER in names else names[0]
    others = [name for name in names if name != against]
    by_document = "documents" in preset.options
    compared = _compared(recipe, by_document)
    rules = [
        ComparisonRule(name=name, variant=other, against=against, exploratory=True, claimed=partial(_has_verdict, name))
        for name in compared
        for other in others
    ]

    def measurements(requested: Preset) -> list[MeasurementRequest]:
        if by_document:
            return [MeasurementRequest(name="standard"), MeasurementRequest(name="repeats", options=requested.options)]
        return [MeasurementRequest(name="standard", options=requested.options)]

    return Experiment(
        name=comparison_name(recipe),
        shows=f"variants of the recipe {recipe.name}: {'; '.join(names)}",
        presets={OWN: preset},
        measurements=measurements,
        compare=compared_by(*rules),
        options=Repeats if by_document else Standard if preset.options else Options,
        headline=lambda _: Headline(name=compared[0], variant=others[0], against=against),
        notes=(_ONE_TEXT,) if LANGUAGE_LOSS in compared else (),
    )


def recorded_experiment(request: Mapping[str, Any]) -> Experiment:
    """Return the experiment of results that `compare_recipe` has led to, from the request that they record."""
    variants = tuple(
        Variant(name=variant["name"], overrides=tuple(variant["overrides"]), coordinates=NO_COORDINATES)
        for variant in request["variants"]
    )
    return own_experiment(Preset(recipe=request["recipe"], variants=variants, options=request["options"]))


def _has_verdict(name: str, coordinates: Coordinates) -> bool:
    """Return whether a number has a verdict: not bits per byte, which repeat the loss, nor a part of a whole."""
    return name != BITS_PER_BYTE and not coordinates


def _compared(recipe: Recipe, by_document: bool) -> tuple[str, ...]:
    """Return the numbers that are compared; the first one is the comparison's subject."""
    if isinstance(recipe.data, RetrievalData):
        return (FIRST_QUERY, ACCURACY, BY_DEPTH)
    if isinstance(recipe.data, ArithmeticData):
        return (EXACT_MATCH,)
    if recipe.data.kind == "text":
        return (*(REPEAT_COLUMNS if by_document else ()), LANGUAGE_LOSS, BITS_PER_BYTE)
    return (LABEL_ACCURACY, MASKED_LOSS) if isinstance(recipe.data, MaskedTextData) else (LABEL_ACCURACY,)
