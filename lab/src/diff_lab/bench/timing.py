"""Times candidates in alternation: each runs once a round, so that a drift of the machine affects all of them alike."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Run = Callable[[], object]
# (run, repeats) → seconds of one run.
Clock = Callable[[Run, int], float]

NO_MEMORY = "it does not fit in the device's memory"

# Memory that is read before each run, in sizes of the second-level cache, and that size where torch does not know it.
FLUSH, USUAL_CACHE = 4, 64 << 20
# The device's queue holds about a thousand launches; so many runs at a time fit into it.
BURST = 50
# The host's head start relative to the time that enqueuing takes, its maximum in seconds, and cycles of a second.
HEAD_START, LONGEST_START, CYCLES = 1.25, 0.2, 2e9

# A sample repeats a fast candidate until it takes about so long: clocks and calls cost microseconds.
SAMPLE_SECONDS = 0.005
# The default number of rounds gives each candidate about so many seconds, within these bounds.
CANDIDATE_SECONDS = 0.3
LEAST_ROUNDS, MOST_ROUNDS = 5, 25


def try_run(device: torch.device, work: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return the result of `work` and None; or None and the reason why it failed, which must not end a benchmark of
    many minutes: torch, cuDNN, Triton and the driver refuse in their own ways what is too large for them.
    """
    try:
        value = work(*arguments)
        synchronize(device)  # a kernel's failure belongs to the work which launched it
        return value, None
    except torch.OutOfMemoryError:
        reason = NO_MEMORY
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
    # Not in the clauses above: there the exception still holds the frames, and they their tensors.
    free_memory(device)
    return None, reason


def free_memory(device: torch.device) -> None:
    """Free all memory that nothing refers to any more, including torch's cache."""
    gc.collect()
    synchronize(device)  # raises again if the device is beyond use
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wall_clock(device: torch.device) -> Clock:
    """Make the clock of a user's waiting, launches included: a CUDA device is synchronised before and after."""

    def seconds(run: Run, repeats: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        return max(time.perf_counter() - start, 1e-9) / repeats

    return seconds


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; nothing on others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_clock(device: torch.device) -> Clock:
    """Make the clock of the device's work: events on CUDA, else the wall clock."""
    return EventClock(device) if device.type == "cuda" else wall_clock(device)


class EventClock:
    """Times each run between two CUDA events, with none of its data in the second-level cache.

    Before each run other memory is read, several times the size of the cache, so that the run's inputs come from the
    device's memory, as in a model whose other layers ran since. It is read and not written, so that nothing is written
    back while the run is timed. Meanwhile, and while the device sleeps at the start of a burst, the host enqueues, so
    that launches do not show in the time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or USUAL_CACHE
        self._other = torch.ones(FLUSH * cache // 4, device=device)
        self._enqueuing: dict[Run, float] = {}
        self._other.sum()  # its kernel is loaded here, not in the first burst

    def __call__(self, run: Run, repeats: int) -> float:
        with torch.cuda.device(self._device):
            total = sum(self._burst(run, min(BURST, repeats - done)) for done in range(0, repeats, BURST))
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
        # Only of the first, single run: later the host may have waited for space in the queue.
        self._enqueuing.setdefault(run, (time.perf_counter() - begin) / repeats)
        torch.cuda.synchronize(self._device)
        return sum(first.elapsed_time(last) for first, last in pairs) * 1e-3


def alternate(candidates: Mapping[str, Run], clock: Clock, rounds: int | None = None) -> dict[str, list[float]]:
    """Time one run of each candidate in seconds, one value a round; the order rotates from round to round.

    The values of one round belong together: a ratio is formed within a round, and its median taken over the rounds.
    Each candidate has run before, so that no first run is timed. Without `rounds` there are 5 to 25 of them, more the
    shorter a run is.
    """
    once = {name: clock(run, 1) for name, run in candidates.items()}
    repeats = {name: max(1, math.ceil(SAMPLE_SECONDS / seconds)) for name, seconds in once.items()}
    if rounds is None:
        longest = max(once[name] * repeats[name] for name in candidates)
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(CANDIDATE_SECONDS / longest)))
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    # A collection in the middle of a run would be charged to that run.
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(clock(candidates[name], repeats[name]))
    finally:
        gc.enable()
    return times
