"""Runs tasks of lm-evaluation-harness, or questions from a file, on a model in memory."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.measure.answers import check_vocabulary
from diff_lab.measure.measurement import Count, EvalInput, Measurement, Text
from diff_lab.measure.question_files import CHOICES, Question, cloze_questions, read_lines
from diff_lab.measure.standard import text_part
from diff_lab.record import Baseline, Result
from diff_lab.statistics import proportion_interval
from diff_transformer.utils.suggestions import did_you_mean

# lm_eval warns of every default that it falls back to.
logging.getLogger("lm_eval").setLevel(logging.ERROR)

# Accuracies without examples, after 1T tokens. The paper does not say which accuracy; what OpenLLaMA publishes of
# itself are the numbers of its row here, with acc_norm for HellaSwag and acc for all others.
TABLE_1_MEASURES = {
    "arc_challenge": "acc",
    "arc_easy": "acc",
    "boolq": "acc",
    "hellaswag": "acc_norm",
    "openbookqa": "acc",
    "piqa": "acc",
    "winogrande": "acc",
}
TABLE_1 = {
    "DIFF-3B": (0.378, 0.729, 0.690, 0.714, 0.290, 0.768, 0.671),
    "OpenLLaMA-3B-v2": (0.339, 0.676, 0.657, 0.700, 0.260, 0.767, 0.629),
    "StableLM-base-alpha-3B-v2": (0.324, 0.673, 0.646, 0.686, 0.264, 0.760, 0.621),
}
AVERAGE = "harness/table1/average"
_NAMES = [f"harness/{task}/{measure}" for task, measure in TABLE_1_MEASURES.items()]


def table_1_average(records: Sequence[Result]) -> Result | None:
    """Return the average that Table 1 ends with, if all its tasks are among the records."""
    by_name = {record.name: record for record in records}
    if not by_name.keys() >= set(_NAMES):
        return None
    tasks = [by_name[name] for name in _NAMES]
    # Each is a share of n right answers, and the tasks are independent of each other.
    variances = [task.value * (1 - task.value) / (task.n - 1) for task in tasks if task.n and task.n > 1]
    value = math.fsum(task.value for task in tasks) / len(tasks)
    half = NORMAL * math.sqrt(math.fsum(variances)) / len(tasks)
    return Result(
        name=AVERAGE,
        variant=tasks[0].variant,
        value=value,
        interval=(value - half, value + half) if len(variances) == len(tasks) else None,
        n=sum(task.n or 0 for task in tasks),
        better="higher",
        method="mean over tasks; value ± 1.96 of their standard errors combined",
    )


def published(records: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return Table 1's numbers for the measures among the records: model → name of the record → value."""
    measured = {record.name for record in records}
    columns = {}
    for model, row in TABLE_1.items():
        values = {**dict(zip(_NAMES, row, strict=True)), AVERAGE: round(math.fsum(row) / len(row), 3)}
        columns[model] = {name: value for name, value in values.items() if name in measured}
    return columns if any(columns.values()) else {}


def task_names(texts: Sequence[str]) -> list[str]:
    """Return the names in texts that separate them by commas, "table1" standing for the paper's seven."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return [task for name in names for task in (TABLE_1_MEASURES if name == "table1" else [name])]


FEWSHOT_SEED = 1234  # lm_eval's own
NORMAL = 1.96  # half of a 95 % interval, in standard errors


def load_tasks(names: Sequence[str], include: Sequence[Path] = ()) -> dict[str, Any]:
    """Load tasks by name; fetch their data if it is not in the cache.

    The names are of tasks, groups or tags of lm_eval, or of YAML tasks in the folders `include`, which come first;
    NAME.jsonl is a file of questions. Raises FileNotFoundError, or ValueError for an unknown name, the same one twice
    or a file named like a task of Table 1.
    """
    for folder in include:
        if not folder.is_dir():
            raise FileNotFoundError(f"The folder of tasks {str(folder)!r} does not exist.")
    files = {name: Path(name).stem for name in names if name.endswith(".jsonl")}
    if double := [key for key, count in Counter(files.get(name, name) for name in names).items() if count > 1]:
        raise ValueError(f"The task {double[0]!r} is named twice.")
    for name, key in files.items():
        if key in TABLE_1_MEASURES:
            raise ValueError(
                f"The file {name!r} has the name of the paper's task {key!r}, of other questions; rename it."
            )
    tasks: dict[str, Any] = {name: name for name in names}
    tasks |= {name: question_task(key, read_lines(Path(name), Question, "questions")) for name, key in files.items()}

    from lm_eval.tasks import TaskManager

    # Reading the index of lm_eval's own tasks takes seconds, so only where one of them may be meant.
    manager = TaskManager(include_defaults=False, include_path=list(include))
    if not {*names} <= {*files, *manager.all_subtasks}:
        manager = TaskManager(include_path=list(include))
    for name in names:
        if name not in files and name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks)
            raise ValueError(f"lm_eval has no task {name!r}{hint} A file of questions ends in .jsonl.")
    for name, task in tasks.items():
        try:
            tasks[name] = manager.load([task])
        except Exception as error:  # data cannot be had; a definition holds templates and code, which can fail too
            raise ValueError(f"lm_eval cannot load the task {name!r}: {_one_line(error)}") from error
    return tasks


def question_task(name: str, questions: list[Question]) -> dict[str, Any]:
    """Return lm_eval's definition of a task whose questions are in memory: nothing is fetched and nothing cached."""
    from datasets import Dataset, DatasetDict

    rows = [{"prompt": one.prompt, "choices": one.choices, "answer": one.answer} for one in questions]
    return {
        "task": name,
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }


def measure_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Any],
    variant: str,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[list[Result], str]]:
    """Measure tasks from `load_tasks` one after the other; the results of each come as soon as it is done.

    They are a record for each metric of a task, of a group also for its members, and a sentence on the texts that were
    too long for the model and lost their beginning, or "". `limit` takes only the first so many questions of each task.
    `num_fewshot` examples stand before each question, unless the task rules them out; its own number unless given.
    Raises ValueError for a tokenizer that does not fit the model, or a task that cannot be run on it.
    """
    language_model = wrap_model(model, tokenizer, batch_size)

    from lm_eval.evaluator import evaluate

    for name, loaded in tasks.items():
        for task in loaded["tasks"].values():
            examples = task.get_config("num_fewshot")
            if num_fewshot is not None and examples != 0:  # a task that says 0 cannot do with examples
                examples = num_fewshot
            task.set_config(key="num_fewshot", value=examples or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        language_model.cut = 0
        try:
            outcome = evaluate(language_model, loaded, limit=limit, bootstrap_iters=1000, log_samples=False)
        except (AssertionError, NotImplementedError, ValueError) as error:  # how lm_eval says that one does not suit
            raise ValueError(f"lm_eval cannot run the task {name!r} with this model: {_one_line(error)}") from error
        note = f"{name}: {language_model.cut:,} texts were longer than the model's context and lost their beginning."
        yield list(_records(outcome, variant)), note if language_model.cut else ""


def wrap_model(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """Return the model as lm_eval knows one, which counts the texts that it had to cut."""
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has neither a bos nor an eos token, and lm_eval begins a text with one.")
    check_vocabulary(model, tokenizer)

    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):
        cut = 0

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
            longest = max(len(continuation) for *_, continuation in requests)
            if longest > self.max_length:
                raise ValueError(f"An answer has {longest} tokens, and the model's context holds {self.max_length}.")
            # The last token is only predicted, never read.
            self.cut += sum(len(before) + len(answer) > self.max_length + 1 for _, before, answer in requests)
            return super()._loglikelihood_tokens(requests, **kwargs)

    return LanguageModel(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)


def _records(outcome: Mapping[str, Any], variant: str) -> Iterator[Result]:
    """Yield a record for each number in lm_eval's answer, whose keys are "metric,filter" and "metric_stderr,filter"."""
    for task, metrics in outcome["results"].items():
        n = outcome["n-samples"].get(task, {}).get("effective")
        fewshot = outcome["n-shot"].get(task, 0)
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error, interval, method = metrics.get(f"{metric}_stderr,{chosen}"), None, f"{fewshot}-shot"
            is_share = n and metric.startswith(("acc", "exact_match")) and 0 <= value <= 1
            if is_share and abs(round(value * n) / n - value) <= 1e-9:  # of answers that are right or wrong
                interval = proportion_interval(round(value * n), n)
                method += "; Wilson's score interval"
            elif isinstance(error, int | float) and math.isfinite(error):
                interval = (value - NORMAL * error, value + NORMAL * error)
                method += "; value ± 1.96 of lm_eval's standard error"
            better = outcome["higher_is_better"].get(task, {}).get(metric)
            yield Result(
                name=f"harness/{task}/{metric}" + ("" if chosen == "none" else f"/{chosen}"),
                variant=variant,
                value=float(value),
                interval=interval,
                n=n,
                seed=FEWSHOT_SEED if fewshot else None,
                better=None if better is None else "higher" if better else "lower",
                method=method,
            )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


HELD_OUT = "held_out_text"


class Harness(Measurement):
    """Tasks of lm-evaluation-harness, or questions from held-out text (Tables 1 and 8), with the average of Table 1 if
    all its tasks are there."""

    needs = "text"

    tasks: Text = Field(
        default="", description='names separated by commas, "table1" for the paper\'s seven; nothing for held-out text'
    )
    questions: Count = Field(default=200, description="questions that are made from held-out text, at most")
    examples: int = Field(default=0, ge=0, description="examples before each question")

    def check(self, batches: Batches | None, tokenizer: Any) -> dict[str, Any]:
        """Return the tasks that the options name, or questions from the held-out text."""
        if names := task_names([self.tasks]):
            return load_tasks(names)
        text = text_part(batches)
        # As many as a question has examples fit the context beside it, if a token is no longer than a character.
        characters = text.length // 6 - 6
        questions = cloze_questions(text, tokenizer, count=self.questions, characters=characters)
        if self.examples >= len(questions):
            raise ValueError(
                f"{self.examples} examples before each question need more than the {len(questions)} questions that the "
                "held-out text makes: give more text, or ask for fewer examples."
            )
        from lm_eval.tasks import TaskManager

        return {HELD_OUT: TaskManager(include_defaults=False).load([question_task(HELD_OUT, questions)])}

    def run(self, measured: EvalInput) -> list[Result]:
        tasks = self.check(measured.batches, measured.tokenizer)
        results = measure_tasks(measured.model, measured.tokenizer, tasks, measured.variant, num_fewshot=self.examples)
        records = [record for found, _ in results for record in found]
        average = table_1_average(records)
        records += [average] if average else []
        return [replace(record, coordinates=Coordinates(examples=self.examples)) for record in records]

    def baselines(self, recipe: Any) -> list[Baseline]:
        names = [] if task_names([self.tasks]) else ["acc", "acc_norm"]
        levels: dict[str, Any] = {"chance": 1 / CHOICES, "floor": 1 / CHOICES, "steps": recipe.train.steps}
        coordinates = Coordinates(examples=self.examples)
        return [Baseline(name=f"harness/{HELD_OUT}/{name}", coordinates=coordinates, **levels) for name in names]
