"""Does several trainings at a time, each in a process of its own, which are shown and stopped together.

At the sizes of experiments on a CPU, two trainings with a thread each take less time than one after the other with two
threads. The processes are begun anew rather than forked, as threads of torch would not be there in a copy; each serves
one training after the other, so that it imports torch once.
"""

import multiprocessing
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from diff_lab.freed_memory import keep_freed_memory
from diff_lab.train import Progress, TrainingInterrupted
from diff_lab.train.process_errors import Interrupt, stop_signals
from diff_transformer.processors import available_memory, usable_processors

T = TypeVar("T")

START = "spawn"  # how a worker begins; tests fork theirs off a process that has imported torch already
_POLL = 0.5  # seconds between two looks at whether the user wants to stop
_UPDATE = 0.2  # seconds between two reports of a worker's steps
_END = 10.0  # seconds in which a worker without work ends
_WORKER_BYTES = 1 << 30  # what a worker takes: half of it for torch and transformers, the rest for a small model


@dataclass(frozen=True)
class Job(Generic[T]):
    """A training, or other work that takes a while.

    `name` is what a user calls it. `work` shows it to the progress that it gets, by whose `update` it is stopped, and
    returns a result. Both `work` and the result are pickled where the job is done by another process.
    """

    name: str
    work: Callable[[Progress], T]


def default_workers(jobs: int, *, on_cpu: bool) -> int:
    """How many of so many trainings are best done at a time: one for each processor core, as far as there is memory for
    them, and on a GPU one."""
    if not on_cpu:
        return 1
    free = available_memory()
    return max(1, min(jobs, usable_processors(), usable_processors() if free is None else free // _WORKER_BYTES))


def worker_threads(workers: int) -> int:
    """Threads of torch in each of so many processes that train at a time: an equal share of the processor cores."""
    return max(1, usable_processors() // workers)


class SideBySide(Generic[T]):
    """Does jobs, `workers` at a time, and gives back the result of each as it is finished.

        with SideBySide(2, progress) as trainings:
            trainings.add(Job("diff", train_diff))
            trainings.add(Job("softmax", train_softmax))
            for job, result in trainings.results():
                ...  # may add more

    One worker is this process, in which the jobs are done one after the other. Of more, each is a process of its own
    with `threads` threads of torch, by default an equal share of the processor cores. `progress.run` is asked for what
    shows each job.

    An error of a job is raised here with its own type, and its message begins with the job's name. Before that, and
    where the user wants to stop, the other jobs are asked to stop: a training saves a checkpoint after its step.
    """

    def __init__(self, workers: int, progress: Progress, *, threads: int | None = None) -> None:
        if workers < 1:
            raise ValueError(f"There must be 1 worker or more, got {workers}.")
        self._count, self._progress = workers, progress
        self._threads = threads or worker_threads(workers)
        self._waiting: deque[Job[T]] = deque()
        self._workers: list[_Worker[T]] = []
        self._interrupt = Interrupt()

    def add(self, job: Job[T]) -> None:
        """Do this job, too, after those that were added before."""
        self._waiting.append(job)

    def __enter__(self) -> "SideBySide[T]":
        if self._count > 1:
            self._interrupt.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A second Ctrl-C; the first has been obeyed. A killed worker leaves what it made, such as tqdm's semaphore,
            # of which multiprocessing warns at the end.
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, TrainingInterrupted):
                for worker in self._workers:
                    worker.process.kill()
            else:
                self._stop_all()
        finally:
            for worker in self._workers:
                worker.end()
            if self._count > 1:
                self._interrupt.__exit__()
        if error is None and self._count > 1 and self._interrupt.requested:  # after the last result
            raise self._interrupted()

    def results(self) -> Iterator[tuple[Job[T], T]]:
        """Each job with its result, in the order in which they are finished, until there are no more.

        Raises:
            TrainingInterrupted: a signal to stop.
            OSError: a worker was killed; the message names its job.
            Exception: what a job has raised.
        """
        if self._count == 1:
            while self._waiting:
                job = self._waiting.popleft()
                yield job, job.work(self._progress.run(job.name))
            return
        while True:
            if self._interrupt.requested:
                self._progress.tell("Each training stops after its step and saves a checkpoint.")
                raise self._interrupted()
            self._hand_out()
            if not self._busy():
                return
            for worker in self._ready():
                doing = worker.job
                assert doing is not None  # it is busy
                outcome = self._receive(worker)
                if isinstance(outcome, _Failure):
                    if isinstance(outcome.error, TrainingInterrupted):  # it got the signal itself
                        raise self._interrupted({doing.name: outcome.error})
                    self._stop_all()
                    raise outcome.error from outcome.cause
                if outcome is not None:
                    yield doing, outcome.value

    def _busy(self) -> "list[_Worker[T]]":
        return [worker for worker in self._workers if worker.job is not None]

    def _hand_out(self) -> None:
        """Give a job to each worker that has none, of which more are begun up to the number wanted."""
        while self._waiting and len(self._busy()) < self._count:
            idle = next((worker for worker in self._workers if worker.job is None), None)
            if idle is None:
                idle = _Worker(self._threads)
                self._workers.append(idle)
            job = self._waiting.popleft()
            idle.begin(job, self._progress.run(job.name))

    def _ready(self) -> "list[_Worker[T]]":
        """The busy workers that have something to say, after waiting for the first of them a while."""
        by_connection = {worker.connection: worker for worker in self._busy()}
        return [by_connection[ready] for ready in wait(list(by_connection), _POLL) if isinstance(ready, Connection)]

    def _receive(self, worker: "_Worker[T]") -> "_Value[T] | _Failure | None":
        """Take one message of a worker: None where its job goes on."""
        try:
            return worker.receive()
        except (EOFError, OSError):
            error = worker.why_it_ended()
            self._workers.remove(worker)
            worker.end()
            return _Failure(error, None)

    def _interrupted(self, stopped: Mapping[str, BaseException] | None = None) -> TrainingInterrupted:
        """Stop all jobs. The error that says so for all of them, of which some have `stopped` already."""
        errors = {**(stopped or {}), **self._stop_all()}
        is_saved = {name: error.is_saved for name, error in errors.items() if isinstance(error, TrainingInterrupted)}
        saved, others = ([name for name in is_saved if is_saved[name] == wanted] for wanted in (True, False))
        sentences = [] if errors else ["Stopped while nothing was trained."]
        if saved:
            sentences.append(f"Stopped after the step that each was in, which checkpoints hold: {'; '.join(saved)}.")
        if others:
            sentences.append(f"Stopped with nothing new saved: {'; '.join(others)}.")
        failed = [str(error).rstrip(".") for name, error in errors.items() if name not in is_saved]
        sentences += [f"Failed while it was stopped: {error}." for error in failed]
        sentences.append("The same command with --resume (in Python: resume=True) goes on from there.")
        numbers = [self._interrupt.signal, *(getattr(error, "signal", None) for error in errors.values())]
        return TrainingInterrupted(" ".join(sentences), next(filter(None, numbers), None))

    def _stop_all(self) -> dict[str, BaseException]:
        """Ask all busy workers to stop, and wait until they have. What each has raised, by the name of its job."""
        errors = {}
        for worker in self._busy():
            with suppress(OSError):  # it has been killed
                worker.connection.send(None)
        while self._busy():
            for worker in self._ready():
                doing, outcome = worker.job, self._receive(worker)
                if doing is not None and isinstance(outcome, _Failure):
                    errors[doing.name] = outcome.error
        return errors


class _Worker(Generic[T]):
    """A process that does one job at a time, and what shows the one that it does."""

    def __init__(self, threads: int) -> None:
        context: Any = multiprocessing.get_context(START)
        self.connection, theirs = context.Pipe()
        # Ctrl-C is the parent's: a worker is born deaf to it, and until it has said so the system keeps it back.
        with _without_interrupts():
            self.process: BaseProcess = context.Process(target=_serve, args=(theirs, threads))
            self.process.start()
        theirs.close()  # so that the end of the process ends the connection
        self.job: Job[T] | None = None
        self._progress: Progress | None = None

    def begin(self, job: Job[T], progress: Progress) -> None:
        # Pickled first: what cannot be is the caller's error, and not the worker's.
        message = ForkingPickler.dumps(job.work)
        self.job, self._progress = job, progress
        with suppress(OSError):  # it has been killed, which `receive` will find out
            self.connection.send_bytes(message)

    def receive(self) -> "_Value[T] | _Failure | None":
        """One message: None where it was about the progress. Raises EOFError or OSError where the process has ended."""
        message = self.connection.recv()
        assert self.job is not None
        assert self._progress is not None
        if not isinstance(message, _Value | _Failure):
            name, *arguments = message
            getattr(self._progress, name)(*arguments)
            return None
        if isinstance(message, _Failure):
            message.name(self.job.name)
        self._progress.stop()
        self.job = self._progress = None
        return message

    def why_it_ended(self) -> OSError | TrainingInterrupted:
        """What to raise of a process that has ended in the midst of its job, which is given up."""
        assert self.job is not None
        assert self._progress is not None
        self._progress.stop()
        name, self.job = self.job.name, None
        self.process.join(_END)
        code = self.process.exitcode or 0
        if -code in stop_signals():  # before it could do what it was told
            return TrainingInterrupted("Stopped before it began.", -code)
        if code == -signal.SIGKILL:
            how = "was killed (signal 9), as the system does where memory is short: take fewer workers (--workers)"
        elif code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"has ended with exit code {code}"
        return OSError(f"{name}: its process {how}. The same command with --resume goes on.")

    def end(self) -> None:
        """End the process, which has no job or was killed."""
        self.connection.close()
        self.process.join(_END)
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.process.close()


@dataclass
class _Value(Generic[T]):
    """What a job has returned."""

    value: T


@dataclass
class _Failure:
    """What a job has raised, and where, for the error of a bug."""

    error: BaseException
    where: str | None

    @property
    def cause(self) -> BaseException | None:
        return None if self.where is None else RuntimeError(f"\n{self.where}")

    def name(self, name: str) -> None:
        """Say in its message which job it is about."""
        if len(self.error.args) == 1 and isinstance(self.error.args[0], str):
            self.error.args = (f"{name}: {self.error.args[0]}",)
        elif isinstance(self.error, OSError):  # the system's, with a number and a file
            self.error.strerror = f"{name}: {self.error.strerror}"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C back for the block, also from a process that begins in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, threads: int) -> None:
    """Do the jobs that come, until None comes or the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(number, _stop_at_once)
    torch.set_num_threads(threads)
    keep_freed_memory()
    with suppress(EOFError, OSError, TrainingInterrupted):
        while True:
            try:
                if (work := connection.recv()) is None:
                    return
                if connection.poll():
                    raise TrainingInterrupted("Stopped before it began.")
                outcome = ForkingPickler.dumps(_Value(work(_Reports(connection))))
            except EOFError:
                return
            except BaseException as error:
                outcome = ForkingPickler.dumps(_failure(error))
            connection.send_bytes(outcome)


def _stop_at_once(number: int, _: Any) -> None:
    """What a signal to stop does outside of a training, which would save a checkpoint first."""
    raise TrainingInterrupted("Stopped.", number)


def _failure(error: BaseException) -> _Failure:
    """An error as it travels to the parent: the user's as it is, and one that is a bug with its traceback.

    An error whose class makes it unfit for travelling is told in words. So is a ValueError of another package, as the
    command line takes one that this package raises for a sentence to the user.
    """
    where: str | None = "".join(traceback.format_exception(error))
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    is_ours = any(
        module.startswith("diff_transformer.") for module in (type(error).__module__, frame.f_globals["__name__"])
    )
    if isinstance(error, OSError | KeyboardInterrupt) or (isinstance(error, ValueError) and is_ours):
        where = None
    elif isinstance(error, ValueError):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failure(error, where)


class _Reports(Progress):
    """Sends what a job shows to the parent, and stops the job where the parent wants it, or is there no more."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._total, self._sent, self._stopping = 0, 0.0, False

    def start(self, total: int, description: str) -> None:
        self._total = total
        self._send("start", total, description)
        self._stop_if_asked()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        is_last = step == self._total
        # A parent that is busy reads nothing for a while, and the job does not wait for it.
        if is_last or (now - self._sent >= _UPDATE and select.select([], [self._connection], [], 0)[1]):
            self._sent = now
            self._send("update", step, loss, tokens_per_second)
        self._stop_if_asked()

    def evaluating(self) -> None:
        self._stop_if_asked()

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self._send("evaluated", step, dict(results))

    def tell(self, message: str) -> None:
        self._send("tell", message)

    def stop(self) -> None:
        self._send("stop")

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the parent is there no more
            self._connection.send(message)

    def _stop_if_asked(self) -> None:
        """Nothing comes from the parent during a job but the wish to stop, which is the signal that trainings know."""
        if not self._stopping and self._connection.poll():
            self._stopping = True
            signal.raise_signal(signal.SIGTERM)
