"""Defines what an experiment is: variants that are trained alike, measurements of each, and comparisons of these.

`definitions.py` has all of them by name, and `runner.py` carries them out.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import Batches, MaskedTextBatches, TextBatches
from diff_lab.measure.measurement import MeasurementRequest, Options
from diff_lab.measure.standard import validation_callback
from diff_lab.record import Comparison, Headline, Result
from diff_lab.statistics import compare
from diff_lab.train import Progress, Recipe, load_recipe
from diff_lab.train.plan import meta_model
from diff_lab.train.recipe import TextData, differences
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import DiffTransformerConfig


def section(name: str, **settings: bool | float | str | None) -> tuple[str, ...]:
    """Write settings of one section of a recipe as overrides: ("train.steps=50", "train.evaluate_every=null")."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return tuple(f"{name}.{key}={text}" for key, text in texts.items())


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model to train: a row of a table.

    Variants with the same coordinates are compared with each other, so they must have the same data, the same training
    but for the learning rate, and the same parameters but for λ and norms.
    """

    name: str  # a recipe's attention type where that says all ("diff", "softmax")
    overrides: tuple[str, ...]  # settings on top of the preset's
    coordinates: Coordinates = NO_COORDINATES  # of its records, a size for example

    def changed(self, *overrides: str, **fields: Any) -> "Variant":
        """Return the variant with more settings, which come after its own, and with other fields."""
        return replace(self, overrides=(*self.overrides, *overrides), **fields)

    @property
    def label(self) -> str:
        """The variant as a reader is told of it."""
        return ", ".join(part for part in (self.name, self.coordinates.label) if part)


DIFF_AND_SOFTMAX = tuple(
    Variant(name=kind, overrides=(f"model.attention_type={kind}",)) for kind in ("diff", "softmax")
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment at one size."""

    recipe: str | Mapping[str, Any] = ""  # the name of a shipped one, or plain settings
    overrides: tuple[str, ...] = ()  # settings of the recipe that are others here, for all variants
    variants: tuple[Variant, ...] = DIFF_AND_SOFTMAX  # none in an experiment that trains nothing
    # Tried for each variant, ascending: the one with the best validation is the variant's. The recipe's own where there
    # are none.
    learning_rates: tuple[float, ...] = ()
    # With how many seeds each is tried, from 0, and no more than are compared: the mean of their validations decides.
    sweep_seeds: int = 1
    # How many more are tried beyond the smallest or the largest of two or more, as long as that one is the best.
    more_rates: int = 4
    # More overrides for these trials, such as fewer steps; without any, the best trials are also the first seeds' runs.
    sweep: tuple[str, ...] = ()
    # Overrides of a second stage of training, which begins with the model of the first.
    extension: tuple[str, ...] = ()
    seeds: int = 1  # how many, from 0; `--seeds` replaces it
    most_seeds: Mapping[str, int] = field(default_factory=dict)  # of variants, by name, of which fewer are trained
    # The share by which counts may differ, where variants cannot be made equal; None where they need not be equal.
    parameter_tolerance: float | None = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the measurement; `--option` replaces them
    minutes: float = 0.0  # about what it takes: two processor cores (cpu, evening, night), one H200

    def variant_recipe(self, variant: Variant, *more: str) -> Recipe:
        """Return the recipe of a variant. Raises as `load_recipe` does."""
        return load_recipe(self.recipe, [*self.overrides, *variant.overrides, *more])

    @property
    def tries_rates(self) -> bool:
        """Whether there are learning rates to choose from."""
        return len(self.learning_rates) > 1

    @property
    def trials_per_rate(self) -> int:
        """With how many seeds each learning rate is tried."""
        return min(self.sweep_seeds, self.seeds, *self.most_seeds.values())

    def seeds_of(self, variant: Variant) -> int:
        """Return the number of seeds with which a variant is trained."""
        return min(self.seeds, self.most_seeds.get(variant.name, self.seeds))

    @property
    def trains_on_text(self) -> bool:
        """Whether its variants are trained on text, which may be the user's (`--text`)."""
        return any(isinstance(self.variant_recipe(variant).data, TextData) for variant in self.variants)


# Settings in which variants that are compared may differ: the model's own, and the rate that is swept for each.
_FREE = ("model.", "train.learning_rate ")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a variant: all of them, and those without λ and norms. Tied ones count once."""

    total: int
    shared: int


def count(config: DiffTransformerConfig) -> ParameterCounts:
    """Return the parameters of a model that is not built."""
    named = list(meta_model(config).named_parameters())
    # What the attention types do not share: norms, and λ's vectors or projection.
    unshared = ("norm", *(f".{module}." for module in ATTENTION_TYPES[config.attention_type].lambda_modules))
    shared = sum(weight.numel() for name, weight in named if not any(part in name for part in unshared))
    return ParameterCounts(sum(weight.numel() for _, weight in named), shared)


def equal_feed_forward(config: DiffTransformerConfig, like: DiffTransformerConfig) -> int:
    """Return the width of the feed-forward network with which a model has as many parameters as another. Both have the
    hidden size and number of layers: its three matrices give the surplus of the attention. λ's vectors and norms aside,
    and but for rounding. Raises ValueError if there is no such width.
    """
    attention, other = (ATTENTION_TYPES[one.attention_type].attention_weights(one) for one in (config, like))
    width: int = like.intermediate_size - round((attention - other) / (3 * like.hidden_size * like.num_hidden_layers))
    if width < 1:
        raise ValueError(
            f"The attention of {config.attention_type!r} has {attention - other:,} parameters more than that of "
            f"{like.attention_type!r}, which is more than its feed-forward networks have."
        )
    return width


def check_alike(recipes: Mapping[Variant, Recipe], counts: Mapping[Variant, ParameterCounts], preset: Preset) -> None:
    """Raise ValueError for two variants that are compared and differ in a setting outside the model, or in their
    number of parameters without λ and norms by more than the preset's tolerance.
    """
    firsts: dict[Coordinates, Variant] = {}  # of those that are compared
    for variant, recipe in recipes.items():
        first = firsts.setdefault(variant.coordinates, variant)
        changed = [text for text in differences(recipes[first], recipe) if not text.startswith(_FREE)]
        both = f"The variants {first.label!r} and {variant.label!r} are not"
        if changed:
            raise ValueError(f"{both} trained alike: {', '.join(changed)}.")
        one, other, tolerance = counts[first].shared, counts[variant].shared, preset.parameter_tolerance
        if tolerance is not None and abs(one - other) > tolerance * one:
            sizes = f"without λ and norms they have {one:,} and {other:,} parameters"
            raise ValueError(f"{both} of equal size: {sizes}, and may differ by {tolerance:.0%}.")


# Up to about so many passes teach nearly as much as new text would (Muennighoff et al., arXiv 2305.16264).
PASSES = 4


def text_notes(recipe: Recipe, batches: Batches) -> list[str]:
    """Return a note on a text that a run reads often; nothing if it does not, or there is no text."""
    text = batches.text if isinstance(batches, MaskedTextBatches) else batches
    if not isinstance(text, TextBatches) or not text.train_tokens:
        return []
    passes = recipe.train.steps * text.batch_size * text.length / text.train_tokens
    if passes <= PASSES:
        return []
    return [
        f"A run reads its text of {text.train_tokens:,} tokens {passes:.0f} times. After about {PASSES} times a text "
        "has little left to teach, and losses tell as much of what was learned by heart; more of it (--text) helps."
    ]


Places = Mapping[str, Sequence[Any]]  # coordinates, each with the values that it may have


@dataclass(frozen=True, kw_only=True)
class ComparisonRule:
    """Which comparisons are made of some numbers: two variants, wherever both were measured."""

    names: Sequence[str] = ()  # of the records
    pattern: str = ""  # of more names, as `re.fullmatch` takes it
    # The claim is that the first variant is the better one; a third word says that nothing is claimed of the two.
    pairs: Sequence[Sequence[str]] = (("diff", "softmax"),)
    at: Places = field(default_factory=dict)  # where the two are compared; wherever both were measured unless given
    claimed: bool = True  # whether anything is claimed
    claimed_at: Places = field(default_factory=dict)  # and where alone, if not everywhere
    exploratory: bool = False  # whether the claim is a question that the paper leaves open
    # Whether the number says how well a variant has learned (an accuracy, a loss, what follows from them), so that a
    # reader must know where one had not levelled off. Not so a speed, a gradient, or what is asked of a fixed budget.
    quality: bool = True


def compared_by(
    *rules: ComparisonRule, paper: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> Callable[[Sequence[Result], Any], list[Comparison]]:
    """Make the comparisons of an experiment by rules alone, whatever its preset.

    `paper` has the paper's values of a number by variant, and by coordinates ("at") if it has any.
    """

    def compared(records: Sequence[Result], _: Any) -> list[Comparison]:
        comparisons = []
        for rule in rules:
            found = [record.name for record in records if re.fullmatch(rule.pattern, record.name)]
            names = (*rule.names, *dict.fromkeys(found))
            for name, (variant, against, *denied) in itertools.product(names, rule.pairs):
                measured: dict[Coordinates, set[str]] = {}
                for record in records:
                    if record.name == name and _is_at(rule.at, record.coordinates):
                        measured.setdefault(record.coordinates, set()).add(record.variant)
                comparisons += [
                    compare(
                        records,
                        name,
                        variant,
                        against,
                        coordinates=place,
                        paper=_paper_values((paper or {}).get(name, ()), variant, against, place),
                        claimed=rule.claimed and not denied and _is_at(rule.claimed_at, place),
                        exploratory=rule.exploratory,
                        quality=rule.quality,
                    )
                    for place, variants in measured.items()
                    if {variant, against} <= variants
                ]
        return comparisons

    return compared


def _is_at(places: Places, coordinates: Coordinates) -> bool:
    return all(coordinates.get(axis) in values for axis, values in places.items())


def _paper_values(
    rows: Sequence[Mapping[str, Any]], variant: str, against: str, coordinates: Coordinates
) -> tuple[float, float] | None:
    """Return the paper's values of two variants there, NaN for one that it does not give; None for neither."""
    for row in rows:
        at = row.get("at", {})
        if bool(at) == bool(coordinates) and _is_at({axis: [value] for axis, value in at.items()}, coordinates):
            values = [row.get(name, math.nan) for name in (variant, against)]
            return None if all(map(math.isnan, values)) else (values[0], values[1])
    return None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure of the paper, or a question beyond it."""

    name: str  # as it is typed: "table6"
    shows: str  # one line
    presets: Mapping[str, Preset]  # "cpu", "gpu", and for hours on two cores "evening" and "night"
    # What the records of all variants and seeds say; see `compared_by`.
    compare: Callable[[Sequence[Result], Preset], list[Comparison]]
    # What is measured on every trained checkpoint.
    requests: Callable[[Preset], Sequence[MeasurementRequest]] = lambda _: ()
    # Instead of these, all numbers of an experiment that trains nothing; each of the preset's seeds repeats them.
    measure_once: Callable[[Preset, Progress], list[Result]] | None = None
    options: type[Options] = Options  # those that a preset may have, each described
    # What training logs about its validation data, and a name for it where it is not the usual. The keys of runs hold
    # the name, so one that was chosen stays.
    on_evaluate: Callable[[Batches], Callable[[Any, int], dict[str, float]]] = validation_callback
    logs: str = ""
    notes: tuple[str, ...] = ()  # sentences that a reader of the numbers must know, whatever they are
    # From the preset's options, the comparison that an overview shows. None where no comparison of two variants stands
    # for the experiment.
    headline: Callable[[Mapping[str, Any]], Headline] | None = None
