"""Handles the system of a process that trains: signals that stop it after a step, and memory that it keeps."""

import ctypes
import math
import os
import platform
import signal
import threading
import time
from typing import Any

SAME_WISH_SECONDS = 3.0  # a second signal within this time repeats the first one

# Of <malloc.h>: from which size on memory comes from the system directly, and how much may lie free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGEST, _MOST_FREE = 1 << 30, (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Have the C library keep freed blocks smaller than 1 GiB. Return whether it does.

    glibc gives large freed memory back to the system, and takes it anew for the next step: of a step of a million
    parameters on a CPU a tenth of the time goes into pages that the system hands out again, filled with zeros. Kept
    memory goes back if more than 2 GiB lie free at the end of the heap, and when the process ends. Nothing is changed
    if the C library is another one than glibc from 2.35 on, nor if the environment says how glibc manages memory
    (``MALLOC_…``, ``GLIBC_TUNABLES``).
    """
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if is_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    # Both: the second alone would leave the first at 128 KiB. An older glibc takes no number as large.
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and set_option(_TRIM_THRESHOLD, _MOST_FREE))


class TrainingInterrupted(KeyboardInterrupt):
    """One of the :func:`stop_signals` stopped a run; the message names the checkpoint and how to resume."""

    def __init__(self, message: str, signal: int | None = None, *, is_saved: bool = False) -> None:
        super().__init__(message)
        self.signal = signal  # the number of the one that asked for it; None where another process got it
        self.is_saved = is_saved  # whether a checkpoint or the model holds all that was done


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run with a checkpoint: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

    SIGHUP is none if it is ignored, as nohup has it.
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

    def _record(self, number: int, _: Any) -> None:
        if self.signal is None:
            self._first, self.signal = time.monotonic(), number
        elif time.monotonic() - self._first > SAME_WISH_SECONDS:
            self.__exit__()
            os.kill(os.getpid(), number)
