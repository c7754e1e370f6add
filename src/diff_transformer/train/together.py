"""Steps that all processes of a run take together, so that an error of one is an error of all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_AS_LONG_AS_IT_TAKES = timedelta(days=30)  # hashing a corpus is no step, after whose usual time a process is given up


def rank() -> int:
    """Which process this is; 0 where there is one."""
    return dist.get_rank() if _several() else 0


def is_first() -> bool:
    """Whether this process is the one that moves and deletes files for all."""
    return rank() == 0


def gathered(value: T, group: Any = None) -> list[T]:
    """Every process' value, by rank, through a process group if not the default one. Called on every process."""
    if not _several():
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value, group=group)
    return values


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _several() else 1


def shared_out(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Which of so many parts, from 0, each name belongs to, so that their sizes add up to about the same."""
    filled = [0] * parts
    numbers = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        numbers[name] = filled.index(min(filled))
        filled[numbers[name]] += sizes[name]
    return numbers


def own_share(sizes: Mapping[str, int]) -> list[str]:
    """This process' part of names with sizes; all processes together have all of them, each once."""
    return [name for name, process in shared_out(sizes, count()).items() if process == rank()]


def told_by_first(find: Callable[[], T]) -> T:
    """What the first process finds, on every process. Called on every process; the others wait as long as it takes.

    Raises:
        OSError, ValueError: as :func:`together`, where the first process raised something.
    """
    if not _several():
        return find()
    found: list[T] = []
    group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    with together(group):
        if is_first():
            found.append(find())
    told: list[Any] = found or [None]
    dist.broadcast_object_list(told, src=0, group=group)
    dist.destroy_process_group(group)
    value: T = told[0]
    return value


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """Work that each process does without the others. At the end they wait for each other, through a process group if
    not the default one.

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
    failures = gathered(None if own is None else (isinstance(own, ValueError), str(own) or type(own).__name__), group)
    if own is not None:
        raise own
    for process, failure in enumerate(failures):
        if failure is not None:
            kind = ValueError if failure[0] else OSError
            raise kind(f"Process {process}: {failure[1]}")


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()
