"""The typer application: a table of commands, and what every command does with errors."""

import functools
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diff_transformer import __version__
from diff_transformer.cli import missing_extra, require_extra

# Command → "module:function".
COMMANDS = {
    "demo": "demo:demo",
    "tokenizer": "tokenizer:tokenizer",
    "prepare": "prepare:prepare",
    "train": "train:command",
    "watch": "watch:watch",
    "plan": "plan:plan",
    "generate": "generate:generate",
    "eval": "evaluate:evaluate",
    "reproduce": "reproduce:reproduce",
    "convert": "convert:convert",
    "export": "export:export",
    "report": "report:report",
    "bench": "bench:bench",
    "build": "build:build",
    "info": "info:info",
}
# These run without the extra [train]: they are for finding out what is wrong.
WITHOUT_EXTRA = ("build", "info")
# What the extra [train] brings for few commands; the others do without.
NEEDED_BY = {
    "datasets": ("demo", "tokenizer", "prepare", "train", "reproduce"),
    "tensorboard": ("demo", "train", "reproduce"),
}
# The base of what typer raises for a wrong command line, which it has under no name of its own.
CommandLineError: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """Commands that are imported when they are asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # The names alone: typer looks here for what a mistyped command may have meant.
        self.commands: Any = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        loaded = getattr(importlib.import_module(f"diff_transformer.cli.{module}"), function)
        if isinstance(loaded, typer.Typer):  # with commands of its own
            return typer.main.get_command(loaded)
        alone = typer.Typer(add_completion=False)
        extra = None if cmd_name in WITHOUT_EXTRA else "train"
        alone.command(cmd_name)(with_plain_errors(loaded, extra=extra, without=not_needed_by(cmd_name)))
        return typer.main.get_command(alone)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """As typer's, but a wrong command line is answered in one line, like every other error."""
        settings["standalone_mode"] = False  # errors and exit codes come back here
        try:
            code = super().main(*arguments, **settings)
        except CommandLineError as error:
            message = " ".join(error.format_message().split())
            if message:  # else it was no command at all, and the help has been shown
                end = "" if message.endswith((".", "?")) else "."
                context = getattr(error, "ctx", None)
                command = context.command_path if context else "diff-transformer"
                typer.echo(f"error: {message}{end} See {command} --help.", err=True)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code or 0)


def not_needed_by(command: str) -> list[str]:
    """Modules of the extra [train] that a command does without."""
    return [module for module, commands in NEEDED_BY.items() if command not in commands]


def with_plain_errors(
    command: Callable[..., None], *, extra: str | None = "train", without: Collection[str] = ()
) -> Callable[..., None]:
    """The command, with expected errors as one line on stderr (exit code 2), and stopped without a traceback (Ctrl-C
    130, SIGTERM 143). Where `extra`, which it needs but for the modules `without`, is not installed, it does not begin.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            if extra is not None:
                require_extra(extra, without)
            command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            if os.environ.get("RANK", "0") == "0":  # of processes that stop together one speaks
                typer.echo(str(interrupt) or "Interrupted.", err=True)
            # As a shell counts: 128 and the number of the signal.
            raise typer.Exit(128 + (getattr(interrupt, "signal", None) or signal.SIGINT)) from None
        except (ValueError, OSError, ModuleNotFoundError) as error:
            message = expected(error)
            if message is None:
                raise
            typer.echo(f"error: {' '.join(message.splitlines())}", err=True)
            raise typer.Exit(2) from None

    return run


def expected(error: Exception) -> str | None:
    """What to tell the user; None where the error is a bug and not an answer to bad input."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if isinstance(error, BrokenPipeError):  # `… | head`: typer ends quietly
        return None
    if isinstance(error, OSError):
        return str(error)
    # A ValueError is a sentence for users if this package raised it; any other is a bug, here or elsewhere.
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(error) if frame.f_globals["__name__"].startswith("diff_transformer.") else None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diff-transformer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, try and measure Differential Transformers beside their twins."""
