"""Defines the experiment on when language is learned: losses by tokens, to 40 tokens a parameter (beyond the paper)."""

from collections.abc import Sequence
from dataclasses import replace

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import (
    Experiment,
    Preset,
    Variant,
    compared_by,
    section,
)
from diff_lab.experiments.language_experiments import (
    DIFF,
    FIXED_TEXT,
    LANGUAGE_CPU,
    LANGUAGE_GPU,
    NO_NORM,
    TRANSFORMER,
    language_preset,
    loss_and_repeats,
    rules_of_repeats,
)
from diff_lab.experiments.recall_experiments import W_LAMBDA, variants_v2
from diff_lab.measure.document_losses import WHOLE, Repeats
from diff_lab.record import Headline
from diff_transformer.ops.sdpa import multiplies_bfloat16

CONSTANT, V2 = "diff, λ_init 0.8", "diff_v2"
LARGE_START = "first weights of one size"
# (variant, against); each is asked whether the first is the better one.
PAIRS = ((DIFF, TRANSFORMER), (CONSTANT, TRANSFORMER), (NO_NORM, TRANSFORMER), (V2, TRANSFORMER), (DIFF, CONSTANT))


def variants_of_size(
    parameters: float, layers: int, hidden_size: int, feed_forward: int, heads: int, *overrides: str
) -> tuple[Variant, ...]:
    """DIFF, the Transformer, DIFF with a constant λ_init, DIFF without headwise norm, and DIFF V2, at one size.

    `heads` are the Transformer's. `overrides` are what else belongs to the size.
    """
    v2, diff, softmax = variants_v2(hidden_size, heads, hidden_size // heads, feed_forward)
    constant = replace(diff, name=CONSTANT, overrides=(*diff.overrides, "model.lambda_init=0.8"))
    no_norm = replace(diff, name=NO_NORM, overrides=(*diff.overrides, "model.headwise_norm=false"))
    shared = (f"model.num_hidden_layers={layers}", *overrides)
    return tuple(
        replace(variant, overrides=(*variant.overrides, *shared), coordinates=Coordinates(parameters=round(parameters)))
        for variant in (diff, softmax, constant, no_norm, v2)
    )


def training(steps: int, length: int, batch_size: int, vocabulary: int, evaluations: int = 40) -> tuple[str, ...]:
    """Settings of a training whose validation loss is taken so many times, at equal distances."""
    every = steps // evaluations
    return (
        *section("data", length=length, batch_size=batch_size, vocab_size=vocabulary),
        *section("train", steps=steps, evaluate_every=every, checkpoint_every=2 * every),
    )


def with_large_start(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """DIFF and the Transformer of these, with first weights of one size in all matrices."""
    return tuple(
        replace(
            variant,
            overrides=(*variant.overrides, "model.residual_initializer_range=null"),
            coordinates=Coordinates(variant.coordinates, part=LARGE_START),
        )
        for variant in variants
        if variant.name in (DIFF, TRANSFORMER)
    )


_SMALL = (0.26e6, 4, 64, 172, 8)
# With 16 heads of the Transformer, DIFF has the 8 that its authors advise.
_MEDIUM = (1.05e6, 4, 128, 344, 16)
# Half a cosine wave after the recipe's warm-up of 50 steps. Short runs would choose too high a rate for DIFF: after 150
# steps .0125 and .03 are level, after 500 the lower one is ahead.
_CPU = (
    *LANGUAGE_CPU,
    *section("data", validation_tokens=40000),
    *section("train", schedule="cosine"),
)
_RATES = (5e-3, 1.25e-2, 3e-2)

_FIRST_TOKENS = variants_of_size(*_SMALL, *training(500, 128, 16, 1024, evaluations=20))
_SMALL_TRAINED = variants_of_size(*_SMALL, *training(5200, 128, 16, 1024))
# Compiled, a layer of this width takes a tenth to a third less time. bfloat16 saves another third where the processor
# multiplies it (AMD EPYC, one thread: .40 s a step in place of .58); elsewhere a step would take seven times as long.
_MEDIUM_SPEED = section("train", compile=True, precision="bf16" if multiplies_bfloat16() else "no")
_MEDIUM_TRAINED = variants_of_size(*_MEDIUM, *training(10400, 256, 16, 2048), *_MEDIUM_SPEED)


def _long_preset(variants: Sequence[Variant], minutes: float) -> Preset:
    """Hours on two cores. Each variant says itself how long it is trained; its rates are chosen by shorter runs."""
    return language_preset(
        *_CPU,
        steps=500,
        variants=tuple(variants),
        learning_rates=_RATES,
        sweep=section("train", steps=2000, evaluate_every=2000),
        seeds=3,
        parameter_tolerance=W_LAMBDA,
        options={"documents": 60, "longest": 2048, "frequent": 100},
        minutes=minutes,
    )


LANGUAGE = Experiment(
    name="language",
    shows="when DIFF, its parts, DIFF V2 and the Transformer learn language: losses by tokens (beyond the paper)",
    presets={
        # The first 4 tokens a parameter alone, and what first weights of one size cost there.
        "cpu": language_preset(
            *_CPU,
            steps=500,
            variants=(*_FIRST_TOKENS, *with_large_start(_FIRST_TOKENS)),
            learning_rates=_RATES,
            seeds=3,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=25,
        ),
        # 40 tokens a parameter, at a size for each.
        "evening": _long_preset(_SMALL_TRAINED, minutes=90),
        "night": _long_preset(_MEDIUM_TRAINED, minutes=600),
        # One H200: 120M tokens for 3M parameters.
        "gpu": language_preset(
            *LANGUAGE_GPU,
            "train.schedule=cosine",
            steps=3700,
            evaluate_every=185,
            variants=variants_of_size(3e6, 4, 128, 344, 16),
            learning_rates=(1e-3, 3e-3, 9e-3),
            sweep=section("train", steps=370, evaluate_every=370),
            seeds=2,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 200, "longest": 8192, "frequent": 1000},
            minutes=25,
        ),
    },
    options=Repeats,
    measurements=loss_and_repeats,
    compare=compared_by(*rules_of_repeats(PAIRS)),
    headline=lambda _: Headline(name=WHOLE, claim="DIFF has a lower loss on text than the Transformer"),
    notes=(
        f"Before its end a training has a higher learning rate than one that ends there would have. {FIXED_TEXT}",
        "DIFF without headwise norm lacks the factor 1 − λ_init after it as well. DIFF V2 has twice the queries; its "
        "feed-forward network is narrower by as many parameters.",
    ),
)
