"""Writes the metrics of a run as lines of JSON and for TensorBoard."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from diff_transformer.utils.files import finite, parse_metrics_line

# Names that TensorBoard's curves have otherwise than the lines.
_TAGS = {"lambdas": "lambda"}
_STATUS = Path("/proc/self/status")  # Linux's own account of this process


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
                f"{str(path)!r} cannot be written ({error.strerror}); the run resumes from its newest checkpoint, with "
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
