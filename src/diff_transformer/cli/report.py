"""`diff-transformer report`"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or the folder of a demo.")],
    output: Annotated[Path | None, typer.Option(help="The page to write.", show_default="in the run's folder")] = None,
) -> None:
    """Draw the page of a demo, or of training runs side by side, from their files."""
    from diff_transformer.cli import console
    from diff_transformer.report import build_run_report

    console.output().print(str(build_run_report(runs, output)), markup=False, soft_wrap=True)
