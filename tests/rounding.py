"""How far rounding alone can move what a model answers, found by moving the result of every operation that it runs.

To first order, the error of an answer is the sum of what the rounding of each step does to it. The rounding of a sum of
n terms is at most n · eps times the sum of their sizes, which is much more than n · eps times the sum where the terms
cancel, as those of λ's gradient do. So a model's projections, scores, softmax, weighted sums, norms and output
projections, and what backpropagation multiplies, are each moved by so much, up or down by chance, with a far larger
number in place of eps: then the rounding of the computation itself does not show, and the rest is proportional.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

STEP = 2.0**-33  # in place of eps: even amplified a thousandfold, its square is far below it
DRAWS = 2  # of signs; an answer has many entries, and the largest counts


class MovedByRounding(TorchDispatchMode):
    """Moves every new float64 tensor by as much as rounding could, if eps were STEP."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, Tensor) and all(result.alias_info is None for result in func._schema.returns)
        if not is_new or out.dtype != torch.float64:
            return out
        signs = torch.randint(0, 2, out.shape, generator=self.generator) * 2 - 1
        moved = out + signs * STEP * rounding_of(func, out, *args, **(kwargs or {}))
        return torch.where(out.isfinite(), moved, out)  # a hidden score stays −∞


def rounding_of(func: Any, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """How much an operation's result may be off, in eps: the number of terms of its sums times the terms' sizes."""
    if func in (aten.mm.default, aten.bmm.default):
        return args[0].shape[-1] * (args[0].abs() @ args[1].abs())
    if func in (aten.sum.default, aten.sum.dim_IntList, aten.mean.dim):
        return args[0].numel() / out.numel() * func(args[0].abs(), *args[1:], **kwargs)
    if func is aten._softmax.default:
        return out.shape[args[1]] * out
    if func is aten._softmax_backward_data.default:
        grad, weights, dim, _ = args
        return out.shape[dim] * weights * (grad.abs() + (grad * weights).abs().sum(dim, keepdim=True))
    return out.abs()


def rounding_limits(answers: Callable[[], Mapping[str, Tensor]]) -> dict[str, float]:
    """By name, how far two ways to compute an answer may be apart, divided by the eps that they compute with.

    Args:
        answers: computes the answers in float64, forward and backward, by torch's own operations alone.
    """
    exact = {name: value.clone() for name, value in answers().items()}
    largest = dict.fromkeys(exact, 0.0)
    for seed in range(DRAWS):
        with MovedByRounding(seed):
            moved = answers()
        for name, value in exact.items():
            assert moved[name].isfinite().all(), name
            largest[name] = max(largest[name], (moved[name] - value).abs().max().item())
    return {name: 2 * error / STEP for name, error in largest.items()}  # both ways round


def check_within(answer: Tensor, expected: Tensor, limit: float, dtype: torch.dtype = torch.float64) -> None:
    """Fails if any entry is off by more than ``limit``, of :func:`rounding_limits`, times the eps of ``dtype``."""
    assert answer.shape == expected.shape
    limit *= torch.finfo(dtype).eps
    error = (answer.double() - expected.double()).abs().max().item()
    assert error <= limit, f"error {error:.3g} over the limit {limit:.3g}"
