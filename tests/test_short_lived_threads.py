"""Threads that compute and end: what came of the work, and that nothing of them is left."""

import threading
import time
from pathlib import Path

import pytest
import torch

from diff_transformer.utils.servers import in_short_lived_thread

NATIVE_THREADS = Path("/proc/self/task")


def test_the_work_is_done_in_a_thread_that_has_ended() -> None:
    thread = in_short_lived_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_is_that_of_the_work() -> None:
    with pytest.raises(ZeroDivisionError):
        in_short_lived_thread(lambda: 1 / 0)


@pytest.mark.skipif(not NATIVE_THREADS.is_dir(), reason="needs Linux")
@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="needs torch with OpenMP")
def test_the_helpers_of_the_thread_end_with_it() -> None:
    def count() -> int:
        return len(list(NATIVE_THREADS.iterdir()))

    def compute() -> int:
        torch.set_num_threads(3)  # of this thread
        torch.ones(1 << 20).exp()
        return count()

    def settled(most: int) -> bool:
        end = time.monotonic() + 20
        while count() > most and time.monotonic() < end:  # the helpers end a moment after their thread
            time.sleep(0.01)
        return count() <= most

    threads = torch.get_num_threads()
    try:
        computing = in_short_lived_thread(compute)  # with what torch begins once for all
        assert settled(computing - 3)
        before = count()
        assert in_short_lived_thread(compute) >= before + 3
        assert settled(before)
    finally:
        torch.set_num_threads(threads)
