"""Counts the processors that this process may use: those that it may run on, limited by a container's share of time.

torch takes a thread for each processor that it may run on. In a container with the time of two out of sixty-four, sixty
of those threads wait for locks that the others hold, so the command line asks for fewer. The module also says
whether a process is rank 0.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
_MEMBERSHIP, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_processors() -> int:
    """Return how many threads of this process can compute at a time: 1 or more."""
    return min([_allowed(), *(max(1, math.ceil(quota)) for quota in _quotas(_MEMBERSHIP, _MOUNT))])


def limit_threads() -> None:
    """Limit torch's threads, before it is imported, to a container's processors, unless OMP_NUM_THREADS is set.

    Processes that this one starts have the same limit.
    """
    usable = usable_processors()
    if usable < _allowed():
        os.environ.setdefault(THREADS, str(usable))


def is_rank0() -> bool:
    """Return whether this process is rank 0 of those that a launcher started, which alone prints anything."""
    return os.environ.get("RANK", "0") == "0"


def _allowed() -> int:
    """Count the processors that this process may run on: torch's own number of threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(membership: Path, mount: Path) -> Iterator[float]:
    """Yield the processors' worth of time of each control group around this process (Linux; version 2)."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers:  # of version 1
            continue
        # In a container its own group may be the root of what is mounted, whatever the path says.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = [word for text in _lines(folder / "cpu.max") for word in text.split()]
            if len(limit) == 2 and all(map(str.isdecimal, limit)):  # else "max", or there is no such file
                yield int(limit[0]) / int(limit[1])
            if folder == mount:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
