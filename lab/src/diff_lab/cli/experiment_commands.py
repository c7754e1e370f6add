"""The commands `demo`, `reproduce` and `compare` train models and compare them; `report` shows the results."""

import shlex
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diff_lab.cli.recipe_options import (
    RecipeName,
    RecipeSettings,
    TextPaths,
    Workers,
    fill_text,
    parse_options,
    read_recipe,
    tokenising_progress,
)
from diff_lab.record import ResultsFile
from diff_transformer.cli import console
from diff_transformer.cli.app import user_message
from diff_transformer.cli.console import Seed, optional

if TYPE_CHECKING:
    from diff_lab.experiments.experiment import Experiment
    from diff_lab.experiments.request import ExperimentRequest
    from diff_lab.report.documents import Table
    from diff_lab.train import Recipe

ALL = "all"


def demo(
    output: Annotated[
        Path | None,
        optional("The folder of everything that the demo writes.", "runs/demo, with --fast runs/demo-fast"),
    ] = None,
    text: TextPaths = None,
    seed: Seed = 0,
    fast: Annotated[
        bool, typer.Option("--fast", help="Take few steps: in a minute or so, everything of models that hardly learn.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo in the output folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the demo in the output folder.")] = False,
) -> None:
    """Train a Differential Transformer beside a Transformer of the same size and compare them.

    Both learn to find needles, and then language. The demo takes 4 to 8 minutes on two processor cores and ends with a
    table and a page to open in a browser, which has their curves.
    """
    from diff_lab.experiments.demo import ATTENTION, EXPLORER_PAGE, run_demo
    from diff_lab.record import AttentionExample
    from diff_lab.report.pages import build_run_report
    from diff_lab.report.tables import demo_table
    from diff_lab.results_files import read_record, read_results
    from diff_lab.train.progress import RunProgress
    from diff_transformer.cli.explored_checkpoints import write_recorded_page
    from diff_transformer.explorer import Answer, Example

    messages = console.messages()
    folder = run_demo(
        output or Path("runs/demo-fast" if fast else "runs/demo"),
        text=text,
        seed=seed,
        fast=fast,
        resume=resume,
        overwrite=overwrite,
        progress=RunProgress(messages),
    )
    explorer = folder / EXPLORER_PAGE
    asked = read_record(folder / ATTENTION, AttentionExample)
    query, begin = asked.query_position, asked.answer_positions[0]
    question = Example("A question of the task", " ".join(asked.tokens[: query + 1]), Answer(query, begin, begin + 1))
    write_recorded_page(folder / "retrieval-diff", folder / "retrieval-softmax", explorer, text=question)
    page, numbers = build_run_report([folder]), folder / "results.json"
    results = read_results(numbers)
    console.output().print(demo_table(results))
    models = sorted(path for path in folder.glob("*/model") if path.is_dir())
    for name, paths in {"page": [page], "explorer": [explorer], "numbers": [numbers], "models": models}.items():
        console.print_line(f"{name + ':':<10}{' '.join(map(str, paths))}")
    next_steps = {
        "retrieval": shlex.quote(str(folder / "retrieval-diff")),
        "twin": shlex.quote(str(folder / "retrieval-softmax")),
        "language": shlex.quote(str(folder / "language-diff")),
        "prompt": "Once" if text else "def ",
        "text": " --text ".join(shlex.quote(str(path)) for path in text or [Path("FOLDER")]),
    }
    console.print_line("\n" + fill_text("demo_next.txt", **next_steps))


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Experiments, such as table6; all of them: all.", show_default=False),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are, and stop.")] = False,
    preset: Annotated[
        Literal["cpu", "evening", "night", "gpu", "paper"],
        typer.Option(
            help="Two processor cores for minutes (cpu) or hours (evening, night), one H200 (gpu), or the paper's own "
            "size, which is checked and not run."
        ),
    ] = "cpu",
    seeds: Annotated[int | None, optional("How many seeds.", "the preset's", min=1)] = None,
    text: TextPaths = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of one experiment's measurement; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None, optional("Folder of results, their report, and runs.", "runs/reproduce-PRESET")
    ] = None,
    workers: Workers = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the results that are there, and resume.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results that are there.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Check the preset, and carry out all of it with models of seconds in a temporary folder. The gpu "
            "preset needs no GPU for it.",
        ),
    ] = False,
) -> None:
    """Repeat a table or a figure of the paper at a size of your own, and say whether it comes out.

    Each variant is trained with every seed on the same data in the same order, with a learning rate chosen for it. An
    interrupted command resumes where it stopped; a run that two experiments need is trained once. The report of all
    results in the output folder is written last: RESULTS.md with its figures.
    """
    if list_:
        console.output().print(_listing())
        return
    from diff_lab.experiments.experiment import EXPERIMENTS, PAPER, find_experiment

    if not names:
        raise ValueError(f"Name one experiment or more of {', '.join(EXPERIMENTS)}; --list says what they show.")
    experiments = [find_experiment(name) for name in dict.fromkeys(names) if name != ALL]
    if ALL in names:
        every = [find_experiment(name) for name in EXPERIMENTS]
        experiments = [experiment for experiment in every if preset in experiment.presets or experiment.name in names]
    files = {"--output": output, "--resume": resume, "--overwrite": overwrite, "--workers": workers}
    if preset == PAPER:
        settings = {"--seeds": seeds, "--text": text, "--option": option, "--rehearse": rehearse}
        console.refuse("--preset paper, which is checked and not run", {**settings, **files})
        from diff_lab.experiments.paper_preset import check_paper, experiments_by_run, paper_preset

        by_run = experiments_by_run()
        for experiment in experiments:
            checked = {"variants": check_paper(experiment), "preset": paper_preset(experiment)}
            values = {"experiment": experiment, "experiments_by_run": by_run, **checked}
            console.print_line(fill_text("paper_preset.txt", **values))
        return

    if rehearse:
        console.refuse("--rehearse, which keeps no files", files)

    from diff_lab.experiments.request import as_defined, check_results, request_experiment, results_path
    from diff_lab.experiments.runner import run_experiment
    from diff_lab.report.pages import DOCUMENT, build_results_report
    from diff_lab.train.progress import RunProgress

    shared = _shared_out(experiments, preset, text or [], parse_options(option or []))
    requests = [
        request_experiment(experiment, preset, seeds=seeds, is_rehearsal=rehearse, **arguments)
        for experiment, arguments in zip(experiments, shared, strict=True)
    ]
    if rehearse:
        _rehearse_all(requests)
        return
    folder = output or Path("runs") / f"reproduce-{preset}"
    for request in requests:
        check_results(results_path(folder, request.experiment.name), request, resume=resume, overwrite=overwrite)

    def reproduce_one(request: "ExperimentRequest") -> None:
        name, minutes = request.experiment.name, request.preset.minutes
        about = "" if minutes is None else f", planned for about {_duration(minutes)}"
        console.say(f"{name}: {request.experiment.shows}{about}")
        shown = RunProgress(console.messages())
        results = run_experiment(request, folder, resume=resume, overwrite=overwrite, progress=shown, workers=workers)
        show_results(results, results_path(folder, name))

    failed = _failed(requests, reproduce_one)
    if len(failed) < len(requests):
        console.print_line(f"report: {build_results_report([folder], folder / DOCUMENT, as_defined)}")
    _refuse_failed(failed, len(requests), "carried out")


def _rehearse_all(requests: "Sequence[ExperimentRequest]") -> None:
    """Rehearse experiments one after the other and write their report, all of it into a folder that is then removed.

    Raises ValueError, after the table of rehearsals, if one of several failed.
    """
    from diff_lab.experiments.rehearsal import rehearse
    from diff_lab.experiments.request import as_defined
    from diff_lab.report.documents import Table
    from diff_lab.report.pages import DOCUMENT, build_results_report
    from diff_lab.train.progress import RunProgress

    phases = ("checks", "small experiment")
    rows: list[tuple[str, ...]] = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def rehearse_one(request: "ExperimentRequest") -> None:
            name = request.experiment.name
            console.say(f"{name}: rehearsed in a temporary folder")
            rehearsal = rehearse(request, folder, RunProgress(console.messages()))
            seconds = (f"{rehearsal.seconds[phase]:.1f}" for phase in phases)
            rows.append((name, *seconds, str(len(rehearsal.results.comparisons))))

        failed = _failed(requests, rehearse_one)
        if rows:
            build_results_report([folder], folder / DOCUMENT, as_defined)
    head = ("experiment", *(f"{phase}, s" for phase in phases), "comparisons")
    caption = (
        "All files were written, the report too. Checks are of the preset itself, comparisons of the small experiment."
    )
    if rows:
        console.output().print(Table.of_rows(head, rows, caption=caption, right=head[1:], one_line=head[:1]))
    _refuse_failed(failed, len(requests), "rehearsed")


def _failed(requests: "Sequence[ExperimentRequest]", work: "Callable[[ExperimentRequest], None]") -> list[str]:
    """Do the work for each request, and return the names of the experiments that failed, after telling why.

    A failure of one of several, such as to fetch a data set, must not keep the others from being done. The error of the
    only one is raised, and so is that of a reader of stdout who has ended.
    """
    failed = []
    for request in requests:
        try:
            work(request)
        except Exception as error:
            if len(requests) == 1 or isinstance(error, BrokenPipeError):
                raise
            message = user_message(error)
            if message is None:  # a bug, or a full memory: where it was
                message = "".join(traceback.format_exception(error)).rstrip()
            failed.append(request.experiment.name)
            console.say(f"error: {failed[-1]}: {message}")
    return failed


def _refuse_failed(failed: Sequence[str], count: int, done: str) -> None:
    """Raise ValueError if some of `count` experiments could not be "carried out", or whatever is `done`."""
    if failed:
        raise ValueError(f"{len(failed)} of {count} experiments could not be {done}: {', '.join(failed)}.")


def _shared_out(
    experiments: "list[Experiment]", preset: str, text: list[Path], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return text and options for each experiment that knows them; those that none knows go to all, and are refused."""
    from diff_lab.experiments.request import preset_of

    presets = [preset_of(experiment, preset) for experiment in experiments]
    known = {name for chosen in presets for name in chosen.options}
    on_text = any(chosen.trains_on_text for chosen in presets)
    return [
        {
            "text": text if chosen.trains_on_text or not on_text else [],
            "options": {name: value for name, value in options.items() if name in chosen.options or name not in known},
        }
        for chosen in presets
    ]


def _listing() -> "Table":
    from diff_lab.experiments.experiment import EXPERIMENTS, find_experiment
    from diff_lab.report.documents import Table

    sizes = ("cpu", "evening", "night", "gpu", "paper")
    rows = []
    for experiment in map(find_experiment, EXPERIMENTS):
        cells = dict.fromkeys(sizes, "–")
        for name, preset in experiment.presets.items():
            cells[name] = "checked" if name == "paper" else _duration(preset.minutes)
        rows.append((experiment.name, experiment.shows, *cells.values()))
    caption = "cpu, evening, night: on two processor cores. gpu: planned for one H200, not timed yet."
    head, one_line = ("name", "what it shows", *sizes), ("name", *sizes)
    return Table.of_rows(head, rows, caption=caption, right=sizes[:-1], one_line=one_line)


def _duration(minutes: float | None) -> str:
    """Return about how long an experiment takes: "7.5 min", "11 h"; "?" if unknown."""
    if minutes is None:
        return "?"
    return f"{minutes:g} min" if minutes < 90 else f"{minutes / 60:g} h"


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
            help="Attention types (diff, diff_grouped, softmax, diff_v2), each with changes of the model if any, such "
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
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A setting of the measurement, such as sequences=500 (retrieval) or documents=100 (text); may be "
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
    report is RESULTS.md with its figures.
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
    console.print_line(f"report: {build_results_report([folder], folder / DOCUMENT, as_defined)}")


def _with_text(name: str, settings: list[str], text: list[Path]) -> "Recipe":
    """Return the recipe, which the text is put into if there is any. Raises ValueError if it is trained on none."""
    from diff_lab.data import TextFiles
    from diff_lab.train.data_kinds import TextData
    from diff_lab.train.recipe import override_of

    resolved = read_recipe(name, settings)
    if not text:
        return resolved
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
    """Return the numbers of a list like "1e-3,3e-3"."""
    try:
        return [] if text is None else [float(rate) for rate in text.split(",")]
    except ValueError:
        raise ValueError(f"--learning-rates is a list of numbers such as 1e-3,3e-3, got {text!r}.") from None


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|RESULTS…",
            help="Run folders, the folder of a demo, or results of `reproduce` and `compare`: files NAME.json or "
            "folders with them.",
        ),
    ],
    output: Annotated[
        Path | None,
        optional(
            "The file to write: a page, or of results a Markdown document (.md).",
            "in the folder of the runs or results",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report that is there.")] = False,
) -> None:
    """Draw the page of a demo, or of training runs beside each other; or set out the results of experiments beside the
    paper's.

    Of results there is a Markdown document (RESULTS.md) with a page of each experiment, METHOD.md and figures beside
    it.
    """
    from diff_lab.report.findings import holds_experiments
    from diff_lab.report.pages import build_results_report, build_run_report, results_report_files, run_report_path

    of_experiments = any(map(holds_experiments, paths))
    replaced = results_report_files(paths, output) if of_experiments else (run_report_path(paths, output),)
    console.refuse_existing(replaced, "report", overwrite=overwrite)
    if of_experiments:
        from diff_lab.experiments.request import as_defined

        written = build_results_report(paths, output, as_defined)
    else:
        written = build_run_report(paths, output)
    console.print_line(str(written))
