"""What ends a process whose fellows have ended or hang, in one sentence instead of waiting or a traceback."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

_EXIT_CODE = 2  # as that of other errors


class TimeLimit:
    """Ends this process where work of the whole group takes longer than it may.

    A process that waits for another inside gloo or NCCL cannot raise an error; NCCL's own limit ends it with a dump of
    its state. So a thread looks at the clock.

    Args:
        minutes: how long may pass between `begin` and `end`.
        sentence: what to say on stderr before the end.
    """

    def __init__(self, minutes: float, sentence: Callable[[], str]) -> None:
        self._seconds, self._sentence = 60 * minutes, sentence
        self._deadline = math.inf
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at the clock as long as this is open."""
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def begin(self) -> None:
        """From now on the time counts."""
        self._deadline = time.monotonic() + self._seconds

    def end(self) -> None:
        """The time no longer counts, until the next `begin`."""
        self._deadline = math.inf

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() > self._deadline:
                os.write(2, f"error: {self._sentence()}\n".encode(errors="replace"))
                os._exit(_EXIT_CODE)


@contextmanager
def plain_connection_errors(minutes: float) -> Iterator[None]:
    """Say in one sentence that other processes cannot be reached, where torch says so.

    Args:
        minutes: how long a process waits for the others, for the message.

    Raises:
        ConnectionError: in place of an error of torch's communication.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo has no class of its own for its errors; they begin with the place in its source.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise ConnectionError(
            "The other processes of the run cannot be reached: one of them has ended, or has given no answer for "
            f"train.timeout_minutes={minutes:g}. Its own messages say why; the same command with --resume auto goes on "
            "from the newest checkpoint."
        ) from error
