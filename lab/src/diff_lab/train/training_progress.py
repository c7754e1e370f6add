"""Shows how far a run is, and writes its metrics as lines of JSON and for TensorBoard."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from diff_transformer.storage.files import finite, parse_metrics_line

# Names that TensorBoard's curves have otherwise than the lines.
_TAGS = {"lambdas": "lambda"}
_SECONDS = 0.5  # between two changes of a line in a notebook
_STATUS = Path("/proc/self/status")  # Linux's own account of this process


class Progress(Protocol):
    """Shows how far a run is. Training itself prints nothing, and what a subclass leaves out shows nothing."""

    def start(self, total: int, description: str) -> None:
        """A run of `total` steps begins or resumes."""
        return

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` steps are done; `loss` is that of the last one."""
        return

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """What the evaluation after `step` steps has found, by the names that the log has."""
        return

    def tell(self, message: str) -> None:
        """A message about the run: what it uses, which steps it skips."""
        return

    def stop(self) -> None:
        """The run is over, whichever way it ended."""
        return

    def run(self, name: str) -> "Progress":
        """What shows one of several runs, called `name`, which may go at the same time; unless told otherwise, this."""
        return self


class Silent(Progress):
    """A progress that shows nothing."""


class InNotebook(Progress):
    """Shows below the cell of a notebook how far a run is: its messages, and one line that changes."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display  # IPython's
        self._line: Any = None
        self._description, self._total, self._next = "", 0, -math.inf

    def start(self, total: int, description: str) -> None:
        self._description, self._total = description, total

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        if step < self._total and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS
        text = f"step {step} of {self._total}, loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        self._line = self._show(text, self._line)

    def tell(self, message: str) -> None:
        self._show(message)

    def _show(self, text: str, line: Any = None) -> Any:
        """Show a new line, or change one that was shown. Returns it."""
        data = {"text/plain": f"{self._description}: {text}"}
        if line is None:
            return self._display(data, raw=True, display_id=True)
        line.update(data, raw=True)
        return line


def default_progress() -> Progress:
    """What shows a run where nobody has said: lines below the cell in a notebook, elsewhere nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return InNotebook(sys.modules["IPython.display"].display) if hasattr(shell, "kernel") else Silent()


class Metrics:
    """Writes the metrics of a run into a file, as lines of JSON, and into the folder of TensorBoard.

    Those of steps after `step`, the last one that is done, are removed first. A context manager, which closes both.
    Where several processes train one model, only the first makes one: the others do not even load TensorBoard.
    """

    def __init__(self, lines: Path, tensorboard: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to load

        if lines.exists():
            os.truncate(lines, _bytes_to_keep(lines, step))
        self._lines, self._tensorboard = lines, tensorboard
        self._file = lines.open("ab", buffering=0)  # a full disk would refuse what was buffered a second time
        self._board = SummaryWriter(str(tensorboard), purge_step=step + 1)
        # An error of TensorBoard's thread is raised again by the next call that writes, so it need not be printed.
        self._thread_errors, threading.excepthook = threading.excepthook, self._print_thread_error

    def log(self, line: dict[str, Any]) -> None:
        """Write numbers and remarks by name, with the step under "step". Raises OSError, as where the disk is full.

        A list holds a number for each layer, and TensorBoard draws a curve of each. None means that there is no such
        number, and TensorBoard gets none. A number that is not finite is null in the lines, as JSON has no other way.
        """
        text = json.dumps(finite(line), allow_nan=False) + "\n"
        unwritten = text.encode()
        with self._plain_errors(self._lines):
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        with self._plain_errors(self._tensorboard):
            for name, value in line.items():
                tag = _TAGS.get(name, name)
                if isinstance(value, list):
                    for layer, number in enumerate(value, start=1):
                        self._board.add_scalar(f"{tag}/layer_{layer:02d}", number, line["step"])
                elif isinstance(value, str):
                    self._board.add_text(tag, value, line["step"])
                elif name != "step" and value is not None:
                    self._board.add_scalar(tag, value, line["step"])

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        try:
            # The error that ended the run is reported, not one that follows from it.
            with suppress(OSError) if error is not None else self._plain_errors(self._tensorboard):
                self._board.close()
        finally:
            threading.excepthook = self._thread_errors

    @contextmanager
    def _plain_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{str(path)!r} cannot be written ({error.strerror}); the run goes on from its newest checkpoint, with "
                "--resume."
            ) from error

    def _print_thread_error(self, error: threading.ExceptHookArgs) -> None:
        if not (type(error.thread).__module__.startswith("tensorboard.") and isinstance(error.exc_value, OSError)):
            self._thread_errors(error)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that were in use at a time: by tensors on a CUDA device, elsewhere by this process.

    None where the system keeps no record of it, as only Linux does.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.is_file():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


def _bytes_to_keep(lines: Path, step: int) -> int:
    """Where the complete lines about steps up to `step` end."""
    end = 0
    with lines.open("rb") as file, suppress(ValueError):  # a power cut may leave anything in the file's place
        for line in file:
            if not line.endswith(b"\n") or parse_metrics_line(line, str(lines))["step"] > step:
                break
            end += len(line)
    return end
