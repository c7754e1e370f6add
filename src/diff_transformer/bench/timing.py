"""Alternated runs: every candidate runs once a round, so that a drift of the machine meets all of them alike."""

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diff_transformer.bench.clock import Clock

# A sample repeats a fast candidate until it takes about so long: clocks and calls cost microseconds.
SAMPLE_SECONDS = 0.005
# Rounds, unless told: so many that each candidate has run for about so long, within these ends.
CANDIDATE_SECONDS = 0.3
LEAST_ROUNDS, MOST_ROUNDS = 5, 25


@dataclass(frozen=True)
class Spread:
    """The median of some values, and how far they lie apart."""

    median: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles and extremes of two values or more."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, (low, high), (min(values), max(values)))


def check_rounds(rounds: int | None) -> None:
    """Raises ValueError for fewer rounds than a median with a spread needs."""
    if rounds is not None and rounds < LEAST_ROUNDS:
        raise ValueError(f"the number of rounds must be {LEAST_ROUNDS} or more, got {rounds}.")


def alternate(
    candidates: Mapping[str, Callable[[], object]], clock: Clock, rounds: int | None = None
) -> dict[str, list[float]]:
    """Seconds of one run of each candidate, one value a round; the order rotates from round to round.

    The values of one round belong together: a ratio is formed within a round, and its median taken over the rounds.

    Args:
        candidates: functions without arguments, each of which has run before (what a first run costs is not timed).
        clock: what the seconds are measured by.
        rounds: how many, or None for 5 to 25, the more the shorter a run is.
    """
    check_rounds(rounds)
    once = {name: clock(run, 1) for name, run in candidates.items()}
    repeats = {name: max(1, math.ceil(SAMPLE_SECONDS / seconds)) for name, seconds in once.items()}
    if rounds is None:
        longest = max(once[name] * repeats[name] for name in candidates)
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(CANDIDATE_SECONDS / longest)))
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    # A collection in the middle of a run would be charged to whoever runs then.
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(clock(candidates[name], repeats[name]))
    finally:
        if collects:
            gc.enable()
    return times
