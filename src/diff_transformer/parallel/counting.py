"""Counts the messages of one rank of many without the others: a fake process group, and fake tensors if wanted.

with one_rank_of(64), FakeTensorMode():
    ...  # build, spread and call the model
    with Messages() as messages:
        loss.backward()
print(messages)
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_SILENT = ("wait", "barrier", "monitored_barrier")


@contextmanager
def one_rank_of(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of many whose messages nobody receives.

    Examples:
        >>> with one_rank_of(512, rank=3):
        ...     torch.distributed.get_rank()
        3
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Messages(TorchDispatchMode):
    """Counts messages and bytes by collective and number of ranks in its group, of what runs in its block.

    Attributes:
        count: messages by (collective, ranks).
        bytes: their bytes, of the whole tensor that is gathered, reduced or scattered.
        largest: numbers in the largest tensor of each message, in order.

    Examples:
        >>> with one_rank_of(8), Messages() as messages:
        ...     torch.distributed.all_reduce(torch.zeros(1024, 1024))
        >>> print(messages)
        allreduce, 8 ranks: 1 messages, 4.0 MiB
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.largest: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        collective = name.rpartition("::")[2].strip("_").removesuffix("_base").removesuffix("_tensor")
        if name.startswith(_NAMESPACES) and not collective.startswith(_SILENT):
            tensors = list(_tensors((*args, *(kwargs or {}).values(), result)))
            key = collective, _group_size(args)
            self.count[key] += 1
            self.bytes[key] += max((x.numel() * x.element_size() for x in tensors), default=0)
            self.largest.append(max((x.numel() for x in tensors), default=0))
        return result

    def __str__(self) -> str:
        return "\n".join(
            f"{name}, {ranks} ranks: {count} messages, {self.bytes[name, ranks] / 2**20:.1f} MiB"
            for (name, ranks), count in sorted(self.count.items())
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _group_size(args: Any) -> int:
    """Return how many ranks take part: the group is an argument, or its name is the last text among them."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except RuntimeError:  # another object, such as an operation to reduce by
                continue
    names = [value for value in args if isinstance(value, str) and value not in ("sum", "avg", "max", "min")]
    return _resolve_process_group(names[-1]).size() if names else 0
