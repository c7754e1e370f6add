"""Lets models compute in threads that end, as a thread that has computed slows down every other one.

torch computes in parallel through OpenMP. The helpers of a thread belong to it and spin while they wait for its next
operation. Once the helpers of two threads are more than the processor cores they fall asleep instead, and waking them
takes longer than a small operation: on two cores a model of 26M parameters writes 60 tokens/s rather than 100. They end
with their thread. So a server loads its models in a short-lived thread, and one thread computes for all questions.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_short_lived_thread(work: Callable[[], T]) -> T:
    """Do the work in a new thread, wait until that has ended, and return its result or raise its error.

    Ctrl-C ends the waiting, and the thread with the program.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="short-lived", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
