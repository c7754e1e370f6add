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
from torch import Tensor
from transformers import PreTrainedTokenizerBase, set_seed

from diff_lab.data import RetrievalBatches, RetrievalSample, TextBatches
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
from diff_transformer.explorer import ExploredModel, LambdaSettings
from diff_transformer.explorer.explored_model import replaced_lambdas
from diff_transformer.model import DiffTransformerForCausalLM, attention_maps
from diff_transformer.utils.files import read_metrics

VARIANTS = ("diff", "softmax")
TASKS = ("retrieval", "language")
RESULTS = "results.json"
ATTENTION = "attention.json"
SAMPLES = "samples.json"
# What a demo leaves beside its runs; the page is the report's, made from the rest.
EXPLORER_PAGE = "explorer.html"  # which the command line writes
LEFTOVERS = (RESULTS, ATTENTION, SAMPLES, EXPLORER_PAGE, "report.html")


SEQUENCES = 512  # of retrieval, measured at the end
EXAMPLES = 64  # sequences among which a query is looked for whose maps are shown
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
    model), ``results.json``, ``attention.json`` and ``samples.json``. The two variants of a task are trained at the
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
                write_json(folder / ATTENTION, attention_example(models, data.batches, seed), indent=None)
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


def attention_example(
    models: dict[str, DiffTransformerForCausalLM], batches: RetrievalBatches, seed: int
) -> dict[str, Any]:
    """Return the maps of one head of each variant for a query that is answered right, if there is one.

    The query is one that both variants answer right and DIFF with λ = 0 does not, if there is one. Of DIFF the head is
    the one whose λ = 0 changes the answer most, as in the explorer; of a model that subtracts nothing the one with most
    of its weight on the answer.
    """
    sample = batches.sample(EXAMPLES, seed)
    right = {variant: retrieval_answers(model, sample) for variant, model in models.items()}
    explored = {variant: ExploredModel(model, variant) for variant, model in models.items()}
    with replaced_lambdas(models["diff"], LambdaSettings(factor=0.0), explored["diff"].heads):
        right_without = retrieval_answers(models["diff"], sample)
    row, place = _first_query(sample, right, right_without)
    query, answer = int(sample.query_positions[row, place]), int(sample.answer_spans[row, place])
    input_ids = sample.input_ids[row : row + 1]
    context = input_ids[0, : batches.context_length]
    keys = ((context >= batches.first_key) & (context < batches.first_value)).nonzero()[:, 0].tolist()
    words = batches.words()
    example: dict[str, Any] = {"layers": {}, "heads": {}, "maps": {}}
    for variant, model in models.items():
        layers = attention_maps(model, input_ids.to(model.device))
        rows = torch.stack([layer.difference[0, :, query].abs().cpu() for layer in layers])  # (layers, heads, keys)
        shares = rows[:, :, answer] / rows.sum(-1)
        layer, head = divmod(int(shares.argmax()), shares.shape[1])
        asked = input_ids[0, : query + 1].tolist()
        if explored[variant].subtracts and (most_changed := explored[variant].most_changed_head(asked)):
            layer, head = (number - 1 for number in most_changed)
        chosen = layers[layer]
        example["layers"][variant], example["heads"][variant] = layer + 1, head + 1
        maps = {"A": chosen.difference}
        if chosen.first is not None and chosen.second is not None:
            maps = {"A1": chosen.first, "A2": chosen.second, "difference": chosen.difference}
        example["maps"][variant] = {
            name: [[round(weight, 5) for weight in row] for row in weights[0, head].tolist()]
            for name, weights in maps.items()
        }
        lambdas = model.lambdas()
        if lambdas is not None:
            example["lambda"] = lambdas[layer]
    return example | {
        "tokens": [words[token] for token in input_ids[0].tolist()],
        "query_position": query,
        "answer_positions": [answer],
        "needle_positions": [position + offset for position in keys for offset in (0, 1)],
        "answered": {variant: bool(answers[row, place]) for variant, answers in right.items()},
    }


def _first_query(sample: RetrievalSample, right: Mapping[str, Tensor], right_without: Tensor) -> tuple[int, int]:
    """Return the sequence and the place in it of the query whose maps are shown; `right` are the (n, Q) answers, and
    `right_without` DIFF's with λ = 0.

    Best is one that both answer right and DIFF with λ = 0 does not, then one that both do, that DIFF does, that another
    does; of equals the first. A key that was asked for before in its sequence has its answer in view.
    """
    answers = sample.answer_spans
    is_repeated = torch.tril(answers[:, :, None] == answers[:, None, :], diagonal=-1).any(-1)
    every = torch.stack(list(right.values()))
    ranks = (every.all(0) & ~right_without, every.all(0), right["diff"], every.any(0))
    score = sum(2 ** (len(ranks) - place) * rank.int() for place, rank in enumerate(ranks))
    best = int((torch.where(is_repeated, -1, score)).argmax())
    return best // answers.shape[1], best % answers.shape[1]


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
