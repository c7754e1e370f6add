"""Table 2: needles found, of N hidden ones when R are asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.eval.needles import ACCURACY, JOINT, cell_name
from diff_transformer.experiments.cluster import THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY as BY_ACCURACY
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.needles import CPU, NOTES, ON_GPU, accuracy_records, cell_baselines, check_cells
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Recipe

# DIFF and the Transformer; mean over five depths.
PAPER = {(1, 1): (1.00, 1.00), (2, 2): (0.92, 0.85), (4, 2): (0.84, 0.62), (6, 2): (0.85, 0.55)}


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    cells = [(int(needles), int(queried)) for needles, queried in preset.options["cells"]]
    found = [record for cell in cells for record in accuracy_records(run, cell, preset.options)]
    # Of one city to a question both accuracies are the same number.
    alone = {cell_name(cell) for cell in cells if cell[1] == 1}
    return [record for record in found if not (record.name == JOINT and record.group in alone)]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    found = []
    for other in [arm.name for arm in preset.arms if arm.name != "diff"]:
        for needles, queried in preset.options["cells"]:
            group = cell_name((needles, queried))
            paper = PAPER.get((needles, queried)) if other == "softmax" else None
            # The paper has needles for the twins alone: how DIFF stands to the control is for us to ask.
            more: dict[str, Any] = {"group": group, "claimed_by": "paper" if other == "softmax" else "us"}
            # One needle among tokens is found by knowing what a value is: nothing is claimed of it, nor in the paper.
            found.append(compare(records, ACCURACY, "diff", other, paper=paper, claimed=needles > 1, **more))
            if queried > 1:
                found.append(compare(records, JOINT, "diff", other, **more))
    return found


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    cells = [(int(needles), int(queried)) for needles, queried in options["cells"]]
    return [baseline for cell in cells for baseline in cell_baselines(recipe, cell, cell_name(cell))]


TABLE_2 = Experiment(
    name="table2",
    shows="needles found, of N hidden ones when R are asked for (Table 2)",
    presets={
        "cpu": replace(CPU, options={"cells": [[1, 1], [2, 1], [2, 2], [4, 1], [4, 2]], "samples": 400}, minutes=7.5),
        "gpu": replace(
            ON_GPU, options={"cells": [[1, 1], [2, 2], [4, 2], [6, 2]], "samples": 100, "batch_size": 64}, minutes=25
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION,),
            arms=TWINS,
            evaluations=tuple(
                Evaluation(
                    measure="needles",
                    options={"needles": needles, "queried": queried, "length": 4096, "samples": 50},
                )
                for needles, queried in PAPER
            ),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=lambda options, data: check_cells(data, options["cells"]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name=ACCURACY, group=cell_name((2, 2))),
    baselines=_baselines,
    notes=(
        *NOTES,
        "needles/accuracy counts each city, needles/joint_accuracy a question whose cities are all answered; the paper "
        "does not say which it reports, its values are put beside the first.",
        "The cpu preset's control, the Transformer with half the heads and headwise norm, is ours: what is asked of it "
        "is no claim of the paper's.",
    ),
)
