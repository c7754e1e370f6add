"""Shows on stderr how far a task is: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from diff_transformer.convert.conversion import Progress as ConversionProgress

# Seconds between two lines of a log, so that a run shows every minute that it is alive.
LOG_SECONDS = 30
# A conversion writes so many lines to a log.
_CONVERSION_LINES = 10
# The time left follows from the speed in the last so many seconds; steps of large models take minutes each.
SPEED_SECONDS = 24 * 60 * 60

DESCRIPTION = TextColumn("{task.description}", markup=False)


class TaskDisplay:
    """One task at a time: a bar with the given columns in a terminal, lines in a log."""

    task: Task  # the one that was started last

    def __init__(self, console: Console, *columns: ProgressColumn, **options: Any) -> None:
        """`options` are those of `rich.progress.Progress`."""
        self.console = console
        options |= {"get_time": monotonic, "speed_estimate_period": SPEED_SECONDS}
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
            self._next_line = monotonic() + LOG_SECONDS
            self.tell(line())

    def tell(self, message: str) -> None:
        """Print a message, above the bar if there is one."""
        self.console.print(message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """End the task; nothing if there is none."""
        self._bar.stop()


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
