"""Sets out what validation curves say: how each variant ends, and how many steps it takes to get somewhere."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from diff_lab.learning import (
    ACCURACY_CURVE,
    StepsRatio,
    VariantCurves,
    curves_of,
    curves_of_one_rate,
    reported_accuracies,
    steps_ratio,
)
from diff_lab.record import ResultsFile
from diff_lab.report import wording
from diff_lab.report.documents import Table
from diff_lab.statistics import mean_interval

STEPS = (
    "Steps are the mean over seeds; between two validations a curve is taken for a line. A ratio is the geometric mean "
    "over paired seeds, with Student's t over the logarithms: below 1 the first variant needs fewer steps. Where only "
    "one variant gets there, the other would need more than its whole training, and one that is there at its first "
    "validation may have needed fewer steps: the ratio is a bound then. Before its end a training has a higher "
    "learning rate than one that ends there would have. Two variants with different learning rates have no ratio: it "
    "would be one of the rates as well."
)
# Of curves with too few validations.
TOO_FEW = (
    "Where it is not known whether a variant has levelled off, though no run diverged, validations are too few to "
    "tell: verdicts on accuracies and losses are then about the moment at which training ended."
)
# Of results with runs and without their curves.
NO_CURVES = (
    "These results hold no validation curves: what they say of accuracies and losses is about the moment at which "
    "training ended."
)


def ends_table(file: ResultsFile) -> Table | None:
    """A row for each variant: its final validation, whether it has levelled off, and the steps to each accuracy that is
    reported. None where the file holds no curves.
    """
    curves = curves_of(file.records)
    if not curves:
        return None
    columns = {"Variant": [wording.variant_label(one.variant) for one in curves]}
    if any(one.coordinates for one in curves):
        columns["Part"] = [one.coordinates.label or "–" for one in curves]
    columns["Steps"] = [f"{one.steps:,}" for one in curves]
    columns["Seeds"] = [str(len(one.by_seed)) for one in curves]
    columns["Ends at"] = list(map(_final, curves))
    columns["Gain in the last fifth"] = list(map(_last_change, curves))
    words = {True: "yes", False: "no", None: wording.NOT_KNOWN}
    columns["Levelled off"] = [words[one.has_levelled_off] for one in curves]
    if any(one.name == ACCURACY_CURVE for one in curves):
        for level in reported_accuracies(file.baselines):
            needed = ([curve.steps_to(level) for curve in one.by_seed.values()] for one in curves)
            columns[f"Steps to {level:g}"] = [
                "–" if one.name != ACCURACY_CURVE else steps_text(steps, one)
                for one, steps in zip(curves, needed, strict=True)
            ]
    too_few = any(one.has_levelled_off is None and all(map(math.isfinite, one.finals)) for one in curves)
    return Table.of_columns(columns, title="How each variant ends", caption=TOO_FEW if too_few else "")


def ratios_table(file: ResultsFile) -> Table | None:
    """A row for each level and each two variants that are compared: the steps of both, and their ratio. None where no
    two variants of one learning rate have curves, or validation accuracies have no level to reach.
    """
    accuracies = reported_accuracies(file.baselines)
    rows = [
        (first, second, ratio)
        for first, second in curves_of_one_rate(file)
        for ratio in _ratios(first, second, accuracies)
    ]
    if not rows:
        return None
    columns = {"First / second": [wording.pair_of(one.variant, other.variant, " / ") for one, other, _ in rows]}
    if any(one.coordinates for one, *_ in rows):
        columns["Part"] = [one.coordinates.label or "–" for one, *_ in rows]
    columns["To reach"] = [_target(one, ratio) for one, _, ratio in rows]
    columns["Steps of the first"] = [steps_text(ratio.steps[0], one) for one, _, ratio in rows]
    columns["Steps of the second"] = [steps_text(ratio.steps[1], other) for _, other, ratio in rows]
    columns["Ratio"] = [ratio_text(ratio) for *_, ratio in rows]
    return Table.of_columns(columns, title="Steps to reach the same", caption=STEPS)


def _ratios(first: VariantCurves, second: VariantCurves, accuracies: Sequence[float]) -> Iterator[StepsRatio]:
    """Of each accuracy that is reported, or of the worse one of two final losses."""
    for level in accuracies if first.name == ACCURACY_CURVE else (None,):
        ratio = steps_ratio(first, second, level)
        if ratio is not None:
            yield ratio


def steps_text(steps: Sequence[float], curves: VariantCurves) -> str:
    """The mean over seeds: "640", "640 (2 of 3 seeds)", "at most 250" at the first validation, "not within 1,000"."""
    reached = [one for one in steps if math.isfinite(one)]
    if len(reached) < len(steps) and not all(map(math.isfinite, curves.finals)):
        return wording.DIVERGED
    if not reached:
        return f"not within {curves.steps:,}"
    is_early = any(curve.steps[0] in steps for curve in curves.by_seed.values())
    mean = f"{'at most ' if is_early else ''}{fmean(reached):,.0f}"
    return mean if len(reached) == len(steps) else f"{mean} ({len(reached)} of {len(steps)} seeds)"


def ratio_text(ratio: StepsRatio) -> str:
    """The ratio with its interval, or what is known of it: "less than 0.31"."""
    if not math.isfinite(ratio.ratio):
        reached = [any(map(math.isfinite, steps)) for steps in ratio.steps]
        return wording.NOT_KNOWN if any(reached) else "neither"
    if ratio.bound is not None:
        is_below = ratio.bound == "below"
        outward = (math.ceil if is_below else math.floor)(round(ratio.ratio * 100, 6)) / 100
        seeds = "" if len(ratio.steps[0]) < 2 else ", no interval"
        return f"{'less' if is_below else 'more'} than {wording.format_number(outward, 2)}{seeds}"
    value = wording.format_number(ratio.ratio, 2)
    if ratio.interval is None:
        return f"{value}, one seed"
    low, high = (wording.format_number(end, 2) for end in ratio.interval)
    return f"{value} [{low}, {high}]"


def _target(first: VariantCurves, ratio: StepsRatio) -> str:
    if ratio.level_of is None:
        return f"accuracy {ratio.level:g}"
    what = "loss" if first.name != ACCURACY_CURVE else "accuracy"
    value = wording.format_number(ratio.level)
    if not ratio.level_of:
        return f"{what} {value}, the worse final one of each seed"
    return f"{what} {value}, with which {wording.with_article(ratio.level_of)} ends"


def _final(curves: VariantCurves) -> str:
    if not all(map(math.isfinite, curves.finals)):
        return wording.DIVERGED
    interval = mean_interval(curves.finals)
    mean = wording.format_number(fmean(curves.finals))
    what = "accuracy" if curves.name == ACCURACY_CURVE else "loss"
    ends = "" if interval is None else " [{}, {}]".format(*map(wording.format_number, interval))
    return f"{what} {mean}{ends}"


def _last_change(curves: VariantCurves) -> str:
    change = curves.last_change()
    if change is None:
        return wording.NOT_KNOWN
    text = f"{change:+.3f}" if curves.name == ACCURACY_CURVE else f"{100 * change:+.1f} %"
    return text.replace("-", "−")
