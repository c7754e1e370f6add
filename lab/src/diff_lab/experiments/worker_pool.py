"""Runs trainings at the same time in worker processes, which are shown and stopped together.

At the sizes of experiments on a CPU, two trainings with a thread each take less time than one after the other with two
threads. A worker runs one training after the other, so that it imports torch once.
"""

import math
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

import psutil
import torch

from diff_lab.train import Progress, loop
from diff_lab.train.loop import Interrupt, TrainingInterrupted, stop_signals
from diff_transformer.utils.cpu_count import usable_processors

T = TypeVar("T")

START = "spawn"  # how a worker starts; tests fork theirs off a process that has imported torch already
_POLL = 0.2  # seconds between two looks at the workers, and at whether the user wants to stop
_WORKER_BYTES = 1 << 30  # what a worker takes: half of it for torch and transformers, the rest for a small model


@dataclass(frozen=True)
class Job(Generic[T]):
    """A training, or other work that takes a while. Another process does it: it and its result can be pickled."""

    name: str  # for the user
    work: Callable[[Progress], T]  # is given the progress that shows the job, and returns the result


def default_workers(jobs: int, *, on_cpu: bool) -> int:
    """Choose how many of so many trainings run at a time: one a processor core, as memory allows; on a GPU one."""
    if not on_cpu:
        return 1
    return max(1, min(jobs, usable_processors(), psutil.virtual_memory().available // _WORKER_BYTES))


class WorkerPool(Generic[T]):
    """Run jobs, `workers` at a time, and return the result of each as it finishes.

        with WorkerPool(2, progress) as pool:
            pool.add(Job("diff", train_diff))
            pool.add(Job("softmax", train_softmax))
            for job, result in pool.results():
                ...  # may add more

    One worker is this process, which runs the jobs one after the other. More are processes, each with an equal share of
    the processor cores for torch's threads. `progress.run` is asked for the progress of each job.

    An error of a job is raised here with its own type, and its message begins with the job's name. Before that, and if
    the user wants to stop, the other jobs are stopped: a training saves a checkpoint after its step.
    """

    def __init__(self, workers: int, progress: Progress) -> None:
        if workers < 1:
            raise ValueError(f"There must be 1 worker or more, got {workers}.")
        self._count, self._progress = workers, progress
        self._waiting: deque[Job[T]] = deque()
        self._workers: list[_Worker[T]] = []
        self._interrupt = Interrupt()

    def add(self, job: Job[T]) -> None:
        """Queue a job after those that were added before."""
        self._waiting.append(job)

    def __enter__(self) -> "WorkerPool[T]":
        if self._count > 1:
            self._interrupt.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, TrainingInterrupted):  # a second Ctrl-C
                for worker in self._workers:
                    worker.process.kill()
            self._stop_all()
        finally:
            for worker in self._workers:
                worker.connection.close()
                worker.process.join()
            if self._count > 1:
                self._interrupt.__exit__()
        if error is None and self._count > 1 and self._interrupt.requested:  # after the last result
            raise self._interrupted()

    def results(self) -> Iterator[tuple[Job[T], T]]:
        """Yield each job with its result, in the order in which they finish, until there are no more.

        Raises:
            TrainingInterrupted: a signal to stop.
            OSError: a worker was killed; the message names its job.
            Exception: an error of a job.
        """
        if self._count == 1:
            while self._waiting:
                job = self._waiting.popleft()
                yield job, job.work(self._progress.run(job.name))
            return
        while not self._interrupt.requested:
            while self._waiting and len(self._busy()) < self._count:
                idle = (one for one in self._workers if not one.is_busy and one.process.is_alive())
                worker = next(idle, None)
                if worker is None:
                    worker = _Worker(max(1, usable_processors() // self._count))
                    self._workers.append(worker)
                job = self._waiting.popleft()
                worker.start(job, self._progress.run(job.name))
            if not self._busy():
                return
            for worker in self._finished():
                try:
                    result = worker.take_result()
                except TrainingInterrupted as error:  # it got the signal itself
                    raise self._interrupted({worker.job.name: error}) from None
                yield worker.job, result
        self._progress.tell("Each training stops after its step and saves a checkpoint.")
        raise self._interrupted()

    def _busy(self) -> "list[_Worker[T]]":
        return [worker for worker in self._workers if worker.is_busy]

    def _finished(self) -> "list[_Worker[T]]":
        """Wait a while for messages of the jobs, and return the workers whose job has ended."""
        busy = self._busy()
        wait([worker.connection for worker in busy], _POLL)
        return [worker for worker in busy if worker.has_ended()]

    def _stop_all(self) -> dict[str, BaseException]:
        """Stop all jobs, and wait until they have. Return the error of each, by its name."""
        errors: dict[str, BaseException] = {}
        for worker in self._busy():
            worker.process.terminate()
        while self._busy():
            for worker in self._finished():
                try:
                    worker.take_result()
                except (Exception, TrainingInterrupted) as error:
                    errors[worker.job.name] = error
        return errors

    def _interrupted(self, stopped: Mapping[str, BaseException] | None = None) -> TrainingInterrupted:
        """Stop all jobs. Return the error that says so for all of them, of which some have `stopped` already."""
        errors = {**(stopped or {}), **self._stop_all()}
        saved = {name: getattr(error, "is_saved", False) for name, error in errors.items()}
        told = "; ".join(f"{name}, {'with a checkpoint' if saved[name] else error}" for name, error in errors.items())
        signals = (self._interrupt.signal, *(getattr(error, "signal", None) for error in errors.values()))
        return TrainingInterrupted(
            f"Stopped: {told or 'nothing was being trained'}. The same command with --resume (in Python: resume=True) "
            "resumes from there.",
            next((number for number in signals if number is not None), None),
        )


class _Worker(Generic[T]):
    """A process that runs one job at a time, and sends the job's progress and its end through a pipe."""

    job: Job[T]
    _end: tuple[Any, BaseException | None, str]  # the result, or the error and its trace, as a pickle holds none

    def __init__(self, threads: int) -> None:
        context: Any = multiprocessing.get_context(START)  # each of which has Process, and their base has not
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, threads))
        self.is_busy = False
        # Ctrl-C is the parent's: a worker ignores it, and until it has said so the system holds the signal back.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends where the process has

    def start(self, job: Job[T], progress: Progress) -> None:
        self.job, self._progress = job, progress
        with suppress(OSError):  # it has been killed, as the end of the pipe tells
            self.connection.send(job.work)
        self.is_busy = True

    def has_ended(self) -> bool:
        """Show what the job has told of its progress, and return whether it has ended, in whichever way."""
        while self.connection.poll():
            try:
                name, *arguments = self.connection.recv()
            except (EOFError, OSError):
                name, arguments = "ended", [None, self._why_it_ended(), ""]
            if name == "ended":
                result, error, trace = arguments
                self._end = result, error, trace
                return True
            getattr(self._progress, name)(*arguments)
        return False

    def take_result(self) -> T:
        """Return the result of the job, which has ended, or raise its error."""
        self.is_busy = False
        self._progress.stop()
        result, error, trace = self._end
        if error is None:
            return cast(T, result)
        if isinstance(error, OSError) and error.strerror:  # the system's, with a number and a file
            error.strerror = f"{self.job.name}: {error.strerror}"
        elif not isinstance(error, TrainingInterrupted) and trace:
            error.args = (f"{self.job.name}: {error.args[0] if len(error.args) == 1 else error}",)
        raise error from RuntimeError(trace)

    def _why_it_ended(self) -> OSError | TrainingInterrupted:
        """Make the error that says how the process ended during its job."""
        self.process.join()
        code = self.process.exitcode or 0
        if code == 0 or -code in stop_signals():  # between two steps of a job's, or before its first
            return TrainingInterrupted("without a checkpoint", -code or None)
        short = ", as the system does where memory is short: take fewer workers (--workers)"
        how = f"ended with exit code {code}{short if code == -signal.SIGKILL else ''}"
        return OSError(f"{self.job.name}: its process {how}. The same command with --resume resumes.")


# What follows runs in a worker.


def _serve(connection: Connection, threads: int) -> None:
    """Run the jobs that come through the connection until it is closed, at the latest where the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(number, _stop)
    # The parent passes on a signal that the system may have sent to this process, too, and kills it to end it at once.
    loop.SAME_WISH_SECONDS = math.inf
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with suppress(EOFError, OSError, TrainingInterrupted):  # the parent is done, or has ended; stopped outside of a job
        while True:
            connection.send(("ended", *_outcome(connection.recv(), _Reports(connection))))


def _stop(number: int, _: Any) -> None:
    """Obey a signal to stop outside of a training, which would save a checkpoint first."""
    raise TrainingInterrupted("without a checkpoint", number)


def _stop_with_parent() -> None:
    """Wait until the parent has ended, then stop the job as the parent would: a training saves a checkpoint."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _outcome(work: Callable[[Progress], T], progress: Progress) -> tuple[T | None, BaseException | None, str]:
    """Return the result of a job, or its error with the text of its traceback, which no pickle holds.

    A RuntimeError stands for an error of another package, which may not be picklable, and for a ValueError of one,
    which is a bug: the command line takes one that this package raises for a sentence to the user, and the parent no
    longer sees who raised it.
    """
    try:
        return work(progress), None, ""
    except BaseException as error:
        ours = ("diff_lab.", "diff_transformer.")
        origin = type(error).__module__
        if isinstance(error, ValueError) and not origin.startswith(ours):
            origin = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals["__name__"]
        is_known = origin == "builtins" or origin.startswith(ours)
        sent = error if is_known else RuntimeError(f"{type(error).__name__}: {error}")
        return None, sent, "".join(traceback.format_exception(error))


class _Reports(Progress):
    """Send the progress of a job to the parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._total, self._sent = 0, 0.0

    def start(self, total: int, description: str) -> None:
        self._total = total
        self._send("start", total, description)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        # A parent that is busy reads nothing for a while, and the job does not wait for it.
        is_due = now - self._sent >= _POLL and select.select([], [self._connection], [], 0)[1]
        if is_due or step == self._total:
            self._sent = now
            self._send("update", step, loss, tokens_per_second)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self._send("evaluated", step, dict(results))

    def tell(self, message: str) -> None:
        self._send("tell", message)

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the parent is there no more
            self._connection.send(message)
