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
            help="What to write: a page, or of results a Markdown document.",
            show_default="in the folder of what is shown",
        ),
    ] = None,
) -> None:
    """Draw the page of a demo, or of training runs side by side; or set out the results of experiments beside the
    paper's.

    Of results there is a Markdown document (RESULTS.md), its figures in the folder "figures" beside it, and one page
    that holds everything (RESULTS.html).
    """
    from diff_transformer.cli import console
    from diff_transformer.report import build_results_report, build_run_report, holds_experiments

    written = (
        build_results_report(paths, output)
        if any(map(holds_experiments, paths))
        else (build_run_report(paths, output),)
    )
    for path in written:
        console.output().print(str(path), markup=False, soft_wrap=True)
