"""What a training run tells the one who watches it, and how it is asked to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Progress(Protocol):
    """Shows how far a run is. Training itself prints nothing."""

    def start(self, total: int, description: str) -> None:
        """A run of `total` steps begins, or goes on."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` steps are done; the loss is that of the last one."""

    def stop(self) -> None:
        """The run is over, whichever way it ended."""


class Silent:
    """A progress that shows nothing."""

    def start(self, total: int, description: str) -> None:
        """Nothing."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a run after a whole step; its message says where the checkpoint is and how to go on."""


class NonFiniteLossError(ValueError):
    """The loss or the gradient stopped being a number. The weights before that step are untouched."""


class Interrupt:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a flag, so that a step is never cut in half; a second one interrupts at once.

    Python delivers signals to the main thread: in any other, this does nothing and the flag stays down.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
