"""Shows on stderr how far a command is: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator, Mapping
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
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

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
    """A `diff_transformer.train.training_progress.Progress` that shows one bar for each run.

    Of several runs that go at the same time there are bars of those that go, and one that says how many are done.
    """

    def __init__(self, console: Console) -> None:
        self._display = TaskDisplay(console, *run_columns())
        self._bars = BarsOfRuns(console)
        self._prefix = ""  # of messages about the run

    def start(self, total: int, description: str) -> None:
        self._prefix = f"{description}: "
        self._display.start(total, description, remarks="")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        task, remarks = self._display.task, _remarks(loss, tokens_per_second)
        is_due = step == task.total or None
        self._display.show(
            lambda: self._prefix + _line(task, step, remarks), is_due=is_due, completed=step, remarks=remarks
        )

    def evaluating(self) -> None:
        """Nothing is to be drawn of it."""

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """The bar has no room for it; the log of the run has it."""

    def tell(self, message: str) -> None:
        self._display.tell(self._prefix + message)

    def stop(self) -> None:
        self._prefix = ""  # later messages are not about this run
        self._display.stop()

    def run(self, name: str) -> "RunOfSeveral":
        return RunOfSeveral(self._bars, name)

    def update_all(self, done: int, total: int, time_left: str) -> None:
        self._bars.update_all(done, total, time_left)


class RunOfSeveral:
    """A `Progress` that shows one of several runs, which may go at the same time."""

    def __init__(self, bars: "BarsOfRuns", name: str) -> None:
        self._bars, self._name = bars, name
        self._task: Task | None = None
        self._next_line = -math.inf
        self._remarks = self._validation = ""

    def start(self, total: int, description: str) -> None:
        """The name says more than the recipe's `description`."""
        self._task = self._bars.add(self._name, total)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        task = self._task
        if task is None:
            return
        self._remarks = _remarks(loss, tokens_per_second) + self._validation
        self._bars.update(task, step, f"loss {loss:.3f}")  # a name and steps leave no room for more
        if self._bars.is_log and (monotonic() >= self._next_line or step == task.total):
            self._next_line = monotonic() + _SECONDS
            self.tell(_line(task, step, self._remarks))

    def evaluating(self) -> None:
        """Nothing is to be drawn of it."""

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        name, value = next(iter(results.items()), ("", 0.0))
        self._validation = f", {name.replace('/', ' ')} {value:.3f}" if name else ""

    def tell(self, message: str) -> None:
        self._bars.tell(f"{self._name}: {message}")

    def stop(self) -> None:
        """Leaves a line where its bar was, as that of the next run takes its place."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._bars.remove(task)
        if not self._bars.is_log and task.completed:
            self.tell(_line(task, int(task.completed), self._remarks))

    def run(self, name: str) -> "RunOfSeveral":
        return RunOfSeveral(self._bars, name)

    def update_all(self, done: int, total: int, time_left: str) -> None:
        self._bars.update_all(done, total, time_left)


class BarsOfRuns:
    """One bar for all runs, and below it one for each that goes at the moment; in a log, lines."""

    def __init__(self, console: Console) -> None:
        self.is_log = not console.is_terminal
        self._console = console
        options: dict[str, Any] = {"get_time": monotonic, "speed_estimate_period": _SPEED_SECONDS}
        self._bars = Progress(*run_columns(), console=console, disable=self.is_log, transient=True, **options)
        self._all: TaskID | None = None
        self._next_line = monotonic() + _SECONDS

    def add(self, name: str, total: int) -> Task:
        """The bar of a run that begins."""
        task = self._bars.add_task(name, total=total, remarks="")
        self._bars.start()
        return next(one for one in self._bars.tasks if one.id == task)

    def update(self, task: Task, step: int, remarks: str) -> None:
        self._bars.update(task.id, completed=step, remarks=remarks)

    def update_all(self, done: int, total: int, time_left: str) -> None:
        if self._all is None:
            self._all = self._bars.add_task("all trainings", total=total, remarks="", of_all=True)
        self._bars.update(self._all, completed=done, total=total, remarks=time_left)
        if self.is_log and monotonic() >= self._next_line:
            self._next_line = monotonic() + _SECONDS
            self.tell(f"{done} of {total} trainings are done" + (f", {time_left}" if time_left else ""))

    def remove(self, task: Task) -> None:
        """A run has ended. Without any there is nothing to show."""
        self._bars.remove_task(task.id)
        if all(one.id == self._all for one in self._bars.tasks):
            self._bars.stop()

    def tell(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)


class TimeLeftOfRun(TimeRemainingColumn):
    """The time left of a run. That of all runs is among the bar's remarks."""

    def render(self, task: Task) -> Text:
        return Text() if "of_all" in task.fields else super().render(task)


def run_columns() -> tuple[ProgressColumn, ...]:
    """What a run's bar shows."""
    remarks = TextColumn("{task.fields[remarks]}", markup=False)
    return DESCRIPTION, BarColumn(), MofNCompleteColumn(), remarks, TimeLeftOfRun(elapsed_when_finished=True)


def _remarks(loss: float, tokens_per_second: float) -> str:
    return f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"


def _line(task: Task, step: int, remarks: str) -> str:
    """What a log says of a run."""
    time_left = f", {timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
    return f"step {step} of {task.total}, {remarks}{time_left}"


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
