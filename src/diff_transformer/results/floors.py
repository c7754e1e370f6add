"""Whether variants have learned enough to be compared: the second half of the verdict's rule.

The first half (`results.verdict`) looks at a difference alone. A difference of two accuracies tells which variant
learned more only where at least one of them learned something: one that guesses, or knows which answers occur and not
where they belong, has not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from diff_transformer.results.intervals import mean_interval
from diff_transformer.results.records import Baseline, Comparison, Result, ResultsFile


def judge(file: ResultsFile) -> ResultsFile:
    """Put each comparison beside its baseline, and take back the verdicts that mean nothing.

    A variant is above a level where all of the 95 % interval of its accuracy is. Of two accuracies the verdict stays
    where at least one variant is above every level of the baseline, and `at_floor` and `at_elimination` name the other
    one if it is not; with none above, it becomes "not comparable". What is not an accuracy itself is "not comparable"
    as soon as one of the two is not above.

    Args:
        file: with its baselines; comparisons without one stay as they are.
    """
    known = {(baseline.name, baseline.group): baseline for baseline in file.baselines}
    return replace(
        file,
        comparisons=tuple(
            row if (row.name, row.group) not in known else _judged(row, known[row.name, row.group], file.records)
            for row in file.comparisons
        ),
    )


def _judged(row: Comparison, baseline: Baseline, records: Sequence[Result]) -> Comparison:
    at_floor, at_elimination = [], []
    for arm in (row.arm, row.against):
        low = lower_end([record for record in records if record.arm == arm and _is_accuracy_of(record, baseline)])
        if low is not None and low <= baseline.floor:
            at_floor.append(arm)
        elif low is not None and baseline.by_elimination is not None and low <= baseline.by_elimination:
            at_elimination.append(arm)
    found = replace(row, baseline=baseline, at_floor=tuple(at_floor), at_elimination=tuple(at_elimination))
    low_arms = len(at_floor) + len(at_elimination)
    if baseline.is_accuracy:
        is_void = low_arms == 2 and row.verdict is not None
    else:
        is_void = low_arms > 0
    if not is_void:
        return found
    # Results of earlier versions claim nothing at all where a variant guesses, and so have no direction.
    better = row.better or next(record.better for record in records if record.name == row.name)
    return replace(found, verdict="not comparable", better=better, seeds_needed=None, documents_needed=False)


def _is_accuracy_of(record: Result, baseline: Baseline) -> bool:
    if baseline.accuracy is None:
        return (record.name, record.group) == (baseline.name, baseline.group)
    return (record.name, record.group) == (baseline.accuracy, baseline.accuracy_group)


def lower_end(records: Sequence[Result]) -> float | None:
    """The lower end of the 95 % interval of one variant's mean over seeds; None where it is not known.

    It allows for other seeds (Student's t) and, where every record has an interval of its own, for other questions than
    those that were asked: the half widths are added in squares, as `results.compare` does. One seed tells nothing of
    others.

    Args:
        records: of one variant and measure, one for each seed.
    """
    values = [record.value for record in records]
    over_seeds = mean_interval(values) if values and all(map(math.isfinite, values)) else None
    if over_seeds is None:
        return None
    own = [record.value - record.interval[0] for record in records if record.interval is not None]
    measured = math.hypot(*own) / len(own) if len(own) == len(values) else 0.0
    return fmean(values) - math.hypot(fmean(values) - over_seeds[0], measured)
