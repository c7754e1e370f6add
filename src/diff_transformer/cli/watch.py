"""`diff-transformer watch`"""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs, drawn over each other, or that of a demo.")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Draw one picture and end; so it is without a terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two pictures.")] = 2.0,
) -> None:
    """Draw the curves of runs in the terminal while they go on; Ctrl-C, or the end of all runs, ends it."""
    from rich.live import Live
    from rich.text import Text

    from diff_transformer.cli import console
    from diff_transformer.report.live import watched
    from diff_transformer.report.terminal import picture

    watching, out = watched(runs), console.output()

    def drawn() -> Text:
        for run in watching:
            run.read()
        width, height = shutil.get_terminal_size()
        return picture(watching, width, height - 1, time.time())  # the last line is the prompt's

    if out.is_terminal and not once:
        try:
            with Live(console=out, screen=True, auto_refresh=False) as live:
                while not all(run.is_finished for run in watching):
                    began = time.perf_counter()
                    live.update(drawn(), refresh=True)
                    # A picture of very many lines takes seconds: nine tenths of a processor stay the training's.
                    time.sleep(max(interval, 9 * (time.perf_counter() - began)))
        except KeyboardInterrupt:  # the way out
            pass
    out.print(drawn(), soft_wrap=True)
