"""Checks before training that variants which are compared have the same data, training and number of parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import Preset, Variant
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.train import Recipe, build_config
from diff_transformer.train.recipe import differences
from diff_transformer.train.step_costs import meta_model
from diff_transformer.variants import ATTENTION_TYPES, head_dim


class Heads(NamedTuple):
    """The heads of a layer: how many, the width d of a query, and whether each has two maps and values of 2d."""

    heads: int
    head_dim: int
    differential: bool


def heads_of(recipe: Recipe) -> Heads:
    """The heads of a recipe's model."""
    config = build_config(recipe, vocab_size=1)
    described = config.described
    return Heads(described.heads(config.num_attention_heads), head_dim(config), described.differential)


# Settings in which variants that are compared may differ: the model's own, and the rate that is swept for each.
_FREE = ("model.", "train.learning_rate ")


@dataclass(frozen=True)
class Counts:
    """Parameters of a variant: all of them, and those without λ and norms. Tied ones count once."""

    total: int
    shared: int


def count(config: DiffTransformerConfig) -> Counts:
    """The parameters of a model that is not built."""
    named = list(meta_model(config).named_parameters())
    # What the attention types do not share: norms, and λ's vectors or projection.
    own = ("norm", *(f".{module}." for module in ATTENTION_TYPES[config.attention_type].lambda_modules))
    shared = sum(weight.numel() for name, weight in named if not any(part in name for part in own))
    return Counts(sum(weight.numel() for _, weight in named), shared)


def check_recipes(recipes: Mapping[Variant, Recipe]) -> None:
    """Raises ValueError for a setting outside the model in which two variants that are compared differ."""
    for first, variant in _pairs(list(recipes)):
        changed = [text for text in differences(recipes[first], recipes[variant]) if not text.startswith(_FREE)]
        if changed:
            raise ValueError(
                f"The variants {first.label!r} and {variant.label!r} are not trained alike: {', '.join(changed)}."
            )


def check_counts(counts: Mapping[Variant, Counts], preset: Preset) -> None:
    """Raises ValueError for variants that are compared and not of equal size but for λ and norms, within the
    preset's tolerance."""
    for first, variant in _pairs(list(counts)):
        one, other = counts[first].shared, counts[variant].shared
        if abs(one - other) > preset.parameter_tolerance * one:
            raise ValueError(
                f"The variants {first.label!r} and {variant.label!r} are not of equal size: without λ and norms they "
                f"have {one:,} and {other:,} parameters."
            )


def _pairs(variants: Sequence[Variant]) -> list[tuple[Variant, Variant]]:
    """Each variant with the first of those that it is compared with."""
    first: dict[Coordinates, Variant] = {}
    for variant in variants:
        first.setdefault(variant.coordinates, variant)
    return [(first[variant.coordinates], variant) for variant in variants if variant is not first[variant.coordinates]]
