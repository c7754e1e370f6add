"""Figure 3, what a wrong learning rate costs, Appendix G and Table 7, on numbers whose answer is known."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import made_up_results
from diff_lab.bench.benchmark import BASELINE, FORWARD, STEP, BenchRow
from diff_lab.bench.model_bench import DIFF
from diff_lab.coordinates import Coordinates
from diff_lab.experiments import computed
from diff_lab.experiments.computed import ratio_interval
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.experiment import Preset, count, equal_feed_forward
from diff_lab.record import Result
from diff_lab.statistics import Fit, fits
from diff_transformer.model import DiffTransformerConfig

SIZES = np.array([1e5, 3e5, 1e6, 4e6, 1e7])
SHARE = 0.62  # the first variant at N is as good as the second at N / 0.62


def law(size: np.ndarray, exponent: float) -> np.ndarray:
    """c + a·N^−b, or c − a·ln N."""
    return 4.0 - 0.2 * np.log(size / 1e5) if exponent == 0 else 1.5 + 40 * size**-exponent


def phi(ratio: np.ndarray, exponent: float) -> np.ndarray:
    """What the losses of a fit fall with, by the ratio of a size to the middle of the sizes."""
    return np.log(ratio) if exponent == 0 else (1 - ratio**-exponent) / exponent


@pytest.mark.parametrize("exponent", [0, 0.1, 0.35, 0.8])
def test_the_ratio_of_exact_laws_is_found(exponent: float) -> None:
    losses = np.stack([law(SIZES / SHARE, exponent), law(SIZES, exponent)])
    fit, inverse = fits(SIZES, np.stack([losses, losses[::-1]]))
    assert fit.exponent == pytest.approx(exponent)
    basis = phi(SIZES / 1e6, exponent)
    for level, slope, variant_losses in zip(fit.levels, fit.slopes, losses, strict=True):
        assert level - slope * basis == pytest.approx(variant_losses)
    assert fit.equal_loss_ratio() == pytest.approx(SHARE)
    assert inverse.equal_loss_ratio() == pytest.approx(1 / SHARE)


@pytest.mark.parametrize("exponent", [0.0, 0.3])
def test_the_size_that_the_ratio_names_has_that_loss(exponent: float) -> None:
    """Also where the ratio is not the same at all sizes."""
    fit = Fit(exponent=exponent, levels=(3.0, 3.2), slopes=(0.25, 0.2))
    loss = 3.2 - 0.2 * phi(np.array(1 / fit.equal_loss_ratio()), exponent)
    assert loss == pytest.approx(3.0)


def test_a_variant_that_never_gets_there() -> None:
    """The second variant's loss tends to 3 − 0.2 / 0.5 = 2.6, and the first one is at 2.5 already."""
    assert math.isnan(Fit(0.5, (2.5, 3.0), (0.2, 0.2)).equal_loss_ratio())
    assert math.isnan(Fit(0.0, (3.0, 3.0), (0.1, -0.1)).equal_loss_ratio())


def test_a_ratio_of_no_size_that_was_trained_is_none() -> None:
    """Log-linear and apart by ln of the ratio: a little within a factor of 1000, and a little beyond."""
    for apart, known in ((6.9, True), (6.91, False), (90.0, False)):
        for levels, ratio in (((3.0, 3.0 + apart), math.exp(-apart)), ((3.0 + apart, 3.0), math.exp(apart))):
            equal_loss_ratio = Fit(0.0, levels, (1.0, 1.0)).equal_loss_ratio()
            assert equal_loss_ratio == pytest.approx(ratio) if known else math.isnan(equal_loss_ratio)


def measured(random: np.random.Generator, seeds: int, share: float, noise: float) -> np.ndarray:
    """(seeds, 2, sizes) losses: what a seed does to both variants alike, and to each."""
    truth = np.stack([law(SIZES / share, 0.2), law(SIZES, 0.2)])
    shared = random.normal(0, 3 * noise, size=(seeds, 1, len(SIZES)))
    return truth + shared + random.normal(0, noise, size=(seeds, 2, len(SIZES)))


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_interval_holds_the_truth_as_often_as_it_says(seeds: int) -> None:
    """95 % of experiments with noise; of 100, fewer than 88 would be a wonder."""
    random = np.random.default_rng(seeds)
    intervals = [ratio_interval(SIZES, measured(random, seeds, SHARE, 0.01), resamples=200) for _ in range(100)]
    inside = sum(low <= SHARE <= high for low, high in intervals)
    assert inside >= 88
    widths = [high - low for low, high in intervals]
    assert 0.01 < np.median(widths) < 0.5


def test_the_noise_that_both_variants_share_does_not_widen_the_interval() -> None:
    random = np.random.default_rng(0)
    quiet = ratio_interval(SIZES, measured(random, 3, SHARE, 1e-9))
    assert quiet == pytest.approx((SHARE, SHARE), rel=1e-3)
    truth = np.stack([law(SIZES / SHARE, 0.0), law(SIZES, 0.0)])
    common = truth + random.normal(0, 0.05, size=(3, 1, len(SIZES)))
    low, high = ratio_interval(SIZES, common)
    separate = truth + random.normal(0, 0.05, size=(3, 2, len(SIZES)))
    wide_low, wide_high = ratio_interval(SIZES, separate)
    assert high - low < 0.5 * (wide_high - wide_low)


def test_no_interval_without_spread_or_trend() -> None:
    random = np.random.default_rng(0)
    assert ratio_interval(SIZES, measured(random, 1, SHARE, 0.01)) is None
    level = 3 + random.normal(0, 0.1, size=(2, 2, len(SIZES)))
    assert ratio_interval(SIZES, level, resamples=200) is None


def made_up(share: float, seeds: int, noise: float = 0.002) -> list[Result]:
    """A scaling law in which DIFF of N·share parameters is as good as a Transformer of N."""
    random = np.random.default_rng(0)
    records = []
    sizes = {20_000: 19_000.0, 40_000: 38_000.0, 60_000: 57_000.0, 130_000: 132_000.0}
    for size, parameters in sizes.items():
        coordinates = Coordinates(parameters=size)
        for variant, factor in (("diff", 1 / share), ("softmax", 1.0)):
            records.append(Result(name=computed.SIZE, variant=variant, coordinates=coordinates, value=parameters))
            for seed in range(seeds):
                loss = 2 + 10 * (parameters * factor) ** -0.2 + random.normal(0, noise)
                shared: dict[str, Any] = {"variant": variant, "seed": seed, "value": loss, "better": "lower"}
                for name in (computed.LANGUAGE_LOSS, "repeats/loss", "repeats/ar_hit", "repeats/other"):
                    records.append(Result(name=name, coordinates=coordinates, **shared))
    return records


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "reproduced"), (1.7, "contrary"), (1.0, "inconclusive")], ids=str)
def test_figure_3_on_made_up_numbers(share: float, verdict: str) -> None:
    experiment = find_experiment("fig3")
    results = experiment.compare(made_up(share, seeds=3), experiment.presets["cpu"])
    by_size = results[0]
    assert by_size.ours == (pytest.approx(share, rel=0.05), 1.0)
    assert by_size.difference == pytest.approx(by_size.ours[0] - 1)
    assert by_size.interval is not None
    assert by_size.interval[0] < share - 1 < by_size.interval[1] or verdict != "inconclusive"
    assert by_size.verdict == verdict
    assert len(by_size.differences) == 3
    assert by_size.reason == ""
    # The interval is a bootstrap: the spread of the seeds' ratios does not tell how many would decide it.
    assert by_size.seeds_needed is None
    single = experiment.compare(made_up(share, seeds=1), experiment.presets["cpu"])[0]
    assert (single.verdict, single.interval) == ("inconclusive", None)


def test_figure_3_where_a_run_diverged() -> None:
    """Nothing is concluded from what a run that diverged has a part in."""
    experiment = find_experiment("fig3")
    of_size = (computed.LANGUAGE_LOSS, "diff", 1, "0.06M")
    records = [
        replace(r, value=math.nan) if (r.name, r.variant, r.seed, r.coordinates.label) == of_size else r
        for r in made_up(0.6, seeds=4)
    ]
    by_size = experiment.compare(records, experiment.presets["cpu"])[0]
    assert [math.isnan(one) for one in by_size.differences] == [False, True, False, False]
    assert (by_size.verdict, by_size.seeds_needed) == ("inconclusive", None)
    assert all(map(math.isnan, (by_size.difference, *by_size.interval)))


@pytest.mark.parametrize(("shift", "slope"), [(10.0, 1.0), (-10.0, 1.0), (0.0, -1.0)])
def test_figure_3_where_the_fits_do_not_meet(shift: float, slope: float) -> None:
    """DIFF far above or below the other at every size, or worse the larger it is: no ratio, and why not."""
    experiment = find_experiment("fig3")
    records = [
        replace(r, value=4 + slope * (r.value - 4) + shift)
        if (r.name, r.variant) == (computed.LANGUAGE_LOSS, "diff")
        else r
        for r in made_up(1.0, seeds=3)
    ]
    by_size = experiment.compare(records, experiment.presets["cpu"])[0]
    assert (by_size.verdict, by_size.seeds_needed, by_size.reason) == ("inconclusive", None, computed.APART)
    assert all(map(math.isnan, (by_size.difference, by_size.ours[0], *by_size.differences, *by_size.interval)))


def test_the_feed_forward_network_gives_what_the_attention_takes_more() -> None:
    def config(kind: str, heads: int, feed_forward: int, **sizes: int) -> DiffTransformerConfig:
        return DiffTransformerConfig(
            **{"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 3, "head_dim": 16, **sizes},
            attention_type=kind,
            num_attention_heads=heads,
            intermediate_size=feed_forward,
        )

    like = config("softmax", 4, 172)
    for variant in (config("diff_v2", 4, 172), config("softmax", 6, 172), config("diff", 2, 172, head_dim=8)):
        width = equal_feed_forward(variant, like)
        variant.intermediate_size = width
        # Rounding leaves at most half a column of three matrices in each layer.
        leftover = sum(
            sign * (count(one).shared + (3 * 64 * 4 if one.attention_type == "diff_v2" else 0))
            for sign, one in ((1, variant), (-1, like))
        )
        assert abs(leftover) <= 3 * 3 * 64 / 2, variant.attention_type
    assert equal_feed_forward(config("diff", 4, 10), like) == 172
    with pytest.raises(ValueError, match=r"of 'diff_v2' has 13,056 parameters more than that of 'softmax', which is"):
        equal_feed_forward(config("diff_v2", 4, 20), config("softmax", 4, 20))


def test_what_a_wrong_learning_rate_costs() -> None:
    """The best rate is the best on average; a run that diverged counts as a guess, as does one that is worse."""
    losses = {
        "diff": {"0.1": (2.0, 2.2), "0.2": (2.1, 1.9), "0.4": (math.nan, 9.0)},
        "softmax": {"0.1": (2.3, 2.5), "0.2": (2.5, 2.7), "0.4": (3.0, 3.2)},
    }
    guess = 4.0
    records = [Result(name=computed.GUESS, variant="diff", value=guess, seed=0)]
    for variant, rates in losses.items():
        for rate, values in rates.items():
            at = Coordinates(learning_rate=float(rate))
            records += made_up_results.measured(computed.LANGUAGE_LOSS, {variant: values}, coordinates=at)
    derived = {(r.name, r.variant, r.seed): r.value for r in computed.loss_by_rate(records)}
    best, excess = computed.BEST, computed.EXCESS
    assert [derived[best, "diff", seed] for seed in (0, 1)] == [2.1, 1.9]
    assert [derived[best, "softmax", seed] for seed in (0, 1)] == [2.3, 2.5]
    assert derived[excess, "diff", 0] == pytest.approx((2.0 + 2.1 + guess) / 3 - 2.1)
    assert derived[excess, "diff", 1] == pytest.approx((2.2 + 1.9 + guess) / 3 - 1.9)
    assert derived[excess, "softmax", 0] == pytest.approx((2.3 + 2.5 + 3.0) / 3 - 2.3)


def sized(values: dict[str, float], step: int, seed: int) -> list[Result]:
    return [
        Result(name="gradient/q", variant=variant, value=v, seed=seed, coordinates=Coordinates(step=step))
        for variant, v in values.items()
    ]


def test_a_distance_is_in_powers_of_ten() -> None:
    """Twice as large and half as large do not cancel, and 0 has no size."""
    records = sized({"diff": 20.0, "softmax": 0.2}, 0, 0)
    records += sized({"diff": 2.0, "softmax": 1.0}, 5, 0) + sized({"diff": 1.0, "softmax": 2.0}, 9, 0)
    records += sized({"diff": 0.0, "softmax": 1.0}, 0, 1)
    distances = {
        (r.coordinates.label, r.seed, r.variant): r.value for r in computed.distance_records(records, "gradient/q")
    }
    assert distances["before training", 0, "diff"] == pytest.approx(2.0)
    assert distances["in training", 0, "diff"] == pytest.approx(math.log10(2))
    assert math.isnan(distances["before training", 1, "diff"])
    assert distances["in training", 0, computed.LIMIT_VARIANT] == 1.0


def row(candidate: str, pass_: str, speed: float | None, ratio: float | None) -> BenchRow:
    return BenchRow(
        candidate=candidate,
        pass_=pass_,
        dtype="float32",
        shape={"batch": 1, "length": 2048},
        ratio=ratio,
        tokens_per_second=speed,
        rounds=5,
        reason=None if speed else "out of memory",
    )


@pytest.mark.parametrize(("ratios", "verdict"), [((1.01, 1.02, 1.0), "reproduced"), ((1.3, 1.31, 1.32), "contrary")])
def test_table7s_share_is_held_against_the_papers(ratios: tuple[float, ...], verdict: str) -> None:
    records = []
    for seed, ratio in enumerate(ratios):
        rows = [row(name, pass_, 100.0, r) for pass_ in (STEP, FORWARD) for name, r in ((BASELINE, 1.0), (DIFF, ratio))]
        records += computed.throughput_records(rows, seed)
    comparisons = {c.name: c for c in find_experiment("table7").compare(records, Preset())}
    share = comparisons["throughput/training_share"]
    assert share.verdict == verdict
    assert share.exploratory
    assert share.ours == pytest.approx((sum(1 / r for r in ratios) / 3, 6635 / 7247))
    assert comparisons["throughput/forward"].paper == (46811.0, 51228.0)
    assert comparisons["throughput/forward"].verdict is None


def test_what_could_not_be_timed_is_said() -> None:
    with pytest.raises(ValueError, match=r"^diff could not be timed \(training step, .*2048\): out of memory\.$"):
        computed.throughput_records([row(DIFF, STEP, None, None)], 0)


@pytest.mark.parametrize("names", [("fig4", "table5", "fig8"), ("fig6", "fig7")])
def test_experiments_share_their_runs(names: tuple[str, ...]) -> None:
    """They measure what the first of them trains, and choose the learning rates as it does."""
    for preset in ("cpu", "gpu"):
        first, *others = (find_experiment(name).presets[preset] for name in names)
        for other in others:
            assert [other.variant_recipe(variant, *other.sweep) for variant in other.variants] == [
                first.variant_recipe(variant, *first.sweep) for variant in first.variants
            ]
            assert (other.learning_rates, other.seeds, other.extension) == (first.learning_rates, first.seeds, ())
