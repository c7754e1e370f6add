"""Defines the experiments with lm-evaluation-harness: without examples (Table 1), and with five (Table 8)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.lab.experiments.language_experiments import language_twins
from diff_transformer.lab.experiments.paper_preset import Evaluation, PaperPreset, Stage
from diff_transformer.lab.measure import harness
from diff_transformer.lab.measure.harness import AVERAGE, TABLE_1_MEASURES, load_tasks, measure_tasks, table_1_average
from diff_transformer.lab.measure.harness_questions import CHOICES, write_cloze
from diff_transformer.lab.measure.measurement import Count, Options, Text
from diff_transformer.lab.measure.standard import text_part
from diff_transformer.lab.record import Baseline, Comparison, Result
from diff_transformer.lab.statistics import compare
from diff_transformer.train import Data, Recipe

NOTES = (
    "No verdict: models of this size answer such tasks by chance, and what they answer says nothing about the paper's "
    "claim.",
    "Unless others are asked for, the questions are made from the held-out text (which of four pieces goes on from a "
    "beginning): the paper's seven tasks need the network and were not run here. Where there is one: --option "
    "tasks=table1, or the harness's names or .jsonl files of your own, separated by commas.",
)


class HarnessOptions(Options):
    """Which questions are asked."""

    tasks: Text = Field(
        default="", description='names separated by commas, "table1" for the paper\'s seven; nothing for held-out text'
    )
    questions: Count = Field(default=200, description="questions that are made from held-out text, at most")


def harness_presets(cpu_minutes: float, shots: Sequence[int]) -> dict[str, Preset]:
    """The language twins with questions from their text; the paper's models with the paper's tasks.

    Args:
        cpu_minutes: how long measuring all models takes.
        shots: examples before each question of the paper's.
    """
    return language_twins(
        cpu={"tasks": "", "questions": 200},
        gpu={"tasks": "", "questions": 1000},
        paper=tuple(Evaluation(tasks="table1", num_fewshot=count) for count in shots),
        cpu_minutes=cpu_minutes,
        gpu_minutes=cpu_minutes,
    )


def check_tasks(options: Mapping[str, Any], data: Data) -> None:
    """Write the questions, load the tasks, and forget them. Raises as `write_cloze` and `load_tasks`."""
    with TemporaryDirectory() as folder:
        load_tasks(_names(options) or [_write_questions(Path(folder), data, options)])


def harness_records(run: MeasuredRun, options: Mapping[str, Any], shots: int) -> list[Result]:
    """What the harness finds of a run, at its number of examples; with the average of Table 1 where all are there.

    Args:
        run: a trained checkpoint.
        options: "tasks", names separated by commas ("table1" for the paper's seven), or "" for questions from the
            held-out text, "questions" of them.
        shots: examples before each question.

    Raises:
        ValueError: tasks that are not known, or whose data cannot be had.
    """
    tasks = load_tasks(_names(options) or [_write_questions(run.folder.parent, run.data, options)])
    done = measure_tasks(run.model, run.data.tokenizer, tasks, run.variant.name, num_fewshot=shots)
    records = [record for result in done for record in result.records]
    average = table_1_average(records)
    shown = [*records, average] if average else records
    return [replace(record, seed=run.seed, coordinates=Coordinates(examples=shots)) for record in shown]


def _names(options: Mapping[str, Any]) -> list[str]:
    names = [part.strip() for part in str(options["tasks"]).split(",") if part.strip()]
    return [task for name in names for task in (TABLE_1_MEASURES if name == "table1" else [name])]


def _write_questions(folder: Path, data: Data, options: Mapping[str, Any]) -> str:
    """The path of a file of questions from the held-out text."""
    text = text_part(data.batches)
    # As many as a question has examples fit the context beside it, if a token is no longer than a character.
    characters = text.length // 6 - 6
    path = folder / "held_out_text.jsonl"
    return str(write_cloze(path, text, data.tokenizer, questions=options["questions"], characters=characters))


def harness_comparisons(
    records: Sequence[Result], paper: Mapping[tuple[str, Coordinates], tuple[float, float]]
) -> list[Comparison]:
    """Both variants in everything that was measured, without a claim; beside it the paper's values.

    Args:
        records: of all variants and seeds.
        paper: (name, number of examples) → the values of DIFF and of its Transformer, NaN where it gives none.
    """
    found = dict.fromkeys((record.name, record.coordinates) for record in records if record.name.startswith("harness/"))
    return [
        compare(records, name, "diff", "softmax", coordinates=place, paper=paper.get((name, place)), claimed=False)
        for name, place in found
    ]


def harness_baselines(recipe: Recipe, options: Mapping[str, Any], shots: Sequence[int]) -> list[Baseline]:
    """Guessing among the choices of the questions from held-out text; for other tasks none is known here.

    Args:
        recipe: of the runs.
        options: as of `harness_records`.
        shots: examples before each question.
    """
    if options["tasks"]:
        return []
    levels: dict[str, Any] = {"chance": 1 / CHOICES, "floor": 1 / CHOICES, "steps": recipe.train.steps}
    return [
        Baseline(name=f"harness/held_out_text/{measure}", coordinates=Coordinates(examples=count), **levels)
        for count in shots
        for measure in ("acc", "acc_norm")
    ]


_NO_EXAMPLES, _FIVE_EXAMPLES = Coordinates(examples=0), Coordinates(examples=5)


def alone(value: float) -> tuple[float, float]:
    """A value of DIFF where the paper gives none of a Transformer trained alike."""
    return (value, math.nan)


# The paper trained no Transformer of its own on as many tokens; other people's are no twins.
TABLE1_PAPER = {
    **{
        (f"harness/{task}/{measure}", _NO_EXAMPLES): alone(value)
        for (task, measure), value in zip(harness.TABLE_1_MEASURES.items(), harness.TABLE_1["DIFF-3B"], strict=True)
    },
    (harness.AVERAGE, _NO_EXAMPLES): alone(0.606),
}


def _measure_table1(run: MeasuredRun, preset: Preset) -> list[Result]:
    return harness_records(run, preset.options, 0)


def _compare_table1(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return harness_comparisons(records, TABLE1_PAPER)


TABLE_1 = Experiment(
    name="table1",
    shows="lm-evaluation-harness without examples (Table 1): the path, without a verdict",
    presets={
        **harness_presets(cpu_minutes=0.5, shots=(0,)),
        "paper": PaperPreset(
            # 1T tokens.
            stages=(Stage(recipe="paper-3b", overrides=("train.steps=238419",), name="paper-3b-1t"),),
            variants=TWINS[:1],
            evaluations=(Evaluation(tasks="table1", num_fewshot=0),),
            remarks=("The paper trained no Transformer of its own on as many tokens: it compares other people's.",),
        ),
    },
    compare=_compare_table1,
    options=HarnessOptions,
    measure=_measure_table1,
    check=check_tasks,
    baselines=lambda recipe, options: harness_baselines(recipe, options, (0,)),
    notes=(
        *NOTES,
        "The paper's averages after 1T tokens: DIFF-3B 60.6, OpenLLaMA-3B-v2 57.5, StableLM-base-alpha-3B-v2 56.8; the "
        "latter two are other people's models. For a checkpoint of your own: diff-transformer eval CHECKPOINT --tasks "
        "table1.",
    ),
)

# DIFF and its Transformer, 3B parameters each. BoolQ is where DIFF is the worse one.
TABLE8_PAPER = {
    (AVERAGE, _NO_EXAMPLES): (0.562, 0.554),
    (AVERAGE, _FIVE_EXAMPLES): (0.580, 0.564),
    ("harness/boolq/acc", _NO_EXAMPLES): (0.601, 0.629),
}
SHOTS = (0, 5)


def _measure_table8(run: MeasuredRun, preset: Preset) -> list[Result]:
    return [record for shots in SHOTS for record in harness_records(run, preset.options, shots)]


def _compare_table8(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return harness_comparisons(records, TABLE8_PAPER)


TABLE_8 = Experiment(
    name="table8",
    shows="lm-evaluation-harness without and with five examples (Table 8): the path, without a verdict",
    presets=harness_presets(cpu_minutes=0.5, shots=SHOTS),
    compare=_compare_table8,
    options=HarnessOptions,
    measure=_measure_table8,
    check=check_tasks,
    baselines=lambda recipe, options: harness_baselines(recipe, options, SHOTS),
    notes=(
        *NOTES,
        "The paper's averages after 350B tokens, Transformer and DIFF: 55.4 and 56.2 without examples, 56.4 and 58.0 "
        "with five.",
    ),
)
