"""Progress of a training run on stderr: a bar in a terminal, a line now and then in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from diff_transformer.cli.console import messages

# How often a log gets a line, as a share of the run.
_LINES = 10


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows what is told of text being tokenised: in a terminal as it goes, in a log a line now and then."""
    if console.is_terminal:
        with console.status("Looking for the text's tokens") as status:
            yield lambda documents, tokens: status.update(f"{documents:,} documents, {tokens:,} tokens")
        return
    told = 0

    def tell(documents: int, tokens: int) -> None:
        nonlocal told
        if tokens >= 2 * told:
            told = tokens
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
        self._told = 0

    def start(self, total: int, description: str) -> None:
        self._total, self._description, self._told = total, description, 0
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
        tenth = step * _LINES // max(1, self._total)
        if tenth > self._told:
            self._told = tenth
            line = f"{self._description}: step {step} of {self._total}, {remarks}"
            self._console.print(line, markup=False, soft_wrap=True)

    def tell(self, message: str) -> None:
        about = f"{self._description}: " if self._description else ""
        self._console.print(about + message, markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._description = ""  # what is told from now on is not about this run
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
