"""Defines the ablation of grouped heads: one, three and four signal heads to a noise head (beyond the paper)."""

from dataclasses import replace
from typing import Any

from diff_lab.experiments.experiment import (
    Experiment,
    Variant,
    compared_by,
    diff_and_softmax,
    equal_feed_forward,
    section,
)
from diff_lab.experiments.language_experiments import (
    DIFF,
    FIXED_TEXT,
    LANGUAGE_CPU,
    LANGUAGE_GPU,
    TRANSFORMER,
    language_preset,
    loss_and_repeats,
    rules_of_repeats,
)
from diff_lab.experiments.language_over_training import training
from diff_lab.measure.document_losses import WHOLE, Repeats
from diff_lab.record import Headline
from diff_transformer.model import DiffTransformerConfig

QUERY_HEADS, KEY_HEADS = 20, 2  # of the Transformer: both 3 + 1 and 4 + 1 divide 20
NOISE_HEADS = {3: 5, 4: 4}  # signal heads to a noise head → noise heads
GROUPED = {ratio: f"diff_grouped, {ratio} signal heads to one" for ratio in NOISE_HEADS}
# (variant, against); each is asked whether the first is the better one.
PAIRS = (
    *((name, against) for name in GROUPED.values() for against in (DIFF, TRANSFORMER)),
    (DIFF, TRANSFORMER),
)
ROUNDING = 0.01  # of the feed-forward networks' widths


def grouped_variants(hidden_size: int, head_dim: int, feed_forward: int, *overrides: str) -> tuple[Variant, ...]:
    """DIFF, groups of three and of four signal heads, and the Transformer, all with as many query heads, one cache and,
    by narrower feed-forward networks, as many parameters."""
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KEY_HEADS}
    sizes = {"hidden_size": hidden_size, "head_dim": head_dim, **heads}
    like = DiffTransformerConfig(attention_type="softmax", intermediate_size=feed_forward, **sizes)
    shared = (*section("model", **sizes), *overrides)
    groups = []
    for ratio, noise_heads in NOISE_HEADS.items():
        own: dict[str, Any] = {"attention_type": "diff_grouped", "num_noise_heads": noise_heads}
        width = equal_feed_forward(DiffTransformerConfig(intermediate_size=feed_forward, **sizes, **own), like)
        changes = section("model", **own, intermediate_size=width)
        groups.append(Variant(name=GROUPED[ratio], overrides=(*shared, *changes)))
    diff, softmax = diff_and_softmax(*shared, f"model.intermediate_size={feed_forward}")
    return (diff, *groups, softmax)


_SMALL = grouped_variants(64, 8, 172, "model.num_hidden_layers=4")
_CPU = language_preset(
    *LANGUAGE_CPU,
    *section("data", validation_tokens=40000),
    "train.schedule=cosine",
    steps=500,
    evaluate_every=25,
    variants=_SMALL,
    learning_rates=(5e-3, 1.25e-2, 3e-2),
    seeds=3,
    parameter_tolerance=ROUNDING,
    options={"documents": 60, "longest": 2048, "frequent": 100},
    minutes=15,
)

GROUPED_HEADS = Experiment(
    name="grouped",
    shows="one, three and four signal heads to a noise head at equal parameters (beyond the paper)",
    presets={
        "cpu": _CPU,
        # 40 tokens a parameter.
        "evening": replace(
            _CPU,
            variants=tuple(
                replace(variant, overrides=(*variant.overrides, *training(5200, 128, 16, 1024))) for variant in _SMALL
            ),
            sweep=section("train", steps=2000, evaluate_every=2000),
            minutes=90,
        ),
        "gpu": language_preset(
            *LANGUAGE_GPU,
            steps=1500,
            evaluate_every=75,
            variants=grouped_variants(512, 32, 1376),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=3,
            parameter_tolerance=ROUNDING,
            options={"documents": 200, "longest": 65536, "frequent": 1000},
            minutes=30,
        ),
    },
    options=Repeats,
    measurements=loss_and_repeats,
    compare=compared_by(*rules_of_repeats(PAIRS)),
    headline=lambda _: Headline(
        name=WHOLE,
        variant=GROUPED[4],
        against=DIFF,
        claim="Four signal heads to a noise head have a lower loss on text than one",
    ),
    notes=(
        f"All variants have {QUERY_HEADS} query heads and caches of one size. With groups fewer of the heads are noise "
        "heads, W_O is larger, and the feed-forward networks are narrower by as many parameters. " + FIXED_TEXT,
    ),
)
