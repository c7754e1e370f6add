"""Settings as a user gives them, and those of every measure and experiment."""

import re
from typing import Any

import pytest

from diff_transformer.eval.measures import MEASURES, find_measure
from diff_transformer.eval.options import check_counts, chosen_options
from diff_transformer.experiments.asked import ask
from diff_transformer.experiments.registry import EXPERIMENTS, find_experiment

DEFAULTS: dict[str, Any] = {
    "count": 4,
    "examples": 0,
    "rate": 0.5,
    "exact": False,
    "folder": "",
    "length": None,
    "shots": [16, 64],
    "noises": [0.0, 0.1],
    "lengths": (2048,),
    "cells": [[1, 1], [2, 1]],
    "types": ("float32",),
    "body": {},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 7),
        ("count", 1),
        ("examples", 0),
        ("rate", 2),
        ("rate", 0.25),
        ("exact", True),
        ("folder", "here"),
        ("length", 512),
        ("length", None),
        ("shots", [1]),
        ("shots", (1, 2)),
        ("noises", [0, 0.3]),
        ("cells", [[4, 2]]),
        ("types", ["bfloat16", "float32"]),
        ("body", {"seed": 1}),
    ],
)
def test_values_of_the_kind_are_taken(name: str, value: object) -> None:
    assert chosen_options({name: value}, DEFAULTS, "It") == {**DEFAULTS, name: value}


def test_nothing_is_no_text() -> None:
    assert chosen_options({"folder": None}, DEFAULTS, "It")["folder"] == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", "x", "It takes a whole number of 1 or more for count, got 'x'."),
        ("count", 2.0, "It takes a whole number of 1 or more for count, got 2.0."),
        ("count", True, "It takes a whole number of 1 or more for count, got True."),
        ("count", 0, "It takes a whole number of 1 or more for count, got 0."),
        ("examples", -1, "It takes a whole number of 0 or more for examples, got -1."),
        ("length", 0, "It takes null or a whole number of 1 or more for length, got 0."),
        ("count", None, "It takes a whole number of 1 or more for count, got nothing."),
        ("count", [4], "It takes a whole number of 1 or more for count, got [4]."),
        ("rate", "fast", "It takes a number for rate, got 'fast'."),
        ("rate", float("nan"), "It takes a number for rate, got nan."),
        ("rate", float("inf"), "It takes a number for rate, got inf."),
        ("rate", False, "It takes a number for rate, got False."),
        ("exact", 1, "It takes true or false for exact, got 1."),
        ("exact", "no", "It takes true or false for exact, got 'no'."),
        ("folder", 2024, "It takes text for folder, got 2024; in quotation marks a number is text."),
        ("length", "abc", "It takes null or a whole number of 1 or more for length, got 'abc'."),
        ("length", False, "It takes null or a whole number of 1 or more for length, got False."),
        ("shots", "abc", "It takes a list of whole numbers of 1 or more such as [16, 64] for shots, got 'abc'."),
        ("shots", 16, "It takes a list of whole numbers of 1 or more such as [16, 64] for shots, got 16."),
        ("shots", [], "It takes a list of whole numbers of 1 or more such as [16, 64] for shots, got []."),
        ("shots", [16, 0], "It takes a list of whole numbers of 1 or more such as [16, 64] for shots, got [16, 0]."),
        (
            "shots",
            [16, "x"],
            "It takes a list of whole numbers of 1 or more such as [16, 64] for shots, got [16, 'x'].",
        ),
        ("noises", ["a"], "It takes a list of numbers such as [0.0, 0.1] for noises, got ['a']."),
        ("lengths", 512, "It takes a list of whole numbers of 1 or more such as [2048] for lengths, got 512."),
        (
            "cells",
            [1, 2],
            "It takes a list of lists of whole numbers of 1 or more such as [[1, 1], [2, 1]] for cells, got [1, 2].",
        ),
        ("types", "float32", "It takes a list of texts such as [float32] for types, got 'float32'."),
        ("types", [None], "It takes a list of texts such as [float32] for types, got [None]."),
        ("body", "x", "It takes a mapping for body, got 'x'."),
        ("counts", 1, "It has no option 'counts'; did you mean 'count'?"),
    ],
)
def test_others_are_one_sentence(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        chosen_options({name: value}, DEFAULTS, "It")


def test_an_option_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"^'recall' has no option 'a'; it has none\.$"):
        chosen_options({"a": 1}, {}, "'recall'")


def test_numbers_too_small() -> None:
    check_counts(2, orders=2, queries=3)
    with pytest.raises(ValueError, match=r"^queries must be 2 or more, got 1\.$"):
        check_counts(2, orders=2, queries=1)


def of_no_kind(defaults: dict[str, Any]) -> None:
    """Each option is refused what is of no kind, and takes its own default."""
    assert chosen_options(defaults, defaults, "It") == defaults
    for name in defaults:
        with pytest.raises(ValueError, match=rf"^It takes .* for {name}, got "):
            chosen_options({name: {1, 2}}, defaults, "It")


@pytest.mark.parametrize("name", MEASURES)
def test_every_measures_options_have_a_kind(name: str) -> None:
    of_no_kind(dict(find_measure(name).options))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiments_options_have_a_kind(name: str) -> None:
    for preset in find_experiment(name).presets.values():
        of_no_kind(dict(preset.options))


def test_an_experiment_is_asked_for_values_of_the_kind() -> None:
    with pytest.raises(
        ValueError, match=r"^'fig6' takes a list of whole numbers of 1 or more such as \[8, 16, 32\] for shots, got"
    ):
        ask(find_experiment("fig6"), options={"shots": 8})
    asked = ask(find_experiment("fig6"), options={"shots": [8]})
    assert asked.preset.options["shots"] == [8]
    assert asked.preset.options["queries"] == 32
