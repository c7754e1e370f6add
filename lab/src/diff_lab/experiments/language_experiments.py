"""Defines the experiments on language loss: Figure 4, Table 6, and beyond the paper V2, long training, and groups."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    compared_by,
    diff_and_softmax,
    equal_feed_forward,
    rules,
    section,
)
from diff_lab.experiments.paper_preset import LONG_CONTEXTS, THREE_BILLION, PaperPreset, Stage, evaluation
from diff_lab.measure.document_losses import CUMULATIVE_LOSS, REPEAT_COLUMNS, WHOLE, Repeats
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.measure.standard import LANGUAGE_LOSS
from diff_lab.record import Headline
from diff_transformer.model import DiffTransformerConfig

FIXED_TEXT = "Intervals are over seeds on one fixed text, and say nothing of other text."

# Minutes on two cores: 2048 tokens to a step. The training sees a fraction of the corpus, so much of it is left to
# measure on: intervals over documents want many. First weights of 0.1 give so narrow a model activations of the scale
# that 0.02 gives one 1600 wide; from 0.02 both variants start slowly, DIFF most of all. What the layers add to the
# residual stream begins small: otherwise the headwise norm lifts DIFF's attention, which says nothing yet, far above
# the embeddings, and it begins late (docs/log.md).
LANGUAGE_CPU = (
    *section("data", tokenizer="bpe", vocab_size=1024, length=128, batch_size=16, isolate_documents=False),
    *section("data", validation_fraction=0.2, validation_tokens=20000),
    *section("model", tie_word_embeddings=True, initializer_range=0.1, residual_initializer_range=0.01),
    *section("train", log_every=20, inspect_every=None, checkpoint_every=200),
)
# One H200: 8 layers of 512, 16 heads of 32 in the Transformer and 8 in DIFF, 32,768 tokens to a step. The standard
# library is seen many times over by then: it was planned for a folder of novels (--text).
LANGUAGE_GPU = (
    *section("data", tokenizer="bpe", vocab_size=8192, length=1024, batch_size=32),
    *section("data", validation_fraction=0.2, validation_tokens=500000),
    *section("model", hidden_size=512, intermediate_size=1376, num_hidden_layers=8, head_dim=32),
    *section("model", initializer_range=0.02, residual_initializer_range=None),
    *section("train", precision="bf16", warmup_steps=100, log_every=50, inspect_every=None, checkpoint_every=1000),
)


# What most experiments on language have at a size, so that they share their runs.
REPEATS = {
    "cpu": {"documents": 60, "longest": 2048, "frequent": 100},
    "gpu": {"documents": 200, "longest": 65536, "frequent": 1000},
}
_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "cpu": (LANGUAGE_CPU, (5e-3, 1.25e-2, 3e-2)),
    "gpu": (LANGUAGE_GPU, (5e-4, 1e-3, 2e-3)),
}


def language_preset(size: str, *overrides: str, steps: int, evaluate_every: int | None = None, **more: Any) -> Preset:
    """Return a preset of the recipe "language" at the size of "cpu" or "gpu", validated ten times in training by
    default; `more` are other fields of the preset.
    """
    shared, rates = _SETTINGS[size]
    training = section("train", steps=steps, evaluate_every=evaluate_every or steps // 10)
    usual: dict[str, Any] = {"learning_rates": rates, "seeds": 3, "options": REPEATS[size]}
    return Preset(recipe="language", overrides=(*shared, *overrides, *training), **(usual | more))


def loss_and_repeats(preset: Preset) -> list[MeasurementRequest]:
    """Return the validation loss, and the loss on whole documents in Table 6's columns, by the preset's options."""
    return [
        MeasurementRequest(name="standard", numbers=(LANGUAGE_LOSS,)),
        MeasurementRequest(name="repeats", options=preset.options),
    ]


def beyond_table_6(*, pairs: Iterable[tuple[str, str]], **fields: Any) -> Experiment:
    """Return an experiment that asks, without a claim of the paper, whether the first of each pair (variant, against)
    is the better one in each of Table 6's columns.
    """
    compare = compared_by(*rules(REPEAT_COLUMNS, pairs, exploratory=True))
    return Experiment(options=Repeats, measurements=loss_and_repeats, compare=compare, **fields)


FIG_4 = Experiment(
    name="fig4",
    shows="cumulative loss by position in long documents (Figure 4)",
    presets={
        # rope_theta × 64, as the paper's 3B model had it; its contexts grew to 16 times the length, in a far smaller
        # share of the steps. The learning rate is lower than any of the first stage's, as the paper's was.
        "cpu": language_preset(
            "cpu",
            *section("data", length=256, batch_size=8),
            *section("model", hidden_size=64, intermediate_size=168, num_hidden_layers=4, head_dim=8),
            steps=500,
            sweep=section("train", steps=170, evaluate_every=170),
            extension=(
                *section("data", length=1024, batch_size=2),
                "model.rope_theta=640000",
                *section("train", steps=50, evaluate_every=50, warmup_steps=5, learning_rate="1e-3"),
            ),
            options={"length": 1024, "first": 64, "documents": 60},
            minutes=8,
        ),
        # The documents of held-out novels are few and long: many contexts of each.
        "gpu": language_preset(
            "gpu",
            steps=1500,
            evaluate_every=100,
            extension=(
                *section("data", length=8192, batch_size=4),
                "model.rope_theta=640000",
                *section("train", steps=150, evaluate_every=150, warmup_steps=15, learning_rate="2.5e-4"),
            ),
            options={"length": 8192, "first": 128, "documents": 100, "windows": 8},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            evaluations=(evaluation("positions", length=65536, first=1024, documents=100, text="your-books"),),
            remarks=("The paper measures on books; it does not say on how many.",),
        ),
    },
    measurements="positions",
    compare=compared_by(ComparisonRule(name=CUMULATIVE_LOSS)),
    # The whole of the long documents.
    headline=lambda options: Headline(
        name=CUMULATIVE_LOSS,
        coordinates=Coordinates(first_tokens=options["length"]),
        claim="DIFF has a lower loss on long documents than the Transformer",
    ),
    notes=(
        "The learning rate of the second stage is one and the same for both variants, fixed beforehand and not swept.",
        "The paper draws Figure 4 and gives no numbers: at every position DIFF's curve lies below.",
        "Whole documents are needed, as long as the longest context; of text of another kind name a folder (--text).",
    ),
)

# About how long the first stage of training takes for Figure 4's models: on two processor cores, and on one H200 (which
# nobody has timed yet).
CPU_MINUTES, GPU_MINUTES = 6.5, 15


def language_presets(
    *, cpu: Mapping[str, Any], gpu: Mapping[str, Any], paper: PaperPreset, cpu_minutes: float, gpu_minutes: float
) -> dict[str, Preset]:
    """Return the presets of an experiment that measures Figure 4's models after their first stage, with its options and
    how long measuring all models takes.
    """
    presets: dict[str, Preset] = {"paper": paper}
    for name, options, minutes in (("cpu", cpu, CPU_MINUTES + cpu_minutes), ("gpu", gpu, GPU_MINUTES + gpu_minutes)):
        presets[name] = replace(FIG_4.presets[name], extension=(), options=options, minutes=minutes)
    return presets


DIFF, TRANSFORMER = "diff", "softmax"
HALF, HALF_NORM = "softmax, half the heads", "softmax, half the heads, headwise norm"
NO_NORM, CONSTANTS = "diff, no headwise norm", ("diff, λ_init 0.8", "diff, λ_init 0.5")
# Validation, AR-hit, others; of 1.4B parameters.
PAPER = {
    TRANSFORMER: (3.087, 0.898, 3.272),
    HALF: (3.088, 0.899, 3.273),
    HALF_NORM: (3.086, 0.899, 3.271),
    DIFF: (3.062, 0.880, 3.247),
    NO_NORM: (3.122, 0.911, 3.309),
    CONSTANTS[0]: (3.065, 0.883, 3.250),
    CONSTANTS[1]: (3.066, 0.882, 3.251),
}
# (variant, against, whether the first is said to be the better one). The schedule of λ_init is said not to matter, nor
# the number of heads of the Transformer.
PAIRS = (
    (DIFF, TRANSFORMER, True),
    (DIFF, HALF, True),
    (DIFF, HALF_NORM, True),
    (DIFF, NO_NORM, True),
    (DIFF, CONSTANTS[0], False),
    (DIFF, CONSTANTS[1], False),
    (HALF, TRANSFORMER, False),
    (HALF_NORM, TRANSFORMER, False),
)


def table_6_variants(heads: int, head_dim: int, *names: str) -> tuple[Variant, ...]:
    """Return the table's rows of these names, or all, for a Transformer of so many heads; half of them are twice as
    wide.

    The headwise norm of the Transformer is over each head's own channels, without DIFF's factor 1 − λ_init, which
    undoes the subtraction's effect on the gradient. Without the norm, DIFF has no such factor either.
    """
    full = section("model", num_attention_heads=heads, head_dim=head_dim)
    half = section("model", num_attention_heads=heads // 2, head_dim=2 * head_dim)
    softmax, diff = "model.attention_type=softmax", "model.attention_type=diff"
    rows = {
        TRANSFORMER: (softmax, *full),
        HALF: (softmax, *half),
        HALF_NORM: (softmax, *half, "model.headwise_norm=true"),
        DIFF: (diff, *full),
        NO_NORM: (diff, *full, "model.headwise_norm=false"),
        CONSTANTS[0]: (diff, *full, "model.lambda_init=0.8"),
        CONSTANTS[1]: (diff, *full, "model.lambda_init=0.5"),
    }
    return tuple(Variant(name=name, overrides=rows[name]) for name in names or rows)


TABLE_6 = Experiment(
    name="table6",
    shows="what DIFF's parts do: all seven rows of Table 6",
    presets={
        # The runs of DIFF and the Transformer are those of `v2`.
        "cpu": language_preset(
            "cpu",
            *section("model", hidden_size=64, intermediate_size=172, num_hidden_layers=4),
            steps=180,
            variants=table_6_variants(8, 8),
            minutes=8.5,
        ),
        "gpu": language_preset(
            "gpu",
            steps=1000,
            evaluate_every=100,
            variants=table_6_variants(16, 32),
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-1.4b"),),
            variants=table_6_variants(16, 128),
            evaluations=(evaluation("repeats", frequent=1000),),
            remarks=("The paper does not say which bigrams it takes for frequent; 1000 is ours.",),
        ),
    },
    measurements="repeats",
    compare=compared_by(
        *(
            ComparisonRule(
                name=name,
                variant=variant,
                against=against,
                paper={NO_COORDINATES: (PAPER[variant][column], PAPER[against][column])}.get,
                claimed=claimed,
            )
            for column, name in enumerate(REPEAT_COLUMNS)
            for variant, against, claimed in PAIRS
        )
    ),
    headline=lambda _: Headline(name=WHOLE, claim="DIFF has a lower loss on text than the Transformer"),
    notes=(
        "DIFF without headwise norm lacks the factor 1 − λ_init after it as well, so this row is of both; the "
        "Transformer with headwise norm has no such factor.",
        "The paper leaves out of AR-hit bigrams that are frequent and does not say how frequent; here the option "
        "`frequent` is how often one may stand in the training text.",
    ),
)


# All parameters are equal; those without λ, which is how variants are checked, differ by V2's projection for λ.
W_LAMBDA = 0.01
V2_PAIRS = (("diff_v2", "softmax"), ("diff_v2", "diff"), ("diff", "softmax"))


def variants_v2(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """Return DIFF V2, whose feed-forward network pays for its queries and W_λ, DIFF, and the Transformer."""
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


V2 = beyond_table_6(
    name="v2",
    shows="DIFF V2 beside DIFF and the Transformer at equal parameters (beyond the paper)",
    presets={
        "cpu": language_preset(
            "cpu",
            "model.num_hidden_layers=4",
            steps=200,
            variants=variants_v2(64, 8, 8, 172),
            seeds=6,
            parameter_tolerance=W_LAMBDA,
            minutes=5,
        ),
        "gpu": language_preset(
            "gpu",
            steps=1500,
            evaluate_every=100,
            variants=variants_v2(512, 16, 32, 1376),
            parameter_tolerance=W_LAMBDA,
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
    pairs=V2_PAIRS,
    headline=lambda _: Headline(
        name=WHOLE, variant="diff_v2", claim="DIFF V2 has a lower loss on text than the Transformer"
    ),
    notes=(
        "DIFF V2 has twice the queries; here its feed-forward network is narrower by as many parameters. Its authors "
        "save them by sharing keys and values instead, and publish no table to compare with.",
    ),
)


CONSTANT = CONSTANTS[0]
LARGE_START = "first weights of one size"
LANGUAGE_PAIRS = (
    (DIFF, TRANSFORMER),
    (CONSTANT, TRANSFORMER),
    (NO_NORM, TRANSFORMER),
    ("diff_v2", TRANSFORMER),
    (DIFF, CONSTANT),
)


def variants_of_size(
    parameters: float, layers: int, hidden_size: int, feed_forward: int, heads: int, *overrides: str
) -> tuple[Variant, ...]:
    """Return DIFF, the Transformer, DIFF with a constant λ_init, DIFF without headwise norm, and DIFF V2, at one size.

    `heads` are the Transformer's. `overrides` are other settings of the size.
    """
    v2, diff, softmax = variants_v2(hidden_size, heads, hidden_size // heads, feed_forward)
    constant = diff.changed("model.lambda_init=0.8", name=CONSTANT)
    no_norm = diff.changed("model.headwise_norm=false", name=NO_NORM)
    shared, size = (f"model.num_hidden_layers={layers}", *overrides), Coordinates(parameters=round(parameters))
    return tuple(one.changed(*shared, coordinates=size) for one in (diff, softmax, constant, no_norm, v2))


def training(steps: int, length: int, batch_size: int, vocabulary: int, evaluations: int = 40) -> tuple[str, ...]:
    """Write settings of a training whose validation loss is taken so many times, at equal distances."""
    every = steps // evaluations
    return (
        *section("data", length=length, batch_size=batch_size, vocab_size=vocabulary),
        *section("train", steps=steps, evaluate_every=every, checkpoint_every=2 * every),
    )


def with_large_start(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer of these, with first weights of one size in all matrices."""
    return tuple(
        one.changed("model.residual_initializer_range=null", coordinates=Coordinates(one.coordinates, part=LARGE_START))
        for one in variants
        if one.name in (DIFF, TRANSFORMER)
    )


_SMALL_SIZE = (0.26e6, 4, 64, 172, 8)
# With 16 heads of the Transformer, DIFF has the 8 that its authors advise.
_MEDIUM = (1.05e6, 4, 128, 344, 16)
# bfloat16 on every machine, so that a CPU finds the runs of a GPU by their keys: there a step takes two thirds of the
# time where the processor multiplies bfloat16 (AMD EPYC, one thread: .40 s for .58), and elsewhere seven times as long.
# The learning rate comes down to 0, and every rate is tried for the whole length: a lower one looks better before the
# decay, and a short trial chooses another (docs/log.md).
_MEDIUM_TRAINING = section("train", compile=False, precision="bf16", final_learning_rate=0)
_FIRST_TOKENS = variants_of_size(*_SMALL_SIZE, *training(500, 128, 16, 1024, evaluations=20))
# The first 4 tokens a parameter alone, and what first weights of one size cost there. Half a cosine wave after the
# recipe's warm-up of 50 steps. Short runs would choose too high a rate for DIFF: after 150 steps .0125 and .03 are
# level, after 500 the lower one is ahead.
_LANGUAGE_CPU = language_preset(
    "cpu",
    *section("data", validation_tokens=40000),
    *section("train", schedule="cosine"),
    steps=500,
    variants=(*_FIRST_TOKENS, *with_large_start(_FIRST_TOKENS)),
    parameter_tolerance=W_LAMBDA,
    minutes=25,
)
# For hours on two cores: each variant says itself how long it is trained, and its rates are chosen by shorter runs.
_SHORTER = section("train", steps=2000, evaluate_every=2000)

LANGUAGE = beyond_table_6(
    name="language",
    shows="when DIFF, its parts, DIFF V2 and the Transformer learn language: losses by tokens (beyond the paper)",
    presets={
        "cpu": _LANGUAGE_CPU,
        # 40 tokens a parameter, at a size for each.
        "evening": replace(
            _LANGUAGE_CPU,
            variants=variants_of_size(*_SMALL_SIZE, *training(5200, 128, 16, 1024)),
            sweep=_SHORTER,
            minutes=90,
        ),
        "night": replace(
            _LANGUAGE_CPU,
            variants=tuple(
                variant
                for variant in variants_of_size(*_MEDIUM, *training(10400, 256, 16, 2048), *_MEDIUM_TRAINING)
                if variant.name in (DIFF, TRANSFORMER, "diff_v2")
            ),
            learning_rates=(5e-3, 8e-3, 1.25e-2),
            sweep_seeds=2,
            more_rates=0,
            seeds=8,
            most_seeds={"diff_v2": 3},
            minutes=800,
        ),
        # One H200: 120M tokens for 3M parameters.
        "gpu": language_preset(
            "gpu",
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
    pairs=LANGUAGE_PAIRS,
    headline=lambda _: Headline(name=WHOLE, claim="DIFF has a lower loss on text than the Transformer"),
    notes=(
        f"Before its end a training has a higher learning rate than one that ends there would have. {FIXED_TEXT}",
        "DIFF without headwise norm lacks the factor 1 − λ_init after it as well. DIFF V2 has twice the queries; its "
        "feed-forward network is narrower by as many parameters.",
    ),
)


QUERY_HEADS, KEY_HEADS = 20, 2  # of the Transformer: both 3 + 1 and 4 + 1 divide 20
NOISE_HEADS = {3: 5, 4: 4}  # signal heads to a noise head → noise heads
GROUPED = {ratio: f"diff_grouped, {ratio} signal heads to one" for ratio in NOISE_HEADS}
GROUPED_PAIRS = (
    *((name, against) for name in GROUPED.values() for against in (DIFF, TRANSFORMER)),
    (DIFF, TRANSFORMER),
)
ROUNDING = 0.01  # of the feed-forward networks' widths


def grouped_variants(hidden_size: int, head_dim: int, feed_forward: int, *overrides: str) -> tuple[Variant, ...]:
    """Return DIFF, groups of three and of four signal heads, and the Transformer, all with as many query heads, one
    cache size and, by narrower feed-forward networks, as many parameters."""
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


_GROUPED_SMALL = grouped_variants(64, 8, 172, "model.num_hidden_layers=4")
_GROUPED_CPU = language_preset(
    "cpu",
    *section("data", validation_tokens=40000),
    "train.schedule=cosine",
    steps=500,
    evaluate_every=25,
    variants=_GROUPED_SMALL,
    parameter_tolerance=ROUNDING,
    minutes=15,
)

GROUPED_HEADS = beyond_table_6(
    name="grouped",
    shows="one, three and four signal heads to a noise head at equal parameters (beyond the paper)",
    presets={
        "cpu": _GROUPED_CPU,
        # 40 tokens a parameter.
        "evening": replace(
            _GROUPED_CPU,
            variants=tuple(variant.changed(*training(5200, 128, 16, 1024)) for variant in _GROUPED_SMALL),
            sweep=_SHORTER,
            minutes=90,
        ),
        "gpu": language_preset(
            "gpu",
            steps=1500,
            evaluate_every=75,
            variants=grouped_variants(512, 32, 1376),
            parameter_tolerance=ROUNDING,
            minutes=30,
        ),
    },
    pairs=GROUPED_PAIRS,
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
