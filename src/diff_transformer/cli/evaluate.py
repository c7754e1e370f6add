"""`diff-transformer eval`"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diff_transformer.cli import require_extra

if TYPE_CHECKING:
    from diff_transformer.data import Batches

# Windows of text, where no recipe tells how long the training's were, and how many at a time.
DEFAULT_LENGTH, BATCH_SIZE = 1024, 16


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run folder, or a folder with config.json and weights.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure on all of this text (.txt, .jsonl, .parquet or a folder; may be repeated) "
            "instead of the held-out data that the run's recipe names."
        ),
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Take this measurement instead, e.g. repeats, outliers or needles, most of them on any causal "
            "language model of transformers; or show this number only, e.g. language/bits_per_byte. May be repeated.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of a measurement that --measure names; may be repeated."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…",
            help="Measure these tasks of lm-evaluation-harness instead, e.g. piqa,boolq, or table1 for the paper's "
            "seven, on any causal language model of transformers. A name that ends in .jsonl is a file of your own "
            "questions and needs no network. May be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions of each task.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="Examples before each question.", show_default="the task's own number, or 0"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Texts of a task at a time.", show_default=str(BATCH_SIZE))
    ] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="A folder with YAML tasks of lm_eval's kind; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the results to this new JSON file.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run.", show_default="the GPU, if any")] = None,
) -> None:
    """Measure a model: loss and bits per byte on text, accuracy and attention on the retrieval task, or harness tasks.

    A file of questions has one JSON object to a line: "question", or "context" (text that the choices continue, or
    that stands before the question), "choices" (two or more texts) and "answer" (the number of the right one, from 0).
    """
    if tasks:
        _refuse("--tasks", {"--text": text, "--measure": measure, "--option": option})
        _check_output(output)
        require_extra("harness")
        from diff_transformer.cli.harness import evaluate_tasks

        options = {"limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size or BATCH_SIZE}
        evaluate_tasks(checkpoint, tasks, include_path or [], output, device, options)
        return
    only_tasks = {"--limit": limit, "--num-fewshot": num_fewshot, "--batch-size": batch_size}
    _refuse("a measurement without --tasks", {**only_tasks, "--include-path": include_path})

    kinds = _check_measures(measure or [])
    if kinds == {"measure"}:
        _check_output(output)
        from diff_transformer.cli.measure import evaluate_measures

        evaluate_measures(checkpoint, text, list(dict.fromkeys(measure or [])), option or [], output, device)
        return
    _refuse("a measurement without a name", {"--option": option})

    from diff_transformer.cli import console
    from diff_transformer.cli.checkpoints import find_checkpoint, find_recipe, load_model
    from diff_transformer.eval import evaluate as evaluate_model
    from diff_transformer.experiments.recall import retrieval_baselines
    from diff_transformer.report import demo_table
    from diff_transformer.results import capture_results, write_json

    _check_output(output)
    console.quiet_libraries()
    folder = find_checkpoint(checkpoint, ours=False)
    model = load_model(folder, device)
    batches = batches_of(folder, text, getattr(model.config, "max_position_embeddings", None))
    records = evaluate_model(model, batches, getattr(model.config, "attention_type", model.config.model_type))
    if measure:
        found = dict.fromkeys(record.name for record in records)
        records = [record for record in records if record.name in measure]
        if not records:
            raise ValueError(f"Nothing of {', '.join(measure)} is measured on this data, only {', '.join(found)}.")
    settings = {"checkpoint": folder, "text": text}
    results = capture_results(f"Evaluation of {folder}", settings, records, str(model.device))
    recipe = None if text else find_recipe(folder)
    if recipe is not None:  # the data is the run's own, so chance and floor of its task are known
        results = replace(results, baselines=tuple(retrieval_baselines(recipe)))
    console.output().print(demo_table(results))
    if output is not None:
        write_json(output, results)


def _refuse(what: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value not in (None, []):
            raise ValueError(f"{option} does not go with {what}.")


def _check_output(output: Path | None) -> None:
    if output is not None and (output.exists() or not output.parent.is_dir()):
        raise FileExistsError(f"--output must be a new file in a folder that exists, got {str(output)!r}.")


def _check_measures(names: list[str]) -> set[str]:
    """What the names mean: "measure" for measurements, "number" for numbers of the one that needs no name.

    Raises:
        ValueError: a name that means nothing, or names of both kinds.
    """
    import difflib

    from diff_transformer.eval.measures import MEASURES
    from diff_transformer.report.rows import LABELS

    for name in names:
        if name not in LABELS and name not in MEASURES:
            known = [*MEASURES, *LABELS]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise ValueError(f"There is no measure {name!r}; {hint}")
    kinds = {"measure" if name in MEASURES else "number" for name in names}
    if len(kinds) > 1:
        raise ValueError(f"--measure names measurements or single numbers, not both: {', '.join(names)}.")
    return kinds


def batches_of(folder: Path, text: list[Path] | None, context: int | None) -> "Batches":
    """The data to measure on: the given text, read with the model's own tokenizer, or what the run was trained on."""
    from diff_transformer.cli.checkpoints import find_recipe, load_tokenizer
    from diff_transformer.data import TextBatches, TextFiles, prepare
    from diff_transformer.train import build_data
    from diff_transformer.train.recipe import TextData

    recipe = find_recipe(folder)
    if text:
        tokenizer = load_tokenizer(folder)
        length = recipe.data.length if recipe else min(context or DEFAULT_LENGTH, DEFAULT_LENGTH)
        cache = prepare(TextFiles(text), tokenizer)
        return TextBatches(cache, tokenizer, length=length, batch_size=BATCH_SIZE, validation_fraction=1)
    if recipe is None:
        raise ValueError(f"No recipe.yaml belongs to {str(folder)!r} and tells its data; name a text with --text.")
    # A tokenizer that is trained again on text that has changed since would give the model other tokens.
    return build_data(recipe, load_tokenizer(folder) if isinstance(recipe.data, TextData) else None).batches
