"""Both arms get the same: checked before anything is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diff_transformer.experiments.framework import Arm, Preset
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.train import Recipe
from diff_transformer.train.memory import meta_model
from diff_transformer.train.recipe import differences

# Parts of names of weights that twins do not share: λ's vectors or projection, and norms.
_OWN = ("norm", ".lam.", "lambda_proj")
# Settings in which arms of a group may differ: the model's own, and the rate that is swept for each.
_FREE = ("model.", "train.learning_rate ")


@dataclass(frozen=True)
class Counts:
    """Parameters of an arm: all of them, and those without λ and norms. Tied ones count once."""

    total: int
    shared: int


def count(config: DiffTransformerConfig) -> Counts:
    """The parameters of a model that is not built."""
    named = list(meta_model(config).named_parameters())
    shared = sum(weight.numel() for name, weight in named if not any(part in name for part in _OWN))
    return Counts(sum(weight.numel() for _, weight in named), shared)


def check_recipes(recipes: Mapping[Arm, Recipe]) -> None:
    """Whether arms of one group have the same data and the same training.

    Raises:
        ValueError: a setting outside the model in which two of them differ.
    """
    for first, arm in _pairs(list(recipes)):
        changed = [text for text in differences(recipes[first], recipes[arm]) if not text.startswith(_FREE)]
        if changed:
            raise ValueError(f"The arms {first.label!r} and {arm.label!r} are not trained alike: {', '.join(changed)}.")


def check_counts(counts: Mapping[Arm, Counts], preset: Preset) -> None:
    """Whether arms of one group are of equal size but for λ and norms, or within the tolerance that the preset states.

    Raises:
        ValueError: two that are not.
    """
    for first, arm in _pairs(list(counts)):
        one, other = counts[first].shared, counts[arm].shared
        if abs(one - other) > preset.parameter_tolerance * one:
            raise ValueError(
                f"The arms {first.label!r} and {arm.label!r} are not of equal size: without λ and norms they have "
                f"{one:,} and {other:,} parameters."
            )


def _pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Each arm with the first of its group."""
    first: dict[str | None, Arm] = {}
    for arm in arms:
        first.setdefault(arm.group, arm)
    return [(first[arm.group], arm) for arm in arms if arm is not first[arm.group]]
