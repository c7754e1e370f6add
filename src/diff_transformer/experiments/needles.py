"""What Table 2, Figure 5 and Table 3 share: the training, whose runs they have in common, and their documents."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import NeedleBatches, NeedleTask, RetrievalBatches
from diff_transformer.eval import AttentionMass, attention_mass
from diff_transformer.eval.floors import joint_levels, text_levels, token_levels
from diff_transformer.eval.needles import (
    ACCURACY,
    BY_DEPTH,
    DEPTHS,
    JOINT,
    depth_name,
    document_attention,
    needle_records,
    token_needle_records,
)
from diff_transformer.experiments.framework import TWINS, MeasuredRun, Preset
from diff_transformer.experiments.language import GPU
from diff_transformer.experiments.table6 import rows
from diff_transformer.experiments.tokens import FINDING
from diff_transformer.results import Baseline, Result
from diff_transformer.train import Data, Recipe
from diff_transformer.train.recipe import NeedleData, RetrievalData

# Two cores: needles among noise tokens. Sequences of 1 to 4 pairs, asked for again and again, so that nothing can be
# answered by elimination. Beside the twins Table 6's control: half the heads of twice the width, with headwise norm.
CPU = Preset(
    recipe="retrieval",
    overrides=(
        *FINDING,
        "train.steps=1000",
        "data.num_pairs=4",
        "data.num_queries=8",
        "data.repeats=true",
        "data.vary=true",
        "data.num_keys=16",
        "data.num_values=16",
        "data.num_noise=16",
        "data.length=52",
        "data.batch_size=32",
    ),
    arms=(*TWINS, rows(4, 16)[2]),
    learning_rates=(5e-4, 1e-3, 3e-3, 6e-3),
    seeds=3,
)
# One H200: text, and in a fifth of the sequences the paper's template with 1 to 8 needles.
ON_GPU = Preset(
    recipe="language",
    overrides=(
        *GPU,
        "data.kind=needles",
        "data.share=0.2",
        "data.needles=8",
        "data.queried=2",
        "data.turns=4",
        "train.steps=2500",
        "train.evaluate_every=2500",
    ),
    arms=TWINS,
    learning_rates=(1e-3, 2e-3),
    seeds=2,
)
NOTES = (
    "The cpu preset hides pairs of tokens among noise tokens: a needle's depth is the fifth of the context that it "
    "lies in. A model that knows which values occur and binds none to its key answers 1/N of N needles, and a little "
    "more, as some values occur twice: that is the floor. By elimination is what it gets that also leaves out the "
    "answers already given. At a single depth a model may be above it by always naming the first needle, so depths are "
    "judged by the accuracy over all of them.",
    "The gpu preset trains from the beginning on text with needle documents among it; the paper's models were "
    "pretrained.",
)


def token_task(data: Data) -> RetrievalBatches | None:
    """A run's data, if it is of tokens."""
    batches = data.batches
    return batches if isinstance(batches, RetrievalBatches) else None


def text_task(data: Data, needles: int, queried: int, length: int | None = None) -> NeedleTask:
    """Documents of a run's validation text."""
    batches = data.batches
    assert isinstance(batches, NeedleBatches)  # the recipe's kind of data, where it is not of tokens
    known = batches.validation
    return NeedleTask(
        data.tokenizer,
        known.haystack,
        length=length or known.length,
        needles=needles,
        queried=queried,
        digits=known.digits,
    )


def check_cells(data: Data, cells: Sequence[Sequence[int]], lengths: Sequence[int | None] = (None,)) -> None:
    """Raises ValueError for a cell of needles and queries, or a length, for which the data have no room."""
    for cell in cells:
        if len(cell) != 2:
            raise ValueError(f"A cell is two numbers, needles and how many are asked for, got {list(cell)}.")
        for length in lengths:
            tokens = token_task(data)
            if tokens is None:
                text_task(data, cell[0], cell[1], length)
            else:
                tokens.asking(cell[0], cell[1], context_length=length)


def accuracy_records(
    run: MeasuredRun, cell: tuple[int, int], options: Any, *, length: int | None = None, group: str | None = None
) -> list[Result]:
    """Accuracy of one cell of needles and queries; `options` has "samples", the documents at each of the five depths.

    Args:
        run: the checkpoint.
        cell: needles, and how many of them are asked for.
        options: of the preset.
        length: tokens of a document of text, or before the first query; as in training unless given.
        group: of the records.
    """
    shared: dict[str, Any] = {"group": group, "seed": run.seed}
    tokens = token_task(run.data)
    if tokens is not None:
        task = tokens.asking(*cell, context_length=length)
        sequences = len(DEPTHS) * options["samples"]
        return token_needle_records(run.model, task, run.arm.name, sequences=sequences, **shared)
    return needle_records(
        run.model,
        run.data.tokenizer,
        text_task(run.data, *cell, length),
        run.arm.name,
        samples=options["samples"],
        batch_size=options["batch_size"],
        **shared,
    )


def cell_baselines(recipe: Recipe, cell: tuple[int, int], group: str) -> list[Baseline]:
    """What the accuracies of `accuracy_records` come to without retrieval.

    Args:
        recipe: of the runs.
        cell: needles, and how many of them are asked for.
        group: of the records.
    """
    data = recipe.data
    if isinstance(data, RetrievalData):
        each, whole = token_levels(*cell, data.num_values), joint_levels(*cell, data.num_values)
        # The first needle that is asked for is the one whose depth is known, and no answer stands before it.
        first = token_levels(cell[0], 1, data.num_values)
    else:
        assert isinstance(data, NeedleData)  # the presets' recipes
        each, whole = text_levels(*cell, data.digits), text_levels(*cell, data.digits, joint=True)
        first = each
    steps = recipe.train.steps
    return [
        Baseline(name=ACCURACY, group=group, steps=steps, **each),
        Baseline(name=JOINT, group=group, steps=steps, **whole),
        *(
            Baseline(
                name=BY_DEPTH,
                group=f"{group}, {depth_name(depth)}",
                steps=steps,
                accuracy=ACCURACY,
                accuracy_group=group,
                **first,
            )
            for depth in DEPTHS
        ),
    ]


def attention_by_depth(run: MeasuredRun, needles: int, samples: int) -> Iterator[tuple[str, AttentionMass]]:
    """The name of each depth, and the attention of about `samples` sequences whose only queried needle lies there."""
    tokens = token_task(run.data)
    if tokens is None:
        task = text_task(run.data, needles, 1)
        for depth in DEPTHS:
            yield depth_name(depth), document_attention(run.model, task.sample(samples, run.seed, depth))
        return
    asked = tokens.asking(needles, 1)
    sample = asked.sample(len(DEPTHS) * samples, run.seed)
    mass = attention_mass(run.model, sample, asked.context_length)
    fifth = (sample.depth[:, 0] * len(DEPTHS)).long().clamp(max=len(DEPTHS) - 1)
    for number, depth in enumerate(DEPTHS):
        if (fifth == number).any():
            yield depth_name(depth), _chosen(mass, fifth == number)


def _chosen(mass: AttentionMass, rows: Tensor) -> AttentionMass:
    return AttentionMass(**{name: torch.as_tensor(values)[rows] for name, values in vars(mass).items()})
