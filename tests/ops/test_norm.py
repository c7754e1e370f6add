"""RMSNorm, alone and as the operator's last step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from budget import BACKENDS, DTYPES, Case, build, check_normed, prepared, skip_unless_it_takes, takes
from diff_transformer import diff_attention
from diff_transformer.ops.functional import rms_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_against_the_formula(dtype: torch.dtype, spread: float, eps: float) -> None:
    x = (torch.randn(2, 3, 10, dtype=torch.float64) * spread).to(dtype)
    weight = torch.randn(10, dtype=torch.float64).to(dtype)
    out = rms_norm(x, weight, eps)
    assert out.dtype == dtype
    expected = oracle.rms_norm(x.double().numpy(), weight.double().numpy(), eps)
    # Computed in float32 at least: one rounding to the dtype, and a handful in the accumulator.
    wide = torch.promote_types(dtype, torch.float32)
    limit = np.abs(expected) * (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(wide).eps)
    limit += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert np.all(np.abs(out.double().numpy() - expected) <= limit)


def test_squares_do_not_overflow_half_precision() -> None:
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16)), torch.ones(1, 4, dtype=torch.float16))


def test_a_float32_weight_does_not_change_the_dtype() -> None:
    assert rms_norm(torch.randn(3, 6).bfloat16(), torch.ones(6)).dtype == torch.bfloat16


def test_gradients() -> None:
    x, weight = torch.randn(2, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), leaves)


# The operator's norm.

CASE = Case(heads=4, queries=7, keys=9, is_causal=True, lam="full")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_the_operator_normalises_each_head(backend: str, dtype: torch.dtype) -> None:
    skip_unless_it_takes(backend, dtype)
    problem, expected = prepared(replace(CASE, dtype=dtype))
    weight = torch.linspace(-2, 2, CASE.dv, dtype=dtype)
    options = {**problem.options, "backend": backend, "norm_weight": weight, "norm_scale": 0.7}
    out = diff_attention(problem.q, problem.k, problem.v, problem.lam, **options)
    assert out.dtype == dtype
    check_normed(out, expected, weight, norm_scale=0.7)


@pytest.mark.parametrize("settings", [{}, {"norm_eps": 0.5, "norm_scale": -0.3}], ids=["as given", "of its own"])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_the_operators_norm_is_the_norm_of_its_result(backend: str, settings: dict[str, float]) -> None:
    """Forward and every gradient, the weight's included, against the norm applied to the same heads afterwards."""
    dtype = torch.float64 if takes(backend, torch.float64) else torch.float32
    skip_unless_it_takes(backend, dtype)
    problem = build(replace(CASE, dtype=dtype))
    assert isinstance(problem.lam, Tensor)
    weight = torch.randn(CASE.dv, dtype=dtype)
    results = []
    for fused in (True, False):
        leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.lam, weight)]
        *inputs, norm_weight = leaves
        if fused:
            out = diff_attention(*inputs, is_causal=True, backend=backend, norm_weight=norm_weight, **settings)
        else:
            heads = diff_attention(*inputs, is_causal=True, backend=backend)
            out = rms_norm(heads, norm_weight, settings.get("norm_eps", 1e-5)) * settings.get("norm_scale", 1.0)
        results.append([out, *torch.autograd.grad(out, leaves, problem.dout)])
    torch.testing.assert_close(*results)
