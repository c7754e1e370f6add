"""Counts the messages of one rank of many without the others, by torch's fake process group."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

    Examples:
        >>> with one_rank_of(8), Messages() as messages:
        ...     torch.distributed.all_reduce(torch.zeros(1024, 1024))
        >>> messages.bytes
        Counter({('allreduce', 8): 4194304})
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the rank's own tensors
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        collective = name.rpartition("::")[2].strip("_").replace("all_", "all")
        collective = collective.removesuffix("_base").removesuffix("_tensor").removesuffix("_into")
        if name.startswith(_NAMESPACES) and not collective.startswith(_SILENT):
            key, leaves = (collective, _group_size(args)), tree_leaves((args, kwargs, result))
            self.count[key] += 1
            self.bytes[key] += max((x.nbytes for x in leaves if isinstance(x, Tensor)), default=0)
        return result


def _group_size(args: Any) -> int:
    """Return how many ranks take part: of the group among the arguments, or of the group named last."""
    for value in args:
        with suppress(AttributeError, RuntimeError):  # no script object, or another one
            return dist.ProcessGroup.unbox(value).size()
    name: Any = next(value for value in reversed(args) if isinstance(value, str))
    return _resolve_process_group(name).size()
