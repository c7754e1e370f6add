"""What an experiment says while it trains many runs: which of how many, and how long the rest will take."""

import time
from collections.abc import Callable

from diff_transformer.train import Progress


class Trainings:
    """A `Progress` for many trainings, one after the other. Each is announced by `next` before it begins.

    Args:
        progress: what shows it.
        costs: what each training is expected to cost, in any unit; those that turn out to be done are taken off.
        clock: tells seconds.
    """

    def __init__(self, progress: Progress, costs: list[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._left, self._clock = progress, list(costs), clock
        self._number, self._of = 0, len(costs)
        self._began: float | None = None
        self._done, self._cost = 0.0, 0.0
        self._title = ""
        self._told: set[str] = set()

    def next(self, title: str, *, found: bool = False) -> None:
        """The next training is called `title`; `found` where an earlier command has finished it."""
        self._number += 1
        self._done += self._cost
        self._cost = self._left.pop(0)
        if found:
            self._cost = 0.0
            return
        if self._began is None:
            self._began = self._clock()
        self._title = f"{title} · run {self._number} of {self._of}{self._time_left()}"

    def _time_left(self) -> str:
        """A guess by what the trainings before have taken, measurements between them included."""
        if self._began is None or not self._done:
            return ""
        minutes = (self._clock() - self._began) / self._done * (self._cost + sum(self._left)) / 60
        return f" · {minutes:.0f} min left" if minutes >= 1 else " · a minute left"

    def start(self, total: int, description: str) -> None:
        self._progress.start(total, self._title or description)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(step, loss, tokens_per_second)

    def tell(self, message: str) -> None:
        """Each message once: what all the runs use is the same."""
        if message not in self._told:
            self._told.add(message)
            self._progress.tell(message)

    def stop(self) -> None:
        self._progress.stop()
