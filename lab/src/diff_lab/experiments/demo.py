"""Runs the demo: DIFF and the Transformer are trained at the same time on retrieval, then on real text, and compared.

Same configuration but `attention_type`, same data in the same order, same number of steps. Everything is written as
files; a page and a table are made from these alone.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from diff_lab.data import RetrievalBatches, TextBatches
from diff_lab.experiments.definitions import DEMO, EXPECTATIONS, FAST_DEMO
from diff_lab.experiments.run_store import load_trained
from diff_lab.experiments.worker_pool import Job, WorkerPool, default_workers
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.retrieval import retrieval_answers, retrieval_baselines
from diff_lab.measure.standard import Standard, curve_baselines, curve_records, validation_callback
from diff_lab.record import Result
from diff_lab.results_files import capture_results, write_json
from diff_lab.train import Data, Progress, Recipe, build_data, load_recipe, train
from diff_lab.train.recipe import override_of
from diff_lab.train.run_setup import METRICS, MODEL, begin_run_folder, check_run_folder, is_run_folder
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.explorer import Answer, Example, ExploredModel, LambdaSettings
from diff_transformer.explorer.explored_model import replaced_lambdas
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.utils.files import read_metrics

VARIANTS = ("diff", "softmax")
TASKS = ("retrieval", "language")
RESULTS = "results.json"
QUESTION = "question.json"  # that the explorer opens with
SAMPLES = "samples.json"
# What a demo leaves beside its runs; the page is the report's, made from the rest.
EXPLORER_PAGE = "explorer.html"  # which the command line writes
LEFTOVERS = (RESULTS, QUESTION, SAMPLES, EXPLORER_PAGE, "report.html", "attention.json")  # the last of 0.2.0

SEQUENCES = 512  # of retrieval, measured at the end
EXAMPLES = 64  # sequences among which the question is looked for
SAMPLE_PROMPT, SAMPLE_LENGTH = 48, 120  # tokens


def run_demo(
    output_dir: str | Path,
    *,
    text: Sequence[str | Path] | None = None,
    seed: int = 0,
    fast: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Train DIFF and the Transformer on both tasks, measure them, and write the files for a report.

    Writes into ``output_dir``, which is returned: a run folder for each task and variant ("retrieval-diff", …, with its
    model), ``results.json``, ``question.json`` and ``samples.json``. The two variants of a task are trained at the
    same time, each in a process with its share of the processor cores; on one core or a GPU, one after the other. So a
    script that calls this must be importable: its work stands under `if __name__ == "__main__"`.

    The folder must be new or empty, unless `resume` keeps the finished parts of an earlier demo in it and resumes, or
    `overwrite` replaces it. `text` (files or folders) is for the language part; without any it is the source of
    Python's standard library. `fast` takes a few steps alone, to see in a minute or so the pages of the demo.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: the folder or the input is not right; nothing has been written.
        TrainingInterrupted: Ctrl-C or SIGTERM; with `resume` the same call resumes from the checkpoints.
    """
    folder, progress = Path(output_dir), progress or Progress()
    _check_folder(folder, resume=resume, overwrite=overwrite)
    recipes: dict[tuple[str, str], Recipe] = {}  # by task and variant, as the runs
    for task, variant in itertools.product(TASKS, VARIANTS):
        overrides = [*DEMO[task], f"train.seed={seed}", f"model.attention_type={variant}"]
        if fast:
            overrides += FAST_DEMO[task]
        if text and task == "language":
            overrides.append(override_of("data.paths", [str(path) for path in text]))
        recipes[task, variant] = load_recipe(task, overrides)
    existing: dict[str, Any] = {"resume": "auto" if resume else False, "overwrite": overwrite}
    runs = {names: folder / "-".join(names) for names in recipes}
    for names, recipe in recipes.items():
        check_run_folder(runs[names], recipe, **existing)
    # All data before any training: bad input is said at once, not after minutes.
    data_of = {task: build_data(recipes[task, "diff"]) for task in TASKS}
    if overwrite:
        # Everything that an earlier demo wrote is deleted at once, so that old and new are never mixed.
        for name in LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
        for names, recipe in recipes.items():
            if is_run_folder(runs[names]):
                begin_run_folder(runs[names], recipe)
    workers = default_workers(len(VARIANTS), on_cpu=not torch.accelerator.is_available())
    words = {"how": "at the same time" if workers > 1 else "one after the other"}
    words["minutes"] = "a minute or so" if fast else "4 to 8 minutes"
    for task in TASKS:
        recipe = recipes[task, "diff"]
        words[task] = f"{recipe.train.steps:,} steps on {recipe.data.describe()}"
    progress.tell(EXPECTATIONS.format(**words))
    records: list[Result] = []
    with WorkerPool[tuple[int, float]](workers, progress) as trainings:
        for task, data in data_of.items():
            labels = {f"{task}, {ATTENTION_TYPES[variant].label}": variant for variant in VARIANTS}
            for label, variant in labels.items():
                work = partial(_train, recipes[task, variant], runs[task, variant], existing)
                trainings.add(Job(label, work))
            trained = {labels[job.name]: result for job, result in trainings.results()}
            models: dict[str, Any] = {
                variant: load_trained(recipes[task, variant], runs[task, variant] / MODEL) for variant in VARIANTS
            }
            if isinstance(data.batches, RetrievalBatches):
                write_json(folder / QUESTION, example_question(models, data.batches, seed))
            else:
                write_json(folder / SAMPLES, text_samples(models, data, seed))
            for variant, model in models.items():
                records += curve_records(read_metrics(runs[task, variant] / METRICS), variant=variant, seed=seed)
                given = EvalInput(model=model, variant=variant, batches=data.batches, seed=seed)
                records += Standard(sequences=SEQUENCES).run(given)
                parameters, seconds = trained[variant]
                time: dict[str, Any] = {"unit": "s", "better": "lower", "seed": seed}
                records += [
                    Result(name=f"{task}/parameters", variant=variant, value=parameters),
                    Result(name=f"{task}/seconds", variant=variant, value=seconds, **time),
                ]
    settings: dict[str, Any] = {"seed": seed}
    for task in TASKS:
        settings[task] = recipes[task, "diff"].model_dump(mode="json", exclude={"model": {"attention_type"}})
    title = "A Differential Transformer beside a Transformer"
    results = capture_results(title, settings, records, device=str(models["diff"].device))
    retrieval = recipes["retrieval", "diff"]
    baselines = (*retrieval_baselines(retrieval), *curve_baselines(retrieval))
    write_json(folder / RESULTS, replace(results, baselines=baselines))
    return folder


def _train(recipe: Recipe, folder: Path, existing: Mapping[str, Any], progress: Progress) -> tuple[int, float]:
    """Train one model; return its number of parameters, and the seconds that it took."""
    data = build_data(recipe)
    run = train(recipe, folder, progress=progress, on_evaluate=validation_callback(data.batches), data=data, **existing)
    return run.parameters, run.seconds


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise FileExistsError for a folder that holds something else, or a demo that is neither resumed nor replaced."""
    if resume and overwrite:
        raise ValueError("A demo is either resumed or overwritten, not both.")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file, not a folder for the demo.")
    names = {path.name for path in folder.glob("*")}
    is_demo = any(is_run_folder(folder / f"{task}-{variant}") for task in TASKS for variant in VARIANTS)
    if is_demo or (folder / RESULTS).is_file() or (names and names.issubset(LEFTOVERS)):
        if not (resume or overwrite):
            raise FileExistsError(
                f"The output folder {str(folder)!r} already holds a demo; "
                "choose another one with --output, resume it with --resume, or replace it with --overwrite."
            )
    elif names:
        raise FileExistsError(f"{str(folder)!r} is not empty and holds no demo, so nothing is written there.")


def example_question(models: dict[str, DiffTransformerForCausalLM], batches: RetrievalBatches, seed: int) -> Example:
    """Return the first query of a sequence, whose answer is not in view yet, with its place.

    Best is one that both variants answer right and DIFF with λ = 0 does not, then one that both do, that DIFF does.
    """
    sample = batches.sample(EXAMPLES, seed)
    diff, softmax = (retrieval_answers(models[variant], sample)[:, 0] for variant in VARIANTS)
    with replaced_lambdas(models["diff"], LambdaSettings(factor=0.0), ExploredModel(models["diff"], "diff").heads):
        without = retrieval_answers(models["diff"], sample)[:, 0]
    both = diff & softmax
    row = int((diff.int() + both + (both & ~without)).argmax())
    query, begin = int(sample.query_positions[row, 0]), int(sample.answer_spans[row, 0])
    words = batches.words()
    text = " ".join(words[token] for token in sample.input_ids[row, : query + 1].tolist())
    return Example("A question of the task", text, Answer(query, begin, begin + 1))


def text_samples(models: dict[str, DiffTransformerForCausalLM], data: Data, seed: int) -> dict[str, str]:
    """Have each variant continue the beginning of the validation text, drawn at temperature 0.8."""
    tokenizer, batches = data.tokenizer, data.batches
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert isinstance(batches, TextBatches)
    prompt = next(iter(batches.validation_batches()))["input_ids"][:1, : min(SAMPLE_PROMPT, batches.length // 2)]
    samples = {"prompt": str(tokenizer.decode(prompt[0]))}
    for variant, model in models.items():
        set_seed(seed)
        prompt = prompt.to(model.device)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(SAMPLE_LENGTH, model.config.max_position_embeddings - prompt.shape[1]),
            do_sample=True,
            temperature=0.8,
            pad_token_id=tokenizer.pad_token_id,
        )
        samples[variant] = str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
    return samples
