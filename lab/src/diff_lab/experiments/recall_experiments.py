"""Defines the experiments beyond the paper: recall, longer contexts, learning rates, and DIFF V2."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import language_experiments as language
from diff_lab.experiments.experiment import (
    DIFF_AND_SOFTMAX,
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    by_name,
    compared_by,
    diff_and_softmax,
    equal_feed_forward,
    section,
)
from diff_lab.experiments.needle_experiments import NEEDLE_CPU
from diff_lab.experiments.paper_preset import PaperPreset, Stage, evaluation
from diff_lab.measure.document_losses import WHOLE, Repeats
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.measure.retrieval import ACCURACY as ALL
from diff_lab.measure.retrieval import FIRST_QUERY, LENGTH_ACCURACY
from diff_lab.measure.standard import GUESS, LANGUAGE_LOSS
from diff_lab.record import Headline, Result
from diff_transformer.model import DiffTransformerConfig

# The rows of Table 6 but for those on λ_init.
RECALL_ROWS = (language.TRANSFORMER, language.HALF, language.HALF_NORM, language.DIFF, language.NO_NORM)

RECALL = Experiment(
    name="recall",
    shows="needles found among noise tokens after the same training (Section 3.4 in small)",
    presets={
        "cpu": Preset(
            # The runs of DIFF and the Transformer are those of `table2`. With Table 6's controls: half the heads of
            # twice the width, with headwise norm, and DIFF without it.
            recipe=NEEDLE_CPU.recipe,
            overrides=NEEDLE_CPU.overrides,
            variants=(*DIFF_AND_SOFTMAX, *language.table_6_variants(4, 16, language.HALF_NORM, language.NO_NORM)),
            learning_rates=NEEDLE_CPU.learning_rates,
            sweep_seeds=NEEDLE_CPU.sweep_seeds,
            seeds=3,
            options={"sequences": 2048},
            minutes=120,
        ),
        # With Table 6's controls: half the heads of twice the width, headwise norm on and off.
        "gpu": Preset(
            recipe="retrieval",
            overrides=(
                *section("model", hidden_size=256, intermediate_size=688),
                *section("data", length=512, num_pairs=16, repeats=True, batch_size=64),
                *section("train", precision="bf16", steps=3000, evaluate_every=100, checkpoint_every=1000),
                *section("train", inspect_every=None, max_loss_rise=None),
            ),
            variants=language.table_6_variants(16, 16, *RECALL_ROWS),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=5,
            options={"sequences": 4096},
            minutes=25,
        ),
    },
    compare=compared_by(
        *(
            ComparisonRule(name=name, against=other, exploratory=True)
            for name in (FIRST_QUERY, ALL)
            for other in RECALL_ROWS
            if other != language.DIFF
        )
    ),
    measurements="standard",
    headline=lambda _: Headline(name=FIRST_QUERY, claim="DIFF answers the first query more often than the Transformer"),
    notes=(
        f"{ALL} is over all queries, whose answers stay in view. Queries are drawn with repeats: nothing can be left "
        "out, but one that repeats an earlier query can be copied from it. The first query cannot.",
    ),
)


LENGTH_GENERALISATION = Experiment(
    name="length_generalisation",
    shows="recall in contexts once, twice and four times as long as in training (beyond the paper)",
    presets={
        # The runs are those of `table2`: what it has trained is measured here.
        "cpu": replace(NEEDLE_CPU, options={"factors": [1, 2, 4], "sequences": 2048}),
        "gpu": Preset(
            recipe="retrieval",
            overrides=(
                *section("model", hidden_size=256, intermediate_size=680, head_dim=16),
                *section("data", length=512, num_pairs=16, num_queries=16, repeats=True, batch_size=64),
                *section("train", steps=6000, warmup_steps=100, evaluate_every=200, checkpoint_every=2000),
                *section("train", inspect_every=None, max_loss_rise=None, precision="bf16"),
            ),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=3,
            options={"factors": [1, 2, 4], "sequences": 4096},
            minutes=20,
        ),
    },
    measurements="retrieval_lengths",
    compare=compared_by(ComparisonRule(name=LENGTH_ACCURACY, exploratory=True)),
    # The longest context: what was trained on is Table 2's and Figure 5's.
    headline=lambda options: Headline(
        name=LENGTH_ACCURACY,
        coordinates=Coordinates(context_factor=max(options["factors"])),
        claim=f"DIFF finds more needles than the Transformer in contexts {max(options['factors'])} times as long as "
        "in training",
    ),
    notes=(
        "Whether DIFF recalls more than the Transformer is an open question: the paper says so of contexts that were "
        "trained on (× 1; Table 2 and Figure 5 ask that), and of longer ones nothing.",
    ),
)

BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def variants_lr_sensitivity(rates: Sequence[float]) -> tuple[Variant, ...]:
    """DIFF and the Transformer at each rate."""
    return tuple(
        variant
        for rate in rates
        for variant in diff_and_softmax(f"train.learning_rate={rate!r}", coordinates=Coordinates(learning_rate=rate))
    )


def derived(records: Sequence[Result]) -> list[Result]:
    """Of each variant and seed: its loss at the variant's best rate, and how much higher the loss is over all rates.

    The best rate has the lowest mean loss over the seeds. The mean over rates of what the loss is above that one's is
    the sensitivity of Wortsman et al. (arXiv 2309.14322); where a run diverged, or ended above it, the loss is that of
    a guess.
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
LR_RULES = compared_by(
    *(ComparisonRule(name=name, exploratory=True, quality=False) for name in (BEST, EXCESS, LANGUAGE_LOSS))
)

LR_SENSITIVITY = Experiment(
    name="lr_sensitivity",
    shows="both models at five learning rates (beyond the paper; Appendix G says that both may have the same)",
    presets={
        "cpu": language.language_preset(
            *language.LANGUAGE_CPU,
            *section("model", hidden_size=64, intermediate_size=168, num_hidden_layers=4, head_dim=8),
            steps=180,
            variants=variants_lr_sensitivity((1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
            seeds=3,
            minutes=7,
        ),
        "gpu": language.language_preset(
            *language.LANGUAGE_GPU,
            steps=800,
            evaluate_every=100,
            variants=variants_lr_sensitivity((2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2)),
            seeds=3,
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

# All parameters are equal; those without λ, which is how variants are checked, differ by V2's projection for λ.
W_LAMBDA = 0.01
PAIRS = (("diff_v2", "softmax"), ("diff_v2", "diff"), ("diff", "softmax"))


def variants_v2(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """DIFF V2, whose feed-forward network gives what its queries and W_λ take, DIFF, and the Transformer."""
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "head_dim": head_dim}
    version_2, transformer = (
        DiffTransformerConfig(attention_type=kind, intermediate_size=feed_forward, **sizes)
        for kind in ("diff_v2", "softmax")
    )
    narrower = section("model", **sizes, intermediate_size=equal_feed_forward(version_2, transformer))
    return (
        Variant(name="diff_v2", overrides=("model.attention_type=diff_v2", *narrower)),
        *diff_and_softmax(*section("model", **sizes, intermediate_size=feed_forward)),
    )


V2 = Experiment(
    name="v2",
    shows="DIFF V2 beside DIFF and the Transformer at equal parameters (beyond the paper)",
    presets={
        "cpu": language.language_preset(
            *language.LANGUAGE_CPU,
            "model.num_hidden_layers=4",
            steps=200,
            variants=variants_v2(64, 8, 8, 172),
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            seeds=6,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=5,
        ),
        "gpu": language.language_preset(
            *language.LANGUAGE_GPU,
            steps=1500,
            evaluate_every=100,
            variants=variants_v2(512, 16, 32, 1376),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=3,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 200, "longest": 65536, "frequent": 1000},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-1.4b"),),
            variants=variants_v2(2048, 16, 128, 5440),
            parameter_tolerance=W_LAMBDA,
            evaluations=(evaluation("standard"), evaluation("repeats", frequent=1000)),
            remarks=("Not the paper's: DIFF V2 at the size of its Table 6.",),
        ),
    },
    options=Repeats,
    measurements=language.loss_and_repeats,
    compare=compared_by(*language.rules_of_repeats(PAIRS)),
    headline=lambda _: Headline(
        name=WHOLE, variant="diff_v2", claim="DIFF V2 has a lower loss on text than the Transformer"
    ),
    notes=(
        "DIFF V2 has twice the queries; here its feed-forward network is narrower by as many parameters. Its authors "
        "save them by sharing keys and values instead, and publish no table to compare with.",
    ),
)
