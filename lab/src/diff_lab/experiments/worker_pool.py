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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from diff_lab import process
from diff_lab.process import Interrupt, TrainingInterrupted, keep_freed_memory, stop_signals
from diff_lab.train import Progress
from diff_transformer.utils.cpu_count import available_memory, usable_processors

T = TypeVar("T")

START = "spawn"  # how a worker starts; tests fork theirs off a process that has imported torch already
_POLL = 0.2  # seconds between two looks at the workers, and at whether the user wants to stop
_WORKER_BYTES = 1 << 30  # what a worker takes: half of it for torch and transformers, the rest for a small model


@dataclass(frozen=True)
class Job(Generic[T]):
    """A training, or other work that takes a while.

    Args:
        name: its name for the user.
        work: is given the progress that shows the job, and returns a result. Another process runs it, so it and the
            result can be pickled.
    """

    name: str
    work: Callable[[Progress], T]


def default_workers(jobs: int, *, on_cpu: bool) -> int:
    """Choose how many of so many trainings run at a time: one a processor core, as memory allows; on a GPU one."""
    if not on_cpu:
        return 1
    free = available_memory()
    return max(1, min(jobs, usable_processors(), usable_processors() if free is None else free // _WORKER_BYTES))


def worker_threads(workers: int) -> int:
    """Count the threads of torch in each of so many workers: an equal share of the processor cores."""
    return max(1, usable_processors() // workers)


class WorkerPool(Generic[T]):
    """Run jobs, `workers` at a time, and return the result of each as it finishes.

        with WorkerPool(2, progress) as pool:
            pool.add(Job("diff", train_diff))
            pool.add(Job("softmax", train_softmax))
            for job, result in pool.results():
                ...  # may add more

    One worker is this process, which runs the jobs one after the other. More are processes with `threads` threads of
    torch each, by default an equal share of the processor cores. `progress.run` is asked for the progress of each job.

    An error of a job is raised here with its own type, and its message begins with the job's name. Before that, and if
    the user wants to stop, the other jobs are stopped: a training saves a checkpoint after its step.
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
        """Queue a job after those that were added before."""
        self._waiting.append(job)

    def __enter__(self) -> "WorkerPool[T]":
        if self._count > 1:
            self._interrupt.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, TrainingInterrupted):  # a second Ctrl-C
                for worker in self._workers:
                    worker.process.kill()
            self._stop_all()
        finally:
            for worker in self._workers:
                worker.executor.shutdown()
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
        while True:
            if self._interrupt.requested:
                self._progress.tell("Each training stops after its step and saves a checkpoint.")
                raise self._interrupted()
            self._hand_out()
            if not self._busy():
                return
            for worker in self._finished():
                job = worker.job
                try:
                    result = worker.take_result()
                except TrainingInterrupted as error:  # it got the signal itself
                    raise self._interrupted({job.name: error}) from None
                except Exception:
                    self._stop_all()
                    raise
                yield job, result

    def _busy(self) -> "list[_Worker[T]]":
        return [worker for worker in self._workers if worker.is_busy]

    def _hand_out(self) -> None:
        """Give waiting jobs to idle workers, of which more are started up to the number wanted."""
        while self._waiting and len(self._busy()) < self._count:
            idle = (worker for worker in self._workers if not worker.is_busy and worker.process.is_alive())
            job = self._waiting.popleft()
            progress = self._progress.run(job.name)
            if (worker := next(idle, None)) is not None:
                worker.start(job, progress)
            else:
                self._workers.append(_Worker(self._threads, job, progress))

    def _finished(self) -> "list[_Worker[T]]":
        """Wait a while for a job to finish, show the progress of all, and return the workers that have finished."""
        busy = self._busy()
        wait([worker.future for worker in busy], _POLL, FIRST_COMPLETED)
        finished = [worker for worker in busy if worker.future.done()]
        for worker in busy:
            worker.show_progress()
        return finished

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
        is_saved = {name: error.is_saved for name, error in errors.items() if isinstance(error, TrainingInterrupted)}
        saved, others = ([name for name in is_saved if is_saved[name] == wanted] for wanted in (True, False))
        sentences = [] if errors else ["Stopped while nothing was trained."]
        if saved:
            sentences.append(f"Stopped after the step that each was in, which checkpoints hold: {'; '.join(saved)}.")
        if others:
            sentences.append(f"Stopped with nothing new saved: {'; '.join(others)}.")
        failed = [str(error).rstrip(".") for name, error in errors.items() if name not in is_saved]
        sentences += [f"Failed while it was stopped: {error}." for error in failed]
        sentences.append("The same command with --resume (in Python: resume=True) resumes from there.")
        numbers = [self._interrupt.signal, *(getattr(error, "signal", None) for error in errors.values())]
        return TrainingInterrupted(" ".join(sentences), next(filter(None, numbers), None))


class _Worker(Generic[T]):
    """A process that runs one job at a time. It has an executor of its own, so that if it is killed, no other is."""

    def __init__(self, threads: int, job: Job[T], progress: Progress) -> None:
        context = multiprocessing.get_context(START)
        self._messages, theirs = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(1, context, _set_up_worker, (theirs, threads))
        others = set(multiprocessing.active_children())
        # Ctrl-C is the parent's: a worker ignores it, and until it has said so the system holds the signal back.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.start(job, progress)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.process: BaseProcess = (set(multiprocessing.active_children()) - others).pop()
        theirs.close()  # so that a job's messages fail where this process has ended, and never block

    def start(self, job: Job[T], progress: Progress) -> None:
        self.job, self._progress, self.is_busy = job, progress, True
        self.future: Future[T] = self.executor.submit(_work, job.work)

    def show_progress(self) -> None:
        with suppress(EOFError, OSError):  # it has been killed
            while self._messages.poll():
                name, *arguments = self._messages.recv()
                getattr(self._progress, name)(*arguments)

    def take_result(self) -> T:
        """Return the result of the job, which has finished, or raise its error."""
        self.is_busy = False
        self._progress.stop()
        error = self.future.exception()
        if isinstance(error, BrokenProcessPool):
            raise self._why_it_ended()
        if error is not None:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (f"{self.job.name}: {error.args[0]}",)
            elif isinstance(error, OSError):  # the system's, with a number and a file
                error.strerror = f"{self.job.name}: {error.strerror}"
            raise error
        return self.future.result()

    def _why_it_ended(self) -> OSError | TrainingInterrupted:
        """Make the error that says how the process ended during its job."""
        self.executor.shutdown()
        code = self.process.exitcode or 0
        if -code in stop_signals():  # before it could do what it was told
            return TrainingInterrupted("Stopped before it began.", -code)
        if code == -signal.SIGKILL:
            how = "was killed (signal 9), as the system does where memory is short: take fewer workers (--workers)"
        elif code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"has ended with exit code {code}"
        return OSError(f"{self.job.name}: its process {how}. The same command with --resume resumes.")


# What follows runs in a worker.

_is_working = threading.Lock()  # held during a job
_to_parent: Connection


def _set_up_worker(to_parent: Connection, threads: int) -> None:
    global _to_parent
    _to_parent = to_parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(number, _stop)
    # The parent passes on a signal that the system may have sent to this process, too, and kills it to end it at once.
    process.SAME_WISH_SECONDS = math.inf
    torch.set_num_threads(threads)
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _stop(number: int, _: Any) -> None:
    """Obey a signal to stop outside of a training, which would save a checkpoint first."""
    if _is_working.locked():
        raise TrainingInterrupted("Stopped.", number)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_with_parent() -> None:
    """Wait until the parent has been killed, then let the training save a checkpoint, and end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    with _is_working:
        os._exit(1)


def _work(work: Callable[[Progress], T]) -> T:
    with _is_working:
        try:
            return work(_Reports(_to_parent))
        except BaseException as error:
            if _is_fit_for_parent(error):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _is_fit_for_parent(error: BaseException) -> bool:
    """Return whether an error may be raised again in the parent.

    Not one whose class cannot be pickled, nor a ValueError of another package, which is a bug: the command line takes
    one that this package raises for a sentence to the user, and the parent no longer sees who raised it.
    """
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    modules = (type(error).__module__, frame.f_globals["__name__"])
    if isinstance(error, ValueError) and not any(one.startswith(("diff_lab.", "diff_transformer.")) for one in modules):
        return False
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return False
    return True


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

    def stop(self) -> None:
        self._send("stop")

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the parent is there no more
            self._connection.send(message)
