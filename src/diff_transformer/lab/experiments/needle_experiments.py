"""Defines the experiments with needles: found (Table 2), by length and depth (Figure 5), and attended to (Table 3)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from diff_transformer.data import NeedleBatches, NeedleTask, RetrievalBatches
from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.experiments.experiment import ACCURACY as BY_ACCURACY
from diff_transformer.lab.experiments.experiment import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.lab.experiments.language_experiments import HALF_NORM, LANGUAGE_GPU, table_6_variants
from diff_transformer.lab.experiments.paper_preset import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.lab.measure.accuracy import joint_levels, text_levels, token_levels
from diff_transformer.lab.measure.measurement import Count, Counts, Options
from diff_transformer.lab.measure.needles import (
    ACCURACY,
    BY_DEPTH,
    DEPTHS,
    JOINT,
    attention_records,
    cell_place,
    document_attention,
    needle_records,
    token_needle_records,
)
from diff_transformer.lab.measure.retrieval import AttentionMass, attention_mass
from diff_transformer.lab.record import Baseline, Comparison, Headline, Result
from diff_transformer.lab.statistics import compare
from diff_transformer.train import Data, Recipe
from diff_transformer.train.data_kinds import NeedleData, RetrievalData

SYNTHETIC_MODEL = (
    "model.hidden_size=64",
    "model.intermediate_size=172",
    "model.num_hidden_layers=2",
    "train.inspect_every=null",
)
# With a small rope_theta a small model finds a token's neighbour sooner.
SYNTHETIC_TASK = (*SYNTHETIC_MODEL, "model.rope_theta=10", "train.evaluate_every=250", "train.checkpoint_every=500")

# Two cores: needles among noise tokens. Sequences of 1 to 4 pairs, asked for again and again, so that nothing can be
# answered by elimination. Beside the twins Table 6's control: half the heads of twice the width, with headwise norm.
NEEDLE_CPU = Preset(
    recipe="retrieval",
    overrides=(
        *SYNTHETIC_TASK,
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
    variants=(*TWINS, *table_6_variants(4, 16, HALF_NORM)),
    learning_rates=(5e-4, 1e-3, 3e-3, 6e-3),
    seeds=3,
)
# One H200: text, and in a fifth of the sequences the paper's template with 1 to 8 needles.
NEEDLE_GPU = Preset(
    recipe="language",
    overrides=(
        *LANGUAGE_GPU,
        "data.kind=needles",
        "data.share=0.2",
        "data.needles=8",
        "data.queried=2",
        "data.turns=4",
        "train.steps=2500",
        "train.evaluate_every=2500",
    ),
    variants=TWINS,
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


class NeedleDepthOptions(Options):
    """How many needles are hidden, and how often."""

    needles: Count = Field(default=4, description="needles in a document")
    samples: Count = Field(default=100, description="documents at each depth")


class NeedleLengthOptions(NeedleDepthOptions):
    """The same, in contexts of several lengths."""

    lengths: Counts = Field(default=(1024,), description="tokens of a document, or before the first query")
    batch_size: Count = Field(default=64, description="documents at a time")


class CellOptions(Options):
    """How many needles are hidden and how many of them are asked for, and how often."""

    cells: Annotated[tuple[Counts, ...], Field(min_length=1)] = Field(
        default=((1, 1),), description="pairs of needles and how many of them are asked for"
    )
    samples: Count = Field(default=100, description="documents at each depth")
    batch_size: Count = Field(default=64, description="documents at a time")


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
    run: MeasuredRun,
    cell: tuple[int, int],
    options: Any,
    *,
    length: int | None = None,
    coordinates: Coordinates = NOWHERE,
) -> list[Result]:
    """Accuracy of one cell of needles and queries; `options` has "samples", the documents at each of the five depths.

    Args:
        run: the checkpoint.
        cell: needles, and how many of them are asked for.
        options: of the preset.
        length: tokens of a document of text, or before the first query; as in training unless given.
        coordinates: of the records.
    """
    shared: dict[str, Any] = {"coordinates": coordinates, "seed": run.seed}
    tokens = token_task(run.data)
    if tokens is not None:
        task = tokens.asking(*cell, context_length=length)
        sequences = len(DEPTHS) * options["samples"]
        return token_needle_records(run.model, task, run.variant.name, sequences=sequences, **shared)
    return needle_records(
        run.model,
        run.data.tokenizer,
        text_task(run.data, *cell, length),
        run.variant.name,
        samples=options["samples"],
        batch_size=options["batch_size"],
        **shared,
    )


def cell_baselines(recipe: Recipe, cell: tuple[int, int], coordinates: Coordinates) -> list[Baseline]:
    """What the accuracies of `accuracy_records` come to without retrieval.

    Args:
        recipe: of the runs.
        cell: needles, and how many of them are asked for.
        coordinates: of the records.
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
        Baseline(name=ACCURACY, coordinates=coordinates, steps=steps, **each),
        Baseline(name=JOINT, coordinates=coordinates, steps=steps, **whole),
        *(
            Baseline(
                name=BY_DEPTH,
                coordinates=Coordinates(coordinates, depth=depth),
                steps=steps,
                accuracy=ACCURACY,
                accuracy_coordinates=coordinates,
                **first,
            )
            for depth in DEPTHS
        ),
    ]


def attention_by_depth(run: MeasuredRun, needles: int, samples: int) -> Iterator[tuple[float, AttentionMass]]:
    """Each depth, and the attention of about `samples` sequences whose only queried needle lies there."""
    tokens = token_task(run.data)
    if tokens is None:
        task = text_task(run.data, needles, 1)
        for depth in DEPTHS:
            yield depth, document_attention(run.model, task.sample(samples, run.seed, depth))
        return
    asked = tokens.asking(needles, 1)
    sample = asked.sample(len(DEPTHS) * samples, run.seed)
    mass = attention_mass(run.model, sample, asked.context_length)
    fifth = (sample.depth[:, 0] * len(DEPTHS)).long().clamp(max=len(DEPTHS) - 1)
    for number, depth in enumerate(DEPTHS):
        if (fifth == number).any():
            yield depth, _chosen(mass, fifth == number)


def _chosen(mass: AttentionMass, rows: Tensor) -> AttentionMass:
    return AttentionMass(**{name: torch.as_tensor(values)[rows] for name, values in vars(mass).items()})


# DIFF and the Transformer; mean over five depths.
TABLE2_PAPER = {(1, 1): (1.00, 1.00), (2, 2): (0.92, 0.85), (4, 2): (0.84, 0.62), (6, 2): (0.85, 0.55)}


def _measure_table2(run: MeasuredRun, preset: Preset) -> list[Result]:
    cells = [(int(needles), int(queried)) for needles, queried in preset.options["cells"]]
    found = [record for cell in cells for record in accuracy_records(run, cell, preset.options)]
    # Of one city to a question both accuracies are the same number.
    alone = {cell_place(cell) for cell in cells if cell[1] == 1}
    return [record for record in found if not (record.name == JOINT and record.coordinates in alone)]


def _compare_table2(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    found = []
    for other in [variant.name for variant in preset.variants if variant.name != "diff"]:
        for needles, queried in preset.options["cells"]:
            place = cell_place((needles, queried))
            paper = TABLE2_PAPER.get((needles, queried)) if other == "softmax" else None
            # The paper has needles for the twins alone: how DIFF stands to the control is for us to ask.
            more: dict[str, Any] = {"coordinates": place, "exploratory": other != "softmax"}
            # One needle among tokens is found by knowing what a value is: nothing is claimed of it, nor in the paper.
            found.append(compare(records, ACCURACY, "diff", other, paper=paper, claimed=needles > 1, **more))
            if queried > 1:
                found.append(compare(records, JOINT, "diff", other, **more))
    return found


def _baselines_table2(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    cells = [(int(needles), int(queried)) for needles, queried in options["cells"]]
    return [baseline for cell in cells for baseline in cell_baselines(recipe, cell, cell_place(cell))]


TABLE_2 = Experiment(
    name="table2",
    shows="needles found, of N hidden ones when R are asked for (Table 2)",
    presets={
        "cpu": replace(
            NEEDLE_CPU, options={"cells": [[1, 1], [2, 1], [2, 2], [4, 1], [4, 2]], "samples": 400}, minutes=7.5
        ),
        "gpu": replace(
            NEEDLE_GPU,
            options={"cells": [[1, 1], [2, 2], [4, 2], [6, 2]], "samples": 100, "batch_size": 64},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION,),
            variants=TWINS,
            evaluations=tuple(
                Evaluation(
                    measure="needles",
                    options={"needles": needles, "queried": queried, "length": 4096, "samples": 50},
                )
                for needles, queried in TABLE2_PAPER
            ),
        ),
    },
    options=CellOptions,
    measure=_measure_table2,
    compare=_compare_table2,
    check=lambda options, data: check_cells(data, options["cells"]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name=ACCURACY, coordinates=cell_place((2, 2))),
    baselines=_baselines_table2,
    notes=(
        *NOTES,
        "needles/accuracy counts each city, needles/joint_accuracy a question whose cities are all answered; the paper "
        "does not say which it reports, its values are put beside the first.",
        "The cpu preset's control, the Transformer with half the heads and headwise norm, is ours: what is asked of it "
        "is no claim of the paper's.",
    ),
)

# At 8K, 16K, … 64K tokens, mean over five depths.
PAPER_DIFF = (1.00, 0.94, 0.87, 0.83, 0.83, 0.92, 0.84, 0.86)
PAPER_TRANSFORMER = (0.95, 0.84, 0.78, 0.64, 0.50, 0.75, 0.78, 0.52)
ALL = Coordinates(length="all lengths")
VARIANTS = ("diff", "softmax")


def _of_length(length: int) -> Coordinates:
    return Coordinates(length=length)


def _measure_fig5(run: MeasuredRun, preset: Preset) -> list[Result]:
    options = preset.options
    records = []
    for length in options["lengths"]:
        cell = (options["needles"], 1)
        found = accuracy_records(run, cell, options, length=length, coordinates=_of_length(length))
        records += [record for record in found if record.name != JOINT]  # of one needle it is the same
    whole = [record for record in records if record.name == ACCURACY]
    mean = fmean(record.value for record in whole)
    count = sum(record.n or 0 for record in whole)
    records.append(replace(whole[0], value=mean, interval=None, n=count, coordinates=ALL, method="mean over lengths"))
    return records


def _compare_fig5(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    paper = (fmean(PAPER_DIFF), fmean(PAPER_TRANSFORMER))
    found = [compare(records, ACCURACY, *VARIANTS, coordinates=ALL, paper=paper)]
    found += [
        compare(records, ACCURACY, *VARIANTS, coordinates=_of_length(length)) for length in preset.options["lengths"]
    ]
    depths = [
        {record.coordinates for record in records if record.name == BY_DEPTH and record.variant == variant}
        for variant in VARIANTS
    ]
    places = dict.fromkeys(record.coordinates for record in records)
    both = [place for place in places if all(place in of for of in depths)]
    return found + [compare(records, BY_DEPTH, *VARIANTS, coordinates=place) for place in both]


def _baselines_fig5(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    cell = (options["needles"], 1)
    places = [ALL, *map(_of_length, options["lengths"])]
    return [baseline for place in places for baseline in cell_baselines(recipe, cell, place)]


FIG_5 = Experiment(
    name="fig5",
    shows="one needle of several found, by the length of the context and the needle's depth (Figure 5)",
    presets={
        "cpu": replace(NEEDLE_CPU, options={"needles": 4, "lengths": [10, 16, 22, 28], "samples": 400}, minutes=7),
        "gpu": replace(
            NEEDLE_GPU,
            options={"needles": 8, "lengths": [384, 512, 640, 768, 896, 1024], "samples": 40, "batch_size": 64},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            variants=TWINS,
            evaluations=tuple(
                Evaluation(
                    measure="needles", options={"needles": 8, "queried": 1, "length": 8192 * part, "samples": 50}
                )
                for part in range(1, 9)
            ),
        ),
    },
    options=NeedleLengthOptions,
    measure=_measure_fig5,
    compare=_compare_fig5,
    check=lambda options, data: check_cells(data, [(options["needles"], 1)], options["lengths"]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name=ACCURACY, coordinates=ALL),
    baselines=_baselines_fig5,
    notes=(*NOTES, f"The paper's values of {ALL.label} are the means of its eight lengths, 8K to 64K."),
)

# By depth: DIFF, the Transformer.
TABLE3_PAPER = {
    "attention_to_answer": ((0.27, 0.30, 0.31, 0.32, 0.40), (0.03, 0.03, 0.03, 0.07, 0.09)),
    "attention_noise": ((0.01, 0.02, 0.02, 0.02, 0.01), (0.51, 0.54, 0.52, 0.49, 0.49)),
}
DEFINITIONS = ("share", "signed")


def _measure_table3(run: MeasuredRun, preset: Preset) -> list[Result]:
    masses = attention_by_depth(run, preset.options["needles"], preset.options["samples"])
    return attention_records(masses, run.variant.name, run.seed)


def _compare_table3(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    measured = {record.coordinates for record in records}
    found = []
    for kind, (diff, transformer) in TABLE3_PAPER.items():
        for definition in DEFINITIONS:
            for depth, *paper in zip(DEPTHS, diff, transformer, strict=True):
                if Coordinates(depth=depth) in measured:
                    values = (paper[0], paper[1])
                    name, place = f"needles/{kind}_{definition}", Coordinates(depth=depth)
                    # Rows that add up to 1 − λ have less of everything, noise and answer, before anything is learnt.
                    claimed = definition == "share"
                    found.append(
                        compare(records, name, "diff", "softmax", coordinates=place, paper=values, claimed=claimed)
                    )
    return found


TABLE_3 = Experiment(
    name="table3",
    shows="attention to the answer and attention noise, by the needle's depth and by both definitions (Table 3)",
    presets={
        "cpu": replace(NEEDLE_CPU, options={"needles": 4, "samples": 200}, minutes=7),
        "gpu": replace(NEEDLE_GPU, options={"needles": 6, "samples": 20}, minutes=25),
        "paper": PaperPreset(
            stages=(THREE_BILLION,),
            variants=TWINS,
            evaluations=(
                Evaluation(
                    measure="needle_attention", options={"needles": 6, "queried": 1, "length": 4096, "samples": 50}
                ),
            ),
            remarks=("The paper does not say how many needles and samples its Table 3 has; these are Table 2's.",),
        ),
    },
    options=NeedleDepthOptions,
    measure=_measure_table3,
    compare=_compare_table3,
    check=lambda options, data: check_cells(data, [(options["needles"], 1)]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name="needles/attention_to_answer_share", coordinates=Coordinates(depth=DEPTHS[0])),
    notes=(
        *NOTES,
        "The paper does not state how it normalises: signed is the sum of the weights of A1 − λ A2, share the sum of "
        "their absolute values over that of the row. Its values are put beside both. Signed rows of DIFF add up to "
        "1 − λ and those of the Transformer to 1: DIFF's signed noise is lower and its signed attention to the answer "
        "is less by that factor whatever it has learnt, so verdicts are on shares alone.",
    ),
)
