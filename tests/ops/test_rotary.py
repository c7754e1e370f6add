"""Rotary embedding in the half-split layout, and the module that makes its tables."""

import numpy as np
import pytest
import torch

import oracle
from diff_transformer.nn import RotaryEmbedding
from diff_transformer.ops.functional import apply_rotary, rotary_tables


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [2, 4, 10])
@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_against_the_formula(d: int, theta: float, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 7, 63])
    x = torch.randn(2, 3, 5, d).to(dtype)
    out = apply_rotary(x, *rotary_tables(positions, d, theta))
    assert out.dtype == dtype
    expected = oracle.rotary(x.double().numpy(), positions.numpy(), theta)
    # An angle of up to 63 carries a relative float32 error, and x is turned by it; then two products and their sum.
    limit = ((64 + 8) * torch.finfo(torch.float32).eps + 3 * torch.finfo(dtype).eps) * float(x.abs().max())
    assert np.abs(out.double().numpy() - expected).max() <= limit


def test_tables() -> None:
    cos, sin = rotary_tables(torch.arange(6).expand(2, 6), 8)
    assert cos.shape == sin.shape == (2, 6, 8)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[..., :4], cos[..., 4:])
    assert torch.equal(cos[:, 0], torch.ones(2, 8))
    assert torch.equal(sin[:, 0], torch.zeros(2, 8))
    assert torch.allclose(cos[0, :, 0], torch.arange(6).cos())


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even.*got 5"):
        rotary_tables(torch.arange(3), 5)
    with pytest.raises(ValueError, match=r"head_dim must be even .*, got 7\.$"):
        RotaryEmbedding(7)
    with pytest.raises(ValueError, match=r"even last axis, got \(3, 5\)"):
        apply_rotary(torch.randn(3, 5), torch.ones(3, 5), torch.ones(3, 5))


@pytest.mark.parametrize("width", [1, 16])
def test_tables_of_another_width_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=rf"cos and sin must be as wide .*, d = 4, got \(3, 4\) and \(3, {width}\)"):
        apply_rotary(torch.randn(3, 4), torch.ones(3, 4), torch.ones(3, width))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradient_turns_back(dtype: torch.dtype) -> None:
    """A rotation is orthogonal: its gradient is the rotation by the angle's negative."""
    cos, sin = rotary_tables(torch.arange(5), 8)
    x = torch.randn(2, 3, 5, 8).to(dtype).requires_grad_()
    gradient = torch.randn(2, 3, 5, 8).to(dtype)
    apply_rotary(x, cos, sin).backward(gradient)
    assert x.grad is not None
    expected = apply_rotary(gradient.double(), cos.double(), -sin.double())
    # The two products and their sum are rounded.
    limit = 3 * torch.finfo(dtype).eps * gradient.abs().max().item()
    assert (x.grad.double() - expected).abs().max() <= limit


def test_positions_of_each_sequence_and_both_maps() -> None:
    """(B, N) positions, as with left padding, against x (B, H, 2, N, d): the tables broadcast over heads and maps."""
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    cos, sin = (table[:, None, None] for table in rotary_tables(positions, 6))
    x = torch.randn(2, 3, 2, 4, 6)
    out = apply_rotary(x, cos, sin)
    for b in range(2):
        assert np.abs(out[b].numpy() - oracle.rotary(x[b].numpy(), positions[b].numpy())).max() < 1e-5


def test_the_module_counts_positions_after_a_cache_and_in_each_sequence() -> None:
    rotary, positions = RotaryEmbedding(8), torch.tensor([[0, 1, 2], [5, 6, 7]])
    for after, batched, expected in zip(
        rotary.positions(torch.zeros(2, 3, 24), past=5), rotary(positions), rotary(torch.arange(8)), strict=True
    ):
        assert torch.equal(after, expected[5:])
        assert torch.equal(batched, expected[positions])
    assert not rotary.state_dict()
    assert rotary.bfloat16()(torch.arange(3))[0].dtype == torch.float32
