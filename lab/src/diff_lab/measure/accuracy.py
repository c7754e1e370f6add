"""Makes records of accuracies, and computes those that are reached without retrieval."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.measure.measurement import EvalInput
from diff_lab.record import Interval, Result
from diff_lab.statistics import mean_interval, proportion_interval

BY_SEQUENCE = "Student's t over sequences (Wilson's interval where none differ)"


def share_interval(means: Tensor) -> Interval | None:
    """Return the interval of a mean of shares, inside 0 … 1; Wilson's if all are 0 or all are 1 and show no spread."""
    if bool((means == means[0]).all()) and float(means[0]) in (0.0, 1.0):
        return proportion_interval(int(means.sum()), len(means))
    interval = mean_interval(means.tolist())
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def ratio_samples(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a number for each sequence (n,), with the mean Σ `sums` / Σ `counts` and, to first order, its spread."""
    sums, counts = sums.double(), counts.double()
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) * len(counts) / counts.sum()


def share_record(measured: EvalInput, name: str, right: Tensor, coordinates: Coordinates = NO_COORDINATES) -> Result:
    """Return the share of right answers, (sequences, answers) boolean, with its interval over sequences."""
    values = right.double()
    interval = share_interval(values.mean(1))
    fields = {"interval": interval, "n": values.numel(), "coordinates": coordinates}
    return measured.record(name, values.mean().item(), better="higher", method=BY_SEQUENCE, **fields)


def proportion_record(measured: EvalInput, name: str, right: Sequence[bool], **fields: Any) -> Result:
    """Return the share of right ones among answers that are independent of each other, with Wilson's interval."""
    interval = proportion_interval(sum(right), len(right))
    return measured.record(name, sum(right) / len(right), interval=interval, n=len(right), better="higher", **fields)


def token_levels(pairs: int, queries: int, values: int, *, repeats: bool = False) -> dict[str, Any]:
    """Return the levels of the retrieval task over all queries in random order, with earlier right answers in view.

    Elimination leaves out the values already given to other keys, and copies the answer to a key asked for before.
    """
    eliminated = fmean(_by_elimination(pairs, queries, values, repeats)) if queries > 1 else None
    return {"chance": 1 / values, "floor": most_frequent(pairs, values), "by_elimination": eliminated}


def _by_elimination(pairs: int, queries: int, values: int, repeats: bool) -> Iterator[float]:
    """Yield the accuracy of each query: the values left are independent draws, one for each key not asked for yet."""
    blind = [0.0, *(most_frequent(left, values) for left in range(1, pairs + 1))]  # by how many keys are left
    likelihoods = {0: 1.0}  # how many different keys were asked for → how likely that is
    for _ in range(queries):
        seen = {count: count / pairs if repeats else 0.0 for count in likelihoods}
        yield math.fsum(
            share * (seen[count] + (1 - seen[count]) * blind[pairs - count]) for count, share in likelihoods.items()
        )
        after: dict[int, float] = {}
        for count, share in likelihoods.items():
            for new, part in ((count, seen[count]), (count + 1, 1 - seen[count])):
                if part:
                    after[new] = after.get(new, 0.0) + share * part
        likelihoods = after
