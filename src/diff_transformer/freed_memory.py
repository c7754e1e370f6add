"""Has the C library keep the memory that is freed, for processes that train on a CPU.

glibc gives large freed memory back to the system, and takes it anew for the next step: of a small model's step a tenth
of the time goes into pages that the system hands out again, filled with zeros.
"""

import ctypes
import os
import platform

# Of <malloc.h>: above which size memory comes from the system directly, and how much may lie free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGEST, _MOST_FREE = 1 << 30, (1 << 31) - 1


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, up to 2 GiB, for itself. Says whether it does.

    Not where the C library is another one than glibc, nor where the environment says how glibc manages memory
    (``MALLOC_…``, ``GLIBC_TUNABLES``).
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    # Both: the second alone would leave the first at 128 KiB, where glibc otherwise raises it as it goes.
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and set_option(_TRIM_THRESHOLD, _MOST_FREE))
