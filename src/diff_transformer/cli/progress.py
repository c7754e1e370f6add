"""Progress of a training run on stderr: a bar in a terminal, a line now and then in a log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from diff_transformer.cli.console import messages

# Seconds from a line of a log to the next one, or a step longer: it is seen every minute that a run lives.
_SECONDS = 30


class _Interval:
    """Says once in a while that it is time for a line: at first, and when some seconds have passed."""

    def __init__(self) -> None:
        self._next = -math.inf

    def is_due(self) -> bool:
        now = monotonic()
        if now < self._next:
            return False
        self._next = now + _SECONDS
        return True


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows what is told of text being tokenised: in a terminal as it goes, in a log a line now and then."""
    if console.is_terminal:
        with console.status("Looking for the text's tokens") as status:
            yield lambda documents, tokens: status.update(f"{documents:,} documents, {tokens:,} tokens")
        return
    every = _Interval()

    def tell(documents: int, tokens: int) -> None:
        if every.is_due():
            console.print(f"tokenised: {documents:,} documents, {tokens:,} tokens", markup=False, soft_wrap=True)

    yield tell


class Bars:
    """A `diff_transformer.train.progress.Progress` that draws one bar for each run."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or messages()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._description = ""
        self._interval = _Interval()
        self._first: tuple[int, float] | None = None  # the first step that was done in this run, and when

    def start(self, total: int, description: str) -> None:
        self._total, self._description = total, description
        self._interval, self._first = _Interval(), None
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remarks]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        self._task = self._bar.add_task(description, total=total, remarks="")
        self._bar.start()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        remarks = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, remarks=remarks)
            return
        self._first = self._first or (step, monotonic())
        if self._interval.is_due() or step == self._total:
            line = f"{self._description}: step {step} of {self._total}, {remarks}{self._time_left(*self._first, step)}"
            self._console.print(line, markup=False, soft_wrap=True)

    def _time_left(self, first: int, since: float, step: int) -> str:
        if not first < step < self._total:
            return ""
        seconds = (monotonic() - since) / (step - first) * (self._total - step)
        return f", {timedelta(seconds=round(seconds))} left"

    def tell(self, message: str) -> None:
        about = f"{self._description}: " if self._description else ""
        self._console.print(about + message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._description = ""  # what is told from now on is not about this run
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
