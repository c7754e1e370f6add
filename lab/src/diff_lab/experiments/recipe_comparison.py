"""Makes an experiment of a user's recipe: attention types, and changes of them, trained by it and compared.

`runner.py` carries it out like every other. Its results hold the recipe, so that a report needs nothing else.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_lab.data import TextBatches
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    compared_by,
    equal_feed_forward,
    section,
)
from diff_lab.measure.document_losses import REPEAT_COLUMNS, Repeats
from diff_lab.measure.measurement import MeasurementRequest, Options, refuse_unknown
from diff_lab.measure.retrieval import ACCURACY, BY_DEPTH, FIRST_QUERY
from diff_lab.measure.standard import EXACT_MATCH, LABEL_ACCURACY, LANGUAGE_LOSS, MASKED_LOSS, Standard
from diff_lab.record import OWN, Headline
from diff_lab.train import Data, Recipe, build_config, build_data, load_recipe
from diff_lab.train.recipe import ModelRecipe, read_yaml
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import DiffTransformerConfig
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
# Settings of a model that no variant may change: they are the type, the data's, or another model's.
_FIXED = ("attention_type", "vocab_size", "max_position_embeddings", "init_from")
_ONE_TEXT = (
    f"Intervals of {LANGUAGE_LOSS} and {BITS_PER_BYTE} are over seeds on one validation text, and say nothing of other "
    "text."
)
# By kind of data, the numbers that are compared, the comparison's subject first, and the options of what is measured.
_COMPARED = {
    "retrieval": (FIRST_QUERY, ACCURACY, BY_DEPTH),
    "arithmetic": (EXACT_MATCH,),
    "text": (LANGUAGE_LOSS, BITS_PER_BYTE),
    "masked_text": (LABEL_ACCURACY, MASKED_LOSS),
}
_OPTIONS = {"retrieval": ("sequences",), "text": ("documents", "frequent", "longest")}


def variant_of(text: str) -> Variant:
    """Return the variant that a user names: an attention type, with changes of the model after colons.

    "diff" is DIFF, "diff:model.lambda_init=0.8" is called "diff, λ_init 0.8". Raises ValueError for a type that no
    recipe trains, and for a setting that the type does not have.
    """
    kind, *changes = text.split(":")
    trained = [name for name, described in ATTENTION_TYPES.items() if not described.corrects_heads]
    if kind not in trained:
        if kind in ATTENTION_TYPES:
            raise ValueError(f"{kind!r} corrects a trained Transformer; no recipe trains it from the start.")
        hint = did_you_mean(kind, trained, f"; there are {', '.join(trained)}.")
        raise ValueError(f"There is no variant {kind!r}{hint}")
    of_types = {setting for described in ATTENTION_TYPES.values() for setting in described.settings}
    without = {*_FIXED, *of_types.difference(ATTENTION_TYPES[kind].settings)}
    known = [f"model.{name}" for name in ModelRecipe.model_fields if name not in without]
    names, overrides = [kind], [f"model.attention_type={kind}"]
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in known:
            hint = did_you_mean(key, known, f"; there are {', '.join(known)}.")
            raise ValueError(f"{text!r} changes settings of {kind!r}, by model.KEY=VALUE, not by {change!r}{hint}")
        words, read = key.removeprefix("model.").replace("_", " ").replace("lambda init", "λ_init"), read_yaml(value)
        names.append(f"{'' if read else 'no '}{words}" if isinstance(read, bool) else f"{words} {value}")
        overrides.append(change)
    return Variant(name=", ".join(names), overrides=tuple(overrides))


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
    options: Collection[str] = (),
    build: Callable[[Recipe], Data] = build_data,
) -> Experiment:
    """Return the experiment that compares variants of a recipe, whose preset is called "own".

    Args:
        variants: two or more, as `variant_of` reads them. The others are compared with "softmax", or with the first if
            that is not among them.
        learning_rates: those that are tried for each variant, or the one that all have; unless given, the recipe's, a
            third and three times of it.
        unmatched: whether to leave the sizes of variants as they are. Otherwise the feed-forward networks of a variant
            whose attention has more or fewer parameters than the Transformer's make up for it.
        options: the names of those that will be asked for, to be refused before any data are read.
        build: makes the data of the recipe.

    Raises ValueError for variants that do not exist or are the same; a recipe that starts from another model; a
    learning rate that is not above 0 or is given twice; an option that no data of this kind take.
    """
    if recipe.model.init_from is not None:
        raise ValueError(
            f"The recipe {recipe.name!r} starts from the model {recipe.model.init_from!r}, which is of one variant; "
            "variants are compared from their first weights on (model.init_from=null)."
        )
    if len(variants) < 2:
        raise ValueError(f"A comparison needs two variants or more, got {', '.join(variants) or 'none'}.")
    settings = recipe.model_dump(mode="json")
    steps, every = recipe.train.steps, recipe.train.evaluate_every
    if every is None or steps // every < min(FEWEST_EVALUATIONS, steps):
        settings["train"]["evaluate_every"] = max(1, steps // EVALUATIONS)
    own = recipe.train.learning_rate
    rates = sorted(learning_rates or {own, float(f"{own / 3:.2g}"), float(f"{own * 3:.2g}")})
    if not all(0 < rate < math.inf for rate in rates) or len({*rates}) < len(rates):
        raise ValueError(f"Learning rates are above 0, each given once, got {', '.join(f'{one:g}' for one in rates)}.")
    if len(rates) == 1:  # no choice
        settings["train"]["learning_rate"] = rates.pop()
    preset = Preset(
        recipe=settings,
        variants=tuple(map(variant_of, variants)),
        learning_rates=tuple(rates),
        seeds=seeds,
        parameter_tolerance=None if unmatched else TOLERANCE,
    )
    names: dict[str, str] = {}
    for variant in preset.variants:
        model = preset.variant_recipe(variant).model.model_dump_json()
        if model in names:
            raise ValueError(f"The variants {names[model]!r} and {variant.name!r} are the same model.")
        names[model] = variant.name
    transformer = load_recipe(settings, [f"model.attention_type={TRANSFORMER}"])
    notes: list[str] = []
    if not unmatched:
        matched = [_matched(variant, preset, build_config(transformer, 1), notes) for variant in preset.variants]
        preset = replace(preset, variants=tuple(matched))
    refuse_unknown(options, _OPTIONS.get(recipe.data.kind, ()), repr(comparison_name(recipe)))
    experiment = own_experiment(replace(preset, options=_measured(recipe, build(recipe), notes)))
    return replace(experiment, notes=(*experiment.notes, *notes))


def _matched(variant: Variant, preset: Preset, like: DiffTransformerConfig, notes: list[str]) -> Variant:
    """Return the variant with a feed-forward network that makes it as large as the Transformer, and add a note."""
    config = build_config(preset.variant_recipe(variant), vocab_size=1)
    is_chosen = any(setting.startswith("model.intermediate_size=") for setting in variant.overrides)
    if is_chosen or any(getattr(config, size) != getattr(like, size) for size in ("hidden_size", "num_hidden_layers")):
        return variant
    width = equal_feed_forward(config, like)
    if width == config.intermediate_size:
        return variant
    more = "more" if width < config.intermediate_size else "fewer"
    notes.append(
        f"The attention of {variant.name} has {more} parameters than the Transformer's with the sizes of the recipe: "
        f"its feed-forward networks are {width:,} wide, not {config.intermediate_size:,}, so that all variants are of "
        f"one size (within {TOLERANCE:.0%}; --unmatched leaves sizes alone)."
    )
    return variant.changed(*section("model", intermediate_size=width))


def _measured(recipe: Recipe, data: Data, notes: list[str]) -> dict[str, Any]:
    """Return the options of the measurements, and add a note on those that the data do not allow."""
    if recipe.data.kind == "retrieval":
        return {"sequences": SEQUENCES}
    if isinstance(data.batches, TextBatches):
        # A bigram is frequent from the same share of the text on, whatever its size.
        repeats = Repeats(frequent=max(FREQUENT, data.batches.train_tokens // TOKENS_OF_FREQUENT))
        try:
            repeats.check(data.batches, data.tokenizer)
        except ValueError as error:
            notes.append(f"Nothing is measured by document, so intervals are over seeds alone. {error}")
        else:
            return repeats.model_dump(mode="json", include=set(_OPTIONS["text"]))
    return {}


def own_experiment(preset: Preset) -> Experiment:
    """Return the experiment of a preset that `compare_recipe` has made, or that its results file records."""
    recipe = load_recipe(preset.recipe)
    names = [variant.name for variant in preset.variants]
    against = TRANSFORMER if TRANSFORMER in names else names[0]
    pairs = [(name, against) for name in names if name != against]
    by_document = "documents" in preset.options
    compared = (*(REPEAT_COLUMNS if by_document else ()), *_COMPARED.get(recipe.data.kind, (LABEL_ACCURACY,)))
    # Bits per byte repeat the loss, and parts of a whole have no verdict.
    asked: dict[str, Any] = {"pairs": pairs, "exploratory": True, "claimed_at": {"depth": [None], "operations": [None]}}
    rules = [ComparisonRule(names=(name,), claimed=name != BITS_PER_BYTE, **asked) for name in compared]

    def requests(requested: Preset) -> list[MeasurementRequest]:
        if by_document:
            return [MeasurementRequest(name="standard"), MeasurementRequest(name="repeats", options=requested.options)]
        return [MeasurementRequest(name="standard", options=requested.options)]

    return Experiment(
        name=comparison_name(recipe),
        shows=f"variants of the recipe {recipe.name}: {'; '.join(names)}",
        presets={OWN: preset},
        requests=requests,
        compare=compared_by(*rules),
        options=Repeats if by_document else Standard if preset.options else Options,
        headline=lambda _: Headline(name=compared[0], variant=pairs[0][0], against=against),
        notes=(_ONE_TEXT,) if LANGUAGE_LOSS in compared else (),
    )


def recorded_experiment(request: Mapping[str, Any]) -> Experiment:
    """Return the experiment of results that `compare_recipe` has led to, from the request that they record."""
    variants = tuple(Variant(name=one["name"], overrides=tuple(one["overrides"])) for one in request["variants"])
    return own_experiment(Preset(recipe=request["recipe"], variants=variants, options=request["options"]))
