"""Ordinary attention of narrow heads by the CPU kernel: as right as the operator, and taken in training alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from budget import Case, Problem, build, expect, skip_unless_it_takes
from diff_transformer import SoftmaxAttention
from diff_transformer.ops import backends
from diff_transformer.ops.cpu.cpu_backend import is_faster, reason_against_cpu_kernel
from diff_transformer.ops.narrow_heads import attends_to_narrow_heads, narrow_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True, "layout": "projection"},
    "decoding one token": {"queries": 1, "keys": 19, "is_causal": True, "layout": "cache"},
    "63 of 111 tokens": {"queries": 63, "keys": 111, "is_causal": True, "d": 7, "dv": 7},
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


needs_kernel = pytest.mark.skipif(
    not is_faster() or reason_against_cpu_kernel() is not None, reason="needs a kernel that auto takes"
)
Q = torch.randn(2, 4, 64, 8)


def learned(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


# Queries, keys, values, mask and dropout.
KERNEL: dict[str, tuple[Any, ...]] = {
    "queries with a gradient": (learned(Q), Q, Q, None, 0.0),
    "values with a gradient": (Q, Q, learned(Q), None, 0.0),
    "a boolean mask": (learned(Q), Q, Q, torch.ones(64, 64, dtype=torch.bool), 0.0),
    "bfloat16": (*[learned(Q.bfloat16())] * 3, None, 0.0),
    "float16": (*[learned(Q.half())] * 3, None, 0.0),
    "heads of 1": (*[learned(Q[..., :1])] * 3, None, 0.0),
}
TORCH: dict[str, tuple[Any, ...]] = {
    "no gradient": (Q, Q, Q, None, 0.0),
    "heads of 9": (*[learned(torch.randn(2, 4, 64, 9))] * 3, None, 0.0),
    "63 queries": (learned(Q[:, :, :63]), learned(Q), learned(Q), None, 0.0),
    "float64": (*[learned(Q.double())] * 3, None, 0.0),
    "dropout": (*[learned(Q)] * 3, None, 0.1),
    "a mask with a gradient": (*[learned(Q)] * 3, learned(torch.zeros(64, 64)), 0.0),
    "another device": (*[learned(Q.to("meta"))] * 3, None, 0.0),
    "a block mask": (*[learned(Q)] * 3, "block", 0.0),
}


@needs_kernel
@pytest.mark.parametrize("case", KERNEL)
def test_what_the_kernel_takes(case: str) -> None:
    assert attends_to_narrow_heads(*KERNEL[case])
    with torch.no_grad():
        assert not attends_to_narrow_heads(*KERNEL[case])


@pytest.mark.parametrize("case", TORCH)
def test_what_is_left_to_torch(case: str) -> None:
    *tensors, mask, dropout = TORCH[case]
    if mask == "block":
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert not attends_to_narrow_heads(*tensors, mask, dropout)


@needs_kernel
def test_what_torch_func_differentiates_is_left_to_torch(ran: Counter[str]) -> None:
    """The kernel has no part in it, and the reference would hold all scores."""
    layer = SoftmaxAttention(32, 4, layer=1)
    gradient = torch.func.grad(lambda x: layer(x, is_causal=True).sum())(torch.randn(1, 64, 32))
    assert gradient.any()
    assert ran == {"torch": 1}


@needs_kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program_asks_for_nothing_of_this_package() -> None:
    layer = SoftmaxAttention(32, 4, layer=1)
    program = torch.export.export(layer, (torch.randn(1, 64, 32),), {"is_causal": True})
    targets = [str(node.target) for node in program.graph.nodes]
    assert not [target for target in targets if "diff_transformer" in target]
    assert any("scaled_dot_product_attention" in target for target in targets)


@needs_kernel
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 9])
def test_what_the_layer_runs(head_dim: int, is_causal: bool, masked: bool, ran: Counter[str]) -> None:
    """By the kernel or by torch: the output and every gradient of the same layer in float64."""
    layer = SoftmaxAttention(4 * head_dim, 4, layer=1, num_key_value_heads=2)
    x = torch.randn(2, 70, 4 * head_dim)
    mask = torch.rand(2, 1, 70, 70) < 0.7 if masked else None
    answers = []
    for dtype in (torch.float32, torch.float64):
        layer = layer.to(dtype)
        layer.zero_grad()
        out = layer(x.to(dtype), attn_mask=mask, is_causal=is_causal)
        out.sum().backward()
        answers.append([out.detach().double(), *(p.grad.double() for p in layer.parameters() if p.grad is not None)])
        assert ran.pop("cpu" if (head_dim, dtype) == (8, torch.float32) else "torch") == 1
        assert not ran.total()
    assert len(answers[0]) == 5
    for computed, exact in zip(*answers, strict=True):
        torch.testing.assert_close(computed, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
