"""Marks the values of a parametrised test that run in `make test-all` alone."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def short_run(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """All ``values`` of one parameter, of which those in ``keep`` run in `make test`, too, and the others with `--all`.

    Each of ``keep`` has to be one of the values, so that a misspelt name is an error. For a single set of values,
    ``pytest.param(..., marks=pytest.mark.all)`` does the same.
    """
    values = list(values)
    unknown = [value for value in keep if value not in values]
    assert not unknown, unknown
    return [value if value in keep else pytest.param(value, marks=pytest.mark.all) for value in values]


def in_turn(names: Iterable[str], *ways: Sequence[Any]) -> list[Any]:
    """Every name with every combination of ``ways``; in `make test` each with one of them, the next with the next."""
    combinations = list(itertools.product(*ways))
    return [
        pytest.param(name, *way, marks=() if i % len(combinations) == number else pytest.mark.all)
        for i, name in enumerate(names)
        for number, way in enumerate(combinations)
    ]
