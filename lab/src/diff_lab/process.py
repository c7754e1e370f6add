"""Handles the signals that stop a training after its step."""

import math
import os
import signal
import threading
import time
from typing import Any

SAME_WISH_SECONDS = 3.0  # a second signal within this time repeats the first one


class TrainingInterrupted(KeyboardInterrupt):
    """One of the :func:`stop_signals` stopped a run; the message names the checkpoint and how to resume."""

    def __init__(self, message: str, signal: int | None = None, *, is_saved: bool = False) -> None:
        super().__init__(message)
        self.signal = signal  # the number of the one that asked for it; None where another process got it
        self.is_saved = is_saved  # whether a checkpoint or the model holds all that was done


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run with a checkpoint: Ctrl-C, SIGTERM, and SIGHUP unless nohup ignores it."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    return numbers


class Interrupt:
    """Whether the run is to stop: one of the :func:`stop_signals` (`signal`) asked for it, or its launcher is gone.

    In the block of this context manager the step in progress is finished; a second signal ends it at once. A second one
    within `SAME_WISH_SECONDS` repeats the first: torchrun passes on what all processes of a job got at once.
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
