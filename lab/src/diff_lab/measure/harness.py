"""Runs tasks of lm-evaluation-harness, or questions from a file, on a model in memory.

lm_eval is imported when something here is called.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.measure.decoding import check_vocabulary
from diff_lab.measure.measurement import Count, EvalInput, Measurement, Text
from diff_lab.measure.question_files import CHOICES, Question, cloze_questions, read_lines
from diff_lab.measure.standard import text_part
from diff_lab.record import Baseline, Interval, Result
from diff_lab.statistics import proportion_interval
from diff_transformer.utils.suggestions import did_you_mean, quoted

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
    value = math.fsum(task.value for task in tasks) / len(tasks)
    # Each is a share of n right answers, and the tasks are independent of each other.
    variances = [task.value * (1 - task.value) / (task.n - 1) for task in tasks if task.n and task.n > 1]
    error = math.sqrt(math.fsum(variances)) / len(tasks)
    return Result(
        name=AVERAGE,
        variant=tasks[0].variant,
        value=value,
        interval=_normal_interval(value, error, is_share=True) if len(variances) == len(tasks) else None,
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


def _normal_interval(value: float, error: float, is_share: bool) -> Interval:
    half = NormalDist().inv_cdf(0.975) * error
    lowest, highest = (0.0, 1.0) if is_share else (-math.inf, math.inf)
    return max(lowest, value - half), min(highest, value + half)


def task_names(texts: Sequence[str]) -> list[str]:
    """Return the names in texts that separate them by commas, "table1" standing for the paper's seven."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return [task for name in names for task in (TABLE_1_MEASURES if name == "table1" else [name])]


# lm_eval's own, for the choice of examples.
FEWSHOT_SEED = 1234
# Resamplings for the few metrics that are no mean and so have no standard error in closed form.
BOOTSTRAP = 1000


@dataclass(frozen=True)
class TaskResult:
    """A record for each metric of a task, of a group also for its members; how many texts were scored, and how many of
    them were too long for the model and lost their beginning."""

    name: str
    records: tuple[Result, ...]
    requests: int
    cut: int


def load_tasks(names: Sequence[str], include: Sequence[Path] = ()) -> dict[str, Any]:
    """Load tasks by name; fetch their data if it is not in the cache.

    Args:
        names: of tasks, groups or tags of lm_eval, or of YAML tasks in `include`; NAME.jsonl is a file of questions.
        include: folders of YAML tasks, which come before lm_eval's own.

    Raises:
        FileNotFoundError: a file or a folder is not there.
        ValueError: an unknown name, the same one twice, a file named like a task of Table 1, or a task that cannot be
            read, needs images or runs a model's code.
    """
    for folder in include:
        if not folder.is_dir():
            raise FileNotFoundError(f"The folder of tasks {str(folder)!r} does not exist.")
    keys = {name: Path(name).stem if name.endswith(".jsonl") else name for name in names}
    if double := [key for key, count in Counter(keys[name] for name in names).items() if count > 1]:
        raise ValueError(f"The task {double[0]!r} is named twice.")
    files = {name: read_lines(Path(name), Question, "questions") for name in names if name.endswith(".jsonl")}
    if unclear := [name for name in files if keys[name] in TABLE_1_MEASURES]:
        raise ValueError(
            f"The file {unclear[0]!r} has the name of the paper's task {keys[unclear[0]]!r}, with whose values tables "
            "would compare it; rename the file."
        )

    from lm_eval.tasks import TaskManager

    with _only_errors():
        # Reading the index of lm_eval's own tasks takes seconds, so only where one of them may be meant.
        manager = TaskManager(include_defaults=False, include_path=list(include))
        others = [name for name in names if name not in files]
        if not set(others) <= set(manager.all_subtasks):
            manager = TaskManager(include_path=list(include))
        for name in others:
            if name not in manager.all_tasks:
                hint = did_you_mean(name, manager.all_tasks)
                raise ValueError(f"lm_eval has no task {name!r}{hint} A file of questions ends in .jsonl.")
        return {
            name: _load(name, _task_of(keys[name], files[name]) if name in files else name, manager) for name in names
        }


def _load(name: str, task: str | dict[str, Any], manager: Any) -> Any:
    try:
        loaded = manager.load([task])
    except OSError as error:
        raise ValueError(f"The data of the task {name!r} cannot be had: {_one_line(error)}") from error
    except Exception as error:  # a task's definition holds templates and code, which can fail in any way
        raise ValueError(f"lm_eval cannot load the task {name!r}: {_one_line(error)}") from error
    for key, member in loaded["tasks"].items():
        if getattr(member, "UNSAFE_CODE", False):
            raise ValueError(f"The task {key!r} runs code that the model writes, which this command does not do.")
        if getattr(member, "MULTIMODAL", False):
            raise ValueError(f"The task {key!r} needs images or sound, and these models read text.")
    return loaded


def _task_of(name: str, questions: list[Question]) -> dict[str, Any]:
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
) -> Iterator[TaskResult]:
    """Measure tasks from `load_tasks` one after the other; the results of each come as soon as it is done.

    `limit` takes only the first so many questions of each task. `num_fewshot` examples stand before each question,
    unless the task rules them out; its own number unless given. Texts are padded on the right, which causal attention
    does not see; without a token that begins a text, the one that ends a text takes its place. Raises ValueError for a
    tokenizer that does not fit the model, fewer questions than examples, or a text that is too long.
    """
    language_model = wrap_model(model, tokenizer, batch_size)
    for key, task in chain(*(loaded["tasks"].items() for loaded in tasks.values())):
        examples = task.get_config("num_fewshot")
        if num_fewshot is not None and examples != 0:  # a task that says 0 cannot do with examples
            examples = num_fewshot
        task.set_config(key="num_fewshot", value=examples or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if examples and task.get_config("custom_dataset") and examples >= len(task.eval_docs):
            raise ValueError(
                f"{examples} examples before each question need more than the {len(task.eval_docs)} of {key!r}."
            )
    from lm_eval.evaluator import evaluate

    for name, loaded in tasks.items():
        language_model.requests = language_model.cut = 0
        try:
            with _only_errors():
                outcome = evaluate(language_model, loaded, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
        except (AssertionError, NotImplementedError) as error:  # how lm_eval says that a task does not suit a model
            raise ValueError(f"lm_eval cannot run the task {name!r} with this model: {_one_line(error)}") from error
        yield TaskResult(name, tuple(_records(outcome, variant)), language_model.requests, language_model.cut)


def wrap_model(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """Return the model as lm_eval knows one. It counts the texts that it scores, and those that it had to cut. Raises
    ValueError for a tokenizer with no token to begin a text with, or more tokens than the model."""
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has neither a bos nor an eos token, and lm_eval begins a text with one.")
    check_vocabulary(model, tokenizer)

    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):
        requests = cut = 0

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
            for text, context, continuation in requests:
                if not 0 < len(continuation) <= self.max_length:
                    raise ValueError(
                        f"The answer {quoted(text[1] if text else '')} has {len(continuation)} tokens of its own, and "
                        f"it must have 1 to {self.max_length}, which the model's context holds."
                    )
                self.requests += 1
                # The last token is only predicted, never read.
                self.cut += len(context) + len(continuation) > self.max_length + 1
            return super()._loglikelihood_tokens(requests, **kwargs)

    with _only_errors():
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
            is_share = metric.startswith(("acc", "exact_match")) and 0 <= value <= 1
            if is_share and value in (0, 1) and n:
                interval = proportion_interval(round(value * n), n)
                method += "; Wilson's score interval"
            elif isinstance(error, int | float) and math.isfinite(error):
                interval = _normal_interval(value, error, is_share)
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


@contextmanager
def _only_errors() -> Iterator[None]:
    """Show only the errors of lm_eval, which logs a warning for every default it falls back to."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
        """Return the tasks that the options name, or questions from the held-out text. Raises ValueError if there are
        none."""
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

        with _only_errors():
            return {HELD_OUT: _load(HELD_OUT, _task_of(HELD_OUT, questions), TaskManager(include_defaults=False))}

    def run(self, measured: EvalInput) -> list[Result]:
        tasks = self.check(measured.batches, measured.tokenizer)
        results = measure_tasks(measured.model, measured.tokenizer, tasks, measured.variant, num_fewshot=self.examples)
        records = [record for result in results for record in result.records]
        average = table_1_average(records)
        records += [average] if average else []
        return [replace(record, coordinates=Coordinates(examples=self.examples)) for record in records]

    def baselines(self, recipe: Any) -> list[Baseline]:
        """Return the baseline of guessing among the choices of questions from held-out text; none for other tasks."""
        names = [] if task_names([self.tasks]) else ["acc", "acc_norm"]
        levels: dict[str, Any] = {"chance": 1 / CHOICES, "floor": 1 / CHOICES, "steps": recipe.train.steps}
        coordinates = Coordinates(examples=self.examples)
        return [Baseline(name=f"harness/{HELD_OUT}/{name}", coordinates=coordinates, **levels) for name in names]
