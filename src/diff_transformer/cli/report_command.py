"""`diff-transformer report`"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|RESULTS…",
            help="Run folders, the folder of a demo, or results of `reproduce`: files NAME.json or folders with them.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="What to write: a page, or of results a Markdown document (.md) or the page alone (.html).",
            show_default="in the folder of what is shown",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report that is there.")] = False,
) -> None:
    """Draw the page of a demo, or of training runs side by side; or set out the results of experiments beside the
    paper's.

    Of results there is a Markdown document (RESULTS.md), its figures in the folder "figures" beside it, and one page
    that holds everything (RESULTS.html), or with `--output RESULTS.html` this page alone.
    """
    from diff_transformer.cli import console
    from diff_transformer.lab.report.experiment_tables import holds_experiments
    from diff_transformer.lab.report.experiments_report import build_results_report, results_report_files
    from diff_transformer.lab.report.run_pages import build_run_report, run_report_path

    of_experiments = any(map(holds_experiments, paths))
    replaced = results_report_files(paths, output) if of_experiments else (run_report_path(paths, output),)
    console.refuse_existing(replaced, "report", overwrite=overwrite)
    written: tuple[Path, ...]
    if of_experiments:
        from diff_transformer.lab.experiments.request import as_defined

        written = build_results_report(paths, output, as_defined)
    else:
        written = (build_run_report(paths, output),)
    for path in written:
        console.print_line(str(path))
