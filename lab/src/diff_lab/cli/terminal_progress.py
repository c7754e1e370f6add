"""Shows on stderr how far a command is: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)

from diff_transformer.cli.task_display import DESCRIPTION, LOG_SECONDS, SPEED_SECONDS, TaskDisplay


class TrainingProgress:
    """A `diff_lab.train.training_progress.Progress` that shows one bar for each run.

    Of several runs that go at the same time there are bars of those that go.
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

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """The bar has no room for it; the log of the run has it."""

    def tell(self, message: str) -> None:
        self._display.tell(self._prefix + message)

    def stop(self) -> None:
        self._prefix = ""  # later messages are not about this run
        self._display.stop()

    def run(self, name: str) -> "RunOfSeveral":
        return RunOfSeveral(self._bars, name)


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
            self._next_line = monotonic() + LOG_SECONDS
            self.tell(_line(task, step, self._remarks))

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


class BarsOfRuns:
    """A bar for each run that goes at the moment; in a log, lines."""

    def __init__(self, console: Console) -> None:
        self.is_log = not console.is_terminal
        self._console = console
        options: dict[str, Any] = {"get_time": monotonic, "speed_estimate_period": SPEED_SECONDS}
        self._bars = Progress(*run_columns(), console=console, disable=self.is_log, transient=True, **options)

    def add(self, name: str, total: int) -> Task:
        """The bar of a run that begins."""
        task = self._bars.add_task(name, total=total, remarks="")
        self._bars.start()
        return next(one for one in self._bars.tasks if one.id == task)

    def update(self, task: Task, step: int, remarks: str) -> None:
        self._bars.update(task.id, completed=step, remarks=remarks)

    def remove(self, task: Task) -> None:
        """A run has ended. Without any there is nothing to show."""
        self._bars.remove_task(task.id)
        if not self._bars.tasks:
            self._bars.stop()

    def tell(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)


def run_columns() -> tuple[ProgressColumn, ...]:
    """What a run's bar shows."""
    remarks = TextColumn("{task.fields[remarks]}", markup=False)
    return DESCRIPTION, BarColumn(), MofNCompleteColumn(), remarks, TimeRemainingColumn(elapsed_when_finished=True)


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
