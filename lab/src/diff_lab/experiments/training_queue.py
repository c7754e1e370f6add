"""Trains what several plans ask for: those that do not depend on each other side by side, and none twice."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from diff_lab.experiments.experiment import Experiment
from diff_lab.experiments.run_store import Store, Stored, run_key, train_in_store
from diff_lab.experiments.side_by_side import Job, SideBySide
from diff_lab.experiments.time_left import Cost, ManyTrainings
from diff_lab.train import Data, Recipe

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """A run to be trained, or found. Where it begins with the model of another run, `before` is that run's key."""

    name: str  # as a user is told of it
    recipe: Recipe
    cost: Cost
    before: str | None = None


# Asks for trainings that do not depend on each other, gets their runs, asks for more, and returns what it was for.
Plan = Generator[Sequence[Training], Sequence[Stored], T]


def carry_out(
    plans: Mapping[K, Plan[T]],
    store: Store,
    experiment: Experiment,
    progress: ManyTrainings,
    *,
    build_data: Callable[[Recipe], Data],
    commit: str | None,
) -> tuple[dict[K, T], list[Stored]]:
    """Train what the plans ask for, in the order in which they ask, `progress.workers` at a time.

    Returns what each plan returns, and all runs, of which some may have been there before. Nothing of it depends on how
    many workers there are, nor on which run is finished first. Raises as `SideBySide` and `Store.train`.
    """
    with SideBySide[Stored](progress.workers, progress) as workers:

        def train(training: Training, key: str) -> None:
            """Begin a training as soon as a worker is free."""
            data = build_data(training.recipe) if progress.workers == 1 else None  # what a worker makes for itself
            made_of = (store, key, training.recipe, experiment.on_evaluate, commit, data)
            workers.add(Job(training.name, partial(train_in_store, *made_of)))

        def key_of(training: Training) -> str:
            return run_key(training.recipe, build_data(training.recipe).batches, training.before, experiment.logs)

        queue = _Queue[K, T](plans, store, progress, train, key_of)
        for plan in plans:
            queue.advance(plan)
        progress.announce()
        for job, run in workers.results():
            progress.finish(job.name)
            queue.take(run)
    return {plan: queue.returned[plan] for plan in plans}, queue.runs()


class _Queue(Generic[K, T]):
    """The plans, and the runs that each waits for. `train` begins a training that is in no store."""

    def __init__(
        self,
        plans: Mapping[K, Plan[T]],
        store: Store,
        progress: ManyTrainings,
        train: Callable[[Training, str], None],
        key_of: Callable[[Training], str],
    ) -> None:
        self._plans, self._store, self._progress, self._train, self._key_of = plans, store, progress, train, key_of
        self._runs: dict[str, Stored | None] = {}  # key → the run; None of one that is asked for
        self._waiting: dict[K, list[str]] = {}  # plan → keys
        self.returned: dict[K, T] = {}

    def runs(self) -> list[Stored]:
        """All that there are."""
        return [run for run in self._runs.values() if run is not None]

    def take(self, run: Stored) -> None:
        """A training has ended: the plans that waited for it alone go on."""
        self._runs[run.key] = run
        for plan in list(self._waiting):
            if all(self._runs[key] is not None for key in self._waiting[plan]):
                self.advance(plan)

    def advance(self, plan: K) -> None:
        """Let a plan ask for trainings until it waits for one."""
        while True:
            keys = self._waiting.pop(plan, None)  # None before it has begun
            runs = [run for key in keys or () if (run := self._runs[key]) is not None]
            try:
                asked = next(self._plans[plan]) if keys is None else self._plans[plan].send(runs)
            except StopIteration as end:
                self.returned[plan] = end.value
                return
            self._waiting[plan] = [self._ask(training) for training in asked]
            if any(self._runs[key] is None for key in self._waiting[plan]):
                return

    def _ask(self, training: Training) -> str:
        """Find or begin a training. Returns its key."""
        key = self._key_of(training)
        if key not in self._runs:
            run = self._runs[key] = self._store.find(key)
            self._progress.plan(training.name, training.cost, None if run is None else run.seconds)
            if run is None:
                self._train(training, key)
        return key
