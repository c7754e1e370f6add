"""Counts the pages of memory that the system gives to this process while it takes, uses and frees the same size."""

import ctypes
from typing import Any

SIZE = 48 << 20  # above the 32 MiB up to which glibc would learn to keep it, and would be told to before 2.35


def pages_of_use(_: Any = None) -> int:
    """The pages that this process takes to use 48 MiB five times, after the first."""
    import resource  # which Windows has not

    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = 0
    for _ in range(6):
        place = library.malloc(ctypes.c_size_t(SIZE))
        ctypes.memset(place, 1, SIZE)
        library.free(place)
        before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
