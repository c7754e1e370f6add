"""Shares of right answers as records: means over sequences, whose answers share a context."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.results import Interval, Result, mean_interval, proportion_interval

BY_SEQUENCE = "Student's t over sequences (Wilson's interval where none differ)"


def share_interval(means: Tensor) -> Interval | None:
    """The interval of a mean of shares, inside 0 … 1; Wilson's where all are 0 or all are 1 and show no spread."""
    if bool((means == means[0]).all()) and float(means[0]) in (0.0, 1.0):
        return proportion_interval(int(means.sum()), len(means))
    interval = mean_interval(means.tolist())
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def share_record(name: str, right: Tensor, **shared: Any) -> Result:
    """The share of right answers among `right`, (sequences, answers) boolean, with its interval.

    It carries no documents: sequences are drawn anew for each seed, so what differs between seeds tells of both.

    Args:
        name: of the record.
        right: the answers; those of a sequence depend on each other.
        shared: other fields of the record.
    """
    values = right.double()
    return Result(
        name=name,
        value=values.mean().item(),
        interval=share_interval(values.mean(1)),
        n=values.numel(),
        better="higher",
        method=BY_SEQUENCE,
        **shared,
    )


def joint(right: Tensor) -> Tensor:
    """Whether all answers of a sequence are right: (sequences, answers) → (sequences, 1) boolean."""
    return torch.as_tensor(right).all(1, keepdim=True)
