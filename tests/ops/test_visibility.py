"""The arithmetic of visibility against the definition, pair by pair."""

import itertools

import pytest
import torch

import oracle
from diff_transformer.ops.visibility import hide_by_position, position_mask, softmax_or_zero, visible_keys

SIZES = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)]
WINDOWS = [None, 1, 2, 4, 100]


@pytest.mark.parametrize(("n", "s"), SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_against_the_definition(n: int, s: int, is_causal: bool, window: int | None) -> None:
    sees = torch.tensor([[oracle.position_sees(i, j, n, s, is_causal, window) for j in range(s)] for i in range(n)])
    mask = position_mask(n, s, is_causal, window, torch.device("cpu"))
    assert torch.equal(torch.ones(n, s, dtype=torch.bool) if mask is None else mask, sees)

    for start, stop in itertools.combinations(range(n + 1), 2):
        low, high = visible_keys(start, stop, n, s, is_causal, window)
        assert 0 <= low <= high <= s
        block = sees[start:stop]
        seen_by_any = block.any(0).nonzero().flatten().tolist()
        # As tight as can be: not a key more than the block sees.
        assert (low, high) == (seen_by_any[0], seen_by_any[-1] + 1) if seen_by_any else low == high
        if low < high:
            scores = torch.zeros(2, stop - start, high - low)
            hide_by_position(scores, start, low, n, s, is_causal, window)
            assert torch.equal(scores == 0, block[:, low:high].expand(2, -1, -1))
            assert torch.equal(scores == -torch.inf, ~block[:, low:high].expand(2, -1, -1))


def test_softmax_of_a_row_of_minus_infinity_is_zero() -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, 0.0], [-torch.inf, -torch.inf]], requires_grad=True)
    weights = softmax_or_zero(scores)
    assert torch.equal(weights, torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]))
    (gradient,) = torch.autograd.grad(weights, [scores], torch.tensor([[1.0, 0.0]] * 3))
    assert torch.equal(gradient, torch.tensor([[0.25, -0.25], [0.0, 0.0], [0.0, 0.0]]))
