"""RMSNorm and the headwise norm of Equation 3."""

import numpy as np
import torch

import oracle
from diff_transformer.nn import HeadwiseNorm, RMSNorm


def with_weight(norm: RMSNorm) -> RMSNorm:
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    return norm.double()


def test_headwise_norm() -> None:
    """Over each head's own channels: (B, N, H, 2d), times 1 − λ_init, one weight for all heads."""
    norm, x = with_weight(HeadwiseNorm(8, 0.3)), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    assert norm.weight.shape == (8,)
    out = norm(x)
    for h in range(3):
        expected = 0.7 * oracle.rms_norm(x[:, :, h].numpy(), norm.weight.detach().numpy(), 1e-5)
        np.testing.assert_allclose(out[:, :, h].detach().numpy(), expected, rtol=1e-13)


def test_gradients() -> None:
    norm, x = with_weight(HeadwiseNorm(6, 0.4)), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x), (x, norm.weight)
    )
