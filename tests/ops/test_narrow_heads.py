"""Ordinary attention of narrow heads by the CPU kernel: as right as the operator, and taken where it is the faster."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from budget import Case, Problem, build, expect, skip_unless_it_takes
from diff_transformer import SoftmaxAttention
from diff_transformer.ops import backends
from diff_transformer.ops.cpu.cpu_backend import is_faster
from diff_transformer.ops.flex import is_block_mask
from diff_transformer.ops.narrow_heads import attends_to_narrow_heads, narrow_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True, "layout": "projection"},
    "decoding one token": {"queries": 1, "keys": 19, "is_causal": True, "layout": "cache"},
    "63 of 111 tokens": {"queries": 63, "keys": 111, "is_causal": True, "d": 15, "dv": 15},
    "more queries than keys, causal": {"queries": 11, "keys": 5, "is_causal": True},
    "257 tokens, grouped": {"batch": 1, "key_heads": 1, "queries": 257, "keys": 257, "is_causal": True, "gain": 1.6},
    "padding": {"mask": "bool (B, 1, 1, S)"},
    "a mask for each head": {"mask": "add -inf (B, H, N, S)", "is_causal": True},
    "window": {"window": 3, "is_causal": True},
    "documents": {"batch": 1, "documents": (2, 3, 4), "is_causal": True},
    "d = 1": {"d": 1, "dv": 1},
}


def ordinary(q: Tensor, k: Tensor, v: Tensor, lam: float, **options: Any) -> Tensor:
    """The first map of each head alone, as the operator with a λ of 0 has it."""
    assert lam == 0.0
    return narrow_attention(q[:, :, 0], k[:, :, 0], v, **options)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the kernel and torch's own attention ran."""
    counter: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return function(*args, **kwargs)

        return call

    kernel = backends._BACKENDS["cpu"]
    monkeypatch.setitem(backends._BACKENDS, "cpu", kernel._replace(attend=counted("cpu", kernel.attend)))
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted("torch", F.scaled_dot_product_attention))
    return counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_within_the_budget_of_the_oracle(case: str, dtype: torch.dtype, ran: Counter[str]) -> None:
    """Outputs and the gradients of queries, keys and values; those of a second map's queries are 0."""
    skip_unless_it_takes("cpu", dtype)
    if not is_faster():
        pytest.skip("auto takes another backend here")
    problem: Problem = replace(build(Case(**{"key_maps": 1, "dv": 4, "dtype": dtype, **CASES[case]})), lam=0.0)
    expect(problem).check(problem.solve(ordinary))
    assert ran == {"cpu": 1}


def test_a_second_map_with_a_weight_is_caught() -> None:
    problem = replace(build(Case(key_maps=1, dv=4, is_causal=True)), lam=0.0)

    def wrong(q: Tensor, k: Tensor, v: Tensor, lam: float, **options: Any) -> Tensor:
        return (1 - 1e-4) * ordinary(q, k, v, lam, **options)

    with pytest.raises(AssertionError, match="over budget"):
        expect(problem).check(problem.solve(wrong))


@pytest.mark.parametrize(
    ("width", "dtype", "dropout", "expected"),
    [
        (15, torch.float32, 0.0, True),
        (8, torch.bfloat16, 0.0, True),
        (8, torch.float16, 0.0, True),
        (16, torch.float32, 0.0, False),
        (8, torch.float64, 0.0, False),
        (8, torch.float32, 0.1, False),
    ],
    ids=str,
)
def test_which_heads(width: int, dtype: torch.dtype, dropout: float, expected: bool) -> None:
    skip_unless_it_takes("cpu", torch.float32)
    query = torch.randn(1, 2, 5, width, dtype=dtype)
    assert attends_to_narrow_heads(query, None, dropout) == (expected and is_faster())


def test_not_on_another_device_nor_with_a_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    query = torch.randn(1, 2, 5, 8)
    assert not attends_to_narrow_heads(query.to("meta"), None, 0.0)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, device="cpu", BLOCK_SIZE=16)
    assert is_block_mask(mask)
    assert not attends_to_narrow_heads(query, mask, 0.0)


@pytest.mark.parametrize("head_dim", [8, 16])
def test_what_the_layer_runs(head_dim: int, ran: Counter[str]) -> None:
    skip_unless_it_takes("cpu", torch.float32)
    torch.manual_seed(0)
    layer = SoftmaxAttention(4 * head_dim, 4, layer=1, num_key_value_heads=2)
    x = torch.randn(2, 7, 4 * head_dim)
    narrow = layer(x, is_causal=True)
    assert ran == {"cpu" if head_dim == 8 and is_faster() else "torch": 1}
    exact = layer.double()(x.double(), is_causal=True)
    assert ran["torch"] == 1 + (head_dim == 16)
    torch.testing.assert_close(narrow.double(), exact, rtol=0, atol=1e-5)
