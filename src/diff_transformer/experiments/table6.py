"""Table 6: what DIFF's parts do, in seven rows, with the loss on tokens that repeat a bigram and on the others."""

from collections.abc import Sequence

from diff_transformer.experiments.cluster import Evaluation, PaperPreset, Stage
from diff_transformer.experiments.framework import Arm, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import CPU, GPU, ar_hit_records, check_ar_hit
from diff_transformer.results import Comparison, Headline, Result, compare

LOSS, AR_HIT, OTHER = COLUMNS = "repeats/loss", "repeats/ar_hit", "repeats/other"
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
# (arm, against, whether the first is said to be the better one). The schedule of λ_init is said not to matter, nor the
# number of heads of the Transformer.
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


def rows(heads: int, head_dim: int) -> tuple[Arm, ...]:
    """The table's rows, for a Transformer of so many heads; half of them are twice as wide.

    The headwise norm of the Transformer is over each head's own channels, without DIFF's factor 1 − λ_init, which
    undoes what the subtraction does to the gradient. Without the norm, DIFF has no such factor either.
    """
    whole = (f"model.num_attention_heads={heads}", f"model.head_dim={head_dim}")
    half = (f"model.num_attention_heads={heads // 2}", f"model.head_dim={2 * head_dim}")
    softmax, diff = "model.attention_type=softmax", "model.attention_type=diff"
    return (
        Arm(name=TRANSFORMER, overrides=(softmax, *whole)),
        Arm(name=HALF, overrides=(softmax, *half)),
        Arm(name=HALF_NORM, overrides=(softmax, *half, "model.headwise_norm=true")),
        Arm(name=DIFF, overrides=(diff, *whole)),
        Arm(name=NO_NORM, overrides=(diff, *whole, "model.headwise_norm=false")),
        Arm(name=CONSTANTS[0], overrides=(diff, *whole, "model.lambda_init=0.8")),
        Arm(name=CONSTANTS[1], overrides=(diff, *whole, "model.lambda_init=0.5")),
    )


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    return ar_hit_records(run, preset.options)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    found = []
    for column, name in enumerate(COLUMNS):
        for arm, against, claimed in PAIRS:
            paper = (PAPER[arm][column], PAPER[against][column])
            found.append(compare(records, name, arm, against, paper=paper, claimed=claimed))
    return found


TABLE_6 = Experiment(
    name="table6",
    shows="what DIFF's parts do: all seven rows of Table 6",
    presets={
        # The twins' runs are those of `v2`.
        "cpu": Preset(
            recipe="language",
            overrides=(
                *CPU,
                "model.hidden_size=64",
                "model.intermediate_size=172",
                "model.num_hidden_layers=4",
                "train.steps=180",
                "train.evaluate_every=180",
            ),
            arms=rows(8, 8),
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            seeds=3,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=8.5,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*GPU, "train.steps=1000", "train.evaluate_every=1000"),
            arms=rows(16, 32),
            learning_rates=(1e-3, 2e-3),
            sweep=("train.steps=250", "train.evaluate_every=250"),
            seeds=2,
            options={"documents": 200, "longest": 8192, "frequent": 1000},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-1.4b"),),
            arms=rows(16, 128),
            evaluations=(Evaluation(measure="repeats", options={"frequent": 1000}),),
            remarks=("The paper does not say which bigrams it takes for frequent; 1000 is ours.",),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=check_ar_hit,
    headline=lambda _: Headline(name=LOSS),
    notes=(
        "DIFF without headwise norm lacks the factor 1 − λ_init after it as well, so this row is of both; the "
        "Transformer with headwise norm has no such factor.",
        "The paper leaves out of AR-hit bigrams that are frequent and does not say how frequent; here the option "
        "`frequent` is how often one may stand in the training text.",
    ),
)
