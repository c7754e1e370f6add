"""Compares losses by size (Figure 3), and at learning rates that are not the best."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import ComparisonRule, Preset, by_name, compared_by, rules
from diff_lab.measure.document_losses import AR_HIT, OTHER, WHOLE
from diff_lab.measure.standard import GUESS, LANGUAGE_LOSS
from diff_lab.record import Comparison, Interval, Result
from diff_lab.statistics import FURTHEST, fits, t_quantile, verdict


def ratio_interval(sizes: np.ndarray, losses: np.ndarray, *, resamples: int = 1000) -> Interval | None:
    """Return the 95 % interval of :meth:`Fit.equal_loss_ratio` by a bootstrap over seeds: losses (K, 2, S), sizes (S,).

    Seeds are drawn for each size by itself, the same for both variants, as those share their data. Few seeds vary less
    among themselves than all would, so the draws are spread by √(K/(K − 1)), and by Student's t over the normal
    quantile for the S·(K − 1) degrees of freedom that S sizes of K seeds have. None for one seed, or if more than one
    in forty of the drawn fits has no ratio.
    """
    seeds = len(losses)
    if seeds < 2:
        return None
    random = np.random.default_rng(0)
    mean = losses.mean(0)
    freedom = len(sizes) * (seeds - 1)
    spread = math.sqrt(seeds / (seeds - 1)) * t_quantile(freedom) / NormalDist().inv_cdf(0.975)
    drawn = random.integers(seeds, size=(resamples, seeds, len(sizes)))
    deviations = (losses - mean)[drawn, :, np.arange(len(sizes))].mean(1).swapaxes(1, 2)  # (resamples, 2, S)
    ratios = [fit.equal_loss_ratio() for fit in fits(sizes, mean + spread * deviations)]
    finite = [ratio for ratio in ratios if not math.isnan(ratio)]
    if len(finite) < 0.975 * resamples:
        return None
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


PARAMETERS = "scaling/parameters_for_equal_loss"
# Where a run diverged, or the fits do not meet.
LOST: Interval = (math.nan, math.nan)
APART = f"the fits of these sizes do not fall with size, or do not meet within a factor of {FURTHEST:g}"
UNSTEADY = f"in more than one in forty draws of the seeds, {APART}"
SIZE = "training/parameters_without_lambda_and_norms"
# The paper: DIFF of 6.8B is as good as a Transformer of 11B.
PAPER_PARAMETERS = 0.622


def compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    """Compare what DIFF needs for an equal loss, and the losses on whole documents by size."""
    sizes = list(dict.fromkeys(variant.coordinates for variant in preset.variants))
    largest = sizes[-1]
    # Of whole documents, so that the interval knows of others.
    by_document = compared_by(ComparisonRule(name=WHOLE), *rules((AR_HIT, OTHER), at=lambda size: size == largest))
    return [*_by_size(records, sizes), *by_document(records, preset)]


def _by_size(records: Sequence[Result], sizes: Sequence[Coordinates]) -> list[Comparison]:
    """Compare the parameters for an equal loss, from the fit through all sizes; nothing if sizes are too few.

    Of a seed that lacks a size nothing can be said, and so nothing of the mean over seeds. Nor can it if the fits of a
    seed or of all do not meet, or too many of those drawn for the interval. How many seeds it takes is not told: the
    interval is a bootstrap of all sizes, and the spread of the seeds' ratios another statistic.
    """
    parameters = {record.coordinates: record.value for record in by_name(records, SIZE) if record.variant == "softmax"}
    losses = {
        (r.variant, r.coordinates, r.seed): r.value for r in by_name(records, LANGUAGE_LOSS) if r.seed is not None
    }
    seeds = sorted({seed for _, _, seed in losses if seed is not None})
    if not seeds or len(sizes) < 3:
        return []
    numbers = np.array([parameters[size] for size in sizes])
    kinds = ("diff", "softmax")
    measured = np.array(
        [[[losses.get((kind, size, seed), math.nan) for size in sizes] for kind in kinds] for seed in seeds]
    )
    logs, log = [_fitted(numbers, one) for one in measured], _fitted(numbers, measured.mean(0))
    interval: Interval | None = LOST
    reason = ""
    if np.isfinite(measured).all():
        interval = ratio_interval(numbers, measured)
        if not all(map(math.isfinite, [log, *logs])):
            reason = APART
        elif interval is None and len(seeds) > 1:
            reason = UNSTEADY
    if reason:
        log, interval = math.nan, LOST
    method = f"fit through {len(sizes)} sizes, bootstrap over the seeds of each"
    return [
        _share_comparison(
            PARAMETERS, log, interval, logs, paper=(PAPER_PARAMETERS, 1.0), quality=True, method=method, reason=reason
        )
    ]


def _fitted(parameters: np.ndarray, losses: np.ndarray) -> float:
    """Return ln of the share of parameters for an equal loss, from losses (2, sizes); NaN without one."""
    return math.log(fits(parameters, losses[None])[0].equal_loss_ratio()) if np.isfinite(losses).all() else math.nan


def _share_comparison(
    name: str, log: float, interval: Interval | None, logs: Sequence[float], **fields: Any
) -> Comparison:
    """Compare a share of the Transformer's need with 1, from ln of the share and of each seed's, and its interval."""
    ratio = math.exp(log)
    shifted = None if interval is None else (interval[0] - 1, interval[1] - 1)
    judged = verdict(shifted, "lower", seeds=len(logs))
    return Comparison(
        name=name,
        variant="diff",
        against="softmax",
        unit="of the Transformer's",
        better="lower",
        ours=(ratio, 1.0),
        difference=ratio - 1,
        differences=tuple(math.exp(one) - 1 for one in logs),
        interval=shifted,
        verdict=judged,
        **fields,
    )


BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def derived(records: Sequence[Result]) -> list[Result]:
    """Return of each variant and seed the loss at the variant's best rate, and how much higher it is over all rates.

    The best rate has the lowest mean loss over the seeds. The mean over rates of the loss above that one's is the
    sensitivity of Wortsman et al. (arXiv 2309.14322); if a run diverged, or ended above it, the loss is that of a
    guess.
    """
    guesses = [record.value for record in by_name(records, GUESS) if math.isfinite(record.value)]
    if not guesses:
        return []
    losses: dict[str, dict[int, dict[Coordinates, float]]] = {}
    for record in by_name(records, LANGUAGE_LOSS):
        if record.seed is not None:
            value = min(record.value, guesses[0]) if math.isfinite(record.value) else guesses[0]
            losses.setdefault(record.variant, {}).setdefault(record.seed, {})[record.coordinates] = value
    results = []
    for variant, seeds in losses.items():
        best = min(next(iter(seeds.values())), key=lambda rate: fmean(by_rate[rate] for by_rate in seeds.values()))
        for seed, by_rate in seeds.items():
            values = {BEST: by_rate[best], EXCESS: fmean(by_rate.values()) - by_rate[best]}
            results += [
                Result(name=name, variant=variant, value=value, seed=seed, unit="nats/token", better="lower")
                for name, value in values.items()
            ]
    return results
