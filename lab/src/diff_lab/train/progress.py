"""Shows how far training runs are: in a terminal a bar each, in a log or a notebook a line now and then."""

import copy
import math
import sys
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic

from rich import progress as bars
from rich.console import Console

LOG_SECONDS = 30  # between two lines of a log, so that a run shows every minute that it is alive
_NOTEBOOK_SECONDS = 5
# The time left follows from the speed in the last so many seconds; steps of large models take minutes each.
_SPEED_SECONDS = 24 * 60 * 60


class Progress:
    """Shows how far a run is: this one nothing, and a subclass what it overrides. Training itself prints nothing."""

    def start(self, total: int, description: str) -> None:
        """A run of `total` steps begins or resumes."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` steps are done; `loss` is that of the last one."""

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """The evaluation after `step` steps has these results, by the names that the log has."""

    def tell(self, message: str) -> None:
        """A message about the run: what it uses, which steps it skips."""

    def stop(self) -> None:
        """The run is over, whichever way it ended."""

    def run(self, name: str) -> "Progress":
        """Make what shows one of several runs, called `name`, which may go at the same time; by default this."""
        return self


class RunProgress(Progress):
    """Shows runs on a console. A run that has ended leaves a line.

    Args:
        console: where to; a bar is drawn if it is a terminal.
        seconds: between two lines of a run where there is no bar.
    """

    def __init__(self, console: Console, seconds: float = LOG_SECONDS) -> None:
        self._console, self._seconds = console, seconds
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[remarks]}", markup=False),
            bars.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            get_time=monotonic,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._name = ""  # of one of several runs
        self._told: set[str] = set()  # the messages of several runs: what all of them use is told once
        self._task: bars.Task | None = None

    def run(self, name: str) -> "RunProgress":
        one = copy.copy(self)  # with the same bars and messages
        one._name = name
        return one

    def start(self, total: int, description: str) -> None:
        number = self._bars.add_task(self._name or description, total=total, remarks="")
        self._task = next(task for task in self._bars.tasks if task.id == number)
        self._next_line, self._validation = -math.inf, ""
        self._bars.start()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self._task is None:
            return
        self._remarks = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._task.id, completed=step, remarks=self._remarks)
        if self._bars.disable and (monotonic() >= self._next_line or step == self._task.total):
            self._next_line = monotonic() + self._seconds
            self._print(self._line(self._task))

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        for name, value in list(results.items())[:1]:
            self._validation = f", {name.replace('/', ' ')} {value:.3f}"

    def tell(self, message: str) -> None:
        if not self._name or message not in self._told:
            self._told.add(message)
            self._print(message)

    def stop(self) -> None:
        if self._task is None:
            return
        if self._task.completed and not self._bars.disable:
            self._print(self._line(self._task))
        self._bars.remove_task(self._task.id)
        self._task = None
        if not self._bars.tasks:
            self._bars.stop()

    def _line(self, task: bars.Task) -> str:
        time_left = f", {timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
        return f"step {task.completed:.0f} of {task.total:.0f}, {self._remarks}{self._validation}{time_left}"

    def _print(self, message: str) -> None:
        """Print a message, above the bars if there are any."""
        name = self._task.description if self._task is not None else self._name
        self._console.print(f"{name}: {message}" if name else message, markup=False, soft_wrap=True)


def default_progress() -> Progress:
    """Make what shows a run where nobody has said: lines below the cell in a notebook, elsewhere nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return Progress()
    return RunProgress(Console(force_terminal=False, force_jupyter=False), _NOTEBOOK_SECONDS)
