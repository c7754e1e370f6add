"""Records that no measurement gives: an arm's sizes, and what is missing of a run that diverged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.experiments.fairness import Counts
from diff_transformer.experiments.framework import Arm
from diff_transformer.results import Result


def size_records(arm: Arm, sizes: Counts) -> list[Result]:
    """How many parameters an arm has, with and without λ and norms."""
    names = {"training/parameters": sizes.total, "training/parameters_without_lambda_and_norms": sizes.shared}
    return [Result(name=name, arm=arm.name, group=arm.group, value=float(value)) for name, value in names.items()]


def lost_records(arm: Arm, seed: int, measured: Mapping[Arm, Sequence[Result]]) -> list[Result]:
    """NaN in place of every number that another arm has: a run that diverged is seen everywhere.

    Another arm of its group; where all of that diverged, one of another group, of whose numbers those are taken that
    are of the group as a whole.
    """
    like = next((other for other in measured if other.group == arm.group), None)
    if like is not None:
        template = list(measured[like])
    else:
        pairs = [(other, record) for other in list(measured)[:1] for record in measured[other]]
        template = [replace(record, group=arm.group) for other, record in pairs if record.group == other.group]
    lost: dict[str, Any] = {"value": math.nan, "interval": None, "documents": (), "n": None}
    return [replace(record, arm=arm.name, seed=seed, **lost) for record in template]
