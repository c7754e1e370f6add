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

# Extra → the packages it brings: the name to import → the name to install.
EXTRAS = {
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    "explore": {"starlette": "starlette", "uvicorn": "uvicorn", "anywidget": "anywidget"},
    "serve": {"jinja2": "jinja2", "pydantic": "pydantic", "starlette": "starlette", "uvicorn": "uvicorn"},
}


class MissingExtraError(ModuleNotFoundError):
    """A module is missing that a command's own extra brings; another extra may bring it too."""

    def __init__(self, name: str, extra: str) -> None:
        super().__init__(name=name)
        self.extra = extra


def require_extra(extra: str) -> None:
    """Raise MissingExtraError if a module of an extra is missing, before torch is imported."""
    for name in EXTRAS[extra]:
        if find_spec(name) is None:
            raise MissingExtraError(name, extra)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Name the extra to install for a missing module; None if the module belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    for extra, brings in EXTRAS.items():
        if name in brings and extra == getattr(error, "extra", extra):
            return f'This command needs {brings[name]}, which is not installed: pip install ".[{extra}]" {CHECKOUT}'
    return None


# transformers imports torchao wherever it is installed, and torchao would begin every command with its warnings. Not in
# `main`: a worker process imports this package, as its parent's script does, and does not run it.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)


def main() -> None:
    """Run the command line `diff-transformer`; see :func:`run_program`."""
    run_program("diff_transformer.cli.app")


def run_program(module: str, *, lasts: bool = False) -> None:
    """Run the typer application `app` of a module on the arguments of this process.

    The exit code is 0, or 2 after an error (one line on stderr), or 128 and the number of the signal that ended it.

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
    sys.stdout = _lasting(sys.stdout, 1, tells_errors=not lasts)
    sys.stderr = _lasting(sys.stderr, 2, tells_errors=False)
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

    def __init__(self, number: int, *, tells_errors: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._tells_errors = tells_errors

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program has made the terminal non-blocking
                select.select([], [self], [])
        except OSError:
            if self._tells_errors:
                self._tells_errors = False
                raise
            return len(data)
        return written


def _lasting(stream: TextIO | None, number: int, *, tells_errors: bool) -> TextIO:
    """Make a standard stream of the system last (`_LastingFile`); leave any other, as a notebook's, alone.

    Generated text may hold any character; a terminal that cannot show one shows "?".
    """
    if stream is None:  # closed when the program began
        encoding, line_buffering, write_through = "utf-8", False, False
    elif not isinstance(stream, io.TextIOWrapper):
        return stream
    elif os.name != "posix" or not _is_at(stream, number):
        stream.reconfigure(errors="replace")
        return stream
    else:
        with suppress(OSError):
            stream.flush()
        encoding = stream.encoding
        line_buffering, write_through = stream.line_buffering, stream.write_through
    file = io.BufferedWriter(_LastingFile(number, tells_errors=tells_errors))
    return io.TextIOWrapper(
        file, encoding, errors="replace", line_buffering=line_buffering, write_through=write_through
    )


def _is_at(stream: TextIO, number: int) -> bool:
    with suppress(OSError):
        return stream.fileno() == number
    return False
