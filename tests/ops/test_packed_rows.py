"""Keys and values in eight bits, which the kernels of the CPU and of Triton read as a cache holds them."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from budget import Case, Problem, check_normed, expect, prepared, skip_unless_it_takes
from diff_transformer.ops import operator
from diff_transformer.ops.operator import packed_attention
from diff_transformer.ops.packed import pack, unpack

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ("cpu", "triton")

CASES = {
    "whole vectors": Case(heads=4, queries=1, keys=150, d=64, dv=128, is_causal=True, lam="per head"),
    "odd widths": Case(heads=4, key_heads=2, queries=2, keys=37, d=9, dv=13, is_causal=True),
    "wide": Case(batch=1, queries=1, keys=70, d=160, dv=129, mask="add (B, H, N, S)"),
    "wider": Case(batch=1, queries=1, keys=20, d=272, dv=70, lam="full"),
    "a chunk": Case(queries=4, keys=300, d=16, dv=32, is_causal=True, layout="projection"),
    "shared keys": Case(heads=4, key_heads=2, key_maps=1, queries=2, keys=33, is_causal=True, lam="per token"),
    "window": Case(queries=2, keys=90, window=17, is_causal=True, lam="per head"),
    "mask": Case(queries=2, keys=50, mask="bool (B, 1, 1, S)", is_causal=True),
    "three signal heads": Case(batch=1, heads=3, key_heads=1, ratio=3, queries=1, keys=700, lam="full"),
}
NOT_BY_TRITON = ("odd widths", "wide", "wider")  # rows that are no whole words, and heads that are too wide


Rows = tuple[Tensor, Tensor]


def packed(k: Tensor, v: Tensor) -> Rows:
    return pack(k.transpose(2, 3).flatten(-2)), pack(v)


def problem_of(name: str, dtype: torch.dtype = torch.float32, exact: bool = True) -> tuple[Problem, Rows]:
    """A case with the numbers that its rows stand for; `exact`: scales are powers of 2, which every dtype holds."""
    problem, _ = prepared(replace(CASES[name], dtype=dtype))

    def rounded(x: Tensor) -> Tensor:
        if exact:
            scale = 2.0 ** (x.float().abs().amax(-1, keepdim=True) / 127).log2().ceil()
            x = (x.float() / scale).round()
            x[..., 0] = 127.0
            x = x * scale
        return unpack(pack(x), dtype)

    k = rounded(problem.k.transpose(2, 3).flatten(-2)).unflatten(-1, (-1, problem.k.shape[-1])).transpose(2, 3)
    problem = replace(problem, k=k, v=rounded(problem.v))
    return problem, packed(problem.k, problem.v)


class UnpackedError(Exception):
    """The rows are about to be unpacked."""


def decode(backend: str, q: Tensor, rows: Rows, lam: Tensor | float, **settings: Any) -> Tensor | None:
    """The kernel's own answer, or None if it leaves the request to others."""
    lam = torch.as_tensor(lam, dtype=torch.float32)
    with torch.no_grad(), mock.patch.object(operator, "unpacked", side_effect=UnpackedError):
        try:
            return packed_attention(q, *rows, lam, backend=backend, **settings)
        except UnpackedError:
            return None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_by_error_budget(name: str, dtype: torch.dtype | None, backend: str) -> None:
    """Against float64 on the numbers that the rows stand for, with a norm and without; None: any scale, in float32."""
    skip_unless_it_takes(backend, dtype or torch.float32)
    problem, rows = problem_of(name, dtype or torch.float32, exact=dtype is not None)
    expected, weight = expect(problem), torch.linspace(0.5, 1.5, problem.v.shape[-1])
    out = decode(backend, problem.q, rows, problem.lam, **problem.options)
    if backend == "triton" and name in NOT_BY_TRITON:
        assert out is None
        return
    normed = decode(backend, problem.q, rows, problem.lam, **problem.options, norm_weight=weight, norm_eps=1e-3)
    assert out is not None
    assert normed is not None
    expected.check_output(out)
    check_normed(normed, expected, weight, norm_eps=1e-3)
    none, one, three = (
        decode(backend, problem.q, rows, problem.lam, signal_weight=torch.tensor(w)) for w in (0.0, 1.0, 3.0)
    )
    assert none is not None
    assert one is not None
    assert three is not None
    torch.testing.assert_close(three.float(), 3 * one.float() - 2 * none.float(), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in triton's interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_rows_that_are_not_finite(backend: str) -> None:
    """Nobody meets them, also where the kernel itself cannot put them aside; a query that sees one gives NaN."""
    skip_unless_it_takes(backend, torch.float32)
    problem, _ = problem_of("mask")
    hidden = ~problem.options["attn_mask"][0, 0, 0]
    k, v = problem.k.clone(), problem.v.clone()
    k[0, :, :, hidden], v[0, :, hidden] = math.nan, math.inf
    with torch.no_grad():
        out = packed_attention(problem.q, *packed(k, v), problem.lam, backend=backend, **problem.options)
        seen = packed_attention(problem.q, *packed(k, v), problem.lam, backend=backend)
    expect(problem).check_output(out)
    assert seen[0].isnan().all()
    assert seen[1].isfinite().all()


@pytest.mark.parametrize("kernel", BACKENDS)
def test_what_the_kernel_leaves_to_others(kernel: str) -> None:
    """Unpacked, the reference and gradients give what they do for the same numbers."""
    skip_unless_it_takes(kernel, torch.float32)
    problem, rows = problem_of("a chunk")
    q = problem.q.clone().requires_grad_()
    for backend in (kernel, "reference"):
        out = packed_attention(q, *rows, problem.lam, backend=backend, **problem.options)
        expect(problem).check_output(out)
    out.sum().backward()
    assert q.grad is not None
    others = [(problem.q.double(), rows), (problem.q, (rows[0][..., :-1], rows[1])), (problem.q[:, :1], rows)]
    for q, other in others[: 2 if kernel == "triton" else 3]:  # the last is refused there
        assert decode(kernel, q, other, 0.5) is None


def test_rows() -> None:
    """An entry is off by half a scale at most; of zeros there is nothing to round."""
    x = torch.randn(2, 3, 5, 7) * torch.logspace(-20, 20, 5).unsqueeze(-1)
    x[0, 0, 0] = 0.0
    assert torch.all((unpack(pack(x), torch.float64) - x).abs() <= x.abs().amax(-1, keepdim=True) / 253)
