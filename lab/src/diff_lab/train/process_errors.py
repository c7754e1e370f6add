"""Exchanges values and errors between the processes of a run, and handles another's end, a hang, and signals."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
SAME_WISH_SECONDS = 3.0  # a second signal within this time repeats the first one


def rank() -> int:
    """The number of this process; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that moves and deletes files for all."""
    return rank() == 0


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: T, group: Any = None) -> list[T]:
    """Every process' value, by rank; each is pickled on its way. Called on every process."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value, group=group)
    return values


def balanced_parts(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Divide names among `parts` parts whose sizes are about equal. Returns the part of each name, from 0."""
    totals = [0] * parts
    part_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        part_of[name] = totals.index(min(totals))
        totals[part_of[name]] += sizes[name]
    return part_of


def local_part(sizes: Mapping[str, int]) -> list[str]:
    """The names that fall to this process where names with sizes are divided among all processes."""
    return [name for name, part in balanced_parts(sizes, count()).items() if part == rank()]


def on_first(compute: Callable[[], T], group: Any = None) -> T:
    """Compute a value on the first process and return it on every one, or raise its error on every one.

    Called on every process.
    """
    with propagate_errors(group):
        value: Any = compute() if is_first() else None
    return gathered(value, group)[0]


def broadcast_from_first(compute: Callable[[], T]) -> T:
    """As :func:`on_first`, but the others wait as long as it takes."""
    if not dist.is_initialized():
        return compute()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))  # hashing a corpus may take longer than a step
    value = on_first(compute, group)
    dist.destroy_process_group(group)
    return value


@contextmanager
def propagate_errors(group: Any = None) -> Iterator[None]:
    """Raise an exception of one rank on every rank, so that none waits for ever. Called on every process.

    At the end of the block the processes wait for each other. Inside, no process may wait for another: one that failed
    would leave it waiting. The process that failed raises its own error; the others a ValueError, or an OSError for any
    other error, whose message names that process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    kind = ValueError if isinstance(error, ValueError) else OSError
    errors = gathered(None if error is None else (kind, str(error) or type(error).__name__), group)
    if error is not None:
        raise error
    for process, remote in enumerate(errors):
        if remote is not None:
            remote_kind, message = remote
            raise remote_kind(f"Process {process}: {message}")


class TimeLimit:
    """Ends this process where a step of the whole group takes longer than it may.

    A process that waits for another inside gloo or NCCL cannot raise an error, so a thread waits: where more than
    `minutes` pass between `begin` and `end`, it writes the sentence that `message` gives to stderr, and ends the
    process. A process alone waits for nobody, and has no limit.
    """

    def __init__(self, minutes: float, message: Callable[[], str]) -> None:
        self._seconds, self._message = 60 * minutes, message
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """Start counting the time."""
        if count() > 1:
            self._timer = threading.Timer(self._seconds, self._end_process)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Stop counting the time until the next `begin`."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_process(self) -> None:
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"error: {self._message()}\n".encode(errors="replace"))
        os._exit(2)  # as all errors of the command line


@contextmanager
def plain_connection_errors(minutes: float) -> Iterator[None]:
    """Raise ConnectionError with one sentence in place of an error of torch's communication.

    `minutes` is how long a process waits for the others.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo has no class of its own for its errors; they begin with the place in its source.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise ConnectionError(
            "The other processes of the run cannot be reached: one of them has ended, or has given no answer for "
            f"train.timeout_minutes={minutes:g}. Its own messages say why; the same command with --resume auto resumes "
            "from the newest checkpoint."
        ) from error


class TrainingInterrupted(KeyboardInterrupt):
    """One of the :func:`stop_signals` stopped a run; the message says where the checkpoint is and how to resume."""

    def __init__(self, message: str, signal: int | None = None, *, is_saved: bool = False) -> None:
        super().__init__(message)
        self.signal = signal  # the number of the one that asked for it; None where another process got it
        self.is_saved = is_saved  # whether a checkpoint or the model holds all that was done


def stop_signals() -> list[signal.Signals]:
    """The signals that end a run with a checkpoint: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

    SIGHUP is none where it is ignored, as nohup has it.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    return numbers


class Interrupt:
    """Whether the run is to stop: one of the :func:`stop_signals` (`signal`) asked for it, or its launcher is gone.

    In the block of this context manager the step in progress is finished; a second signal ends it at once. A second one
    within `SAME_WISH_SECONDS` repeats the first: whoever signals all processes of a job at once signals torchrun as
    well, which passes the signal on. Python delivers signals to the main thread; any other thread records none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first = math.inf  # when it came
        self._raises = False
        self._handlers: dict[int, Any] = {}  # those before the block
        # torchrun's processes end with it, unless it was killed: then nobody would stop them.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether the run is to stop after this step."""
        return self.signal is not None or self._launcher not in (None, os.getppid())

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._record) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def raised_at_once(self) -> Iterator[None]:
        """In this block a first signal raises TrainingInterrupted wherever the main thread is."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _record(self, number: int, _: Any) -> None:
        if self.signal is None:
            self._first, self.signal = time.monotonic(), number
            if self._raises:
                raise TrainingInterrupted("Stopped at once.", number)
        elif time.monotonic() - self._first > SAME_WISH_SECONDS:
            self.__exit__()
            os.kill(os.getpid(), number)
