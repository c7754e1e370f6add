"""Keys and values in eight bits, which the CPU kernel reads as a cache holds them."""

import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from budget import Case, Problem, check_normed, expect, prepared
from diff_transformer.ops.cpu.cpu_backend import decode_fast_path, reason_against_cpu_kernel
from diff_transformer.ops.packed import pack, packed_attention, unpack

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no kernel"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = {
    "whole vectors": Case(heads=4, queries=1, keys=150, d=64, dv=128, is_causal=True, lam="per head"),
    "odd widths": Case(heads=4, key_heads=2, queries=2, keys=37, d=9, dv=13, is_causal=True),
    "wide": Case(batch=1, queries=1, keys=70, d=160, dv=129, mask="add (B, H, N, S)"),
    "a chunk": Case(queries=4, keys=300, d=16, dv=32, is_causal=True, layout="projection"),
    "shared keys": Case(heads=4, key_heads=2, key_maps=1, queries=2, keys=33, is_causal=True, lam="per token"),
    "window": Case(queries=2, keys=90, window=17, is_causal=True, lam="per head"),
    "mask": Case(queries=2, keys=50, mask="bool (B, 1, 1, S)", is_causal=True),
    "three signal heads": Case(batch=1, heads=3, key_heads=1, ratio=3, queries=1, keys=700, lam="full"),
}


def rows_of(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the operator as the rows of a cache."""
    return pack(k.transpose(2, 3).flatten(-2)), pack(v)


def representable(problem: Problem) -> Problem:
    """The problem with keys and values that rows of int8 hold exactly, in any dtype: their scales are powers of 2."""

    def rounded(x: Tensor) -> Tensor:
        scale = 2.0 ** (x.float().abs().amax(-1, keepdim=True) / 127).log2().ceil()
        x = (x.float() / scale).round()
        x[..., 0] = 127 * x[..., 0].sign().where(x[..., 0] != 0, torch.ones(()))
        return x * scale

    k = rounded(problem.k.transpose(2, 3).flatten(-2)).unflatten(-1, (-1, problem.k.shape[-1])).transpose(2, 3)
    dtype = problem.q.dtype
    return replace(problem, k=k.to(dtype), v=rounded(problem.v).to(dtype))


def decode(q: Tensor, rows: tuple[Tensor, Tensor], lam: Tensor | float, **settings: Any) -> Tensor | None:
    """The kernel's own answer, or None if it leaves the request to others."""
    given: dict[str, Any] = {"attn_mask": None, "is_causal": False, "scale": None, "window": None}
    given |= {"norm_weight": None, "norm_eps": 1e-5, "norm_scale": 1.0, "signal_weight": None}
    assert reason_against_cpu_kernel() is None
    lam = torch.as_tensor(lam, dtype=torch.float32)
    with torch.no_grad():
        return decode_fast_path("cpu", q, *rows, lam, *(given | settings).values(), packed=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_by_error_budget(name: str, dtype: torch.dtype) -> None:
    """Against float64 on the numbers that the rows stand for, with a norm and without."""
    problem = representable(prepared(replace(CASES[name], dtype=dtype))[0])
    rows = rows_of(problem.k, problem.v)
    assert torch.equal(unpack(rows[1], dtype), problem.v)
    expected = expect(problem)
    out = decode(problem.q, rows, problem.lam, **problem.options)
    assert out is not None
    assert out.dtype == dtype
    expected.check_output(out)
    weight = torch.linspace(0.5, 1.5, problem.v.shape[-1])
    normed = decode(problem.q, rows, problem.lam, **problem.options, norm_weight=weight)
    assert normed is not None
    check_normed(normed, expected, weight)


def test_any_scale_and_weight_of_the_signal() -> None:
    problem, _ = prepared(CASES["odd widths"])
    rows = rows_of(problem.k, problem.v)
    k = unpack(rows[0], torch.float32).unflatten(-1, (-1, problem.q.shape[-1])).transpose(2, 3)
    assert not torch.equal(k, problem.k)
    rounded = replace(problem, k=k, v=unpack(rows[1], torch.float32))
    out = decode(problem.q, rows, problem.lam, **problem.options)
    assert out is not None
    expect(rounded).check_output(out)
    weighted = [decode(problem.q, rows, problem.lam, signal_weight=torch.tensor(w)) for w in (0.0, 1.0, 3.0)]
    torch.testing.assert_close(weighted[2], 3 * weighted[1] - 2 * weighted[0])


def test_hidden_rows_that_are_not_finite() -> None:
    """Nobody meets them, also where the kernel itself cannot put them aside; a query that sees one gives NaN."""
    problem = representable(prepared(CASES["mask"])[0])
    hidden = ~problem.options["attn_mask"][0, 0, 0]
    k, v = problem.k.clone(), problem.v.clone()
    k[0, :, :, hidden], v[0, :, hidden] = math.nan, math.inf
    rows = rows_of(k, v)
    assert not unpack(rows[1], torch.float32)[0, :, hidden].isfinite().any()
    settings = {**problem.options, "backend": "cpu"}
    with torch.no_grad():
        out = packed_attention(problem.q, *rows, problem.lam.detach(), **settings)
        seen = packed_attention(problem.q, *rows, problem.lam, backend="cpu")
    expect(problem).check_output(out)
    assert seen[0].isnan().all()
    assert seen[1].isfinite().all()


def test_what_the_kernel_leaves_to_others() -> None:
    """Unpacked, the reference and gradients give what they do for the same numbers."""
    problem = representable(prepared(CASES["a chunk"])[0])
    rows, q = rows_of(problem.k, problem.v), problem.q.clone().requires_grad_()
    for backend in ("cpu", "reference"):
        out = packed_attention(q, *rows, problem.lam, backend=backend, **problem.options)
        expect(problem).check_output(out)
    out.sum().backward()
    assert q.grad is not None
    many = torch.randn(1, 2, 2, 40, 8)
    for wrong in ((many, rows), (problem.q.double(), rows), (problem.q, tuple(row[..., :-1] for row in rows))):
        assert decode(wrong[0], wrong[1], 0.5) is None


def test_rows() -> None:
    """An entry is off by half a scale at most; of zeros there is nothing to round."""
    x = torch.randn(2, 3, 5, 7) * torch.logspace(-20, 20, 5).unsqueeze(-1)
    x[0, 0, 0] = 0.0
    off = (unpack(pack(x), torch.float64) - x.double()).abs()
    assert torch.all(off <= x.abs().amax(-1, keepdim=True) / 253)
    assert pack(x).shape == (2, 3, 5, 11)
    assert not unpack(pack(x), torch.float32)[0, 0, 0].any()
