"""Compares losses by size, and defines the experiments on losses by size and tokens (Figure 3) and by learning rate."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import language_experiments as language
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    by_name,
    compared_by,
    diff_and_softmax,
    rules,
    section,
)
from diff_lab.experiments.paper_preset import PaperPreset, Stage, evaluation
from diff_lab.measure.document_losses import AR_HIT, OTHER, WHOLE, Repeats
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.measure.standard import GUESS, LANGUAGE_LOSS
from diff_lab.record import Comparison, Headline, Interval, Result
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
# Figure 3a's sizes with their losses, read off the figure: DIFF, Transformer.
PAPER_SIZES = {
    0.83e9: ("paper-830m", (3.138, 3.170)),
    1.4e9: ("paper-1.4b", (3.062, 3.087)),
    2.8e9: ("paper-2.8b", (2.977, 3.003)),
    6.8e9: ("paper-6.8b", (2.934, 2.961)),
    13.1e9: ("paper-13.1b", (2.872, 2.899)),
}
PAPER_LOSSES = {Coordinates(parameters=size): losses for size, (_, losses) in PAPER_SIZES.items()}
# Figure 3b, read off: the same gap of the 3B models after so many tokens of training.
PAPER_GAPS = {"40B": -0.092, "160B": -0.045, "360B": -0.034}
# The same sizes, and the models of Figure 3b.
PAPER_RECIPES = {
    **{Coordinates(parameters=size): recipe for size, (recipe, _) in PAPER_SIZES.items()},
    Coordinates(parameters=3e9, part="by tokens"): "paper-3b",
}


def sized(parameters: float, layers: int, width: int, feed_forward: int, head_dim: int) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer at a size: parameters as the paper counts them."""
    overrides = section(
        "model", num_hidden_layers=layers, hidden_size=width, intermediate_size=feed_forward, head_dim=head_dim
    )
    return diff_and_softmax(*overrides, coordinates=Coordinates(parameters=parameters))


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
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


FIG_3 = Experiment(
    name="fig3",
    shows="language loss by size and by tokens: what DIFF needs to be as good as the Transformer (Figure 3)",
    presets={
        # Sizes of which the smallest is too small for these few tokens: of larger ones none is better than another yet.
        "cpu": language.language_preset(
            "cpu",
            steps=250,
            evaluate_every=50,
            variants=(
                *sized(20_000, 2, 16, 44, 4),
                *sized(40_000, 2, 24, 64, 4),
                *sized(60_000, 2, 32, 84, 4),
                *sized(130_000, 3, 48, 128, 4),
            ),
            learning_rates=(1.25e-2, 3e-2, 7.5e-2),
            minutes=8,
        ),
        "gpu": language.language_preset(
            "gpu",
            steps=900,
            evaluate_every=90,
            variants=(
                *sized(3_000_000, 4, 128, 344, 16),
                *sized(9_000_000, 6, 256, 688, 32),
                *sized(17_000_000, 6, 384, 1024, 32),
                *sized(34_000_000, 8, 512, 1376, 32),
            ),
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-830m"),),
            recipes=PAPER_RECIPES,
            variants=tuple(variant for size in PAPER_RECIPES for variant in diff_and_softmax(coordinates=size)),
            evaluations=(evaluation("standard"),),
            remarks=(
                "Figure 3a is the loss of the five sizes after 10B tokens. Figure 3b is the 3B models' loss by tokens: "
                "validation/loss at every 1000th step, of 4.2M tokens each, in metrics.jsonl of their runs.",
            ),
        ),
    },
    options=Repeats,
    measurements=language.loss_and_repeats,
    compare=_compare,
    headline=lambda _: Headline(
        name=PARAMETERS, claim="DIFF needs fewer parameters than the Transformer for the same loss"
    ),
    notes=(
        f"{PARAMETERS} is read at the middle of the sizes (their geometric mean), with all parameters but λ and norms "
        f"counted; the paper reads it at 6.8B. Where {APART}, for one seed, for all, or for "
        "more than one in forty draws of the seeds, it is not known.",
        f"{PARAMETERS} is of {LANGUAGE_LOSS}. {language.FIXED_TEXT} The losses by size "
        f"({WHOLE}) are of whole documents, each in contexts of its own, and their intervals allow for other "
        "documents.",
        "The paper's gaps by size, read off Figure 3a: "
        + ", ".join(f"{first - second:+.3f} at {size.label}" for size, (first, second) in PAPER_LOSSES.items())
        + "; by tokens of training, read off Figure 3b: "
        + ", ".join(f"{gap:+.3f} after {tokens}" for tokens, gap in PAPER_GAPS.items())
        + ".",
    ),
)


BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def variants_lr_sensitivity(rates: Sequence[float]) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer at each rate."""
    return tuple(
        variant
        for rate in rates
        for variant in diff_and_softmax(f"train.learning_rate={rate!r}", coordinates=Coordinates(learning_rate=rate))
    )


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


# What is asked is how a fixed budget ends at each rate.
LR_RULES = compared_by(*rules((BEST, EXCESS, LANGUAGE_LOSS), exploratory=True, quality=False))

LR_SENSITIVITY = Experiment(
    name="lr_sensitivity",
    shows="both models at five learning rates (beyond the paper; Appendix G says that both may have the same)",
    presets={
        "cpu": language.language_preset(
            "cpu",
            *section("model", hidden_size=64, intermediate_size=168, num_hidden_layers=4, head_dim=8),
            steps=180,
            learning_rates=(),
            options={},
            variants=variants_lr_sensitivity((1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
            minutes=7,
        ),
        "gpu": language.language_preset(
            "gpu",
            steps=800,
            evaluate_every=100,
            learning_rates=(),
            options={},
            variants=variants_lr_sensitivity((2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2)),
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-830m"),),
            variants=variants_lr_sensitivity((3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4)),
            evaluations=(evaluation("standard"),),
            remarks=("Not the paper's: its smallest models, at a quarter of its learning rate to four times as much.",),
        ),
    },
    measurements=lambda _: [
        MeasurementRequest(name="standard", numbers=(LANGUAGE_LOSS,)),
        MeasurementRequest(name="loss_of_a_guess"),
    ],
    compare=lambda records, preset: LR_RULES([*records, *derived(records)], preset),
    headline=lambda _: Headline(
        name=EXCESS, claim="DIFF loses less than the Transformer with learning rates that are not its best"
    ),
    notes=(
        "The paper trains both with one learning rate and argues that their gradients are of one size (Appendix G); it "
        f"shows no sweep. {BEST} is the loss at the variant's best rate, {EXCESS} the mean over the rates of the loss "
        "above it. In both a run that diverged, and one whose loss is higher, counts as a guess among all tokens: that "
        f"a rate is too high is what is asked here. In {LANGUAGE_LOSS} a run that diverged is missing, and none is "
        "cut.",
        f"{LANGUAGE_LOSS} and what is made of it: {language.FIXED_TEXT}",
    ),
)
