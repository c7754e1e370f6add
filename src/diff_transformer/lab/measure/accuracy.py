"""Makes records of accuracies, and computes those that are reached without retrieval.

In the retrieval task a sequence's values are drawn independently, so that some occur twice. Whoever knows them all and
no key answers best with the most frequent one: right in E[the largest number of equal values] / N of the cases.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import Any, TypedDict

from torch import Tensor

from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.measure.measurement import EvalInput
from diff_transformer.lab.record import Interval, Result
from diff_transformer.lab.statistics import mean_interval, proportion_interval

BY_SEQUENCE = "Student's t over sequences (Wilson's interval where none differ)"


def share_interval(means: Tensor) -> Interval | None:
    """The interval of a mean of shares, inside 0 … 1; Wilson's where all are 0 or all are 1 and show no spread."""
    if bool((means == means[0]).all()) and float(means[0]) in (0.0, 1.0):
        return proportion_interval(int(means.sum()), len(means))
    interval = mean_interval(means.tolist())
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def ratio_samples(sums: Tensor, counts: Tensor) -> Tensor:
    """For each sequence (n,) a number, so that their mean is Σ `sums` / Σ `counts` and their spread that of this ratio.

    To first order: the ratio plus what the sequence adds to it. Sequences with more counts weigh more, as in the ratio.
    """
    sums, counts = sums.double(), counts.double()
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) * len(counts) / counts.sum()


def share_record(measured: EvalInput, name: str, right: Tensor, coordinates: Coordinates = NOWHERE) -> Result:
    """The share of right answers among `right`, (sequences, answers) boolean, with its interval over sequences.

    It carries no documents: sequences are drawn anew for each seed, so what differs between seeds tells of both.
    """
    values = right.double()
    interval = share_interval(values.mean(1))
    fields = {"interval": interval, "n": values.numel(), "coordinates": coordinates}
    return measured.record(name, values.mean().item(), better="higher", method=BY_SEQUENCE, **fields)


def proportion_record(measured: EvalInput, name: str, right: Sequence[bool], **fields: Any) -> Result:
    """The share of right ones among answers that are independent of each other, with Wilson's interval."""
    interval = proportion_interval(sum(right), len(right))
    return measured.record(name, sum(right) / len(right), interval=interval, n=len(right), better="higher", **fields)


class Levels(TypedDict):
    """The levels of a `Baseline`."""

    chance: float
    floor: float
    by_elimination: float | None


def token_levels(pairs: int, queries: int, values: int, *, repeats: bool = False) -> Levels:
    """Of the accuracy over all queries of the retrieval task, in random order, the right answers to earlier ones in
    view.

    Elimination leaves out the values already given to other keys, and copies the answer to a key that was already
    asked for, where queries are drawn with repeats.
    """
    eliminated = None
    if queries > 1:
        eliminated = fmean(_by_elimination(pairs, queries, values, repeats))
    return Levels(chance=1 / values, floor=most_frequent(pairs, values), by_elimination=eliminated)


def joint_levels(pairs: int, queries: int, values: int) -> Levels:
    """Of the share of sequences whose queries, all different, are all answered right.

    The best answers without binding are the most frequent values one after the other, each as often as it occurs.
    """
    all_right = 0.0
    for counts, share in _partitions_drawn(pairs, values):
        ways = sorted((occurrences for count in counts for occurrences in range(1, count + 1)), reverse=True)
        all_right += share * math.prod(ways[:queries]) / math.perm(pairs, queries)
    return Levels(chance=values**-queries, floor=all_right, by_elimination=None)


def text_levels(needles: int, queried: int, digits: int, *, joint: bool = False) -> Levels:
    """Of needles in text: an answer that lists as many of the context's numbers as are asked for, at random. `joint` is
    whether all numbers of a question have to be right."""
    floor = 1 / math.comb(needles, queried) if joint else queried / needles
    guess = 1 / (9 * 10 ** (digits - 1))  # the first digit is not 0
    return Levels(chance=guess**queried if joint else guess, floor=max(floor, guess), by_elimination=None)


@cache
def most_frequent(drawn: int, values: int) -> float:
    """E[the largest number of equal ones among so many independent draws] / draws."""
    return sum(share * counts[0] for counts, share in _partitions_drawn(drawn, values)) / drawn


def _by_elimination(pairs: int, queries: int, values: int, repeats: bool) -> Iterator[float]:
    """The accuracy of each query: those left are again independent draws, one for each key not asked for so far."""
    likelihoods = {0: 1.0}  # how many different keys were asked for → how likely that is
    for _ in range(queries):
        seen = {count: count / pairs if repeats else 0.0 for count in likelihoods}
        yield math.fsum(
            share * (seen[count] + (1 - seen[count]) * (most_frequent(pairs - count, values) if count < pairs else 0.0))
            for count, share in likelihoods.items()
        )
        after: dict[int, float] = {}
        for count, share in likelihoods.items():
            for new, part in ((count, seen[count]), (count + 1, 1 - seen[count])):
                if part:
                    after[new] = after.get(new, 0.0) + share * part
        likelihoods = after


def _partitions_drawn(drawn: int, values: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """How often each value occurs among independent draws, largest first, and how likely that is."""
    for counts in _partitions(drawn, drawn):
        ways = math.factorial(drawn) // math.prod(map(math.factorial, counts))
        choices = math.perm(values, len(counts)) // math.prod(map(math.factorial, Counter(counts).values()))
        yield counts, ways * choices / values**drawn


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for others in _partitions(total - first, first):
            yield (first, *others)
