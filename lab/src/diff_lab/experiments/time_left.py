"""Shows many trainings: each while it goes, how many there are, and about how long they will take."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diff_lab.train import Progress
from diff_lab.train.training_progress import Silent

_STEPS = 3  # after the first one, before its speed is told
_TIMING = 10.0  # seconds after which no more kinds of steps are timed: the others follow from their operations
_SECONDS = 1.0  # between two looks at the time that is left


@dataclass(frozen=True)
class Cost:
    """What a training costs: `steps` of so many `operations`, in any unit. Steps of one `kind` take the same time."""

    kind: str
    operations: float
    steps: int


class ManyTrainings(Silent):
    """A `Progress` for trainings of which `workers` go at a time.

    What is known to come is announced by `expect`, and by `plan` when its name is known; a finished one by `finish`.
    The time that is left follows from the steps that were done so far, for a kind without any by its operations, and
    before there are any from what the same steps took in earlier commands, or else from `step_seconds`, if it is given
    and knows what a step of a training takes. `may_grow` says that sweeps of learning rates may widen.
    """

    def __init__(
        self,
        progress: Progress,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
        step_seconds: Callable[[Cost], float | None] = lambda _: None,
        *,
        may_grow: bool = False,
    ) -> None:
        self._may_grow = may_grow
        self._progress, self.workers, self._clock, self._step_seconds = progress, workers, clock, step_seconds
        self._expected: Counter[Cost] = Counter()
        self._going: dict[str, _Training] = {}  # those that go, wait, or stopped short of their end
        self._finished = 0
        self._earlier: dict[
            str, tuple[float, float]
        ] = {}  # kind → operations and seconds of a step in earlier commands
        self._measured: dict[str, tuple[float, float]] = {}  # the same in this one
        self._messages: set[str] = set()
        self._has_told_time = False
        self._shown = clock()

    def expect(self, cost: Cost, number: int = 1) -> None:
        """So many trainings of this cost will come."""
        self._expected[cost] += number

    def plan(self, name: str, cost: Cost, earlier: float | None = None) -> None:
        """A training has come, which may have been expected. An earlier command may have finished it, in so many
        seconds."""
        self.drop(cost)
        if earlier is None:
            self._going[name] = _Training(cost)
        else:
            self._finished += 1
            if earlier:
                self._earlier[cost.kind] = (cost.operations, earlier / cost.steps)

    def drop(self, cost: Cost) -> None:
        """One of the expected trainings will not come, or has."""
        self._expected[cost] = max(0, self._expected[cost] - 1)

    def announce(self) -> None:
        """Say how many trainings there are, before the first of them."""
        total, left = self._total(), self._total() - self._finished
        if left:
            end = self._clock() + _TIMING
            for cost in dict.fromkeys([*(one.cost for one in self._going.values()), *(+self._expected)]):
                is_known = cost.kind in self._earlier or self._clock() >= end
                if not is_known and (seconds := self._step_seconds(cost)) is not None:
                    self._earlier[cost.kind] = (cost.operations, seconds)
            sentence = f"{total} trainings" if total > 1 else "1 training"
            done = f", of which {self._finished} {'is' if self._finished == 1 else 'are'} finished" * bool(
                self._finished
            )
            seconds = self._seconds_left()
            takes = "the first steps will tell how long they take" if seconds is None else f"{in_words(seconds)} left"
            self._has_told_time = seconds is not None
            beside = f", {self.workers} at a time" if self.workers > 1 else ""
            more = ", and more where the best learning rate is the smallest or the largest tried" * self._may_grow
            self._progress.tell(f"{sentence}{done}{beside}; {takes}{more}.")
        self._show()

    def finish(self, name: str) -> None:
        """A training has ended."""
        self._measure(self._going.pop(name))
        self._finished += 1
        self._show()

    def run(self, name: str) -> Progress:
        return _Shown(self, name, self._progress.run(name))

    def tell(self, message: str) -> None:
        """Each message once: what all the runs use is the same."""
        if self.is_new(message):
            self._progress.tell(message)

    def is_new(self, message: str) -> bool:
        """Whether no run has told it before."""
        is_new = message not in self._messages
        self._messages.add(message)
        return is_new

    def step(self, name: str, step: int) -> None:
        """A training is at this step."""
        training, now = self._going[name], self._clock()
        if training.began is None:
            training.began = (step, now)
        training.at = (step, now)
        if now - self._shown >= _SECONDS:
            self._show()

    def _total(self) -> int:
        return self._finished + len(self._going) + self._expected.total()

    def _show(self) -> None:
        self._shown = self._clock()
        seconds = self._seconds_left()
        self._progress.update_all(self._finished, self._total(), f"{in_words(seconds)} left" if seconds else "")
        if seconds and not self._has_told_time:
            self._has_told_time = True
            self._progress.tell(f"{in_words(seconds).capitalize()} left for all trainings.")

    def _measure(self, training: "_Training") -> None:
        if (seconds := training.step_seconds()) is not None:
            self._measured[training.cost.kind] = (training.cost.operations, seconds)

    def _seconds_left(self) -> float | None:
        """What is left where all workers have work until the end, or what the longest training needs alone."""
        for training in self._going.values():
            self._measure(training)
        known = {**self._earlier, **self._measured}
        if not known:
            return None
        # Of another kind of training nothing is known but its operations.
        per_operation = sum(seconds for _, seconds in (self._measured or known).values()) / sum(
            operations for operations, _ in (self._measured or known).values()
        )

        def step_seconds(cost: Cost) -> float:
            return known[cost.kind][1] if cost.kind in known else cost.operations * per_operation

        left = [step_seconds(one.cost) * (one.cost.steps - one.steps) for one in self._going.values()]
        left += [step_seconds(cost) * cost.steps for cost, number in self._expected.items() for _ in range(number)]
        return max(sum(left) / self.workers, max(left, default=0.0))


@dataclass
class _Training:
    """One that goes or waits: at which step it was when it was first heard of and when last, and when that was."""

    cost: Cost
    began: tuple[int, float] | None = None
    at: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        """How many are done."""
        return self.at[0] if self.at else 0

    def step_seconds(self) -> float | None:
        """What a step takes, validation included; None where too few are done."""
        if self.began is None or self.at is None or self.at[0] - self.began[0] < min(_STEPS, self.cost.steps - 1):
            return None
        return (self.at[1] - self.began[1]) / max(1, self.at[0] - self.began[0])


class _Shown(Silent):
    """One of the trainings, which is shown by its name."""

    def __init__(self, trainings: ManyTrainings, name: str, progress: Progress) -> None:
        self._trainings, self._name, self._progress = trainings, name, progress

    def start(self, total: int, description: str) -> None:
        self._progress.start(total, self._name)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(step, loss, tokens_per_second)
        self._trainings.step(self._name, step)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self._progress.evaluated(step, results)

    def tell(self, message: str) -> None:
        if self._trainings.is_new(message):
            self._progress.tell(message)

    def stop(self) -> None:
        self._progress.stop()


def in_words(seconds: float) -> str:
    """ "about 25 min"."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 2 * 60 * 60:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
