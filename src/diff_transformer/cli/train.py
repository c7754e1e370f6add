"""`diff-transformer train`"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from diff_transformer.cli.app import with_plain_errors

command = typer.Typer(add_completion=False)


class ResumableCommand(TyperCommand):
    """A command whose `--resume` has the value "auto" or none, where an option of typer's has one always or never.

    `--resume` alone is handed on as an empty value.
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
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe such as tiny.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's: train.steps=100"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto]", help="Go on from the newest checkpoint; with 'auto', begin a run if there is none."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
) -> None:
    """Train the model of a recipe; look on with TensorBoard or `diff-transformer report`."""
    from diff_transformer.cli import console, refuse_repeated
    from diff_transformer.cli.progress import Bars, preparing
    from diff_transformer.eval import validation_callback
    from diff_transformer.train import build_data, load_recipe
    from diff_transformer.train import train as train_recipe
    from diff_transformer.train.distributed import Processes, is_first_process
    from diff_transformer.train.run_folder import check_run_folder

    refuse_repeated(settings or ())
    console.quiet_libraries()
    wish = _resume_of(resume)
    resolved = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / resolved.name
    # What cannot be is refused before text is read and a tokenizer trained.
    check_run_folder(folder, resolved, resume=wish, overwrite=overwrite)
    Processes.of(resolved.train).check(resolved)
    messages = console.messages(quiet=not is_first_process())
    with preparing(messages) as tell:
        data = build_data(resolved, tell=tell)
    run = train_recipe(
        resolved,
        folder,
        resume=wish,
        overwrite=overwrite,
        progress=Bars(messages),
        on_evaluate=validation_callback(data.batches),
        data=data,
    )
    if not is_first_process():
        return
    measured = ", ".join(
        f"{name} {value:.4g}" for name, value in run.last.items() if name == "loss" or name.startswith("validation/")
    )
    out = console.output()
    out.print(
        f"{run.parameters:,} parameters, {run.seconds:.1f} s, last step: {measured}", markup=False, soft_wrap=True
    )
    out.print(f"model: {run.model_folder}", markup=False, soft_wrap=True)


def _resume_of(value: str | None) -> bool | Literal["auto"]:
    if value == "auto":
        return "auto"
    if value:
        raise ValueError(f"--resume takes no value or 'auto', got {value!r}.")
    return value is not None
