"""The command `compare` trains variants of a user's recipe and compares them as experiments do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diff_lab.cli.experiment_commands import show_results
from diff_lab.cli.recipe_options import (
    RecipeName,
    RecipeSettings,
    TextPaths,
    Workers,
    parse_options,
    read_recipe,
    tokenising_progress,
)
from diff_transformer.cli import console
from diff_transformer.cli.console import optional

if TYPE_CHECKING:
    from diff_lab.train import Recipe


def compare(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Attention types (diff, diff_grouped, softmax, diff_v2), each with changes of the model if any, such "
            "as diff:model.lambda_init=0.8 or diff:model.headwise_norm=false.",
        ),
    ] = "diff,softmax",
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds, from 0; each is given to all variants.")] = 3,
    learning_rates: Annotated[
        str | None,
        optional("The rates that are tried for each variant.", "the recipe's, a third of it, and three times of it"),
    ] = None,
    text: TextPaths = None,
    unmatched: Annotated[
        bool,
        typer.Option(
            "--unmatched", help="Leave the sizes of variants alone, where the attention of one has more parameters."
        ),
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A setting of what is measured, such as sequences=500 (retrieval) or documents=100 (text); may be "
            "repeated.",
        ),
    ] = None,
    output: Annotated[Path | None, optional("Folder of results, their report, and runs.", "runs/compare-NAME")] = None,
    workers: Workers = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the results that are there, and resume.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that are there.")] = False,
) -> None:
    """Compare attention types by a recipe of your own, as `reproduce` does by those of the experiments.

    Each variant is trained with every seed on the same data in the same order, with a learning rate chosen for it. An
    interrupted command resumes where it stopped; a run that is finished in the output folder is not trained again. The
    report is RESULTS.md with its figures, and RESULTS.html.
    """
    from diff_lab.experiments.recipe_comparison import check_options, compare_recipe, with_data
    from diff_lab.experiments.request import (
        as_defined,
        check_results,
        refuse_results,
        request_experiment,
        results_path,
    )
    from diff_lab.experiments.runner import run_experiment
    from diff_lab.record import OWN
    from diff_lab.report.pages import DOCUMENT, build_results_report
    from diff_lab.train import build_data
    from diff_lab.train.progress import RunProgress

    resolved = _with_text(recipe, settings or [], text or [])
    names = [name.strip() for name in variants.split(",")]
    rates, options = _rates(learning_rates), parse_options(option or [])
    check_options(resolved, options)
    experiment = compare_recipe(resolved, names, seeds=seeds, learning_rates=rates, unmatched=unmatched)
    folder = output or Path("runs") / experiment.name.replace("recipe_", "compare-", 1)
    path = results_path(folder, experiment.name)
    refuse_results(path, resume=resume, overwrite=overwrite)
    messages = console.messages()
    with tokenising_progress(messages) as tell:
        data = build_data(resolved, tell=tell)
    request = request_experiment(with_data(experiment, data), OWN, options=options)
    check_results(path, request, resume=resume, overwrite=overwrite)
    if seeds == 1:
        messages.print("With one seed there are no intervals, and every answer is inconclusive.")
    results = run_experiment(
        request,
        folder,
        resume=resume,
        overwrite=overwrite,
        progress=RunProgress(messages),
        workers=workers,
    )
    show_results(results, path)
    for written in build_results_report([folder], folder / DOCUMENT, as_defined):
        console.print_line(f"report: {written}")


def _with_text(name: str, settings: list[str], text: list[Path]) -> "Recipe":
    """The recipe, which the text is put into if there is any. Raises ValueError where it is trained on none."""
    from diff_lab.data import TextFiles
    from diff_lab.train.data_kinds import TextData
    from diff_lab.train.recipe import override_of

    if not text:
        return read_recipe(name, settings)
    resolved = read_recipe(name, settings)
    if not isinstance(resolved.data, TextData):
        raise ValueError(
            f"--text does not go with the recipe {resolved.name!r}, whose data is {resolved.data.describe()}."
        )
    if resolved.data.dataset is not None:
        raise ValueError(
            f"--text does not go with the recipe {resolved.name!r}, whose text is {resolved.data.describe()}; "
            "data.dataset=null takes it out."
        )
    TextFiles(text)  # refuses what is no text
    paths = [str(path.expanduser().resolve()) for path in text]
    return read_recipe(name, [*settings, override_of("data.paths", paths)])


def _rates(text: str | None) -> list[float]:
    """The numbers of a list like "1e-3,3e-3"."""
    try:
        return [] if text is None else [float(rate) for rate in text.split(",")]
    except ValueError:
        raise ValueError(f"--learning-rates is a list of numbers such as 1e-3,3e-3, got {text!r}.") from None
