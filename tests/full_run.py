"""Marks the values of a parametrised test that run in `make test-all` alone."""

from collections.abc import Collection, Iterable
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
