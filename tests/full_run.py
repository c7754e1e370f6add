"""Chooses the cases of parametrised tests that run in `make test`; the others run in `make test-all` alone."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

WHOLE = ("every_case", "gpu")


def short_run(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Mark all ``values`` of one parameter but those in ``keep`` to run with `--all` alone.

    Each of ``keep`` has to be one of the values, so that a misspelt name is an error. For a single set of values,
    ``pytest.param(..., marks=pytest.mark.all)`` does the same.
    """
    values = list(values)
    unknown = [value for value in keep if value not in values]
    assert not unknown, unknown
    return [value if value in keep else _with_all(value) for value in values]


def _with_all(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.all)


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `make test` leaves out.

    These are the tests marked `all`, and most of the cases that are a product of parameters. A test of all attention
    types (a parameter ``kind``) runs with two of them, and the next test of its file with the next two. Of the cases
    that are left of a test, those run that have every value of every parameter once. A test that is marked `every_case`
    or `gpu` keeps its cases.
    """
    out = {item for item in items if item.get_closest_marker("all")}
    cases = defaultdict(list)
    for item in items:
        if item not in out and hasattr(item, "callspec") and not any(map(item.get_closest_marker, WHOLE)):
            cases[item.path, item.nodeid.partition("[")[0]].append(item)
    turns: Counter[Path] = Counter()
    for (file, _), group in cases.items():
        of_kinds = _of_two_kinds(group, turns[file])
        turns[file] += 2 * (of_kinds != group)
        out |= set(group) - _with_every_value(of_kinds)
    return out


def _of_two_kinds(cases: list[Any], turn: int) -> list[Any]:
    """Return the cases of two attention types, where all types have the same cases."""
    kinds = list(dict.fromkeys(_values(case).get("kind") for case in cases))
    others = {frozenset(_values(case).items() - {("kind", _values(case).get("kind"))}) for case in cases}
    if len(kinds) <= 2 or len(kinds) * len(others) != len(cases):
        return cases
    keep = kinds[turn % len(kinds)], kinds[(turn + 1) % len(kinds)]
    return [case for case in cases if _values(case)["kind"] in keep]


def _with_every_value(cases: Sequence[Any]) -> set[Any]:
    """Return cases that have every value between them: greedily, and of equals the one whose values are used least."""
    values = {case: _values(case).items() for case in cases}
    used: Counter[Hashable] = Counter()
    kept = set()
    while best := max(
        (case for case in cases if any(value not in used for value in values[case])),
        key=lambda case: (sum(value not in used for value in values[case]), -sum(used[v] for v in values[case])),
        default=None,
    ):
        kept.add(best)
        used.update(values[best])
    return kept


def _values(case: Any) -> dict[str, Hashable]:
    """Return the value of each parameter, as something that can be compared."""
    return {name: (type(value), repr(value)) for name, value in case.callspec.params.items()}
