"""Computes what experiments compare beside their measurements.

Parameters for an equal loss (Figure 3), throughput (Table 7), the sizes of gradients (Appendix G), and losses at
learning rates that are not the best.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from pydantic import Field

from diff_lab.bench.benchmark import FORWARD, STEP, BenchRow, Recorder, refuse_wrong
from diff_lab.bench.model_bench import DIFF, ModelSettings, measure_model
from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.experiments.experiment import ComparisonRule, Preset, compared_by
from diff_lab.measure.document_losses import AR_HIT, OTHER, WHOLE
from diff_lab.measure.gradients import gradient_callback
from diff_lab.measure.measurement import Count, Counts, Options, Text
from diff_lab.measure.standard import GUESS, LANGUAGE_LOSS, validation_callback
from diff_lab.record import Comparison, Interval, Result
from diff_lab.statistics import FURTHEST, fits, t_quantile, verdict
from diff_lab.train import Progress


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


# Where a run diverged, or the fits do not meet.
LOST: Interval = (math.nan, math.nan)
APART = f"the fits of these sizes do not fall with size, or do not meet within a factor of {FURTHEST:g}"
UNSTEADY = f"in more than one in forty draws of the seeds, {APART}"
SIZE = "training/parameters_without_lambda_and_norms"
# The paper: DIFF of 6.8B is as good as a Transformer of 11B.
PAPER_PARAMETERS = 0.622


def compare_sizes(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    """Compare the parameters that DIFF needs for an equal loss, and the losses on whole documents by size."""
    sizes = list(dict.fromkeys(record.coordinates for record in records if record.name == SIZE))
    largest = {axis: [value] for axis, value in sizes[-1].items()}
    # Of whole documents, so that the interval knows of others.
    losses = ComparisonRule(names=(WHOLE,)), ComparisonRule(names=(AR_HIT, OTHER), at=largest)
    return [*_by_size(records, sizes), *compared_by(*losses)(records, preset)]


def _by_size(records: Sequence[Result], sizes: Sequence[Coordinates]) -> list[Comparison]:
    """Compare the parameters for an equal loss, from the fit through all sizes; nothing if sizes are too few.

    Of a seed that lacks a size nothing can be said, and so nothing of the mean over seeds. Nor can it if the fits of a
    seed or of all do not meet, or too many of those drawn for the interval. How many seeds it takes is not told: the
    interval is a bootstrap of all sizes, and the spread of the seeds' ratios another statistic.
    """
    losses = {(r.variant, r.coordinates, r.seed): r.value for r in records if r.name == LANGUAGE_LOSS}
    seeds = sorted({seed for _, _, seed in losses if seed is not None})
    if not seeds or len(sizes) < 3:
        return []
    parameters = {r.coordinates: r.value for r in records if (r.name, r.variant) == (SIZE, "softmax")}
    numbers, kinds = np.array([parameters[size] for size in sizes]), ("diff", "softmax")
    measured = np.array(
        [[[losses.get((kind, size, seed), math.nan) for size in sizes] for kind in kinds] for seed in seeds]
    )
    ratio, *ratios = (
        fits(numbers, one[None])[0].equal_loss_ratio() if np.isfinite(one).all() else math.nan
        for one in (measured.mean(0), *measured)
    )
    interval: Interval | None = LOST
    reason = ""
    if np.isfinite(measured).all():
        interval = ratio_interval(numbers, measured)
        if not all(map(math.isfinite, [ratio, *ratios])):
            reason = APART
        elif interval is None and len(seeds) > 1:
            reason = UNSTEADY
    if reason:
        ratio, interval = math.nan, LOST
    shifted = None if interval is None else (interval[0] - 1, interval[1] - 1)
    return [
        Comparison(
            name="scaling/parameters_for_equal_loss",
            variant="diff",
            against="softmax",
            unit="of the Transformer's",
            better="lower",
            ours=(ratio, 1.0),
            paper=(PAPER_PARAMETERS, 1.0),
            difference=ratio - 1,
            differences=tuple(one - 1 for one in ratios),
            interval=shifted,
            verdict=verdict(shifted, "lower", seeds=len(ratios)),
            quality=True,
            method=f"fit through {len(sizes)} sizes, bootstrap over the seeds of each",
            reason=reason,
        )
    ]


BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def loss_by_rate(records: Sequence[Result]) -> list[Result]:
    """Return of each variant and seed the loss at the variant's best rate, and how much higher it is over all rates.

    The best rate has the lowest mean loss over the seeds. The mean over rates of the loss above that one's is the
    sensitivity of Wortsman et al. (arXiv 2309.14322); if a run diverged, or ended above it, the loss is that of a
    guess.
    """
    guess = next((one.value for one in records if one.name == GUESS and math.isfinite(one.value)), None)
    if guess is None:
        return []
    losses: dict[str, dict[int | None, dict[Coordinates, float]]] = {}
    for record in (one for one in records if one.name == LANGUAGE_LOSS):
        value = min(record.value, guess) if math.isfinite(record.value) else guess
        losses.setdefault(record.variant, {}).setdefault(record.seed, {})[record.coordinates] = value
    results = []
    for variant, seeds in losses.items():
        rates = next(iter(seeds.values()))
        best = min(rates, key=lambda rate: fmean(by_rate[rate] for by_rate in seeds.values()))
        for seed, by_rate in seeds.items():
            shared: dict[str, Any] = {"variant": variant, "seed": seed, "unit": "nats/token", "better": "lower"}
            excess = fmean(by_rate.values()) - by_rate[best]
            results += [Result(name=BEST, value=by_rate[best], **shared), Result(name=EXCESS, value=excess, **shared)]
    return results


# Parameters that both variants have; no "output" where it is tied to the embedding.
KINDS = ("q", "k", "v", "o", "mlp", "norm", "embedding", "output")
# "Equivalent in magnitude" taken at its word: within a power of ten, each way.
LIMIT = 1.0
LIMIT_VARIANT = "a tenfold difference"


def on_evaluate(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    """Log the gradients beside the validation."""
    validation, gradients = validation_callback(batches), gradient_callback(batches)

    return lambda model, step: validation(model, step) | gradients(model, step)


def compare_gradients(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    """Compare the sizes, which the paper has within a power of ten, before and in training."""
    sizes = [f"gradient/{kind}" for kind in KINDS]
    steps = [record.coordinates["step"] for record in records if record.name == sizes[0]]
    distances = [record for size in sizes for record in distance_records(records, size)]
    pairs = [("diff", LIMIT_VARIANT)]
    return compared_by(
        ComparisonRule(names=[f"{size}_distance" for size in sizes], pairs=pairs, exploratory=True, quality=False),
        ComparisonRule(names=sizes, at={"step": [steps[0], steps[-1]]}, claimed=False, quality=False),
    )([*records, *distances], preset)


def distance_records(records: Sequence[Result], size: str) -> list[Result]:
    """Return how far apart both variants' gradients are, |log10 of their ratio|: before training, and the mean of all
    steps that were looked at in it. The limit stands beside each as a variant of its own.
    """
    sizes = {(one.seed, one.coordinates, one.variant): one.value for one in records if one.name == size}
    distances: dict[tuple[int | None, str], list[float]] = {}
    for (seed, step, variant), value in sizes.items():
        other = sizes.get((seed, step, "softmax"))
        if variant == "diff" and other is not None:
            phase = "before training" if step == Coordinates(step=0) else "in training"
            decades = abs(math.log10(value / other)) if value > 0 and other > 0 else math.nan
            distances.setdefault((seed, phase), []).append(decades)
    shared: dict[str, Any] = {"name": f"{size}_distance", "unit": "powers of ten", "better": "lower"}
    return [
        Result(variant=variant, value=value, seed=seed, coordinates=Coordinates(phase=phase), **shared)
        for (seed, phase), decades in distances.items()
        for variant, value in (("diff", fmean(decades)), (LIMIT_VARIANT, LIMIT))
    ]


THROUGHPUT_NAMES = {STEP: "throughput/training", FORWARD: "throughput/forward"}
# Tokens per second of the paper's DIFF over its Transformer's, of 3B parameters, by length.
PAPER_SHARES = {
    "throughput/training": {2048: 6635 / 7247, 4096: 6718 / 7491},
    "throughput/forward": {2048: 46811 / 51228, 4096: 44521 / 48762},
}
PAPER_VARIANT = "the paper's diff"


class ThroughputOptions(Options):
    """Settings of the timing; one that is not given is the device's own, see `ModelSettings`."""

    device: Text = Field(default="cpu", description="a torch device")
    dtypes: tuple[str] = Field(default=("float32",), description="a dtype, in a list")
    lengths: Counts = Field(default=(2048,), description="tokens of a sequence")
    layers: Count | None = Field(default=None, description="decoder layers")
    rounds: Count | None = Field(default=None, description="alternated runs")
    check_layers: Count | None = Field(default=None, description="layers of the models whose results are checked")
    check_vocabulary: Count | None = Field(default=None, description="vocabulary of those models")


def measure_throughput(preset: Preset, progress: Progress) -> list[Result]:
    """Measure a repetition for each seed: models built anew, checked, and timed in alternated runs."""
    settings = ModelSettings.on(passes=("forward", "step"), candidates=(DIFF,), **preset.options)
    records = []
    for seed in range(preset.seeds):
        progress.tell(f"repetition {seed + 1} of {preset.seeds}")
        recorder = Recorder(progress.tell, show=lambda row: None)
        measure_model(settings, recorder)
        refuse_wrong(recorder.rows)
        records += throughput_records(recorder.rows, seed)
    return records


def throughput_records(rows: Sequence[BenchRow], seed: int) -> list[Result]:
    """Return a repetition's rows as records: tokens per second, and DIFF's as a share of the Transformer's. Raises
    ValueError if something could not be timed."""
    records = []
    for row in rows:
        if row.tokens_per_second is None or row.ratio is None:
            raise ValueError(f"{row.candidate} could not be timed ({row.pass_}, {row.sizes}): {row.reason}.")
        name, length, variant = THROUGHPUT_NAMES[row.pass_], Coordinates(length=row.shape["length"]), row.candidate
        shared: dict[str, Any] = {"coordinates": length, "seed": seed, "better": "higher"}
        speed = row.tokens_per_second
        records.append(Result(name=name, variant=variant, value=speed, n=row.rounds, unit="tokens/s", **shared))
        if row.candidate == DIFF:
            shared["name"] = f"{name}_share"
            records.append(Result(variant=variant, value=1 / row.ratio, n=row.rounds, **shared))
            if (share := PAPER_SHARES[name].get(row.shape["length"])) is not None:
                records.append(Result(variant=PAPER_VARIANT, value=share, **shared))
    return records
