"""Defines the interface of measurements, and finds one by its name: `diff-lab eval CHECKPOINT --measure NAME`."""

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from diff_lab.data import Batches
from diff_lab.record import Baseline, Result
from diff_transformer.utils.suggestions import did_you_mean, quoted


class Options(BaseModel):
    """The options of a measurement or of an experiment, each described; no value of another kind, no unknown name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]  # of something whose spread is measured
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]
Shares = Annotated[tuple[Annotated[FiniteFloat, Field(ge=0, le=1)], ...], Field(min_length=1)]
# The command line reads `NAME=` as nothing.
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]

O = TypeVar("O", bound=Options)  # noqa: E741  # options
R = TypeVar("R", Result, Baseline)
B = TypeVar("B", bound=Batches)


def read_options(kind: type[O], values: Mapping[str, Any], subject: str) -> O:
    """Return the options of that kind, by name. Raises ValueError, which begins with `subject`, for others."""
    refuse_unknown(values, kind.model_fields, subject)
    try:
        # Of JSON pydantic takes a list for a tuple without taking a text for a number.
        return kind.model_validate_json(json.dumps(dict(values), default=repr))
    except ValidationError as error:
        raise ValueError(f"{subject} {refusal(error, kind, values)}") from None


def refusal(error: ValidationError, kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the end of the sentence on pydantic's first refusal among the values of a described model."""
    first = error.errors()[0]
    # pydantic's words for JSON; a user writes YAML.
    allowed = first["msg"].removeprefix("Value error, ").replace("Input", "it", 1)
    allowed = allowed.replace("a valid array", "a list such as [16, 64]")
    if not first["loc"]:
        return f"cannot be taken: {allowed}."
    name = str(first["loc"][0])
    hint = "; in quotation marks a number is text" if first["type"] == "string_type" else ""
    value = "nothing" if values.get(name) is None else quoted(values[name])
    return f"cannot take {value} for {name} ({kind.model_fields[name].description}): {allowed}{hint}."


def refuse_unknown(names: Collection[str], known: Collection[str], subject: str) -> None:
    """Raise ValueError for a name that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"; it has {', '.join(known) or 'none'}.")
            raise ValueError(f"{subject} has no option {name!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The training of a model by an experiment."""

    folder: Path  # of the run, where a measurement may keep a file
    metrics: Sequence[Mapping[str, Any]]  # the lines of `metrics.jsonl`, validation during training among them
    untrained: Callable[[], Any]  # builds the model as it was before training, ready to evaluate, on the model's device


@dataclass(frozen=True, kw_only=True)
class EvalInput:
    """The model to measure, and its data."""

    model: Any  # a causal language model of transformers in evaluation mode, on its device
    variant: str  # what to call it in the records
    batches: Batches | None = None  # validation data; None for a measurement that needs none
    tokenizer: Any = None  # the model's; None where it has none (a model of a synthetic task)
    seed: int = 0  # of whatever the measurement draws
    training: TrainingRecord | None = None  # None for a checkpoint that no experiment has trained

    @property
    def data(self) -> Batches:
        """The validation data, if the measurement needs it."""
        assert self.batches is not None  # needs is not None
        return self.batches

    def record(self, name: str, value: float, **fields: Any) -> Result:
        """Make the record of a number of this model, with the seed; other fields of `Result` as they are given."""
        return Result(**{"name": name, "variant": self.variant, "value": value, "seed": self.seed, **fields})


def data_of(batches: Batches | None, kind: type[B], described: str, measurement: str, of_text: str) -> B:
    """Return the data, if it is of that kind. Raises ValueError if it is not."""
    if not isinstance(batches, kind):
        raise ValueError(
            f"{measurement} is measured on {described} alone, which the model was not trained on; of a model of text, "
            f"measure {of_text}."
        )
    return batches


class Measurement(Options):
    """A measurement, known by its name in `MEASUREMENTS` on the command line, in experiments and in presets.

    Its fields are its options. The data it needs are "text" (`TextBatches`, of --text or of the run's recipe), "recipe"
    (whatever the run was trained on) or None; "training" if it also needs an experiment's `TrainingRecord`.
    """

    needs: ClassVar[Literal["text", "recipe", "training"] | None] = "recipe"
    any_model: ClassVar[bool] = True  # whether it also runs on models that are not this project's, such as Llama

    def check(self, batches: Batches, tokenizer: Any) -> object:
        """Raise ValueError, before there is a model, if the data, read with a tokenizer, cannot serve the options."""

    def run(self, measured: EvalInput) -> list[Result]:
        """Take the numbers."""
        raise NotImplementedError

    def baselines(self, recipe: Any) -> list[Baseline]:
        """Return each accuracy of a model that was trained by a recipe and has not learned the measured task."""
        return []


@dataclass(frozen=True, kw_only=True)
class MeasurementRequest:
    """A measurement by name, with the options that are not its defaults."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()  # the names of the records that are wanted; all of them unless given

    def resolve(self) -> Measurement:
        """Return the measurement with its options. Raises ValueError if either is not known."""
        return read_options(find_measurement(self.name), self.options, f"The measure {self.name}")

    def run(self, measured: EvalInput) -> list[Result]:
        """Return the records that are wanted."""
        return self._wanted(self.resolve().run(measured))

    def baselines(self, recipe: Any) -> list[Baseline]:
        """Return the accuracies among these records without learning, for runs with this recipe."""
        # A results file of an earlier version may hold options that are gone; only what has baselines reads them.
        if find_measurement(self.name).baselines is Measurement.baselines:
            return []
        return self._wanted(self.resolve().baselines(recipe))

    def _wanted(self, records: list[R]) -> list[R]:
        return [record for record in records if not self.numbers or record.name in self.numbers]


# The measurements in each module of this package. The class of "needle_attention" is `NeedleAttention`.
_MODULES = {
    "standard": ("standard", "loss_of_a_guess", "arithmetic"),
    "harness": ("harness",),
    "needles": ("needles", "needle_attention"),
    "many_shot": ("many_shot", "many_shot_orders", "episodes", "episode_orders"),
    "retrieval": ("noise",),
    "document_losses": ("positions", "repeats"),
    "hallucination": ("hallucination",),
    "attention_logits": ("quantised", "outliers"),
    "cache_bits": ("low_bit",),
    "gradients": ("gradients", "gradients_in_training"),
}
MEASUREMENTS = {name: module for module, names in _MODULES.items() for name in names}


def find_measurement(name: str) -> type[Measurement]:
    """Return the measurement of that name. Raises ValueError naming the nearest if there is none."""
    if name not in MEASUREMENTS:
        hint = did_you_mean(name, MEASUREMENTS, f"; there are {', '.join(MEASUREMENTS)}.")
        raise ValueError(f"There is no measure {name!r}{hint}")
    module = importlib.import_module(f"diff_lab.measure.{MEASUREMENTS[name]}")
    measurement: type[Measurement] = getattr(module, name.title().replace("_", ""))
    return measurement
