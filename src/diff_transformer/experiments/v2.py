"""Beyond the paper: DIFF V2 beside DIFF and the Transformer, all with the same number of parameters."""

from collections.abc import Sequence

from diff_transformer.experiments.cluster import Evaluation, PaperPreset, Stage
from diff_transformer.experiments.framework import TWINS, Arm, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import CPU, GPU, WHOLE, ar_hit_records, check_ar_hit, loss_record
from diff_transformer.results import Comparison, Headline, Result, compare

# All parameters are equal; those without λ, which is how arms are checked, differ by V2's projection for λ.
W_LAMBDA = 0.01
PAIRS = (("diff_v2", "softmax"), ("diff_v2", "diff"), ("diff", "softmax"))


def arms(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Arm, ...]:
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
        Arm(name=twin.name, overrides=(*twin.overrides, *sizes, f"model.intermediate_size={feed_forward}"))
        for twin in TWINS
    ]
    narrower = f"model.intermediate_size={feed_forward - more // 3}"
    return (Arm(name="diff_v2", overrides=("model.attention_type=diff_v2", *sizes, narrower)), *twins)


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    return [loss_record(run), *ar_hit_records(run, preset.options)]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    names = (WHOLE, "repeats/ar_hit", "repeats/other")
    return [compare(records, name, arm, against, claimed_by="us") for name in names for arm, against in PAIRS]


V2 = Experiment(
    name="v2",
    shows="DIFF V2 beside DIFF and the Transformer at equal parameters (beyond the paper)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(*CPU, "model.num_hidden_layers=4", "train.steps=200", "train.evaluate_every=200"),
            arms=arms(64, 8, 8, 172),
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            seeds=6,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 60, "longest": 2048, "frequent": 100},
            minutes=5,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*GPU, "train.steps=1200", "train.evaluate_every=1200"),
            arms=arms(512, 16, 32, 1376),
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=300", "train.evaluate_every=300"),
            seeds=3,
            parameter_tolerance=W_LAMBDA,
            options={"documents": 200, "longest": 8192, "frequent": 1000},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-1.4b"),),
            arms=arms(2048, 16, 128, 5440),
            parameter_tolerance=W_LAMBDA,
            evaluations=(Evaluation(measure="standard"), Evaluation(measure="repeats", options={"frequent": 1000})),
            remarks=("Not the paper's: DIFF V2 at the size of its Table 6.",),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=check_ar_hit,
    headline=lambda _: Headline(name=WHOLE, arm="diff_v2"),
    notes=(
        "DIFF V2 has twice the queries; here its feed-forward network is narrower by as many parameters. Its authors "
        "save them by sharing keys and values instead, and publish no table to compare with.",
    ),
)
