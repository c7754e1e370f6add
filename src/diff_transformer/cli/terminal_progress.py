"""Shows on stderr how far a command is: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
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
    Task,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from diff_transformer.convert.conversion import Progress as ConversionProgress

# Seconds between two lines of a log, so that a run shows every minute that it is alive.
_SECONDS = 30
# A conversion writes so many lines to a log.
_CONVERSION_LINES = 10
# The time left follows from the speed in the last so many seconds; steps of large models take minutes each.
_SPEED_SECONDS = 24 * 60 * 60

DESCRIPTION = TextColumn("{task.description}", markup=False)


class TaskDisplay:
    """One task at a time: a bar with the given columns in a terminal, lines in a log."""

    task: Task  # the one that was started last

    def __init__(self, console: Console, *columns: ProgressColumn, **options: Any) -> None:
        """`options` are those of `rich.progress.Progress`."""
        self.console = console
        options |= {"get_time": monotonic, "speed_estimate_period": _SPEED_SECONDS}
        self._new_bar = partial(Progress, *columns, console=console, disable=not console.is_terminal, **options)
        self._bar = self._new_bar()
        self._next_line = -math.inf

    def start(self, total: float | None = None, description: str = "", **fields: Any) -> None:
        """Begin a task; `fields` are what the columns show besides."""
        self._next_line = -math.inf
        self._bar = self._new_bar()
        self._bar.add_task(description, total=total, **fields)
        (self.task,) = self._bar.tasks
        self._bar.start()

    def show(self, line: Callable[[], str], *, is_due: bool | None = None, **fields: Any) -> None:
        """Move the bar, in which `fields` change as `rich.progress.Progress.update` takes them.

        In a log, print a line instead if it is due, by default if the last one is some time ago.
        """
        self._bar.update(self.task.id, **fields)
        if self._bar.disable and (monotonic() >= self._next_line if is_due is None else is_due):
            self._next_line = monotonic() + _SECONDS
            self.tell(line())

    def tell(self, message: str) -> None:
        """Print a message, above the bar if there is one."""
        self.console.print(message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """End the task; nothing if there is none."""
        self._bar.stop()


class TrainingProgress:
    """A `diff_transformer.train.training_progress.Progress` that shows one bar for each run."""

    def __init__(self, console: Console) -> None:
        remarks = TextColumn("{task.fields[remarks]}", markup=False)
        time_left = TimeRemainingColumn(elapsed_when_finished=True)
        self._display = TaskDisplay(console, DESCRIPTION, BarColumn(), MofNCompleteColumn(), remarks, time_left)
        self._prefix = ""  # of messages about the run

    def start(self, total: int, description: str) -> None:
        self._prefix = f"{description}: "
        self._display.start(total, description, remarks="")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        task, remarks = self._display.task, f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"

        def line() -> str:
            time_left = f", {timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
            return f"{self._prefix}step {step} of {task.total}, {remarks}{time_left}"

        self._display.show(line, is_due=step == task.total or None, completed=step, remarks=remarks)

    def tell(self, message: str) -> None:
        self._display.tell(self._prefix + message)

    def stop(self) -> None:
        self._prefix = ""  # later messages are not about this run
        self._display.stop()


@contextmanager
def tokenising_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows how many documents and tokens are tokenised, as the function that it gives is called, and at Ctrl-C."""
    display = TaskDisplay(console, SpinnerColumn(), DESCRIPTION, transient=True)

    counts = ""

    def tell(documents: int, tokens: int) -> None:
        nonlocal counts
        counts = f"{documents:,} documents, {tokens:,} tokens"
        display.show(lambda: f"tokenised: {counts}", description=counts)

    display.start(description="Looking for the text's tokens")
    try:
        yield tell
    except KeyboardInterrupt as interrupt:
        if not counts:
            raise
        raise KeyboardInterrupt(f"Interrupted after {counts}: the same command goes on from there.") from interrupt
    finally:
        display.stop()


@contextmanager
def conversion_progress(console: Console) -> Iterator["ConversionProgress"]:
    """Shows how many bytes of weights have been written, of how many, as the function that it gives is called."""
    display = TaskDisplay(console, BarColumn(), DownloadColumn(), TimeRemainingColumn(), transient=True)

    def tell(done: int, total: int) -> None:
        tenths = [size * _CONVERSION_LINES // max(1, total) for size in (display.task.completed, done)]
        display.show(lambda: f"{done:,} of {total:,} bytes", is_due=tenths[0] < tenths[1], completed=done, total=total)

    display.start()
    try:
        yield tell
    finally:
        display.stop()
