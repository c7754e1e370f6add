"""Makes typer applications from tables of commands, and handles the errors of all commands alike."""

import functools
import signal
import sys
import traceback
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diff_transformer._version import INSTALL_LAB, __version__
from diff_transformer.cli import missing_extra
from diff_transformer.cli.console import quiet_libraries
from diff_transformer.utils.cpu_count import is_rank0
from diff_transformer.utils.files import is_full_disk

# Command → "module:function".
COMMANDS = {
    "generate": "generate_command:generate",
    "explore": "explore_command:explore",
    "maps": "explore_command:maps",
    "serve": "serve_command:serve",
    "convert": "convert_command:convert",
    "export": "convert_command:export",
    "info": "info_command:info",
}
# Commands that were here until version 0.2.0 and are those of `diff-lab`.
MOVED = ("bench", "compare", "demo", "eval", "plan", "prepare", "report", "reproduce", "tokenizer", "train")
# What typer raises for a wrong command line, and the base of it, which it has under no names of its own.
UsageError: Any = typer.BadParameter.__mro__[1]
CommandLineError: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """Commands of a table, each of which is imported when it is called."""

    program = "diff-transformer"
    table = COMMANDS
    package = "diff_transformer.cli"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Only the names: typer lists them, and suggests one of them for a mistyped command.
        self.commands: Any = dict.fromkeys(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.table:
            if cmd_name in MOVED:
                raise UsageError(f"`{cmd_name}` is `diff-lab {cmd_name}` now, which {INSTALL_LAB} installs.")
            return None
        loaded = resolve_name(f"{self.package}.{self.table[cmd_name]}")
        commands = loaded if isinstance(loaded, typer.Typer) else typer.Typer(add_completion=False)
        if commands is not loaded:  # it is a function, and not made by its module
            commands.command(cmd_name)(with_plain_errors(loaded))
        command: Any = typer.main.get_command(commands)
        for each in (command, *getattr(command, "commands", {}).values()):
            # A line for each paragraph, which a terminal of any width can wrap.
            each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (each.help or "").split("\n\n"))
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
                command = context.command_path if context else self.program
                typer.echo(f"error: {message}{end} See {command} --help.", err=True)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        except OSError as error:  # of what is printed before any command begins, as by --list
            typer.echo(f"error: {error}", err=True)
            sys.exit(2)
        sys.exit(code or 0)


def with_plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that expected errors and interruptions end it without a traceback.

    An expected error is one line on stderr with exit code 2; Ctrl-C exits with 130 and SIGTERM with 143.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            quiet_libraries()
            command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            if is_rank0():
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
    """Return the message for the user; None if the error is a bug and not an answer to bad input."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    if isinstance(error, OSError):  # of a broken pipe, as by `… | head`, typer ends quietly
        return None if isinstance(error, BrokenPipeError) else str(error)
    if is_full_disk(error):  # of a library that has classes of its own
        return f"There is no room on the disk: {error}"
    if not isinstance(error, ValueError):
        return None
    # A ValueError that this package or the laboratory raises is a sentence for users; any other is a bug.
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(error) if frame.f_globals["__name__"].startswith(("diff_transformer.", "diff_lab.")) else None


def make_app(commands: type[Commands], introduction: str) -> typer.Typer:
    """Make the application of a program, which alone shows its help."""
    app = typer.Typer(
        cls=commands,
        add_completion=False,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(is_requested: bool) -> None:
        if is_requested:
            typer.echo(f"{commands.program} {__version__}")
            raise typer.Exit

    @app.callback(help=introduction)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


app = make_app(Commands, "Run, explore, convert, share and serve Differential Transformers.")
