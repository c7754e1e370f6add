"""Two arms compared over the seeds that both have, and the verdict on the paper's claim, by a rule fixed beforehand."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from diff_transformer.results.intervals import bootstrap_interval, mean_interval, t_quantile
from diff_transformer.results.records import Better, Claimant, Comparison, Interval, Result, Verdict

SEEDS = "Student's t over paired seeds"
DOCUMENTS = "bootstrap over paired documents"
BOTH = f"{SEEDS} and {DOCUMENTS}, half widths added in squares"
# More seeds than anyone will train.
MOST_SEEDS = 10_000


def compare(
    records: Sequence[Result],
    name: str,
    arm: str,
    against: str,
    *,
    group: str | None = None,
    paper: tuple[float, float] | None = None,
    claimed: bool = True,
    claimed_by: Claimant = "paper",
) -> Comparison:
    """Compare two arms in a measure, over the seeds for which both have a record.

    The interval of the mean difference is Student's over seeds. Where the records carry documents, it also allows for
    other documents: a bootstrap over them, with the mean of all seeds for each, is added in squares, which is a little
    too wide, as what a seed does to a document counts in both. With one seed it is the bootstrap alone, and the
    verdict stays open: other documents say nothing about other seeds.

    Args:
        records: of all arms and seeds.
        name: the measure.
        arm: the one that is claimed to be better.
        against: the other one.
        group: the part measured.
        paper: the paper's values of `arm` and `against`, NaN where it gives none.
        claimed: whether anything is claimed; if not, there is a difference and no verdict.
        claimed_by: whose claim it is.

    Raises:
        ValueError: the arms have no seed in common, two records of one seed, or no direction for a claim.
    """
    first, second = (_by_seed(records, name, one, group) for one in (arm, against))
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        part = f" of {group}" if group is not None else ""
        raise ValueError(f"{name}{part} was not measured in both {arm!r} and {against!r} for any seed")
    pairs = [(first[seed], second[seed]) for seed in seeds]
    better = pairs[0][0].better if claimed else None
    if claimed and better is None:
        raise ValueError(f"{name} has no better direction, so nothing can be claimed of it")
    differences = tuple(one.value - other.value for one, other in pairs)
    difference, interval, method = fmean(differences), mean_interval(differences), SEEDS if len(seeds) > 1 else ""
    over_seeds, other_documents = interval, 0.0
    if all(record.documents for pair in pairs for record in pair):
        documents = [_over_seeds([pair[side] for pair in pairs]) for side in (0, 1)]
        drawn = bootstrap_interval(*documents)
        other_documents = abs(drawn[0 if difference > 0 else 1] - difference)  # the half that may reach 0
        interval, method = (drawn, DOCUMENTS) if interval is None else (_added(difference, interval, drawn), BOTH)
    judged = None if better is None else verdict(interval, better, seeds=len(seeds))
    too_few_documents = judged == "inconclusive" and len(seeds) > 1 and other_documents > 0
    if too_few_documents and better is not None:
        decided = verdict(over_seeds, better, seeds=len(seeds)) != "inconclusive"
        too_few_documents = decided or other_documents >= abs(difference)
    needed = None
    if judged == "inconclusive" and not too_few_documents:
        needed = seeds_needed(differences, other_documents)
        # A bootstrap's halves differ, so that by one of them the seeds there are may seem to be enough.
        needed = needed if needed is not None and needed > len(seeds) else None
    return Comparison(
        name=name,
        arm=arm,
        against=against,
        group=group,
        unit=pairs[0][0].unit,
        better=better,
        paper=paper,
        ours=(fmean(one.value for one, _ in pairs), fmean(other.value for _, other in pairs)),
        differences=differences,
        difference=difference,
        interval=interval,
        method=method,
        verdict=judged,
        seeds_needed=needed,
        documents_needed=too_few_documents,
        claimed_by=claimed_by,
    )


def remark_on_seeds(comparisons: Sequence[Comparison]) -> str | None:
    """What a reader must know of verdicts over one or two seeds; None where every verdict is over more."""
    fewest = min((len(row.differences) for row in comparisons if row.verdict is not None), default=MOST_SEEDS)
    if fewest > 2:
        return None
    if fewest < 2:
        return "Verdicts on one seed are inconclusive by the rule, whatever came out: it tells nothing of other seeds."
    # Half the width is t s / √2, and s = |d₁ − d₂| / √2.
    return (
        f"With two seeds Student's t is {t_quantile(1):.1f}, so little can be decided: only a mean difference more "
        f"than {t_quantile(1) / 2:.1f} times as large as what the two seeds' differences are apart."
    )


def verdict(interval: Interval | None, better: Better, *, seeds: int) -> Verdict:
    """The rule: whether the 95 % interval of a difference, claimed better − other, lies on the claim's side of 0.

    Args:
        interval: None where nothing is known of the spread.
        better: whether a positive or a negative difference is the claim's.
        seeds: how many the interval is over; with one, the verdict is "inconclusive" whatever the interval.
    """
    if interval is None or seeds < 2:
        return "inconclusive"
    low, high = interval if better == "higher" else (-interval[1], -interval[0])
    return "reproduced" if low > 0 else "contrary" if high < 0 else "inconclusive"


def seeds_needed(differences: Sequence[float], other: float = 0.0, power: float = 0.8) -> int | None:
    """With how many paired seeds a t-test at 5 % (two sides) finds a difference of this size and spread.

    The mean and the standard deviation of `differences` are taken for the true ones, which for two or three of them
    is a rough guess.

    Args:
        differences: one for each seed so far.
        other: half the width of an interval, added in squares, that more seeds do not make narrower.
        power: in which share of experiments it is to be found.

    Returns:
        2 or more; None where the spread is not known, the difference is not finite or not larger than `other`, or the
        number would be above 10,000.
    """
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    mean, spread = abs(fmean(differences)), stdev(differences)
    if mean <= other:
        return None
    if spread == 0:
        return 2
    effect, floor = mean / spread, other / spread
    low, high = 1, 2  # too few, enough
    while _power(effect, high, floor) < power:
        low, high = high, 2 * high
        if high > 2 * MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(effect, middle, floor) >= power else (middle, high)
    return high if high <= MOST_SEEDS else None


def _power(effect: float, seeds: int, floor: float = 0.0) -> float:
    """How often a t-test over `seeds` pairs finds a difference of `effect` standard deviations, on its own side.

    That is P(Z + effect √n > √(t² U² + floor² n)) with Z normal and U = √(χ²ᵥ / ν), ν = n − 1: an integral over U, by
    Simpson's rule where its density is not negligible. `floor` is half the width, in standard deviations, of an
    interval that does not shrink with n.
    """
    df = seeds - 1
    shift, threshold, normal = effect * math.sqrt(seeds), t_quantile(df), NormalDist()
    beside = floor * math.sqrt(seeds)
    scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    low, high = max(0.0, 1 - 8 / math.sqrt(2 * df)), 1 + 8 / math.sqrt(2 * df)
    steps = 400
    width = (high - low) / steps
    total = 0.0
    for index in range(steps + 1):
        u = low + index * width
        if u == 0:
            density = math.exp(scale) if df == 1 else 0.0
        else:
            density = math.exp(scale + (df - 1) * math.log(u) - df * u * u / 2)
        weight = 1 if index in (0, steps) else 4 if index % 2 else 2
        total += weight * density * normal.cdf(shift - math.hypot(threshold * u, beside))
    return total * width / 3


def _by_seed(records: Sequence[Result], name: str, arm: str, group: str | None) -> dict[int | None, Result]:
    found: dict[int | None, Result] = {}
    for record in records:
        if (record.name, record.arm, record.group) == (name, arm, group):
            if record.seed in found:
                raise ValueError(f"{name} of {arm!r} was measured twice for seed {record.seed}")
            found[record.seed] = record
    return found


def _over_seeds(records: Sequence[Result]) -> list[tuple[float, float]]:
    """The documents of several seeds together: sums and counts added, document by document."""
    return [
        (math.fsum(sums for sums, _ in document), math.fsum(counts for _, counts in document))
        for document in zip(*(record.documents for record in records), strict=True)
    ]


def _added(centre: float, first: Interval, second: Interval) -> Interval:
    """Two intervals around one centre as one, for causes that are independent of each other."""
    low, high = (math.hypot(first[end] - centre, second[end] - centre) for end in (0, 1))
    return (centre - low, centre + high)
