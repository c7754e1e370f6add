"""Tables 1 and 8 on the twins that are trained here: lm-evaluation-harness, its tasks or questions from their text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diff_transformer.eval.cloze import CHOICES, write_cloze
from diff_transformer.eval.documents import text_part
from diff_transformer.eval.harness import load_tasks, measure_tasks
from diff_transformer.eval.table_1 import TABLE_1_MEASURES, table_1_average
from diff_transformer.experiments.cluster import Evaluation
from diff_transformer.experiments.framework import MeasuredRun, Preset
from diff_transformer.experiments.language_twins import language_twins
from diff_transformer.results import Baseline, Comparison, Result, compare
from diff_transformer.train import Data, Recipe

NOTES = (
    "No verdict: models of this size answer such tasks by chance, and what they answer says nothing about the paper's "
    "claim.",
    "Unless others are asked for, the questions are made from the held-out text (which of four pieces goes on from a "
    "beginning): the paper's seven tasks need the network and were not run here. Where there is one: --option "
    "tasks=table1, or the harness's names or .jsonl files of your own, separated by commas.",
)


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
    """What the harness finds of a run, in the group of its examples; with the average of Table 1 where all are there.

    Args:
        run: a trained checkpoint.
        options: "tasks", names separated by commas ("table1" for the paper's seven), or "" for questions from the
            held-out text, "questions" of them.
        shots: examples before each question.

    Raises:
        ValueError: tasks that are not known, or whose data cannot be had.
    """
    tasks = load_tasks(_names(options) or [_write_questions(run.folder.parent, run.data, options)])
    done = measure_tasks(run.model, run.data.tokenizer, tasks, run.arm.name, num_fewshot=shots)
    records = [record for result in done for record in result.records]
    average = table_1_average(records)
    shown = [*records, average] if average else records
    return [replace(record, seed=run.seed, group=f"{shots}-shot") for record in shown]


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
    records: Sequence[Result], paper: Mapping[tuple[str, str], tuple[float, float]]
) -> list[Comparison]:
    """Both arms in everything that was measured, without a claim; beside it the paper's values.

    Args:
        records: of all arms and seeds.
        paper: (name, group) → the values of DIFF and of its Transformer, NaN where it gives none.
    """
    found = dict.fromkeys((record.name, record.group) for record in records if record.name.startswith("harness/"))
    return [
        compare(records, name, "diff", "softmax", group=group, paper=paper.get((name, group or "")), claimed=False)
        for name, group in found
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
        Baseline(name=f"harness/held_out_text/{measure}", group=f"{count}-shot", **levels)
        for count in shots
        for measure in ("acc", "acc_norm")
    ]


def alone(value: float) -> tuple[float, float]:
    """A value of DIFF where the paper gives none of a Transformer trained alike."""
    return (value, math.nan)
