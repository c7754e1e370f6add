"""Defines what an experiment is: variants that are trained alike, measurements of each, and comparisons of these.

Every experiment is an `Experiment` in a module of this package; `registry.py` lists them by name, and `runner.py`
carries them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diff_transformer.data import Batches
from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.measure.measurement import MeasurementRequest, Options
from diff_transformer.lab.measure.standard import validation_callback
from diff_transformer.lab.record import Baseline, Better, Comparison, Headline, Result
from diff_transformer.train import Data, Progress, Recipe, build_data, load_recipe
from diff_transformer.train.data_kinds import TextData

# Of the commands `reproduce --preset`; "paper" is counted on the meta device and never run.
PRESETS = ("cpu", "gpu", "paper")
PAPER = "paper"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained: a row of a table.

    Attributes:
        name: what to call it; one of a recipe's attention types where that says all ("diff", "softmax").
        overrides: settings on top of the preset's: "model.attention_type=softmax".
        coordinates: of its records, a size for example. Variants with the same ones are compared with each other, so
            they must have the same data, the same training but for the learning rate, and the same parameters but for λ
            and norms.
    """

    name: str
    overrides: tuple[str, ...]
    coordinates: Coordinates = NOWHERE

    @property
    def label(self) -> str:
        """The variant as a reader is told of it."""
        return ", ".join(part for part in (self.name, self.coordinates.label) if part)


TWINS = (
    Variant(name="diff", overrides=("model.attention_type=diff",)),
    Variant(name="softmax", overrides=("model.attention_type=softmax",)),
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment at one size.

    Attributes:
        recipe: the name of a shipped recipe; the paper's own size has stages instead, see `PaperPreset`.
        overrides: its settings that are others here, for all variants.
        variants: what is trained; none for an experiment that trains nothing (`Experiment.measure_once`).
        learning_rates: tried for each variant with the first seed, ascending; the one with the best validation is the
            variant's. None: the recipe's own.
        sweep: more overrides for these trials, such as fewer steps. Where there are none, the best trial is the first
            seed's run.
        extension: overrides of a second stage of training, which begins with the model of the first:
            "data.length=1024", "train.steps=40".
        seeds: how many, from 0; `--seeds` replaces it.
        parameter_tolerance: the share by which counts may differ, where variants cannot be made equal.
        options: what the measurement needs besides, by name (sample sizes, lengths); `--option` replaces them.
        minutes: about how long it takes: on two processor cores (cpu) or one H200 (gpu); None for the paper's own.
    """

    recipe: str = ""
    overrides: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    learning_rates: tuple[float, ...] = ()
    sweep: tuple[str, ...] = ()
    extension: tuple[str, ...] = ()
    seeds: int = 1
    parameter_tolerance: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    minutes: float | None = None

    def variant_recipe(self, variant: Variant, *more: str) -> Recipe:
        """The recipe of a variant. Raises as `load_recipe` does."""
        return load_recipe(self.recipe, [*self.overrides, *variant.overrides, *more])

    @property
    def trains_on_text(self) -> bool:
        """Whether all its variants are trained on text, which may be the user's (`--text`)."""
        return bool(self.variants) and all(
            isinstance(self.variant_recipe(variant).data, TextData) for variant in self.variants
        )


def measured_by(name: str) -> Callable[[Preset], tuple[MeasurementRequest, ...]]:
    """What an experiment measures with one measurement, whose options are the preset's."""
    return lambda preset: (MeasurementRequest(name=name, options=preset.options),)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A trained checkpoint, ready to be measured.

    Attributes:
        variant: which one.
        seed: of weights and data; records of the measurement carry it.
        recipe: the whole recipe of its last stage of training.
        folder: of the run, with `model/` and `metrics.jsonl`.
        model: in evaluation mode, on its device.
        data: what it was trained on; the same object for all variants that are compared.
        metrics: the lines of `metrics.jsonl`, validation during training among them.
    """

    variant: Variant
    seed: int
    recipe: Recipe
    folder: Path
    model: Any
    data: Data
    metrics: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MeasurementContext:
    """What an experiment that trains nothing knows: where it may write, how often to repeat, whom to tell.

    Attributes:
        folder: for files of its own; exists.
        seeds: how many repetitions are asked for.
        progress: is told about every step.
    """

    folder: Path
    seeds: int
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Validation:
    """By which number of its validation data a learning rate is chosen: a name that `on_evaluate` logs."""

    name: str
    better: Better


LOSS = Validation(name="validation/loss", better="lower")
ACCURACY = Validation(name="validation/accuracy", better="higher")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure of the paper, or a question beyond it.

    Attributes:
        name: as it is typed: "table6".
        shows: one line.
        presets: by name, see `PRESETS`.
        options: what `--option` may replace.
        measurements: from a preset, what is measured on every trained checkpoint; see `measured_by`.
        measure: instead of it, takes the numbers of one trained checkpoint; each record has the run's variant and seed.
        measure_once: instead of both, takes all numbers of an experiment that trains nothing.
        compare: what the records of all variants and seeds say; see `diff_transformer.lab.statistics.compare`.
        validation: by what learning rates are chosen.
        build_data: a recipe's data, where it is not what the recipe itself says.
        on_evaluate: what training logs about its validation data.
        logs: a name for it, where it is not the usual. The keys of runs hold it, so one that was chosen stays.
        check: beside `measure`, raises where the options ask for what cannot be had: a judge, a task, longer documents
            than the data have. Called with the options and with the data of each variant before anything is trained.
        notes: sentences that a reader of the numbers must know, whatever they are.
        headline: from the measurement's options, which comparison the experiment is about: the one that an overview
            shows. None where no comparison of two variants stands for it.
        baselines: from a recipe (the same for all variants but for the model) and the measurement's options, what a
            model comes to in each accuracy that has not learned what is measured.
    """

    name: str
    shows: str
    presets: Mapping[str, Preset]
    compare: Callable[[Sequence[Result], Preset], list[Comparison]]
    options: type[Options] = Options
    measurements: Callable[[Preset], Sequence[MeasurementRequest]] | None = None
    measure: Callable[[MeasuredRun, Preset], list[Result]] | None = None
    measure_once: Callable[[MeasurementContext, Preset], list[Result]] | None = None
    validation: Validation = LOSS
    build_data: Callable[[Recipe], Data] = build_data
    on_evaluate: Callable[[Batches], Callable[[Any, int], dict[str, float]]] = validation_callback
    logs: str = ""
    check: Callable[[Mapping[str, Any], Data], None] | None = None
    notes: tuple[str, ...] = ()
    headline: Callable[[Mapping[str, Any]], Headline] | None = None
    baselines: Callable[[Recipe, Mapping[str, Any]], list[Baseline]] | None = None

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.measurements, self.measure, self.measure_once)) != 1:
            raise ValueError(f"the experiment {self.name!r} needs one of measurements, measure and measure_once")
        if bool(self.logs) == (self.on_evaluate is validation_callback):
            raise ValueError(f"the experiment {self.name!r} needs a name for what it logs, if that is not the usual")
        if unknown := sorted(self.presets.keys() - set(PRESETS)):
            raise ValueError(f"the experiment {self.name!r} has the unknown preset {unknown[0]!r}")
