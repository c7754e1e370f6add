"""Defines the experiment on scaling: what DIFF and the Transformer need for an equal loss (Figure 3)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import (
    TWINS,
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    compared_by,
    section,
)
from diff_transformer.lab.experiments.language_experiments import (
    AR_HIT,
    FIXED_TEXT,
    LANGUAGE_CPU,
    LANGUAGE_GPU,
    OTHER,
    WHOLE,
    by_name,
)
from diff_transformer.lab.experiments.paper_preset import Evaluation, PaperPreset, Stage
from diff_transformer.lab.experiments.scaling_fit import FURTHEST, fit, ratio_interval, tokens_ratio
from diff_transformer.lab.measure.document_losses import RepeatOptions
from diff_transformer.lab.measure.measurement import MeasurementRequest
from diff_transformer.lab.measure.standard import CURVE, LANGUAGE_LOSS
from diff_transformer.lab.record import Comparison, Headline, Interval, Result
from diff_transformer.lab.statistics import mean_interval, seeds_needed, verdict

PARAMETERS = "scaling/parameters_for_equal_loss"
TOKENS = "scaling/tokens_for_equal_loss"
# Where a run diverged, or the fits do not meet.
LOST: Interval = (math.nan, math.nan)
APART = f"the fits of these sizes do not fall with size, or do not meet within a factor of {FURTHEST:g}"
UNSTEADY = f"in more than one in forty draws of the seeds, {APART}"
SIZE = "training/parameters_without_lambda_and_norms"
# The paper: DIFF of 6.8B is as good as a Transformer of 11B; 160B tokens do for DIFF what 251B do for the Transformer.
PAPER_PARAMETERS, PAPER_TOKENS = 0.622, 0.637
# Figure 3a, read off the figure: DIFF, Transformer.
PAPER_LOSSES = {
    Coordinates(parameters=0.83e9): (3.138, 3.170),
    Coordinates(parameters=1.4e9): (3.062, 3.087),
    Coordinates(parameters=2.8e9): (2.977, 3.003),
    Coordinates(parameters=6.8e9): (2.934, 2.961),
    Coordinates(parameters=13.1e9): (2.872, 2.899),
}
# Figure 3b, read off: the same gap of the 3B models after so many tokens of training.
PAPER_GAPS = {"40B": -0.092, "160B": -0.045, "360B": -0.034}

# Figure 3a's sizes, and the models of Figure 3b.
PAPER_RECIPES = {
    Coordinates(parameters=0.83e9): "paper-830m",
    Coordinates(parameters=1.4e9): "paper-1.4b",
    Coordinates(parameters=2.8e9): "paper-2.8b",
    Coordinates(parameters=6.8e9): "paper-6.8b",
    Coordinates(parameters=13.1e9): "paper-13.1b",
    Coordinates(parameters=3e9, part="by tokens"): "paper-3b",
}


def sized(parameters: float, layers: int, width: int, feed_forward: int, head_dim: int) -> tuple[Variant, ...]:
    """The twins at a size: parameters as the paper counts them."""
    overrides = section(
        "model", num_hidden_layers=layers, hidden_size=width, intermediate_size=feed_forward, head_dim=head_dim
    )
    return tuple(
        Variant(name=twin.name, overrides=(*twin.overrides, *overrides), coordinates=Coordinates(parameters=parameters))
        for twin in TWINS
    )


def _requests(preset: Preset) -> list[MeasurementRequest]:
    return [
        MeasurementRequest(name="standard", numbers=(LANGUAGE_LOSS,)),
        MeasurementRequest(name="loss_by_tokens"),
        MeasurementRequest(name="repeats", options=preset.options),
    ]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    sizes = list(dict.fromkeys(variant.coordinates for variant in preset.variants))
    largest = sizes[-1]
    rules = (
        # Of whole documents, so that the interval knows of others.
        ComparisonRule(name=WHOLE, paper=PAPER_LOSSES.get),
        *(ComparisonRule(name=name, at=lambda place: place == largest) for name in (AR_HIT, OTHER)),
    )
    return [*_by_size(records, sizes), *_by_tokens(records, largest), *compared_by(*rules)(records, preset)]


def _by_size(records: Sequence[Result], sizes: Sequence[Coordinates]) -> list[Comparison]:
    """Parameters for an equal loss, from the fit through all sizes; nothing where sizes are too few.

    Of a seed that lacks a size nothing can be said, and so nothing of the mean over seeds. Nor can it where the fits
    of a seed or of all do not meet, or too many of those drawn for the interval. How many seeds it takes is not told:
    the interval is a bootstrap of all sizes, and the spread of the seeds' ratios another statistic.
    """
    parameters = {record.coordinates: record.value for record in by_name(records, SIZE) if record.variant == "softmax"}
    losses = {
        (r.variant, r.coordinates, r.seed): r.value for r in by_name(records, LANGUAGE_LOSS) if r.seed is not None
    }
    seeds = sorted({seed for _, _, seed in losses if seed is not None})
    if not seeds or len(sizes) < 3:
        return []
    numbers = np.array([parameters[size] for size in sizes])
    measured = np.array(
        [[[losses.get((a, size, seed), math.nan) for size in sizes] for a in ("diff", "softmax")] for seed in seeds]
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
    return [_needed(PARAMETERS, log, interval, logs, method, PAPER_PARAMETERS, needed=None, reason=reason)]


def _fitted(parameters: np.ndarray, losses: np.ndarray) -> float:
    """ln of the share of parameters that does, from losses (2, sizes); NaN where one is lost, or no share does."""
    return math.log(fit(parameters, losses).equal_loss_ratio()) if np.isfinite(losses).all() else math.nan


def _by_tokens(records: Sequence[Result], size: Coordinates) -> list[Comparison]:
    """Tokens for an equal loss, from the curves of a size; Student's t over the logarithms of the seeds' ratios."""
    seeds = sorted({r.seed for r in by_name(records, LANGUAGE_LOSS) if r.seed is not None and r.coordinates == size})
    curves: dict[tuple[str, int], dict[int, float]] = {
        (variant, seed): {} for variant in ("diff", "softmax") for seed in seeds
    }
    for record in by_name(records, CURVE):
        if record.coordinates.without("tokens") == size and record.seed is not None:
            curves[record.variant, record.seed][int(record.coordinates.place("tokens"))] = record.value
    if not seeds:
        return []
    logs = [_read_off(curves["diff", seed], curves["softmax", seed]) for seed in seeds]
    interval = mean_interval(logs)
    bounds = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    method = f"training curves of {size.label}, Student's t over ln of the ratio, paired seeds"
    return [_needed(TOKENS, fmean(logs), bounds, logs, method, PAPER_TOKENS, needed=seeds_needed(logs))]


def _read_off(diff: dict[int, float], softmax: dict[int, float]) -> float:
    """ln of the share of tokens that does; NaN where a run diverged."""
    points = [*diff.values(), *softmax.values()]
    lost = not diff or not softmax or not all(map(math.isfinite, points))
    return math.nan if lost else math.log(tokens_ratio(diff, softmax))


def _needed(
    name: str,
    log: float,
    interval: Interval | None,
    logs: Sequence[float],
    method: str,
    paper: float,
    *,
    needed: int | None,
    reason: str = "",
) -> Comparison:
    """A share of what the Transformer needs, which is 1: from ln of the share and of each seed's, and its interval.

    `needed` is the number of seeds that would decide it, by the statistic of the interval; `reason` says why the share
    is not known, where no run diverged.
    """
    ratio = math.exp(log)
    shifted = None if interval is None else (interval[0] - 1, interval[1] - 1)
    judged = verdict(shifted, "lower", seeds=len(logs))
    return Comparison(
        name=name,
        variant="diff",
        against="softmax",
        unit="of the Transformer's",
        better="lower",
        paper=(paper, 1.0),
        ours=(ratio, 1.0),
        difference=ratio - 1,
        differences=tuple(math.exp(one) - 1 for one in logs),
        interval=shifted,
        method=method,
        verdict=judged,
        seeds_needed=needed if judged == "inconclusive" else None,
        reason=reason,
    )


FIG_3 = Experiment(
    name="fig3",
    shows="language loss by size and by tokens: what DIFF needs to be as good as the Transformer (Figure 3)",
    presets={
        # Sizes of which the smallest is too small for these few tokens: of larger ones none is better than another yet.
        "cpu": Preset(
            recipe="language",
            overrides=(*LANGUAGE_CPU, *section("train", steps=250, evaluate_every=50)),
            variants=(
                *sized(20_000, 2, 16, 44, 4),
                *sized(40_000, 2, 24, 64, 4),
                *sized(60_000, 2, 32, 84, 4),
                *sized(130_000, 3, 48, 128, 4),
            ),
            learning_rates=(1.25e-2, 3e-2, 7.5e-2),
            seeds=3,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=8,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*LANGUAGE_GPU, *section("train", steps=900, evaluate_every=90)),
            variants=(
                *sized(3_000_000, 4, 128, 344, 16),
                *sized(9_000_000, 6, 256, 688, 32),
                *sized(17_000_000, 6, 384, 1024, 32),
                *sized(34_000_000, 8, 512, 1376, 32),
            ),
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=section("train", steps=225, evaluate_every=225),
            seeds=3,
            options={"documents": 200, "longest": 8192, "frequent": 1000},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-830m"),),
            recipes=PAPER_RECIPES,
            variants=tuple(replace(twin, coordinates=size) for size in PAPER_RECIPES for twin in TWINS),
            evaluations=(Evaluation(name="standard"),),
            remarks=(
                "Figure 3a is the loss of the five sizes after 10B tokens. Figure 3b is the 3B models' loss by tokens: "
                "validation/loss at every 1000th step, of 4.2M tokens each, in metrics.jsonl of their runs.",
            ),
        ),
    },
    options=RepeatOptions,
    measurements=_requests,
    compare=_compare,
    headline=lambda _: Headline(name=PARAMETERS),
    notes=(
        f"{PARAMETERS} is read at the middle of the sizes (their geometric mean), with all parameters but λ and norms "
        f"counted; the paper reads it at 6.8B. Where {APART}, for "
        "one seed, for all, or for more than one in forty draws of the seeds, it is not known.",
        f"{PARAMETERS} and {TOKENS} are of {LANGUAGE_LOSS}. {FIXED_TEXT} The losses by size ({WHOLE}) are of whole "
        "documents, "
        "each in contexts of its own, and their intervals allow for other documents.",
        f"{TOKENS} compares two runs of one schedule: before its end a run has a higher learning rate than one that "
        "ends there would have.",
        "The paper's gaps by size, read off Figure 3a: "
        + ", ".join(f"{first - second:+.3f} at {size.label}" for size, (first, second) in PAPER_LOSSES.items())
        + "; by tokens of training, read off Figure 3b: "
        + ", ".join(f"{gap:+.3f} after {tokens}" for tokens, gap in PAPER_GAPS.items())
        + ".",
    ),
)
