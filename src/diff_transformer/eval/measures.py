"""Measurements by name: each runs on any checkpoint alone (`diff-transformer eval CHECKPOINT --measure NAME`)."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from diff_transformer.data import Batches
from diff_transformer.results import Result

# Name → "module:object" in this room. One line for each.
MEASURES: dict[str, str] = {
    "standard": "measures:STANDARD",
    "needles": "needle_measures:NEEDLES",
    "needle_attention": "needle_measures:NEEDLE_ATTENTION",
    "needle_tokens": "needle_measures:NEEDLE_TOKENS",
    "many_shot": "labelled:MANY_SHOT",
    "many_shot_orders": "labelled:MANY_SHOT_ORDERS",
    "episodes": "many_shot:EPISODES",
    "episode_orders": "many_shot:EPISODE_ORDERS",
    "retrieval_lengths": "lengths:RETRIEVAL_LENGTHS",
    "positions": "positions:POSITIONS",
    "repeats": "repeats:REPEATS",
    "hallucination": "hallucination:HALLUCINATION",
    "arithmetic": "arithmetic:ARITHMETIC",
    "outliers": "outliers:OUTLIERS",
    "quantised": "quantised:QUANTISED",
    "gradients": "gradients:GRADIENTS",
    "closed_forms": "closed_forms:CLOSED_FORMS",
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured, and on what.

    Attributes:
        model: a causal language model of transformers in evaluation mode, on its device.
        arm: what to call it in the records.
        batches: validation data; None for a measure that needs none.
        tokenizer: the model's; None where it has none (a model of a synthetic task).
        options: the measure's own, each with a value.
        seed: of whatever the measure draws.
    """

    model: Any
    arm: str
    batches: Batches | None = None
    tokenizer: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measurement that the command line can run.

    Attributes:
        shows: one line.
        measure: takes the numbers.
        needs: the validation data it takes: "text" (`TextBatches`, of --text or of the run's recipe, or the recipe's
            `NeedleBatches`), "recipe" (whatever the run was trained on), or None.
        any_model: whether it also runs on models that are not this project's, such as Llama and DiffLlama.
        options: its settings with their defaults; `--option NAME=VALUE` replaces them by others of the same kind, see
            `diff_transformer.eval.options`. What has no default is "" where it is text, None where it is a number.
    """

    shows: str
    measure: Callable[[Subject], list[Result]]
    needs: Literal["text", "recipe"] | None
    any_model: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def find_measure(name: str) -> Measure:
    """The measure of that name. Raises ValueError naming the nearest where there is none."""
    if name not in MEASURES:
        near = difflib.get_close_matches(name, MEASURES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(MEASURES)}."
        raise ValueError(f"There is no measure {name!r}; {hint}")
    module, attribute = MEASURES[name].split(":")
    found = getattr(importlib.import_module(f"diff_transformer.eval.{module}"), attribute)
    assert isinstance(found, Measure)
    return found


def _standard(subject: Subject) -> list[Result]:
    from diff_transformer.eval.records import evaluate

    assert subject.batches is not None  # needs="recipe"
    return evaluate(subject.model, subject.batches, subject.arm, seed=subject.seed, **subject.options)


STANDARD = Measure(
    shows="loss and bits per byte on text; accuracy and attention mass on the retrieval task",
    measure=_standard,
    needs="recipe",
    any_model=True,
    options={"sequences": 512},
)
