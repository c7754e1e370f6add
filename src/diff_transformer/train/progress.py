"""What a training run tells the one who watches it, and how it is asked to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SAME_WISH_SECONDS = 3.0


class Progress(Protocol):
    """Shows how far a run is. Training itself prints nothing."""

    def start(self, total: int, description: str) -> None:
        """A run of `total` steps begins, or goes on."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` steps are done; the loss is that of the last one."""

    def tell(self, message: str) -> None:
        """Something to know about the run: what it uses, what it leaves out."""

    def stop(self) -> None:
        """The run is over, whichever way it ended."""


class Silent:
    """A progress that shows nothing."""

    def start(self, total: int, description: str) -> None:
        """Nothing."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Nothing."""

    def tell(self, message: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run after a whole step; its message says where the checkpoint is and how to go on.

    Attributes:
        signal: the number of the signal that asked for it; None where another process got it.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class DivergenceError(ValueError):
    """A step went wrong; the message says where it began. The weights before that step are untouched."""


class Interrupt:
    """Whether a signal asked the run to stop, and which; or the launcher is gone that watched over this process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        # torchrun's processes end with it, unless it was killed: then nobody would stop them.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        return self.signal is not None or self._launcher not in (None, os.getppid())


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C or SIGTERM into a note, so that a step is never cut in half; a second one ends at once.

    One that comes within seconds of the first is the same wish: who signals all processes of a job at once signals
    torchrun as well, which hands it on.

    Python delivers signals to the main thread: in any other, this does nothing and the note stays empty.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    first: float | None = None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first, interrupt.signal = now, number
        elif now - first > SAME_WISH_SECONDS:
            restore()
            os.kill(os.getpid(), number)

    for number in before:
        signal.signal(number, note)
    try:
        yield interrupt
    finally:
        restore()
