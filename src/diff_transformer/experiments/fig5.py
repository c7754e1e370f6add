"""Figure 5: one needle of several found, by the length of the context and the needle's depth."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from diff_transformer.eval.needles import ACCURACY, BY_DEPTH, JOINT
from diff_transformer.experiments.cluster import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY as BY_ACCURACY
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.needles import CPU, NOTES, ON_GPU, accuracy_records, cell_baselines, check_cells
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Recipe

# At 8K, 16K, … 64K tokens, mean over five depths.
PAPER_DIFF = (1.00, 0.94, 0.87, 0.83, 0.83, 0.92, 0.84, 0.86)
PAPER_TRANSFORMER = (0.95, 0.84, 0.78, 0.64, 0.50, 0.75, 0.78, 0.52)
ALL = "all lengths"
ARMS = ("diff", "softmax")


def _group(length: int) -> str:
    return f"{length} tokens"


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    options = preset.options
    records = []
    for length in options["lengths"]:
        cell = (options["needles"], 1)
        found = accuracy_records(run, cell, options, length=length, group=_group(length))
        records += [record for record in found if record.name != JOINT]  # of one needle it is the same
    whole = [record for record in records if record.name == ACCURACY]
    mean = fmean(record.value for record in whole)
    count = sum(record.n or 0 for record in whole)
    records.append(replace(whole[0], value=mean, interval=None, n=count, group=ALL, method="mean over lengths"))
    return records


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    paper = (fmean(PAPER_DIFF), fmean(PAPER_TRANSFORMER))
    found = [compare(records, ACCURACY, *ARMS, group=ALL, paper=paper)]
    found += [compare(records, ACCURACY, *ARMS, group=_group(length)) for length in preset.options["lengths"]]
    depths = [{record.group for record in records if record.name == BY_DEPTH and record.arm == arm} for arm in ARMS]
    both = [group for group in dict.fromkeys(record.group for record in records) if all(group in of for of in depths)]
    return found + [compare(records, BY_DEPTH, *ARMS, group=group) for group in both]


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    cell = (options["needles"], 1)
    groups = [ALL, *map(_group, options["lengths"])]
    return [baseline for group in groups for baseline in cell_baselines(recipe, cell, group)]


FIG_5 = Experiment(
    name="fig5",
    shows="one needle of several found, by the length of the context and the needle's depth (Figure 5)",
    presets={
        "cpu": replace(CPU, options={"needles": 4, "lengths": [10, 16, 22, 28], "samples": 400}, minutes=7),
        "gpu": replace(
            ON_GPU,
            options={"needles": 8, "lengths": [384, 512, 640, 768, 896, 1024], "samples": 40, "batch_size": 64},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            arms=TWINS,
            evaluations=tuple(
                Evaluation(
                    measure="needles", options={"needles": 8, "queried": 1, "length": 8192 * part, "samples": 50}
                )
                for part in range(1, 9)
            ),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=lambda options, data: check_cells(data, [(options["needles"], 1)], options["lengths"]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name=ACCURACY, group=ALL),
    baselines=_baselines,
    notes=(*NOTES, f"The paper's values of {ALL!r} are the means of its eight lengths, 8K to 64K."),
)
