"""Has the C library keep the memory that is freed, for processes that train on a CPU.

glibc gives large freed memory back to the system, and takes it anew for the next step: of a step of a million
parameters a tenth of the time goes into pages that the system hands out again, filled with zeros.
"""

import ctypes
import os
import platform

# Of <malloc.h>: from which size on memory comes from the system directly, and how much may lie free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGEST, _MOST_FREE = 1 << 30, (1 << 31) - 1
_LARGEST_BEFORE = 1 << 25  # what glibc allows before 2.35


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees of blocks smaller than 1 GiB. Says whether it does.

    It goes back to the system where more than 2 GiB lie free at the end of the heap, and when the process ends. Not
    where the C library is another one than glibc, nor where the environment says how glibc manages memory
    (``MALLOC_…``, ``GLIBC_TUNABLES``).
    """
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if is_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    # Both: the second alone would leave the first at 128 KiB, where glibc otherwise raises it as it goes.
    is_set = set_option(_MMAP_THRESHOLD, _LARGEST) or set_option(_MMAP_THRESHOLD, _LARGEST_BEFORE)
    return bool(is_set and set_option(_TRIM_THRESHOLD, _MOST_FREE))
