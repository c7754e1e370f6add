"""Runs the demo: DIFF and the Transformer learn to find answers among distractors, and are compared.

Same configuration but `attention_type`, same data in the same order, same number of steps. Everything is written as
files; a page and a table are made from these alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diff_lab.data import RecallBatches
from diff_lab.experiments.definitions import DEMO, EXPECTATIONS, FAST_DEMO
from diff_lab.experiments.run_store import load_trained
from diff_lab.experiments.worker_pool import Job, WorkerPool, default_workers
from diff_lab.files import read_metrics
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.retrieval import BY_LAMBDA, NOISE_ACCURACY, Noise, retrieval_answers
from diff_lab.measure.standard import LABEL_ACCURACY, curve_baselines, curve_records
from diff_lab.record import Result
from diff_lab.results_files import capture_results, write_json
from diff_lab.train import Progress, Recipe, build_data, load_recipe, train
from diff_lab.train.run_setup import METRICS, MODEL, begin_run_folder, check_run_folder, is_run_folder
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.explorer import ExploredModel, LambdaSettings
from diff_transformer.explorer.explored_model import LEARNED, replaced_lambdas
from diff_transformer.explorer.explorer import STRIP_FACTORS

VARIANTS = ("diff", "softmax")  # also the names of their runs' folders
RESULTS = "results.json"
# What a demo leaves beside its runs; the page is the report's, made from the rest.
EXPLORER_PAGE = "explorer.html"  # which the command line writes
LEFTOVERS = (RESULTS, EXPLORER_PAGE, "report.html")
SEQUENCES = 512  # with a question each: those of a run's examples, which the explorer asks, too
_OFF = LambdaSettings(factor=0.0)


def run_demo(
    output_dir: str | Path,
    *,
    seed: int = 0,
    fast: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Train DIFF and the Transformer on associative recall, measure them, and write the files for a report.

    Writes into ``output_dir``, which is returned: the runs "diff" and "softmax", with their models, and results.json.
    The two are trained at the same time, each in a process with its share of the cores; on one core or a GPU, one after
    the other. So a script that calls this must be importable: its work stands under `if __name__ == "__main__"`.

    The folder must be new or empty, unless `resume` keeps the finished parts of an earlier demo in it and resumes, or
    `overwrite` replaces it. `fast` takes fewer pairs and steps, to see the pages of the demo within a minute.

    Raises:
        FileExistsError, ValueError: the folder is not right; nothing has been written.
        TrainingInterrupted: Ctrl-C or SIGTERM; with `resume` the same call resumes from the checkpoints.
    """
    folder, progress = Path(output_dir), progress or Progress()
    _check_folder(folder, resume=resume, overwrite=overwrite)
    settings = [*DEMO, *(FAST_DEMO if fast else ()), f"train.seed={seed}"]
    recipes = {variant: load_recipe("recall", [*settings, f"model.attention_type={variant}"]) for variant in VARIANTS}
    existing: dict[str, Any] = {"resume": "auto" if resume else False, "overwrite": overwrite}
    for variant, recipe in recipes.items():
        check_run_folder(folder / variant, recipe, **existing)
    if overwrite:
        # Everything that an earlier demo wrote is deleted at once, so that old and new are never mixed.
        for name in LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
        for variant, recipe in recipes.items():
            if is_run_folder(folder / variant):
                begin_run_folder(folder / variant, recipe)
    recipe, task = recipes["diff"], _task(recipes["diff"])
    workers = default_workers(len(VARIANTS), on_cpu=not torch.accelerator.is_available())
    how = "at the same time" if workers > 1 else "one after the other"
    minutes = "a minute" if fast else "2 to 4 minutes"
    progress.tell(EXPECTATIONS.format(how=how, minutes=minutes, pairs=task.pairs, steps=recipe.train.steps))
    with WorkerPool[int](workers, progress) as trainings:
        variants = {ATTENTION_TYPES[variant].label: variant for variant in VARIANTS}
        for label, variant in variants.items():
            trainings.add(Job(label, partial(_train, recipes[variant], folder / variant, existing)))
        parameters = {variants[job.name]: count for job, count in trainings.results()}
    models: dict[str, Any] = {
        variant: load_trained(recipe, folder / variant / MODEL) for variant, recipe in recipes.items()
    }
    noise = Noise(pairs=tuple(range(2, task.pairs + 1, 2)), sequences=SEQUENCES, factors=STRIP_FACTORS)
    records: list[Result] = []
    for variant, model in models.items():
        records += curve_records(read_metrics(folder / variant / METRICS), variant=variant, seed=seed)
        measured = noise.run(EvalInput(model=model, variant=variant, batches=task, seed=0))
        records += [replace(one, seed=seed) for one in measured if one.name in (NOISE_ACCURACY, BY_LAMBDA)]
        records.append(Result(name="training/parameters", variant=variant, value=parameters[variant]))
    described: dict[str, Any] = {"seed": seed, "view": opening_view(models, task)}
    described["recall"] = recipe.model_dump(mode="json", exclude={"model": {"attention_type"}})
    title = "A Differential Transformer beside a Transformer"
    results = capture_results(title, described, records, device=str(models["diff"].device))
    levels = [level for level in noise.baselines(recipe) if level.name == NOISE_ACCURACY]
    write_json(folder / RESULTS, replace(results, baselines=(*levels, *curve_baselines(recipe))))
    return folder


def _task(recipe: Recipe) -> RecallBatches:
    """Return a run's task with one question a sequence: an answer that is in view helps with those that follow."""
    batches = build_data(recipe).batches
    assert isinstance(batches, RecallBatches)
    return replace(batches, questions=1)


def _train(recipe: Recipe, folder: Path, existing: Mapping[str, Any], progress: Progress) -> int:
    """Train one model; return its number of parameters."""
    questions = _task(recipe).sample(SEQUENCES, seed=0)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        return {LABEL_ACCURACY: retrieval_answers(model, questions).float().mean().item()}

    return train(recipe, folder, progress=progress, on_evaluate=on_evaluate, **existing).parameters


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise FileExistsError for a folder that holds something else, or a demo that is neither resumed nor replaced."""
    if resume and overwrite:
        raise ValueError("A demo is either resumed or overwritten, not both.")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file, not a folder for the demo.")
    names = {path.name for path in folder.glob("*")}
    is_demo = any(is_run_folder(folder / variant) for variant in VARIANTS)
    if is_demo or (folder / RESULTS).is_file() or (names and names.issubset(LEFTOVERS)):
        if not (resume or overwrite):
            raise FileExistsError(
                f"The output folder {str(folder)!r} already holds a demo; "
                "choose another one with --output, resume it with --resume, or replace it with --overwrite."
            )
    elif names:
        raise FileExistsError(f"{str(folder)!r} is not empty and holds no demo, so nothing is written there.")


def opening_view(models: Mapping[str, Any], task: RecallBatches) -> dict[str, Any]:
    """Return a question, and the maps of the head of DIFF whose λ = 0 changes the answer most: learned, and all λ = 0.

    Best is a question that both answer right and DIFF with all λ = 0 does not, then one that both do, that DIFF does.
    """
    sample, explored = task.sample(SEQUENCES, seed=0), ExploredModel(models["diff"], "diff")
    diff, softmax = (retrieval_answers(models[variant], sample)[:, 0] for variant in VARIANTS)
    with replaced_lambdas(models["diff"], _OFF, explored.heads):
        without = retrieval_answers(models["diff"], sample)[:, 0]
    both = diff & softmax
    row = int((diff.int() + both + (both & ~without)).argmax())
    tokens, words = sample.input_ids[row, :-1].tolist(), task.words()  # all but the answer itself
    layer, head = explored.most_changed_head(tokens) or (1, 1)
    view = {"words": [words[token] for token in tokens], "answer": int(sample.answer_spans[row, 0])}
    for name, lambdas in (("learned", LEARNED), ("without", _OFF)):
        maps = explored.trace(tokens, lambdas).maps.of(layer - 1, slice(head - 1, head))
        view[name] = maps.difference[0].tolist()
    return {**view, "layer": layer, "head": head}
