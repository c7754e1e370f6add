"""Defines the experiments beyond the paper: recall, longer contexts, learning rates, and DIFF V2."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import (
    ACCURACY,
    TWINS,
    Experiment,
    MeasuredRun,
    Preset,
    Variant,
    measured_by,
)
from diff_transformer.lab.experiments.language_experiments import (
    DIFF,
    FIXED_TEXT,
    HALF,
    HALF_NORM,
    LANGUAGE_CPU,
    LANGUAGE_GPU,
    LANGUAGE_LOSS,
    NO_NORM,
    TRANSFORMER,
    WHOLE,
    ar_hit_records,
    by_name,
    check_ar_hit,
    loss_record,
    table_6_variants,
    text_of,
)
from diff_transformer.lab.experiments.needle_experiments import NEEDLE_CPU, SYNTHETIC_MODEL
from diff_transformer.lab.experiments.paper_preset import Evaluation, PaperPreset, Stage
from diff_transformer.lab.measure.accuracy import token_levels
from diff_transformer.lab.measure.ar_hit import RepeatOptions
from diff_transformer.lab.measure.retrieval_lengths import LENGTH_ACCURACY, LengthOptions
from diff_transformer.lab.measure.standard import DEPTHS, StandardOptions
from diff_transformer.lab.record import Baseline, Comparison, Headline, Result
from diff_transformer.lab.statistics import compare
from diff_transformer.train import Recipe
from diff_transformer.train.data_kinds import RetrievalData

# Later queries can be answered without finding anything, so the first is judged on its own as well; see the notes.
FIRST = "retrieval/first_query_accuracy"
ALL = "retrieval/accuracy"
BY_DEPTH = "retrieval/accuracy_by_depth"


def _compare_recall(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    others = [variant.name for variant in preset.variants if variant.name != DIFF]
    return [compare(records, name, DIFF, other, exploratory=True) for name in (FIRST, ALL) for other in others]


def retrieval_baselines(recipe: Recipe) -> list[Baseline]:
    """What the accuracies of `retrieval_records` come to without retrieval; nothing is known of another task's."""
    data, steps = recipe.data, recipe.train.steps
    if not isinstance(data, RetrievalData):
        return []
    first = token_levels(data.num_pairs, 1, data.num_values)
    levels = token_levels(data.num_pairs, data.num_queries or data.num_pairs, data.num_values, repeats=data.repeats)
    of_depths = [Baseline(name=BY_DEPTH, coordinates=depth, steps=steps, accuracy=ALL, **levels) for depth in DEPTHS]
    return [
        Baseline(name=FIRST, steps=steps, **first),
        Baseline(name=ALL, steps=steps, **levels),
        *of_depths,
    ]


def _baselines_recall(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    return retrieval_baselines(recipe)


RECALL = Experiment(
    name="recall",
    shows="needles found among noise tokens after the same training (Section 3.4 in small)",
    presets={
        "cpu": Preset(
            recipe="retrieval",
            overrides=(
                *SYNTHETIC_MODEL,
                "data.num_pairs=8",
                "train.steps=800",
                "train.evaluate_every=200",
                "train.checkpoint_every=400",
                "train.max_loss_rise=null",  # it jumps early with some seeds; the accuracy tells
            ),
            # Beside the twins Table 6's control: half the heads of twice the width, with headwise norm.
            variants=table_6_variants(4, 16, DIFF, TRANSFORMER, HALF_NORM),
            learning_rates=(1e-3, 3e-3, 6e-3),
            sweep=("train.steps=200",),
            seeds=3,
            options={"sequences": 2048},
            minutes=9,
        ),
        # With Table 6's controls: half the heads of twice the width, headwise norm on and off.
        "gpu": Preset(
            recipe="retrieval",
            overrides=(
                "model.hidden_size=256",
                "model.intermediate_size=688",
                "data.length=512",
                "data.num_pairs=16",
                "data.repeats=true",
                "data.batch_size=64",
                "train.precision=bf16",
                "train.steps=1500",
                "train.evaluate_every=1500",
                "train.checkpoint_every=500",
                "train.inspect_every=null",
            ),
            variants=table_6_variants(16, 16, TRANSFORMER, HALF, HALF_NORM, DIFF, NO_NORM),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=5,
            options={"sequences": 4096},
            minutes=25,
        ),
    },
    compare=_compare_recall,
    options=StandardOptions,
    measurements=measured_by("standard"),
    validation=ACCURACY,
    headline=lambda _: Headline(name=FIRST),
    baselines=_baselines_recall,
    notes=(
        f"{ALL} is over all queries, whose answers stay in view. The cpu preset asks for each of 8 pairs once, so a "
        "model that knows which values occur can leave out those already given and finds nothing (by elimination, "
        "beside the floor); only the first query cannot be answered that way. The gpu preset draws "
        "queries with repeats: nothing can be left out, but one that repeats an earlier query can be copied from it.",
    ),
)


def _compare_length_generalisation(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    places = [Coordinates(context_factor=factor) for factor in preset.options["factors"]]
    return [
        compare(records, LENGTH_ACCURACY, "diff", "softmax", coordinates=place, exploratory=True) for place in places
    ]


def _headline(options: Mapping[str, Any]) -> Headline:
    """The longest context: what was trained on is Table 2's and Figure 5's."""
    return Headline(name=LENGTH_ACCURACY, coordinates=Coordinates(context_factor=max(options["factors"])))


def _baselines_length_generalisation(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    assert isinstance(recipe.data, RetrievalData)  # the presets' recipes
    levels = token_levels(recipe.data.num_pairs, 1, recipe.data.num_values)
    # Whether a model has learned the task is told by the shortest contexts, whatever is left of it in longer ones.
    shortest = Coordinates(context_factor=min(options["factors"]))
    told: dict[str, Any] = {"accuracy": LENGTH_ACCURACY, "accuracy_coordinates": shortest}
    return [
        Baseline(name=LENGTH_ACCURACY, coordinates=place, steps=recipe.train.steps, **levels, **told)
        for place in (Coordinates(context_factor=factor) for factor in options["factors"])
    ]


LENGTH_GENERALISATION = Experiment(
    name="length_generalisation",
    shows="recall in contexts once, twice and four times as long as in training (beyond the paper)",
    presets={
        # The runs are those of `table2`: what it has trained is measured here.
        "cpu": replace(NEEDLE_CPU, minutes=7.5, options={"factors": [1, 2, 4], "sequences": 2048}),
        "gpu": Preset(
            recipe="retrieval",
            overrides=(
                "model.hidden_size=256",
                "model.intermediate_size=680",
                "model.head_dim=16",
                "data.length=512",
                "data.num_pairs=16",
                "data.num_queries=16",
                "data.repeats=true",
                "data.batch_size=64",
                "train.steps=3000",
                "train.warmup_steps=100",
                "train.evaluate_every=1500",
                "train.checkpoint_every=1500",
                "train.inspect_every=null",
                "train.precision=bf16",
            ),
            variants=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=1000", "train.evaluate_every=1000"),
            seeds=3,
            options={"factors": [1, 2, 4], "sequences": 4096},
            minutes=20,
        ),
    },
    options=LengthOptions,
    measurements=measured_by("retrieval_lengths"),
    compare=_compare_length_generalisation,
    validation=ACCURACY,
    headline=_headline,
    baselines=_baselines_length_generalisation,
    notes=(
        "Whether DIFF recalls more than its twin is our question here: the paper says so of contexts that were trained "
        "on (× 1; Table 2 and Figure 5 ask that), and of longer ones nothing.",
    ),
)

UNIFORM = "sensitivity/loss_of_a_guess"
BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def variants_lr_sensitivity(rates: Sequence[float]) -> tuple[Variant, ...]:
    """The twins at each rate."""
    return tuple(
        Variant(
            name=twin.name,
            overrides=(*twin.overrides, f"train.learning_rate={rate!r}"),
            coordinates=Coordinates(learning_rate=rate),
        )
        for rate in rates
        for twin in TWINS
    )


def derived(records: Sequence[Result]) -> list[Result]:
    """Of each variant and seed: its loss at the variant's best rate, and how much higher the loss is over all rates.

    The best rate has the lowest mean loss over the seeds. The mean over rates of what the loss is above that one's is
    the sensitivity of Wortsman et al. (arXiv 2309.14322); where a run diverged, or ended above it, the loss is that of
    a guess.
    """
    guesses = [record.value for record in by_name(records, UNIFORM) if math.isfinite(record.value)]
    if not guesses:
        return []
    losses: dict[str, dict[int, dict[Coordinates, float]]] = {}
    for record in by_name(records, LANGUAGE_LOSS):
        if record.seed is not None:
            value = min(record.value, guesses[0]) if math.isfinite(record.value) else guesses[0]
            losses.setdefault(record.variant, {}).setdefault(record.seed, {})[record.coordinates] = value
    found = []
    for variant, seeds in losses.items():
        best = best_rate(seeds)
        for seed, by_rate in seeds.items():
            values = {BEST: by_rate[best], EXCESS: fmean(by_rate.values()) - by_rate[best]}
            found += [
                Result(name=name, variant=variant, value=value, seed=seed, unit="nats/token", better="lower")
                for name, value in values.items()
            ]
    return found


def best_rate(seeds: Mapping[int, Mapping[Coordinates, float]]) -> Coordinates:
    """The rate with the lowest mean loss; of equals the first."""
    rates = next(iter(seeds.values()))
    return min(rates, key=lambda rate: fmean(by_rate[rate] for by_rate in seeds.values()))


def _measure_lr_sensitivity(run: MeasuredRun, preset: Preset) -> list[Result]:
    guess = math.log(text_of(run).vocab_size)
    variant = run.variant
    uniform = Result(name=UNIFORM, variant=variant.name, coordinates=variant.coordinates, value=guess, seed=run.seed)
    return [loss_record(run), uniform]


def _compare_lr_sensitivity(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    rates = list(dict.fromkeys(variant.coordinates for variant in preset.variants))
    both = derived(records)
    found = [compare(both, name, "diff", "softmax", exploratory=True) for name in (BEST, EXCESS) if both]
    return [
        *found,
        *(compare(records, LANGUAGE_LOSS, "diff", "softmax", coordinates=rate, exploratory=True) for rate in rates),
    ]


LR_SENSITIVITY = Experiment(
    name="lr_sensitivity",
    shows="both twins at five learning rates (beyond the paper; Appendix G says that both may have the same)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(
                *LANGUAGE_CPU,
                "model.hidden_size=64",
                "model.intermediate_size=168",
                "model.num_hidden_layers=4",
                "model.head_dim=8",
                "train.steps=180",
                "train.evaluate_every=180",
            ),
            variants=variants_lr_sensitivity((1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
            seeds=3,
            minutes=7,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*LANGUAGE_GPU, "train.steps=800", "train.evaluate_every=800"),
            variants=variants_lr_sensitivity((2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2)),
            seeds=2,
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-830m"),),
            variants=variants_lr_sensitivity((3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4)),
            evaluations=(Evaluation(measure="standard"),),
            remarks=("Not the paper's: its smallest models, at a quarter of its learning rate to four times as much.",),
        ),
    },
    measure=_measure_lr_sensitivity,
    compare=_compare_lr_sensitivity,
    headline=lambda _: Headline(name=EXCESS),
    notes=(
        "The paper trains both with one learning rate and argues that their gradients are of one size (Appendix G); it "
        f"shows no sweep. {BEST} is the loss at the variant's best rate, {EXCESS} the mean over the rates of the loss "
        "above it. In both a run that diverged, and one whose loss is higher, counts as a guess among all tokens: that "
        f"a rate is too high is what is asked here. In {LANGUAGE_LOSS} a run that diverged is missing, and none is "
        "cut.",
        f"{LANGUAGE_LOSS} and what is made of it: {FIXED_TEXT}",
    ),
)

# All parameters are equal; those without λ, which is how variants are checked, differ by V2's projection for λ.
W_LAMBDA = 0.01
PAIRS = (("diff_v2", "softmax"), ("diff_v2", "diff"), ("diff", "softmax"))


def variants_v2(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """DIFF V2, whose feed-forward network gives what its queries and W_λ take, and the twins.

    W_Q has heads·head_dim rows more and W_λ heads; the feed-forward network three matrices of that width.

    Raises:
        ValueError: sizes with which the counts cannot be equal.
    """
    more = heads * head_dim + heads
    if more % 3:
        raise ValueError(f"heads·(head_dim + 1) must be a multiple of 3, got {heads}·({head_dim} + 1).")
    sizes = (f"model.hidden_size={hidden_size}", f"model.num_attention_heads={heads}", f"model.head_dim={head_dim}")
    twins = [
        Variant(name=twin.name, overrides=(*twin.overrides, *sizes, f"model.intermediate_size={feed_forward}"))
        for twin in TWINS
    ]
    narrower = f"model.intermediate_size={feed_forward - more // 3}"
    return (Variant(name="diff_v2", overrides=("model.attention_type=diff_v2", *sizes, narrower)), *twins)


def _measure_v2(run: MeasuredRun, preset: Preset) -> list[Result]:
    return [loss_record(run), *ar_hit_records(run, preset.options)]


def _compare_v2(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    names = (WHOLE, "repeats/ar_hit", "repeats/other")
    return [compare(records, name, variant, against, exploratory=True) for name in names for variant, against in PAIRS]


V2 = Experiment(
    name="v2",
    shows="DIFF V2 beside DIFF and the Transformer at equal parameters (beyond the paper)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(*LANGUAGE_CPU, "model.num_hidden_layers=4", "train.steps=200", "train.evaluate_every=200"),
            variants=variants_v2(64, 8, 8, 172),
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            seeds=6,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=5,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*LANGUAGE_GPU, "train.steps=1200", "train.evaluate_every=1200"),
            variants=variants_v2(512, 16, 32, 1376),
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=300", "train.evaluate_every=300"),
            seeds=3,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 200, "longest": 8192, "frequent": 1000},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-1.4b"),),
            variants=variants_v2(2048, 16, 128, 5440),
            parameter_tolerance=W_LAMBDA,
            evaluations=(Evaluation(measure="standard"), Evaluation(measure="repeats", options={"frequent": 1000})),
            remarks=("Not the paper's: DIFF V2 at the size of its Table 6.",),
        ),
    },
    options=RepeatOptions,
    measure=_measure_v2,
    compare=_compare_v2,
    check=check_ar_hit,
    headline=lambda _: Headline(name=WHOLE, variant="diff_v2"),
    notes=(
        "DIFF V2 has twice the queries; here its feed-forward network is narrower by as many parameters. Its authors "
        "save them by sharing keys and values instead, and publish no table to compare with.",
    ),
)
