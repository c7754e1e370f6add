"""Holds parts of all commands: arguments, values of options, and output (results to stdout, all else to stderr)."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diff_transformer.shipped_models import LANGUAGE_MODEL

LARGEST_SEED = (1 << 63) - 1  # the largest seed that torch's generators take


def optional(help_text: str, default: str, *names: str, **settings: Any) -> Any:
    """Return an option that is None if it is left out; `default` describes the command's behaviour then."""
    return typer.Option(*names, help=help_text, show_default=default, **settings)


_CHECKPOINT: dict[str, Any] = {
    "metavar": "CHECKPOINT",
    "help": "The folder of a run, a folder with config.json and weights, or a model that comes with the package "
    "(`diff-transformer generate --list` names them).",
}
Checkpoint = Annotated[Path, typer.Argument(**_CHECKPOINT)]
TextCheckpoint = Annotated[
    Path | None, typer.Argument(**_CHECKPOINT, show_default=f"{LANGUAGE_MODEL}, which comes with the package")
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of weights, data and sampling.")]
Device = Annotated[str | None, optional("The device to run on.", "the GPU, if any")]


def refuse(subject: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that was given, since none of these goes with the `subject`."""
    for option, value in options.items():
        if value not in (None, []) and value is not False:
            raise ValueError(f"{option} does not go with {subject}.")


def refuse_existing(paths: Iterable[Path], subject: str, *, overwrite: bool) -> None:
    """Raise FileExistsError for the first path that exists, unless --overwrite was given; its folder must exist."""
    for path in paths:
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise FileNotFoundError(f"the folder of {str(path)!r} does not exist, or this user may not write to it")
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{str(path)!r} is there already; choose another --output, or replace the {subject} with --overwrite."
            )


def output() -> Console:
    """Return the console on stdout. Lines are not wrapped if stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_line(text: str) -> None:
    """Print a line to stdout as it is: nothing in it is markup, and a long line is not broken."""
    output().print(text, markup=False, soft_wrap=True)


def messages(*, quiet: bool = False) -> Console:
    """Return the console on stderr. A quiet one prints nothing, as on all ranks but rank 0."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def say(text: str) -> None:
    """Print a line to stderr as it is: nothing in it is markup, and a long line is not broken."""
    messages().print(text, markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers and datasets, imported already or when they are."""
    for library, variable in {"transformers": "HF_HUB", "datasets": "HF_DATASETS"}.items():
        os.environ.setdefault(f"{variable}_DISABLE_PROGRESS_BARS", "1")
        if (module := sys.modules.get(f"{library}.utils.logging")) is not None:
            module.disable_progress_bar()
