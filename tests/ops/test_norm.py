"""RMSNorm."""

import numpy as np
import pytest
import torch

import oracle
from diff_transformer.ops.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
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


def test_without_a_weight_and_at_zero() -> None:
    x = torch.randn(3, 6)
    assert torch.equal(rms_norm(x), rms_norm(x, torch.ones(6)))
    assert torch.equal(rms_norm(torch.zeros(2, 6), torch.ones(6)), torch.zeros(2, 6))


def test_a_float32_weight_does_not_change_the_dtype() -> None:
    assert rms_norm(torch.randn(3, 6).bfloat16(), torch.ones(6)).dtype == torch.bfloat16


def test_gradients() -> None:
    x, weight = torch.randn(2, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), leaves)
