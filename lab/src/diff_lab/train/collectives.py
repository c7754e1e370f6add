"""Exchanges values and errors between the ranks of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Return the number of this process among those of the run; 0 if there is one."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank0() -> bool:
    """Return whether this process is the one that writes, moves and deletes files for all."""
    return rank() == 0


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Return every rank's value; each is pickled on its way. Called on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_rank0(compute: Callable[[], T], group: Any = None) -> T:
    """Compute a value on rank 0 and return it on every rank, or raise its error on every rank.

    Called on every rank.
    """
    with propagate_errors(group):
        value: Any = compute() if is_rank0() else None
    return all_gather_object(value, group)[0]


def broadcast_from_rank0(compute: Callable[[], T]) -> T:
    """Compute a value as :func:`on_rank0` does, but let the other ranks wait as long as it takes."""
    if not dist.is_initialized():
        return compute()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))  # hashing a corpus may take longer than a step
    value = on_rank0(compute, group)
    dist.destroy_process_group(group)
    return value


@contextmanager
def propagate_errors(group: Any = None) -> Iterator[None]:
    """Raise an exception of one rank on every rank, so that none waits for ever. Called on every rank.

    At the end of the block the ranks wait for each other. Inside, none may wait for another: one that failed would
    leave it waiting. The rank that failed raises its own error; the others a ValueError, or an OSError for any other
    error, whose message names that rank's process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    kind = ValueError if isinstance(error, ValueError) else OSError
    errors = all_gather_object(None if error is None else (kind, str(error) or type(error).__name__), group)
    if error is not None:
        raise error
    for process, remote in enumerate(errors):
        if remote is not None:
            remote_kind, message = remote
            raise remote_kind(f"Process {process}: {message}")


@contextmanager
def plain_connection_errors(minutes: float) -> Iterator[None]:
    """Raise ConnectionError with one sentence in place of an error of torch's communication.

    `minutes` is how long a process waits for the others.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo has no class of its own for its errors; they begin with the place in its source.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise ConnectionError(
            "The other ranks of the run cannot be reached: one of them has ended, or has given no answer for "
            f"train.timeout_minutes={minutes:g}. Its own messages say why; the same command with --resume auto resumes "
            "from the newest checkpoint."
        ) from error
