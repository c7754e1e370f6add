"""The rotary embedding of models built from these modules: half-split, float32 tables."""

import pytest
import torch

from diff_transformer.nn import RotaryEmbedding


def test_positions_after_a_cache() -> None:
    rotary, x = RotaryEmbedding(8), torch.zeros(2, 3, 24)
    for table, expected in zip(rotary.positions(x, past=5), rotary(torch.arange(8)), strict=True):
        assert torch.equal(table, expected[5:])


def test_positions_of_each_sequence() -> None:
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    for batched, alone in zip(RotaryEmbedding(8)(positions), RotaryEmbedding(8)(positions[1]), strict=True):
        assert batched.shape == (2, 3, 8)
        assert torch.equal(batched[1], alone)


def test_no_parameters_and_no_state() -> None:
    rotary = RotaryEmbedding(8)
    assert not rotary.state_dict()
    assert rotary.bfloat16()(torch.arange(3))[0].dtype == torch.float32


def test_odd_width() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even .*, got 7\.$"):
        RotaryEmbedding(7)
