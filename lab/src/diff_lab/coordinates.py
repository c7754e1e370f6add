"""Defines a number's coordinates (4 needles, 2 of them queried), and their words in a report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import core_schema

from diff_transformer.utils.suggestions import quoted

# A number, a word, or the lowest and the highest of a range of numbers.
Coordinate = float | str | tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """The meaning of a coordinate, and how a number, a range of numbers, or a word is written."""

    title: str  # of a figure's axis
    phrase: str  # a number or a range in a label: "{} needles"
    word: str = "{}"  # a word in a label: "per {}"
    form: Literal["plain", "count", "share", "size"] = "plain"  # as it is, with commas, in per cent, or as 6.8B

    def label(self, value: Coordinate) -> str:
        """Write a value by itself: "4 needles", "depth 0–20 %"."""
        phrase = self.word if isinstance(value, str) else self.phrase
        return (phrase.removesuffix("s") if value == 1 else phrase).format(self.text(value))

    def text(self, value: Coordinate) -> str:
        """Write a value as it stands beside the axis: "25 %", "0.5M", "0–20 %"."""
        if isinstance(value, str):
            return value
        if isinstance(value, tuple):
            low, high = map(self.text, value)
            return f"{low.removesuffix(' %')}–{high}"
        if self.form == "share":
            return f"{100 * value:g} %"
        if self.form == "size":
            return f"{value / 1e9:g}B" if value >= 5e8 else f"{value / 1e6:g}M"
        if self.form == "count":
            return f"{value:,}"
        return str(value) if isinstance(value, int) else f"{value:g}"


AXES = {
    "needles": Axis("needles", "{} needles"),
    "queries": Axis("needles asked for", "{} queried"),
    "pairs": Axis("pairs in the context", "{} pairs"),
    "factor": Axis("factor of λ", "λ × {}"),
    "layer": Axis("layer", "layer {}"),
    "length": Axis("length of the context in tokens", "{} tokens"),
    "depth": Axis("depth in the context", "depth {}", form="share"),
    "context_factor": Axis("length of the context, in lengths of training", "context × {}"),
    "orders": Axis("order of the demonstrations", "{}", word="{} orders"),
    "noise": Axis("share of wrong labels", "noise {}"),
    "shots": Axis("shots", "{} shots"),
    "examples": Axis("examples before each question", "{}-shot"),
    "operations": Axis("operations", "{} operations"),
    "first_tokens": Axis("tokens from the start of the document", "first {} tokens"),
    "position": Axis("position in the document", "position {}"),
    "bits": Axis("bits of a number", "{} bits"),
    "granularity": Axis("what shares a scale", "{}", word="per {}"),
    "rank": Axis("rank by size", "top-{}"),
    "step": Axis("step of training", "step {}"),
    "parameters": Axis("parameters", "{}", form="size"),
    "tokens": Axis("tokens of training", "{} tokens", form="count"),
    "learning_rate": Axis("learning rate", "learning rate {}"),
    "phase": Axis("phase of training", "{}"),
    "part": Axis("part", "{}"),
}


class Coordinates(dict[str, Coordinate]):
    """Names of axes with a number, a word or a range of numbers each; hashable, and never changed once made.

    Raises ValueError for a value that is none of these.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        given: dict[str, Any] = dict(values or {}, **more)
        super().__init__(given)
        for name, value in given.items():
            is_range = isinstance(value, list | tuple) and len(value) == 2
            numbers = value if is_range else (value,)
            is_number = all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
            if not (is_number or isinstance(value, str)):
                raise ValueError(f"the coordinate {name} must be a number, a word or two numbers, got {quoted(value)}")
            self[name] = (value[0], value[1]) if is_range else value

    def __hash__(self) -> int:  # type: ignore[override]  # a dict's is None
        return hash(frozenset(self.items()))

    @property
    def label(self) -> str:
        """All in their order: "4 needles, 2 queried"; "" if there are none."""
        return ", ".join(axis(name).label(value) for name, value in self.items())

    def without(self, name: str) -> "Coordinates":
        """Return the other coordinates."""
        return Coordinates({key: value for key, value in self.items() if key != name})

    def position(self, name: str) -> float:
        """Return the position of a coordinate on its axis: the middle of a range; NaN for a word."""
        value = self[name]
        if isinstance(value, tuple):
            return sum(value) / 2
        return math.nan if isinstance(value, str) else float(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic read them from a mapping."""
        return core_schema.no_info_after_validator_function(cls, core_schema.dict_schema())


def axis(name: str) -> Axis:
    """Return the axis of a coordinate; one that has no entry is called by its name."""
    words = name.replace("_", " ")
    return AXES.get(name, Axis(words, f"{words} {{}}"))


NO_COORDINATES = Coordinates()
