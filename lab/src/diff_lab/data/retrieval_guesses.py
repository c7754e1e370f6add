"""Computes the accuracies that are reached in the retrieval task by guessing among the values of the context.

A sequence's values are drawn independently, so that some occur twice. Whoever knows them all and no key answers best
with the most frequent one: right in E[the largest number of equal values] / N of the cases.
"""

import itertools
import math
from functools import cache

import numpy as np


def most_frequent(drawn: int, values: int) -> float:
    """E[the largest number of equal ones among so many independent draws] / draws."""
    return float(right_ways(drawn, values, 1)[drawn]) / drawn


@cache
def right_ways(most_drawn: int, values: int, answers: int) -> np.ndarray:
    """For 0 … `most_drawn` independent draws, the expected number of ways in which the most frequent values are right
    as the answers to so many different draws: (most_drawn + 1,).

    A value that was drawn c times is right in c ways, given again in c − 1, down to 1. So a value that was drawn t
    times or more stands once for each of t, t − 1, … 1, and the answers are the largest of all these numbers. The sum
    over all draws goes through t from above. How often each value was drawn counts as if it were Poisson's, which is
    the same where the total is known, and keeps the numbers within the range of floats up to 1,900 draws.
    """
    drawn = np.arange(most_drawn + 1)
    mean = max(most_drawn, 1) / math.e / values
    # Of each number of values drawn t times or more, of draws that are theirs, and of answers given.
    weights = np.zeros((1, most_drawn + 1, answers + 1))
    weights[0, 0, 0] = 1
    for t in range(most_drawn, 0, -1):
        before, most = weights, min(values, most_drawn // t)
        weights = np.zeros((most + 1, most_drawn + 1, answers + 1))
        likelihood = t * math.log(mean) - math.lgamma(t + 1)
        for old, new in itertools.combinations_with_replacement(range(most + 1), 2):
            if old >= len(before):
                break
            more = new - old
            chosen = math.exp(math.log(math.comb(values - old, more)) + more * likelihood)
            reached = before[old, : most_drawn + 1 - more * t] * chosen
            for given in range(answers + 1):
                now = min(answers, given + new)
                weights[new, more * t :, now] += reached[:, given] * float(t) ** (now - given)
    log_total = np.array([math.lgamma(n + 1) - n * math.log(mean * values) for n in drawn])
    return weights.sum((0, 2)) * np.exp(log_total)
