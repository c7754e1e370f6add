"""Table 5: the largest attention logits and hidden states of the twins."""

from collections.abc import Sequence

from diff_transformer.eval.outliers import TOKENS, TOPS, outlier_records
from diff_transformer.experiments.cluster import Evaluation
from diff_transformer.experiments.framework import Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import FIXED_TEXT
from diff_transformer.experiments.language_twins import language_twins
from diff_transformer.results import Comparison, Headline, Result, compare

# Of the paper's 3B models over 0.4M tokens, DIFF and then the Transformer.
PAPER = {
    "outliers/attention_logits": {
        "top-1": (38.8, 318.0),
        "top-2": (38.8, 308.2),
        "top-3": (37.3, 304.9),
        "top-10": (32.0, 284.7),
        "top-100": (27.4, 251.5),
        "median": (3.3, 5.4),
    },
    "outliers/hidden_states": {
        "top-1": (1688.2, 3608.6),
        "top-2": (1672.5, 3607.4),
        "top-3": (1672.1, 3603.6),
        "top-10": (1624.3, 3552.1),
        "top-100": (740.9, 2448.2),
        "median": (1.2, 0.6),
    },
}


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    return outlier_records(run.model, run.data.batches, run.arm.name, seed=run.seed, **preset.options)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    groups = [f"top-{rank}" for rank in TOPS] + ["median"]
    return [
        compare(records, name, "diff", "softmax", group=group, paper=values[group], claimed=group != "median")
        for name, values in PAPER.items()
        for group in groups
    ]


TABLE_5 = Experiment(
    name="table5",
    shows="activation outliers: the largest attention logits and hidden states (Table 5)",
    presets=language_twins(
        cpu={"tokens": 40_000},
        gpu={"tokens": TOKENS},
        paper=(Evaluation(measure="outliers", options={"tokens": TOKENS}),),
        cpu_minutes=0.5,
        gpu_minutes=2,
    ),
    compare=_compare,
    measure=_measure,
    headline=lambda _: Headline(name="outliers/attention_logits", group="top-1"),
    notes=(
        "Attention logits are q·k/√d as the softmax gets them, of the keys that a query sees, of all heads and layers, "
        "and of both maps of DIFF. Hidden states are the residual stream after each layer.",
        f"The paper's values are of models of 3B parameters over 0.4M tokens. {FIXED_TEXT} The largest of other text "
        "may be larger.",
    ),
)
