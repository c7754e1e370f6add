"""The rotary embedding of models built from these modules: half-split, float32 tables."""

import numpy as np
import pytest
import torch

import oracle
from diff_transformer.nn import RotaryEmbedding
from diff_transformer.ops import apply_rotary


@pytest.mark.parametrize("theta", [10000.0, 500.0])
@pytest.mark.parametrize("start", [0, 1000])
def test_against_the_oracle(theta: float, start: int) -> None:
    """The angle at position p is computed in float32: off by up to 2 eps·p (its frequency and the product)."""
    positions = torch.arange(start, start + 5)
    cos, sin = RotaryEmbedding(8, theta)(positions)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (5, 8)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    expected = oracle.rotary(x.numpy(), positions.numpy(), theta)
    limit = 2 * torch.finfo(torch.float32).eps * (start + 5) * np.abs(x.numpy()).max()
    assert np.abs(apply_rotary(x, cos, sin).numpy() - expected).max() < limit


def test_positions_after_a_cache() -> None:
    rotary, x = RotaryEmbedding(8), torch.zeros(2, 3, 24)
    for table, expected in zip(rotary.positions(x, past=5), rotary(torch.arange(8)), strict=True):
        assert torch.equal(table, expected[5:])


def test_positions_of_each_sequence() -> None:
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    for batched, alone in zip(RotaryEmbedding(8)(positions), RotaryEmbedding(8)(positions[1]), strict=True):
        assert batched.shape == (2, 3, 8)
        assert torch.equal(batched[1], alone)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotary = RotaryEmbedding(8)

    def score(i: int, j: int) -> float:
        (cq, sq), (ck, sk) = rotary(torch.tensor(i)), rotary(torch.tensor(j))
        return (apply_rotary(q, cq, sq) @ apply_rotary(k, ck, sk)).item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert abs(score(9, 4) - score(4, 9)) > 1e-2


def test_the_dtype_is_that_of_the_input() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    assert apply_rotary(x, *RotaryEmbedding(8).positions(x)).dtype == torch.bfloat16


def test_no_parameters_and_no_state() -> None:
    rotary = RotaryEmbedding(8)
    assert not rotary.state_dict()
    assert rotary.bfloat16()(torch.arange(3))[0].dtype == torch.float32


def test_odd_width() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even .*, got 7\.$"):
        RotaryEmbedding(7)
