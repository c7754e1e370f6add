"""Steps that all processes of a run take together, so that an error of one is an error of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Which process this is; 0 where there is one."""
    return dist.get_rank() if _several() else 0


def is_first() -> bool:
    """Whether this process is the one that moves and deletes files for all."""
    return rank() == 0


def gathered(value: T) -> list[T]:
    """Every process' value, by rank. Called on every process."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """Work that each process does without the others. At the end they wait for each other.

    Inside, no process may wait for another: one that failed would leave it waiting.

    Raises:
        OSError, ValueError: another process raised this (OSError for any other error); the message names the process.
            The process that failed raises its own error.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    failures = gathered(None if own is None else (isinstance(own, ValueError), str(own) or type(own).__name__))
    if own is not None:
        raise own
    for process, failure in enumerate(failures):
        if failure is not None:
            kind = ValueError if failure[0] else OSError
            raise kind(f"Process {process}: {failure[1]}")


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()
