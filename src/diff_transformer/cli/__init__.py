"""The command line `diff-transformer`: modules of commands, each imported when one of its commands is called."""

import importlib
import io
import logging
import os
import select
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TextIO

from diff_transformer._version import CHECKOUT
from diff_transformer.utils.cpu_count import limit_threads

# Extra → the packages it brings, each imported by the name under which it is installed.
EXTRAS = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "explore": ("starlette", "uvicorn", "anywidget"),
    "serve": ("jinja2", "pydantic", "starlette", "uvicorn"),
}


def require_extra(extra: str) -> None:
    """Raise ValueError if a module of an extra is missing, before torch is imported."""
    for name in EXTRAS[extra]:
        if find_spec(name) is None:
            raise ValueError(_advice(name, extra))


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Name the extra to install for a missing module; None if the module belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    return next((_advice(name, extra) for extra, brings in EXTRAS.items() if name in brings), None)


def _advice(name: str, extra: str) -> str:
    return f'This command needs {name}, which is not installed: pip install ".[{extra}]" {CHECKOUT}'


# transformers imports torchao wherever it is installed, and torchao would begin every command with its warnings. Not in
# `main`: a worker process imports this package, as its parent's script does, and does not run it.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)


def main() -> None:
    """Run the command line `diff-transformer`; see :func:`run_program`."""
    run_program("diff_transformer.cli.app")


def run_program(module: str, *, lasts: bool = False) -> None:
    """Run the typer application `app` of a module on the arguments of this process.

    Args:
        module: its name; it is imported when the standard streams are ready.
        lasts: whether the program goes on when the reader of its stdout has ended, because its result is files.
    """
    for number in range(3):
        # The next file that is opened would take the number of a closed stream, and what is printed.
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdout = _lasting(1, sys.stdout, tells_errors=not lasts)
    sys.stderr = _lasting(2, sys.stderr, tells_errors=False)
    limit_threads()
    try:
        importlib.import_module(module).app()
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        sys.stderr.write(f"error: {advice}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


class _LastingFile(io.FileIO):
    """Writer to stdout or stderr, and to nowhere once that fails, as in a terminal or a pipe that was closed.

    With ``tells_errors`` the first failure is raised, so that a command which only prints can end.
    """

    tells_errors = False

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program has made the terminal non-blocking
                select.select([], [self], [])
        except OSError:
            if self.tells_errors:
                self.tells_errors = False
                raise
            return len(data)
        return written


def _lasting(number: int, stream: TextIO | None, *, tells_errors: bool) -> TextIO:
    """Open a standard stream that lasts, and shows "?" for a character of generated text that it cannot show."""
    file = _LastingFile(number, "w", closefd=False)
    file.tells_errors = tells_errors
    encoding = stream.encoding if stream else None
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, errors="replace", line_buffering=True)
