"""Makes the typer application from the table of commands, and handles the errors of all commands alike."""

import functools
import importlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diff_transformer._version import __version__
from diff_transformer.cli.console import quiet_libraries
from diff_transformer.cli.extras import TRAINING, missing_extra, require_extra
from diff_transformer.cli.start_page import start_page
from diff_transformer.processors import is_first_process
from diff_transformer.storage.files import is_full_disk

# Command → "module:function".
COMMANDS = {
    "demo": "experiment_commands:demo",
    "tokenizer": "train_commands:tokenizer",
    "prepare": "train_commands:prepare",
    "train": "train_commands:command",
    "watch": "train_commands:watch",
    "plan": "plan_command:plan",
    "generate": "generate_command:generate",
    "explore": "explore_command:explore",
    "serve": "serve_command:serve",
    "eval": "eval_command:evaluate",
    "reproduce": "experiment_commands:reproduce",
    "compare": "compare_command:compare",
    "convert": "convert_command:convert",
    "export": "export_command:export",
    "report": "experiment_commands:report",
    "bench": "bench_command:bench",
    "build": "setup_commands:build",
    "info": "setup_commands:info",
}
# Commands that run without the extra [train], so that a user can find out what is missing.
WITHOUT_EXTRA = ("build", "info")
# Commands that have an extra of their own instead of [train].
OWN_EXTRA = {"serve": "serve"}
# Packages of the extra [train] that only these commands need.
NEEDED_BY = {"datasets": (*TRAINING, "tokenizer", "prepare"), "tensorboard": TRAINING}
# The base of what typer raises for a wrong command line, which it has under no name of its own.
CommandLineError: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """Commands, each of which is imported when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Only the names: typer lists them, and suggests one of them for a mistyped command.
        self.commands: Any = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        loaded = getattr(importlib.import_module(f"diff_transformer.cli.{module}"), function)
        if isinstance(loaded, typer.Typer):  # made by its module
            commands = loaded
        else:
            commands = typer.Typer(add_completion=False)
            commands.command(cmd_name)(with_plain_errors(loaded, cmd_name))
        command: Any = typer.main.get_command(commands)
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = joined_paragraphs(each.help or "")
        return command

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """Run a command as typer does, but answer a wrong command line with one line, like every other error."""
        settings["standalone_mode"] = False  # so that errors and exit codes are returned here
        try:
            code = super().main(*arguments, **settings)
        except CommandLineError as error:
            message = " ".join(error.format_message().split())
            if message:  # there is none where a group was given no command and its help has been shown
                end = "" if message.endswith((".", "?")) else "."
                context = getattr(error, "ctx", None)
                command = context.command_path if context else "diff-transformer"
                typer.echo(f"error: {message}{end} See {command} --help.", err=True)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        except OSError as error:  # of what is printed before any command begins, as by --list
            typer.echo(f"error: {error}", err=True)
            sys.exit(2)
        sys.exit(code or 0)


def joined_paragraphs(text: str) -> str:
    """A text with one line for each paragraph, which a terminal of any width can wrap."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def with_plain_errors(command: Callable[..., None], name: str) -> Callable[..., None]:
    """Wrap a command so that expected errors and interruptions end it without a traceback.

    An expected error is one line on stderr with exit code 2; Ctrl-C exits with 130 and SIGTERM with 143. Where the
    command's packages are not installed, it does not start.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            if name not in WITHOUT_EXTRA:
                extra = OWN_EXTRA.get(name, "train")
                require_extra(extra, [module for module, commands in NEEDED_BY.items() if name not in commands])
            quiet_libraries()
            command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            if is_first_process():
                typer.echo(str(interrupt) or "Interrupted.", err=True)
            # Shells use 128 plus the number of the signal.
            raise typer.Exit(128 + (getattr(interrupt, "signal", None) or signal.SIGINT)) from None
        except Exception as error:
            message = user_message(error)
            if message is None:
                raise
            typer.echo(f"error: {' '.join(message.splitlines())}", err=True)
            raise typer.Exit(2) from None

    return run


def user_message(error: Exception) -> str | None:
    """The message for the user; None where the error is a bug and not an answer to bad input."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if isinstance(error, BrokenPipeError):  # `… | head`: typer ends quietly
        return None
    if isinstance(error, OSError):
        return str(error)
    if is_full_disk(error):  # of a library that has classes of its own
        return f"There is no room on the disk: {error}"
    if not isinstance(error, ValueError):
        return None
    # A ValueError that this package raises is a sentence for users; any other is a bug.
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(error) if frame.f_globals["__name__"].startswith("diff_transformer.") else None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"diff-transformer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, run and measure Differential Transformers beside Transformers of the same size."""
    if context.invoked_subcommand is None:
        typer.echo(start_page())
