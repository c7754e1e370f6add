"""The commands `demo`, `reproduce` and `compare` train models and compare them; `report` shows the results."""

import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diff_lab.cli.recipe_options import RecipeName, RecipeSettings, parse_options, tokenising_progress
from diff_lab.record import ResultsFile
from diff_transformer.cli import console
from diff_transformer.cli.app import user_message
from diff_transformer.cli.console import Seed, optional

if TYPE_CHECKING:
    from diff_lab.report.documents import Table

ALL = "all"
Resume = Annotated[bool, typer.Option("--resume", help="Keep what is in the output folder, and resume.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]
TextPaths = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to train on: a .txt, .jsonl or .parquet file, or a folder of them; may be repeated. "
        "By default the source of Python's standard library."
    ),
]
Workers = Annotated[
    int | None,
    optional(
        "How many trainings run at the same time, each in a process of its own.",
        "one for each processor core, on a GPU 1",
        min=1,
    ),
]
MeasurementOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A setting of the measurement, such as sequences=500 (retrieval) or documents=100 (text); repeatable.",
    ),
]


def demo(
    output: Annotated[
        Path | None, optional("The folder of everything that the demo writes.", "runs/demo, with --fast runs/demo-fast")
    ] = None,
    seed: Seed = 0,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Take fewer pairs and steps: a minute, after which a model may not have begun."),
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a Differential Transformer beside a Transformer of the same size and compare them.

    Both are trained to find answers among distractors. The demo takes 2 to 4 minutes on two idle processor cores. It
    ends with a table and a page to open in a browser: the curves of both, and what DIFF's answers owe to λ.
    """
    from diff_lab.experiments.demo import EXPLORER_PAGE, RESULTS, run_demo
    from diff_lab.report.documents import fill
    from diff_lab.report.pages import build_run_report
    from diff_lab.report.tables import demo_table
    from diff_lab.results_files import read_results
    from diff_lab.train.progress import RunProgress
    from diff_transformer.cli.explored_checkpoints import write_recorded_page
    from diff_transformer.explorer import Answer, Example

    folder = run_demo(
        output or Path("runs/demo-fast" if fast else "runs/demo"),
        seed=seed,
        fast=fast,
        resume=resume,
        overwrite=overwrite,
        progress=RunProgress(console.messages()),
    )
    explorer, numbers = folder / EXPLORER_PAGE, folder / RESULTS
    results = read_results(numbers)
    words, answer = results.settings["view"]["words"], results.settings["view"]["answer"]
    place = Answer(len(words) - 1, answer, answer + 1)
    question = Example("A question of the task", " ".join(words), place)
    write_recorded_page(folder / "diff", folder / "softmax", explorer, text=question)
    page = build_run_report([folder])
    console.output().print(demo_table(results, apart=True))
    models = sorted(path for path in folder.glob("*/model") if path.is_dir())
    for name, paths in {"page": [page], "explorer": [explorer], "numbers": [numbers], "models": models}.items():
        console.print_line(f"{name + ':':<10}{' '.join(map(str, paths))}")
    console.print_line("\n" + fill("demo_next.txt", folder=folder).rstrip())


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Experiments, such as table6; all of them: all.", show_default=False),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are, and stop.")] = False,
    preset: Annotated[
        Literal["cpu", "evening", "night", "gpu"],
        typer.Option(
            help="Two processor cores for minutes (cpu) or hours (evening, night), or one H200 (gpu). "
            "docs/experiments.md has commands for the paper's own size."
        ),
    ] = "cpu",
    seeds: Annotated[int | None, optional("How many seeds.", "the preset's", min=1)] = None,
    text: TextPaths = None,
    option: MeasurementOptions = None,
    output: Annotated[
        Path | None, optional("Folder of results, their report, and runs.", "runs/reproduce-PRESET")
    ] = None,
    workers: Workers = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Repeat a table or a figure of the paper at a size of your own, and say whether it comes out.

    Each variant is trained with every seed on the same data in the same order, with a learning rate chosen for it. An
    interrupted command resumes where it stopped; a run that two experiments need is trained once. The report of all
    results in the output folder is written last: RESULTS.md with its figures.
    """
    if list_:
        console.output().print(_listing())
        return
    from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment

    if not names:
        raise ValueError(f"Name one experiment or more of {', '.join(EXPERIMENTS)}; --list says what they show.")
    # A table and a figure may be one experiment's.
    experiments = list({one.name: one for one in (find_experiment(name) for name in names if name != ALL)}.values())
    if ALL in names:
        experiments = [one for one in EXPERIMENTS.values() if preset in one.presets or one in experiments]

    from diff_lab.experiments.request import check_results, preset_of, request_experiment, results_path
    from diff_lab.experiments.runner import run_experiment
    from diff_lab.train.progress import RunProgress

    options = parse_options(option or [])
    if option and len(experiments) > 1:
        raise ValueError("--option goes with one experiment, whose measurement it sets.")
    # Of several, text is for those that are trained on some.
    on_text = [preset_of(one, preset).trains_on_text for one in experiments]
    requests = [
        request_experiment(
            one, preset, seeds=seeds, text=text or [] if is_on_text or not any(on_text) else [], options=options
        )
        for one, is_on_text in zip(experiments, on_text, strict=True)
    ]
    failed = []
    folder, kept = output or Path("runs") / f"reproduce-{preset}", {"resume": resume, "overwrite": overwrite}
    for request in requests:
        check_results(results_path(folder, request.experiment.name), request, **kept)
    for request in requests:
        name, about = request.experiment.name, _duration(request.preset.minutes)
        console.say(f"{name}: {request.experiment.shows}, planned for about {about}")
        try:
            results = run_experiment(request, folder, progress=RunProgress(console.messages()), workers=workers, **kept)
            show_results(results, results_path(folder, name))
        except Exception as error:
            # A failure of one of several, such as to fetch a data set, must not keep the others from being done.
            if len(requests) == 1 or isinstance(error, BrokenPipeError):
                raise
            failed.append(name)
            # Of a bug, or a full memory, where it was.
            why = user_message(error) or "".join(traceback.format_exception(error)).rstrip()
            console.say(f"error: {name}: {why}")
    if len(failed) < len(requests):
        _write_report(folder)
    if failed:
        raise ValueError(f"{len(failed)} of {len(requests)} experiments could not be carried out: {', '.join(failed)}.")


def _write_report(folder: Path) -> None:
    """Write the report of the results in a folder, and print where it is."""
    from diff_lab.experiments.request import as_defined
    from diff_lab.report.pages import DOCUMENT, build_results_report

    console.print_line(f"report: {build_results_report([folder], folder / DOCUMENT, as_defined)}")


def _listing() -> "Table":
    from diff_lab.experiments.definitions import EXPERIMENTS
    from diff_lab.report.documents import Table

    sizes = ("cpu", "evening", "night", "gpu")
    rows = []
    for experiment in EXPERIMENTS.values():
        times = (_duration(experiment.presets[size].minutes) if size in experiment.presets else "–" for size in sizes)
        rows.append((experiment.name, experiment.shows, *times))
    caption = "cpu, evening, night: on two processor cores. gpu: planned for one H200, not timed yet."
    head, one_line = ("name", "what it shows", *sizes), ("name", *sizes)
    return Table(head=head, rows=rows, caption=caption, right=sizes, one_line=one_line)


def _duration(minutes: float) -> str:
    """Return about how long an experiment takes: "7.5 min", "11 h"."""
    return f"{minutes:g} min" if minutes < 90 else f"{minutes / 60:.3g} h"


def show_results(results: ResultsFile, path: Path) -> None:
    """Print the comparisons, the variants, the notes, and the path of the results."""
    from diff_lab.report.tables import variants_table, verdict_table
    from diff_lab.report.wording import note_words

    out = console.output()
    out.print(verdict_table(results))
    if results.settings["variants"]:
        out.print(variants_table(results.settings))
    for note in results.notes:
        console.print_line(f"note: {note_words(results, note)}")
    console.print_line(f"numbers: {path}")


def compare(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Attention types (diff, softmax, diff_v2, …), each with changes of the model if any, such "
            "as diff:model.lambda_init=0.8 or diff:model.headwise_norm=false.",
        ),
    ] = "diff,softmax",
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds, from 0; each is given to all variants.")] = 3,
    learning_rates: Annotated[
        str | None,
        optional("The learning rates to try for each variant.", "the recipe's, a third of it, and three times of it"),
    ] = None,
    text: TextPaths = None,
    unmatched: Annotated[
        bool,
        typer.Option(
            "--unmatched", help="Leave the sizes of variants alone, even if the attention of one has more parameters."
        ),
    ] = False,
    option: MeasurementOptions = None,
    output: Annotated[Path | None, optional("Folder of results, their report, and runs.", "runs/compare-NAME")] = None,
    workers: Workers = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Compare attention types by a recipe of your own, as `reproduce` does by those of the experiments.

    Each variant is trained with every seed on the same data in the same order, with a learning rate chosen for it. An
    interrupted command resumes where it stopped; a run that is finished in the output folder is not trained again. The
    report is RESULTS.md with its figures.
    """
    from diff_lab.experiments.recipe_comparison import compare_recipe, comparison_name
    from diff_lab.experiments.request import check_results, refuse_results, request_experiment, results_path
    from diff_lab.experiments.runner import run_experiment
    from diff_lab.record import OWN
    from diff_lab.train import build_data, load_recipe
    from diff_lab.train.progress import RunProgress
    from diff_lab.train.recipe import override_of

    try:
        rates = [float(rate) for rate in learning_rates.split(",")] if learning_rates else []
    except ValueError:
        raise ValueError(f"--learning-rates must be numbers with commas between, got {learning_rates!r}.") from None
    paths = [str(path.expanduser().resolve()) for path in text or []]
    resolved = load_recipe(recipe, [*(settings or []), *([override_of("data.paths", paths)] if paths else [])])
    name = comparison_name(resolved)
    folder = output or Path("runs") / name.replace("recipe_", "compare-", 1)
    kept = {"resume": resume, "overwrite": overwrite}
    refuse_results(results_path(folder, name), **kept)
    messages, options = console.messages(), parse_options(option or [])
    with tokenising_progress(messages) as tell:
        experiment = compare_recipe(
            resolved,
            [one.strip() for one in variants.split(",")],
            seeds=seeds,
            learning_rates=rates,
            unmatched=unmatched,
            options=options,
            build=partial(build_data, tell=tell),
        )
    request = request_experiment(experiment, OWN, options=options)
    check_results(results_path(folder, name), request, **kept)
    if seeds == 1:
        messages.print("With one seed there are no intervals over seeds, and every answer is inconclusive.")
    results = run_experiment(request, folder, progress=RunProgress(messages), workers=workers, **kept)
    show_results(results, results_path(folder, name))
    _write_report(folder)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|RESULTS…", help="Runs, the folder of a demo, or results: NAME.json or folders."),
    ],
    output: Annotated[
        Path | None, optional("The file to write: .html, or of results .md.", "in the folder of the runs or results")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the page of a demo, or of training runs beside each other; or set out the results of experiments beside the
    paper's.

    Of results there is a Markdown document (RESULTS.md), beside it a page of each experiment, METHOD.md and figures.
    """
    from diff_lab.report.findings import holds_experiments
    from diff_lab.report.pages import build_results_report, build_run_report, results_report_path, run_report_path

    of_experiments = any(map(holds_experiments, paths))
    path = (results_report_path if of_experiments else run_report_path)(paths, output)
    console.refuse_existing((path,), "report", overwrite=overwrite)
    if not of_experiments:
        console.print_line(str(build_run_report(paths, output)))
        return
    from diff_lab.experiments.request import as_defined

    console.print_line(str(build_results_report(paths, output, as_defined)))
