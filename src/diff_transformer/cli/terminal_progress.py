"""Shows on stderr how far a command is: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from diff_transformer.cli.console import messages

if TYPE_CHECKING:
    from diff_transformer.convert.conversion import Progress as ConversionProgress

# Seconds between two lines of a log, so that a run shows every minute that it is alive.
_SECONDS = 30
# A conversion writes so many lines to a log.
_CONVERSION_LINES = 10

DESCRIPTION = TextColumn("{task.description}", markup=False)


class TaskDisplay:
    """One task at a time: a bar with the given columns in a terminal, lines in a log."""

    def __init__(self, console: Console, *columns: ProgressColumn, **options: Any) -> None:
        """`options` are those of `rich.progress.Progress`."""
        self.console = console
        self._columns, self._options = columns, options
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._next_line = -math.inf

    def start(self, total: float | None = None, description: str = "", **fields: Any) -> None:
        """Begin a task; `fields` are what the columns show besides."""
        self._next_line = -math.inf
        if self.console.is_terminal:
            self._bar = Progress(*self._columns, console=self.console, **self._options)
            self._task = self._bar.add_task(description, total=total, **fields)
            self._bar.start()

    def show(self, line: Callable[[], str], *, is_due: bool | None = None, **fields: Any) -> None:
        """Move the bar, in which `fields` change as `rich.progress.Progress.update` takes them.

        In a log, print a line instead if it is due, by default if the last one is some time ago.
        """
        if self._bar is not None:
            self._bar.update(self._task, **fields)
        elif monotonic() >= self._next_line if is_due is None else is_due:
            self._next_line = monotonic() + _SECONDS
            self.tell(line())

    def tell(self, message: str) -> None:
        """Print a message, above the bar if there is one."""
        self.console.print(message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """End the task; nothing if there is none."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class TrainingProgress:
    """A `diff_transformer.train.training_progress.Progress` that shows one bar for each run."""

    def __init__(self, console: Console | None = None) -> None:
        remarks = TextColumn("{task.fields[remarks]}", markup=False)
        time_left = TimeRemainingColumn(elapsed_when_finished=True)
        self._display = TaskDisplay(
            console or messages(), DESCRIPTION, BarColumn(), MofNCompleteColumn(), remarks, time_left
        )
        self._total, self._description = 0, ""
        self._first: tuple[int, float] | None = None  # the first step that was done in this run, and when

    def start(self, total: int, description: str) -> None:
        self._total, self._description, self._first = total, description, None
        self._display.start(total, description, remarks="")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        remarks = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        first, since = self._first = self._first or (step, monotonic())

        def line() -> str:
            left = ""
            if first < step < self._total:
                seconds = (monotonic() - since) / (step - first) * (self._total - step)
                left = f", {timedelta(seconds=round(seconds))} left"
            return f"{self._description}: step {step} of {self._total}, {remarks}{left}"

        self._display.show(line, is_due=True if step == self._total else None, completed=step, remarks=remarks)

    def tell(self, message: str) -> None:
        self._display.tell(f"{self._description}: {message}" if self._description else message)

    def stop(self) -> None:
        self._description = ""  # later messages are not about this run
        self._display.stop()


@contextmanager
def tokenising_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows how many documents and tokens of a text have been tokenised, as the function that it gives is called."""
    display = TaskDisplay(console, SpinnerColumn(), DESCRIPTION, transient=True)

    def tell(documents: int, tokens: int) -> None:
        counts = f"{documents:,} documents, {tokens:,} tokens"
        display.show(lambda: f"tokenised: {counts}", description=counts)

    display.start(description="Looking for the text's tokens")
    try:
        yield tell
    finally:
        display.stop()


@contextmanager
def conversion_progress(console: Console) -> Iterator["ConversionProgress"]:
    """Shows how many bytes of weights have been written, of how many, as the function that it gives is called."""
    display = TaskDisplay(console, BarColumn(), DownloadColumn(), TimeRemainingColumn(), transient=True)
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        tenths = done * _CONVERSION_LINES // max(1, total)
        display.show(lambda: f"{done:,} of {total:,} bytes", is_due=tenths > shown, completed=done, total=total)
        shown = tenths

    display.start()
    try:
        yield tell
    finally:
        display.stop()
