"""Says in plain words what a report found: what holds, what does not, what is open, and how sure that is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diff_lab.learning import (
    ACCURACY_CURVE,
    StepsRatio,
    VariantCurves,
    curves_of_one_rate,
    reported_accuracies,
    steps_ratio,
)
from diff_lab.record import Comparison, Verdict
from diff_lab.report import wording
from diff_lab.report.experiment_tables import ExperimentResults, name_in_report
from diff_lab.report.learning_tables import ratio_text
from diff_lab.statistics import holm, p_value

# In the order of the report.
_TITLES: dict[Verdict, str] = {
    "reproduced": "Holds at this size and length of training",
    "contrary": "Does not hold: the other variant is ahead",
    "inconclusive": "Open: the interval holds 0, or is not known",
    "still learning": "Open: training ended while one of the two was still learning",
    "not comparable": "Not comparable: one of the two is not shown to have begun to learn",
}
LEVEL = 0.05  # of a test
_SOONER = "How soon: the steps that one variant needs, divided by the other's"


@dataclass(frozen=True)
class Finding:
    """One sentence of the summary, and the experiment that it is about, with its name in the report.

    `standing` says who is ahead, where that is all that is known: "DIFF is ahead so far".
    """

    results: ExperimentResults
    name: str
    sentence: str
    standing: str = ""


@dataclass(frozen=True)
class Findings:
    """Findings with one verdict, or of how soon variants learn, which has none, under a title."""

    title: str
    verdict: Verdict | None
    findings: tuple[Finding, ...]

    @property
    def are_decided(self) -> bool:
        """Whether the intervals say which variant is ahead, of variants that have learned."""
        return self.verdict in ("reproduced", "contrary")

    @property
    def by_standing(self) -> dict[str, list[Finding]]:
        """The findings by who is ahead; under "" where nobody is said to be."""
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.standing, []).append(finding)
        return found


def summary(all_results: Sequence[ExperimentResults]) -> list[Findings]:
    """The comparison that each experiment is about, by verdict, and how soon the two variants learn; no empty part.

    Experiments of which no comparison stands for the whole have no sentence.
    """
    rows = [(results, results.headline) for results in all_results if results.file.headline is not None]
    parts = [
        Findings(
            title,
            verdict,
            tuple(
                _finding(results, row, all_results)
                for results, row in rows
                if row is not None and row.verdict == verdict
            ),
        )
        for verdict, title in _TITLES.items()
    ]
    parts.append(Findings(_SOONER, None, tuple(_speeds(all_results))))
    return [part for part in parts if part.findings]


def corrected(
    all_results: Sequence[ExperimentResults],
) -> tuple[int, list[tuple[float, ExperimentResults, Comparison]]]:
    """Find the comparisons that stand for an experiment and have a small p after Holm's correction.

    Returns:
        For how many comparisons it corrects, and those that are left with their p, the smallest first.
    """
    rows = [(results, results.headline) for results in all_results if results.file.headline is not None]
    tested = [(results, row, p) for results, row in rows if row is not None and (p := p_value(row)) is not None]
    all_p = holm([p for _, _, p in tested])
    left = [(p, results, row) for p, (results, row, _) in zip(all_p, tested, strict=True) if p < LEVEL]
    return len(tested), sorted(left, key=lambda one: one[0])


def certainty(all_results: Sequence[ExperimentResults]) -> str:
    """How many seeds and how large models the findings are of, and how many comparisons they were picked from."""
    trained = [variant for results in all_results for variant in results.variants]
    judged = sum(row.verdict is not None for results in all_results for row in results.file.comparisons)
    if not trained or not judged:
        return ""
    seeds = {len(row.differences) for results in all_results for row in results.file.comparisons if row.differences}
    sizes = [variant["parameters"] for variant in trained]
    return (
        f"The models have {_range(min(sizes), max(sizes))} parameters and the comparisons "
        f"{_range(min(seeds), max(seeds))} seeds, so they say nothing of large models. The definition of each "
        f"experiment names the one comparison that stands for it above, out of {judged:,} with a verdict. "
        f"{wording.UNCORRECTED}{_correction(all_results)}"
    )


def _correction(all_results: Sequence[ExperimentResults]) -> str:
    """What is left of several comparisons that stand for an experiment."""
    tested, left = corrected(all_results)
    if tested < 2:
        return ""
    names = [f"{name_in_report(results, all_results)} ({p:.3f})" for p, results, _ in left]
    where = f"{' and '.join(names)} alone" if names else "none of them"
    return f" After Holm's correction for the {tested} named comparisons p is below {LEVEL} in {where}."


def _finding(results: ExperimentResults, row: Comparison, all_results: Sequence[ExperimentResults]) -> Finding:
    standing = wording.so_far(row) if row.verdict == "still learning" else ""
    return Finding(results, name_in_report(results, all_results), _sentence(results, row), standing)


def _sentence(results: ExperimentResults, row: Comparison) -> str:
    """The claim, the two values, their difference, and what limits the verdict."""
    headline = results.file.headline
    assert headline is not None
    # Where the named comparison has no verdict, another one stands for the experiment.
    claim = (headline.claim if headline.names(row) else "") or _claim(row)
    text = f"{claim}: {' against '.join(map(wording.format_number, row.ours))}{row.unit and f' {row.unit}'}"
    if row.verdict != "not comparable":
        text += f", {wording.format_difference(row, results.variants)}"
    limits = wording.verdict_limits(row)
    return f"{text} ({limits})." if limits else f"{text}."


def _claim(row: Comparison) -> str:
    """Of a comparison that no sentence was written for."""
    part = f", {row.coordinates.label}" if row.coordinates else ""
    number = f"a {row.better or 'different'} {wording.measure_words(row.name)}{part}"
    return f"{wording.variant_label(row.variant)} has {number} than {wording.with_article(row.against)}"


def _speeds(all_results: Sequence[ExperimentResults]) -> Iterator[Finding]:
    """A sentence for each two variants of one learning rate that an experiment is about, and each size; runs that
    experiments share once.
    """
    seen: set[tuple[tuple[float, ...], ...]] = set()
    for results in all_results:
        row = results.headline
        if results.file.headline is None or row is None:
            continue
        levels = reported_accuracies(results.file.baselines)
        for first, second in curves_of_one_rate(results.file):
            if (first.variant, second.variant) != (row.variant, row.against):
                continue
            ratio = steps_ratio(first, second, max(levels, default=None) if first.name == ACCURACY_CURVE else None)
            if ratio is None or not math.isfinite(ratio.ratio) or ratio.steps in seen:
                continue
            seen.add(ratio.steps)
            yield Finding(results, name_in_report(results, all_results), _speed(first, second, ratio))


def _speed(first: VariantCurves, second: VariantCurves, ratio: StepsRatio) -> str:
    size = f" ({first.coordinates.label})" if first.coordinates else ""
    what = "accuracy" if first.name == ACCURACY_CURVE else "loss"
    target = f"a validation {what} of {wording.format_number(ratio.level)}"
    if ratio.level_of:
        target += f", with which {wording.with_article(ratio.level_of)} ends"
    return (
        f"{wording.variant_label(first.variant)} / {wording.variant_label(second.variant)}{size}, to {target}: "
        f"{ratio_text(ratio)}."
    )


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
