"""Defines the experiments on language loss: by position in long documents (Figure 4), and of DIFF's parts (Table 6)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    compared_by,
    section,
)
from diff_lab.experiments.paper_preset import LONG_CONTEXTS, THREE_BILLION, PaperPreset, Stage, evaluation
from diff_lab.measure.document_losses import CUMULATIVE_LOSS, REPEAT_COLUMNS, WHOLE, position_marks
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.measure.standard import LANGUAGE_LOSS
from diff_lab.record import Headline

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


def language_preset(*overrides: str, steps: int, evaluate_every: int | None = None, **more: Any) -> Preset:
    """A preset of the recipe "language", whose models are validated ten times in training unless told otherwise."""
    training = section("train", steps=steps, evaluate_every=evaluate_every or steps // 10)
    return Preset(recipe="language", overrides=(*overrides, *training), **more)


def loss_and_repeats(preset: Preset) -> list[MeasurementRequest]:
    """The validation loss, and the loss on whole documents in Table 6's columns, by the preset's options."""
    return [
        MeasurementRequest(name="standard", numbers=(LANGUAGE_LOSS,)),
        MeasurementRequest(name="repeats", options=preset.options),
    ]


def rules_of_repeats(pairs: Iterable[tuple[str, str]]) -> list[ComparisonRule]:
    """Each pair (variant, against) in each of Table 6's columns, without a claim of the paper."""
    return [
        ComparisonRule(name=name, variant=variant, against=against, exploratory=True)
        for name in REPEAT_COLUMNS
        for variant, against in pairs
    ]


FIG_4 = Experiment(
    name="fig4",
    shows="cumulative loss by position in long documents (Figure 4)",
    presets={
        # rope_theta × 64, as the paper's 3B model had it; its contexts grew to 16 times the length, in a far smaller
        # share of the steps. The learning rate is lower than any of the first stage's, as the paper's was.
        "cpu": language_preset(
            *LANGUAGE_CPU,
            *section("data", length=256, batch_size=8),
            *section("model", hidden_size=64, intermediate_size=168, num_hidden_layers=4, head_dim=8),
            steps=500,
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            sweep=section("train", steps=170, evaluate_every=170),
            extension=(
                *section("data", length=1024, batch_size=2),
                "model.rope_theta=640000",
                *section("train", steps=50, evaluate_every=50, warmup_steps=5, learning_rate="1e-3"),
            ),
            seeds=3,
            options={"length": 1024, "first": 64, "documents": 60},
            minutes=8,
        ),
        # The documents of held-out novels are few and long: many contexts of each.
        "gpu": language_preset(
            *LANGUAGE_GPU,
            steps=1500,
            evaluate_every=100,
            learning_rates=(5e-4, 1e-3, 2e-3),
            extension=(
                *section("data", length=8192, batch_size=4),
                "model.rope_theta=640000",
                *section("train", steps=150, evaluate_every=150, warmup_steps=15, learning_rate="2.5e-4"),
            ),
            seeds=3,
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
        coordinates=Coordinates(first_tokens=position_marks(options["length"], options["first"])[-1]),
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
    """The presets of an experiment that measures Figure 4's models after their first stage of training: its options,
    and how long measuring all models takes.
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
    """The table's rows of these names, or all of them, for a Transformer of so many heads; half of them are twice as
    wide.

    The headwise norm of the Transformer is over each head's own channels, without DIFF's factor 1 − λ_init, which
    undoes what the subtraction does to the gradient. Without the norm, DIFF has no such factor either.
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
            *LANGUAGE_CPU,
            *section("model", hidden_size=64, intermediate_size=172, num_hidden_layers=4),
            steps=180,
            variants=table_6_variants(8, 8),
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            seeds=3,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=8.5,
        ),
        "gpu": language_preset(
            *LANGUAGE_GPU,
            steps=1000,
            evaluate_every=100,
            variants=table_6_variants(16, 32),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=3,
            options={"documents": 200, "longest": 65536, "frequent": 1000},
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
