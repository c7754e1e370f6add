"""Gradients that float16 holds, of summands that it does not hold: they are added up in float32 and rounded once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from budget import BACKENDS, Problem, float64, magnitudes, skip_unless_it_takes, solve_by_oracle
from diff_transformer.ops import diff_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Of the incoming gradients of four heads that are equal in all else: their sum is a tenth of one head's.
SIGNS = torch.tensor([1.0, 1.0, -1.0, -0.9]).view(1, 4, 1, 1)


def equal_heads(
    heads: int, key_maps: int, lam: float, second: float = 1.0, alike: bool = False, dtype: torch.dtype = torch.float32
) -> Problem:
    """Heads with the same queries, all much alike, and one key head.

    Queries of the second map are `second` times those of the first. `alike`: both maps have the same keys, and all keys
    the same value, so that the gradients of queries and keys are small. λ has `dtype`.
    """

    def like(*shape: int) -> Tensor:
        return 1 + torch.randn(shape, dtype=torch.float64) / 8

    queries = like(1, 1, 1, 64, 4) * torch.tensor([1.0, second], dtype=torch.float64).view(1, 1, 2, 1, 1)
    keys, values = torch.randn(1, 1, key_maps, 5, 4, dtype=torch.float64), torch.randn(1, 1, 5, 8, dtype=torch.float64)
    if alike:
        keys[:, :, 1], values[:, :, 1:] = keys[:, :, 0], values[:, :, :1]
    tensors = queries.expand(1, heads, 2, 64, 4), keys, values
    q, k, v, dout = (x.to(torch.float16) for x in (*tensors, like(1, 1, 64, 8) * SIGNS[:, :heads] * 5000))
    return Problem(q, k, v, torch.tensor(lam, dtype=dtype), dout)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "heads that share keys, values and a λ in float16": lambda: equal_heads(4, 2, 0.5, dtype=torch.float16),
    "maps that share keys": lambda: equal_heads(1, 1, 0.95),
    "maps that share values": lambda: equal_heads(1, 2, 0.95, alike=True),
    "heads and maps that share keys": lambda: equal_heads(4, 1, 0.5, second=-1.0),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_near_the_largest_number(backend: str, problem: str) -> None:
    skip_unless_it_takes(backend, torch.float16)
    posed = PROBLEMS[problem]()
    values, forward = solve_by_oracle(posed)
    assert all(abs(values[name]).max() < torch.finfo(getattr(posed, name).dtype).max for name in ("q", "k", "v", "lam"))
    terms = magnitudes(posed, forward)
    assert max(terms[name].max() for name in "kv") > 4 * torch.finfo(torch.float16).max
    result = posed.solve(diff_attention, backend=backend)
    for name, value in values.items():
        # The band of tests/budget.py; its plain formula is no measure here, as it gives Inf.
        limit = torch.finfo(torch.float16).eps * (3 * terms[name].max() + abs(value))
        assert (abs(float64(result[name]) - value) <= limit).all(), name
