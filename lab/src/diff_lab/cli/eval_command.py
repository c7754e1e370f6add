"""The command `eval` takes measurements of a model, or lets it answer the tasks of lm-evaluation-harness."""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diff_lab.cli.recipe_options import find_recipe, parse_options
from diff_lab.report.documents import Table
from diff_transformer._version import CHECKOUT
from diff_transformer.cli import console
from diff_transformer.cli.console import Checkpoint, Device, optional
from diff_transformer.shipped_models import HELD_OUT

if TYPE_CHECKING:
    from diff_lab.data import Batches
    from diff_lab.measure.measurement import Measurement
    from diff_lab.record import Result, ResultsFile


def evaluate_tasks(
    checkpoint: Path, tasks: list[str], include: list[Path], device: str | None, options: dict[str, Any]
) -> "Iterator[tuple[ResultsFile, Table]]":
    """Yield the results up to each task, when that is done, and their table."""
    from diff_lab.measure.harness import load_tasks, measure_tasks, published, table_1_average, task_names
    from diff_lab.report.tables import measure_table
    from diff_lab.results_files import capture_results
    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer, shown_folder
    from diff_transformer.utils.environment import installed_version

    names = task_names(tasks)
    if not names:
        raise ValueError(
            f"--tasks must name tasks of lm_eval or .jsonl files, separated by commas, got {','.join(tasks)!r}."
        )
    folder = find_checkpoint(checkpoint, ours=False)
    tokenizer, loaded = load_tokenizer(folder), load_tasks(names, include)
    console.say(f"Loading {shown_folder(folder)} …")
    model = load_model(folder, device)
    console.say(f"Answering {', '.join(names)} …")
    variant = getattr(model.config, "attention_type", model.config.model_type)
    settings: dict[str, Any] = {"checkpoint": shown_folder(folder), "tasks": names, **options, "notes": []}
    records: list[Any] = []
    for found, note in measure_tasks(model, tokenizer, loaded, variant, **options):
        records += found
        settings["notes"] += [note] if note else []
        average = table_1_average(records)
        shown = [*records, average] if average else records
        settings["published"] = published(shown)
        title = f"lm-evaluation-harness on {shown_folder(folder)}"
        results = capture_results(title, settings, shown, str(model.device))
        results = replace(results, versions={**results.versions, "lm_eval": installed_version("lm_eval")})
        yield results, measure_table(results)


def evaluate_measures(
    checkpoint: Path, text: list[Path] | None, names: list[str], option_texts: list[str], device: str | None
) -> "Iterator[tuple[ResultsFile, Table]]":
    """Yield the results of all named measurements, or else of the standard one, at once, and their table."""
    from diff_lab.data import MaskedTextBatches, TextBatches, TextFiles, prepare
    from diff_lab.measure.measurement import EvalInput
    from diff_lab.report.tables import demo_table, measure_table
    from diff_lab.results_files import capture_results
    from diff_lab.train import build_data
    from diff_lab.train.loop import refuse_other_data
    from diff_lab.train.recipe import TextData
    from diff_transformer.cli import checkpoints

    if not names:
        console.refuse("a measurement without a name", {"--option": option_texts})
    measures = read_measurements(names or ["standard"], option_texts)
    needs = {measure.needs: name for name, measure in measures.items()}
    if "training" in needs:
        raise ValueError(f"The measure {needs['training']} is taken of an experiment's runs, by diff-lab reproduce.")
    takes_data = bool(needs.keys() - {None})
    if text and not takes_data:
        raise ValueError(f"--text does not go with the measure {', '.join(measures)}, which takes no text.")
    any_model = all(measure.any_model for measure in measures.values())
    folder = checkpoints.find_checkpoint(checkpoint, ours=not any_model)
    auto_class, shown = checkpoints.auto_class_of(folder), checkpoints.shown_folder(folder)
    is_encoder = auto_class == "AutoModelForMaskedLM"
    if is_encoder and names:
        raise ValueError(f"{str(folder)!r} holds an encoder, whose numbers eval tells without --measure.")
    if takes_data and not text and (folder / HELD_OUT).is_file():
        console.say(f"Measured on {HELD_OUT} in the model's folder, text that was kept from training.")
        text = [folder / HELD_OUT]
    recipe = find_recipe(folder)
    if takes_data and not text and recipe is None:
        raise ValueError(f"No recipe.yaml belongs to {str(folder)!r} and tells its data; name a text with --text.")
    reads_text = bool(text) or (takes_data and recipe is not None and isinstance(recipe.data, TextData))
    if not reads_text and (name := needs.get("text")):
        raise ValueError(f"The measure {name} needs text, and the run was trained on none: name some by --text.")
    corpus = TextFiles(text) if text else None
    tokenizer = checkpoints.load_tokenizer(folder, required=reads_text)
    console.say(f"Loading {shown} …")
    model = checkpoints.load_model(folder, device, auto_class)
    batches: Batches | None = None
    if corpus is not None:
        cache = prepare(corpus, tokenizer)
        context = getattr(model.config, "max_position_embeddings", DEFAULT_LENGTH)
        length = min(recipe.data.length if recipe else min(context, DEFAULT_LENGTH), len(cache.tokens))
        batches = TextBatches(cache, tokenizer, length=length, batch_size=BATCH_SIZE, validation_fraction=1)
        if is_encoder:
            fraction = getattr(recipe and recipe.data, "mask_fraction", MaskedTextBatches.mask_fraction)
            batches = MaskedTextBatches(batches, tokenizer, mask_fraction=fraction)
    elif takes_data and recipe is not None:
        # A tokenizer that is trained again on text that has changed since would give the model other tokens.
        batches = build_data(recipe, tokenizer if reads_text else None).batches
        refuse_other_data(folder, batches)
    console.say(f"Taking the measurement {', '.join(names)} …" if names else "Measuring …")
    records: list[Result] = []
    sums = build_data(recipe).batches if recipe is not None and recipe.data.kind == "arithmetic" else None
    variant = getattr(model.config, "attention_type", model.config.model_type)
    for measure in measures.values():
        data = batches if measure.needs else sums
        records += measure.run(EvalInput(model=model, variant=variant, batches=data, tokenizer=tokenizer))
    settings: dict[str, Any] = {"checkpoint": shown, "text": text}
    if names:
        settings["measures"] = {name: measure.model_dump(mode="json") for name, measure in measures.items()}
        records = [replace(record, documents=()) for record in records]
    title = f"{', '.join(names) or 'Evaluation'} of {shown}"
    results = capture_results(title, settings, records, str(model.device))
    if recipe is not None and not text:  # the data is the run's own, so chance and floor of its task are known
        baselines = chain(*(measure.baselines(recipe) for measure in measures.values()))
        results = replace(results, baselines=tuple(baselines))
    yield results, measure_table(results) if names else demo_table(results)


def read_measurements(names: list[str], option_texts: list[str]) -> "dict[str, Measurement]":
    """Return the measurements of these names, with options NAME=VALUE, each of which one or more must have."""
    from diff_lab.measure.measurement import MeasurementRequest, find_measurement, refuse_unknown

    values = parse_options(option_texts)
    known = {name: find_measurement(name).model_fields for name in names}
    refuse_unknown(values, list(dict.fromkeys(chain(*known.values()))), f"The measure {', '.join(names)}")
    chosen = {name: {option: values[option] for option in values.keys() & known[name]} for name in names}
    return {name: MeasurementRequest(name=name, options=options).resolve() for name, options in chosen.items()}


# Windows of text, where no recipe tells how long the training's were, and how many at a time.
DEFAULT_LENGTH, BATCH_SIZE = 1024, 16


def evaluate(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure on the complete contexts of this text (.txt, .jsonl, .parquet or a folder; may be repeated) "
            "instead of the held-out data that the run's recipe names, or that comes with a model of the package."
        ),
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Take this measurement instead, e.g. repeats, outliers or needles, most of them on any causal "
            "language model of transformers. May be repeated.",
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
        int | None, optional("Examples before each question.", "the task's own number, or 0", min=0)
    ] = None,
    batch_size: Annotated[int | None, optional("Texts of a task at a time.", str(BATCH_SIZE), min=1)] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="A folder with YAML tasks of lm_eval's kind; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the results to this new JSON file.")] = None,
    device: Device = None,
) -> None:
    """Measure a model: loss and bits per byte on text, accuracy and attention on the retrieval task, or harness tasks.

    A file of questions has one JSON object to a line: "question", or "context" (text that the choices continue, or
    that stands before the question), "choices" (two or more texts) and "answer" (the number of the right one, from 0).
    """
    if tasks:
        console.refuse("--tasks", {"--text": text, "--measure": measure, "--option": option})
    else:
        only_tasks = {"--limit": limit, "--num-fewshot": num_fewshot, "--batch-size": batch_size}
        console.refuse("a measurement without --tasks", {**only_tasks, "--include-path": include_path})
    if output is not None and (output.exists() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK)):
        raise FileExistsError(f"--output must be a new file in a folder that may be written to, got {str(output)!r}.")
    if tasks:
        if find_spec("lm_eval") is None:  # said before torch is imported
            raise ValueError(f'--tasks needs lm-eval, which is not installed: pip install "./lab[harness]" {CHECKOUT}')
        options = {"limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size or BATCH_SIZE}
        evaluated = evaluate_tasks(checkpoint, tasks, include_path or [], device, options)
    else:
        evaluated = evaluate_measures(checkpoint, text, list(dict.fromkeys(measure or [])), option or [], device)
    from diff_lab.results_files import write_json

    table = None
    try:
        for results, results_table in evaluated:
            table = results_table
            if output is not None:  # after each task, so that what is done is never lost
                write_json(output, results)
    finally:
        if table is not None:
            console.output().print(table)
