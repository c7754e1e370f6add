"""Recall: which arm finds more of the needles hidden among noise tokens, after the same training.

Not a table of the paper: its Section 3.4 at the level of tokens, at a size where DIFF and its twin are told apart
within minutes.
"""

from collections.abc import Sequence

from diff_transformer.data import RetrievalBatches
from diff_transformer.eval import retrieval_records
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.results import Comparison, Result, compare

# Queries are drawn with repeats: where every pair is asked for once, later queries can be answered by elimination. One
# that repeats an earlier query can be answered from it, so the first is judged on its own as well.
FIRST = "retrieval/first_query_accuracy"
ALL = "retrieval/accuracy"


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, RetrievalBatches)
    sequences = preset.options["sequences"]
    return retrieval_records(run.model, run.data.batches, run.arm.name, sequences=sequences, seed=run.seed)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return [compare(records, name, "diff", "softmax") for name in (FIRST, ALL)]


RECALL = Experiment(
    name="recall",
    shows="needles found among noise tokens after the same training (Section 3.4 in small)",
    presets={
        "cpu": Preset(
            recipe="retrieval",
            overrides=(
                "model.hidden_size=64",
                "model.intermediate_size=172",
                "model.num_hidden_layers=2",
                "data.repeats=true",
                "train.steps=600",
            ),
            arms=TWINS,
            learning_rates=(1e-3, 3e-3, 1e-2),
            seeds=5,
            options={"sequences": 2048},
            minutes=8,
        ),
    },
    compare=_compare,
    measure=_measure,
    validation=ACCURACY,
    uses_text=False,
    notes=(
        f"Queries are drawn with repeats, so that none can be answered by elimination; {ALL} is over all of them, and "
        "one that repeats an earlier query of its sequence can be answered from it.",
    ),
)
