"""The commands `train` and `watch` train a recipe and draw the curves of runs in the terminal."""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from diff_transformer.cli.app import with_plain_errors
from diff_transformer.cli.arguments import RecipeName, RecipeSettings


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs, drawn in the same axes, or the folder of a demo."),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Draw one picture and exit, as the command always does without a terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two pictures.")] = 2.0,
) -> None:
    """Draw the curves of runs in the terminal while they train, until all runs have ended or Ctrl-C is pressed."""
    from rich.live import Live
    from rich.text import Text

    from diff_transformer.cli import console
    from diff_transformer.lab.report.terminal_curves import picture
    from diff_transformer.lab.report.watched_run import watched

    watching, out = watched(runs), console.output()

    def draw() -> Text:
        for run in watching:
            run.read()
        width, height = shutil.get_terminal_size()
        return picture(watching, width, height - 1, time.time())  # the last line is the prompt's

    if out.is_terminal and not once:
        try:
            with Live(console=out, screen=True, auto_refresh=False) as live:
                while not all(run.is_finished for run in watching):
                    began = time.perf_counter()
                    live.update(draw(), refresh=True)
                    # Drawing many lines takes seconds; nine tenths of a processor are left to the training.
                    time.sleep(max(interval, 9 * (time.perf_counter() - began)))
        except KeyboardInterrupt:  # the way out
            pass
    out.print(draw(), soft_wrap=True)


command = typer.Typer(add_completion=False)


class ResumableCommand(TyperCommand):
    """A command whose option `--resume` may stand alone or have the value "auto", which typer's options cannot.

    `--resume` alone is passed on as an empty value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            if word == "auto" and words[-1:] == ["--resume="]:
                words[-1] += word
            else:
                words.append("--resume=" if word == "--resume" else word)
        return super().parse_args(ctx, words)


@command.command("train", cls=ResumableCommand)
@with_plain_errors
def train(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto]",
            help="Continue from the newest checkpoint; with 'auto', start a new run where there is none.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
) -> None:
    """Train the model of a recipe. Follow the run with `diff-transformer watch` or TensorBoard."""
    from diff_transformer.cli import console
    from diff_transformer.cli.console import refuse_repeated
    from diff_transformer.cli.terminal_progress import TrainingProgress, tokenising_progress
    from diff_transformer.lab.measure.standard import validation_callback
    from diff_transformer.train import build_data, load_recipe, open_run
    from diff_transformer.train.distributed import is_first_process

    refuse_repeated(settings or ())
    console.quiet_libraries()
    resolved = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / resolved.name
    messages = console.messages(quiet=not is_first_process())
    # A run that cannot begin is refused here, before any text is read or a tokenizer is trained.
    with open_run(resolved, folder, resume=_resume_mode(resume), overwrite=overwrite) as opened:
        with tokenising_progress(messages) as tell:
            data = build_data(resolved, tell=tell)
        run = opened.train(data, TrainingProgress(messages), validation_callback(data.batches))
    if not is_first_process():
        return
    measured = ", ".join(
        f"{name} {value:.4g}" for name, value in run.last.items() if name == "loss" or name.startswith("validation/")
    )
    console.print_line(f"{run.parameters:,} parameters, {run.seconds:.1f} s, last step: {measured}")
    console.print_line(f"model: {run.model_folder}")


def _resume_mode(value: str | None) -> bool | Literal["auto"]:
    if value == "auto":
        return "auto"
    if value:
        raise ValueError(f"--resume takes no value or 'auto', got {value!r}.")
    return value is not None
