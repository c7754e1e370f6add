"""Runs the demo: DIFF and the Transformer are trained side by side on retrieval and on real text, and compared.

Same configuration but `attention_type`, same data in the same order, same number of steps. Everything is written as
files; a page and a table are made from these alone.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, set_seed

from diff_transformer.data import RetrievalBatches, TextBatches
from diff_transformer.lab.experiments.experiment import section
from diff_transformer.lab.measure.measurement import EvalInput
from diff_transformer.lab.measure.retrieval import retrieval_baselines
from diff_transformer.lab.measure.standard import Standard, validation_callback
from diff_transformer.lab.record import Result
from diff_transformer.lab.results_files import capture_results, write_json
from diff_transformer.model import DiffTransformerForCausalLM, attention_maps
from diff_transformer.train import Data, Progress, build_data, load_recipe, train
from diff_transformer.train.run_folder import begin_run_folder, check_run_folder, is_run_folder

VARIANTS = ("diff", "softmax")
TASKS = ("retrieval", "language")
RESULTS = "results.json"
ATTENTION = "attention.json"
SAMPLES = "samples.json"
# What a demo leaves beside its runs; the page is the report's, made from the rest.
LEFTOVERS = (RESULTS, ATTENTION, SAMPLES, "report.html")

# A setting that ends in seconds and shows nothing but that everything runs.
_TINY = (
    *section("train", steps=6, log_every=2, warmup_steps=1, checkpoint_every=3),
    *section("model", hidden_size=32, head_dim=8, num_hidden_layers=2),
)
FAST = {
    "retrieval": (*_TINY, *section("data", batch_size=4, length=48)),
    "language": (*_TINY, *section("data", batch_size=4, length=64, validation_tokens=1024)),
}
SEQUENCES = {False: 512, True: 16}
SAMPLE_PROMPT, SAMPLE_LENGTH = 64, 160  # tokens


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
    """Train DIFF and the Transformer on both tasks, measure them, and write what a report needs.

    Writes into ``output_dir``, which is returned: a run folder for each task and variant ("retrieval-diff", …, with its
    model), ``results.json``, ``attention.json`` and ``samples.json``.

    The folder must be new or empty, unless `resume` keeps what an earlier demo in it has finished and goes on from
    there, or `overwrite` replaces it. `text` (files or folders) is for the language part; without any it is the source
    of Python's standard library. `fast` is a tiny setting that ends in seconds, to see that everything runs.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: the folder or the input is not right; nothing has been written.
    """
    folder = Path(output_dir)
    _check_folder(folder, resume=resume, overwrite=overwrite)
    overrides = {task: [*(FAST[task] if fast else ()), f"train.seed={seed}"] for task in TASKS}
    if text:
        overrides["language"].append(f"data.paths={json.dumps([str(path) for path in text])}")
    recipes = {
        (task, variant): load_recipe(task, [*overrides[task], f"model.attention_type={variant}"])
        for task in TASKS
        for variant in VARIANTS
    }
    run_folders = {(task, variant): folder / f"{task}-{variant}" for task, variant in recipes}
    existing: dict[str, Any] = {"resume": "auto" if resume else False, "overwrite": overwrite}
    for key, recipe in recipes.items():
        check_run_folder(run_folders[key], recipe, **existing)
    # All data before any training: bad input is said at once, not after minutes.
    data_of = {task: build_data(recipes[task, "diff"]) for task in TASKS}
    if overwrite:
        # Everything that an earlier demo wrote is deleted at once, so that old and new are never mixed.
        for name in LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
        for key, recipe in recipes.items():
            if is_run_folder(run_folders[key]):
                begin_run_folder(run_folders[key], recipe)
    records: list[Result] = []
    for task, data in data_of.items():
        models: dict[str, DiffTransformerForCausalLM] = {}
        for variant in VARIANTS:
            run = train(
                recipes[task, variant],
                run_folders[task, variant],
                progress=progress,
                on_evaluate=validation_callback(data.batches),
                data=data,
                **existing,
            )
            models[variant] = run.model
            measured = EvalInput(model=run.model, variant=variant, batches=data.batches, seed=seed)
            records += Standard(sequences=SEQUENCES[fast]).run(measured)
            records += [
                Result(name=f"{task}/parameters", variant=variant, value=run.parameters),
                Result(name=f"{task}/seconds", variant=variant, value=run.seconds, unit="s", better="lower", seed=seed),
            ]
        if isinstance(data.batches, RetrievalBatches):
            write_json(folder / ATTENTION, attention_example(models, data.batches, seed), indent=None)
        else:
            write_json(folder / SAMPLES, text_samples(models, data, seed))
    settings: dict[str, Any] = {"seed": seed}
    for task in TASKS:
        settings[task] = recipes[task, "diff"].model_dump(mode="json", exclude={"model": {"attention_type"}})
    title = "A Differential Transformer beside its twin"
    results = capture_results(title, settings, records, device=str(models["diff"].device))
    baselines = tuple(retrieval_baselines(recipes["retrieval", "diff"]))
    write_json(folder / RESULTS, replace(results, baselines=baselines))
    return folder


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ValueError("A demo is either resumed or overwritten, not both.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file, not a folder for the demo.")
    names = {path.name for path in folder.iterdir()}
    has_runs = any(is_run_folder(folder / f"{task}-{variant}") for task in TASKS for variant in VARIANTS)
    is_demo = has_runs or (folder / RESULTS).is_file() or (bool(names) and names.issubset(LEFTOVERS))
    if is_demo and not (resume or overwrite):
        raise FileExistsError(
            f"The output folder {str(folder)!r} already holds a demo; "
            "choose another one with --output, go on with --resume, or replace it with --overwrite."
        )
    if not is_demo and names:
        raise FileExistsError(f"{str(folder)!r} is not empty and holds no demo, so nothing is written there.")


def attention_example(
    models: dict[str, DiffTransformerForCausalLM], batches: RetrievalBatches, seed: int
) -> dict[str, Any]:
    """The maps of one head of each variant for the first evaluation sequence.

    In each model the head is the one that puts most of its weight, positive or negative, on the answers of this
    sequence: the same rule for both.
    """
    sample = batches.sample(1, seed)
    answers, queries = sample.answer_spans[0], sample.query_positions[0]
    example: dict[str, Any] = {"layers": {}, "heads": {}, "maps": {}}
    for variant, model in models.items():
        layers = attention_maps(model, sample.input_ids.to(model.device))
        shares = torch.stack([_answer_share(layer.difference[0].cpu(), queries, answers) for layer in layers])
        layer, head = divmod(int(shares.argmax()), shares.shape[1])
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
        "tokens": batches.names(sample.input_ids[0]),
        "query_position": int(queries[0]),
        "answer_positions": [int(answers[0])],
        "needle_positions": sorted({int(answer) - offset for answer in answers for offset in (0, 1)}),
    }


def _answer_share(maps: Tensor, queries: Tensor, answers: Tensor) -> Tensor:
    """(H, N, N) → (H,): share of each query's absolute weight that lies on its answer, averaged over the queries."""
    rows = maps[:, queries].abs()
    return (rows[:, torch.arange(len(queries)), answers] / rows.sum(-1)).mean(-1)


def text_samples(models: dict[str, DiffTransformerForCausalLM], data: Data, seed: int) -> dict[str, str]:
    """How each variant goes on from the beginning of the validation text, drawn at temperature 0.8."""
    tokenizer, batches = data.tokenizer, data.batches
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert isinstance(batches, TextBatches)
    window = next(iter(batches.validation_batches()))["input_ids"][:1]
    prompt = window[:, : min(SAMPLE_PROMPT, batches.length // 2)]
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
