"""What a run takes: by the clock on the wall, or on a CUDA device between two events."""

import time
from collections.abc import Callable, Iterator

import torch

Run = Callable[[], object]
# Runs in a row → seconds of one of them.
Clock = Callable[[Run, int], float]

# Memory that is read before each run, in second-level caches, and the size of such a cache where torch does not tell.
FLUSH, USUAL_CACHE = 4, 64 << 20
# A queue holds about a thousand launches; so many runs at a time fit into it.
BURST = 50
# The host's head start: a share more than it took to enqueue the runs, and at most so many seconds.
HEAD_START, LONGEST_START, CYCLES = 1.25, 0.2, 2e9


def wall_clock(device: torch.device) -> Clock:
    """What somebody waits for, launches included; a CUDA device is waited for before and after."""

    def seconds(run: Run, repeats: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        return max(time.perf_counter() - start, 1e-9) / repeats

    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_clock(device: torch.device) -> Clock:
    """What the device is busy with: CUDA events where there are any, else the clock on the wall."""
    return EventClock(device) if device.type == "cuda" else wall_clock(device)


class EventClock:
    """Seconds between two CUDA events around each run, with nothing of the run's own in the second-level cache.

    Before each run other memory is read, several times the cache: what a run reads comes from the device's memory, as
    in a model whose other layers ran since. It is read and not written, so that nothing is left to be written back
    while the run is timed. Meanwhile, and while the device waits at the start of a burst, the host enqueues: launches
    that take it longer than the kernels take the device do not show in the time. What they cost a whole model is in
    `bench model`, which goes by the clock on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or USUAL_CACHE
        self._other = torch.ones(FLUSH * cache // 4, device=device)
        self._enqueuing: dict[Run, float] = {}
        self._other.sum()  # its kernel is loaded here, not in the first burst

    def __call__(self, run: Run, repeats: int) -> float:
        with torch.cuda.device(self._device):
            total = sum(self._burst(run, size) for size in _bursts(repeats))
        return max(total, 1e-9) / repeats

    def _burst(self, run: Run, repeats: int) -> float:
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
        torch.cuda.synchronize(self._device)
        if run in self._enqueuing:
            start = min(self._enqueuing[run] * repeats * HEAD_START, LONGEST_START)
            torch.cuda._sleep(int(start * CYCLES))
        begin = time.perf_counter()
        for first, last in pairs:
            self._other.sum()
            first.record()
            run()
            last.record()
        # Only of the first, single run: later the host may have waited for a place in the queue.
        self._enqueuing.setdefault(run, (time.perf_counter() - begin) / repeats)
        torch.cuda.synchronize(self._device)
        return sum(first.elapsed_time(last) for first, last in pairs) * 1e-3


def _bursts(repeats: int) -> Iterator[int]:
    while repeats > 0:
        yield min(repeats, BURST)
        repeats -= BURST
