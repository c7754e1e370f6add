"""Recall: which arm finds more of the needles hidden among noise tokens, after the same training.

Not a table of the paper: its Section 3.4 at the level of tokens, at a size where DIFF and its twin are told apart
within minutes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.data import RetrievalBatches
from diff_transformer.eval import retrieval_records
from diff_transformer.eval.floors import token_levels
from diff_transformer.eval.records import DEPTHS
from diff_transformer.experiments.framework import ACCURACY, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.table6 import DIFF, rows
from diff_transformer.experiments.tokens import SMALL
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Recipe
from diff_transformer.train.recipe import RetrievalData

# Later queries can be answered without finding anything, so the first is judged on its own as well; see the notes.
FIRST = "retrieval/first_query_accuracy"
ALL = "retrieval/accuracy"
BY_DEPTH = "retrieval/accuracy_by_depth"


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, RetrievalBatches)
    sequences = preset.options["sequences"]
    return retrieval_records(run.model, run.data.batches, run.arm.name, sequences=sequences, seed=run.seed)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    others = [arm.name for arm in preset.arms if arm.name != DIFF]
    return [compare(records, name, DIFF, other, claimed_by="us") for name in (FIRST, ALL) for other in others]


def retrieval_baselines(recipe: Recipe) -> list[Baseline]:
    """What the accuracies of `retrieval_records` come to without retrieval; nothing is known of another task's."""
    data, steps = recipe.data, recipe.train.steps
    if not isinstance(data, RetrievalData):
        return []
    first = token_levels(data.num_pairs, 1, data.num_values)
    levels = token_levels(data.num_pairs, data.num_queries or data.num_pairs, data.num_values, repeats=data.repeats)
    of_depths = [
        Baseline(name=BY_DEPTH, group=depth, steps=steps, accuracy=ALL, accuracy_group=None, **levels)
        for depth in DEPTHS
    ]
    return [
        Baseline(name=FIRST, group=None, steps=steps, **first),
        Baseline(name=ALL, group=None, steps=steps, **levels),
        *of_depths,
    ]


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    return retrieval_baselines(recipe)


RECALL = Experiment(
    name="recall",
    shows="needles found among noise tokens after the same training (Section 3.4 in small)",
    presets={
        "cpu": Preset(
            recipe="retrieval",
            overrides=(
                *SMALL,
                "data.num_pairs=8",
                "train.steps=800",
                "train.evaluate_every=200",
                "train.checkpoint_every=400",
                "train.max_loss_rise=null",  # it jumps early with some seeds; the accuracy tells
            ),
            # Beside the twins Table 6's control: half the heads of twice the width, with headwise norm.
            arms=tuple(rows(4, 16)[row] for row in (3, 0, 2)),
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
            arms=rows(16, 16)[:5],
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=5,
            options={"sequences": 4096},
            minutes=25,
        ),
    },
    compare=_compare,
    measure=_measure,
    validation=ACCURACY,
    headline=lambda _: Headline(name=FIRST),
    baselines=_baselines,
    notes=(
        f"{ALL} is over all queries, whose answers stay in view. The cpu preset asks for each of 8 pairs once, so a "
        "model that knows which values occur can leave out those already given and finds nothing (by elimination, "
        "beside the floor); only the first query cannot be answered that way. The gpu preset draws "
        "queries with repeats: nothing can be left out, but one that repeats an earlier query can be copied from it.",
    ),
)
