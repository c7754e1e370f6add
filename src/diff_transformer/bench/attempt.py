"""Work that may fail for a reason that belongs in a table: too large for the device's memory, refused by a kernel."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

NO_MEMORY = "it does not fit in the device's memory"


def attempt(
    work: Callable[[], T], device: torch.device, answers: tuple[type[Exception], ...] = ()
) -> tuple[T | None, str | None]:
    """What `work` returns, or why it did not: memory of a CUDA device ran out, or one of `answers` was raised.

    Whatever the failed work held is given back before the next candidate asks for memory.
    """
    try:
        value = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's failure is that of the work which launched it
        return value, None
    except torch.OutOfMemoryError:
        reason = NO_MEMORY
    except answers as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        reason = f"{type(failure).__name__}: {first}"
    # Not in the clauses above: there the exception still holds the frames, and they their tensors.
    give_back_memory(device)
    return None, reason


def give_back_memory(device: torch.device) -> None:
    """Free what nothing refers to any more, also what torch keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises again if the device is beyond use
        torch.cuda.empty_cache()
