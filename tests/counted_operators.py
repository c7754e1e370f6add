"""Counts the operators that torch runs, so that it shows which backend answers."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def named(self, part: str) -> int:
        return sum(count for name, count in self.count.items() if part in name)
