"""The arithmetic of visibility against the definition, pair by pair."""

import itertools

import pytest
import torch

import oracle
from diff_transformer.ops.visibility import (
    hide,
    position_limits,
    position_mask,
    seen_keys,
    segment_bounds_from,
    segment_limits,
    softmax_or_zero,
    softmax_or_zero_,
    visible_keys,
)

SIZES = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)]
WINDOWS = [None, 1, 2, 4, 100]


@pytest.mark.parametrize(("n", "s"), SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_against_the_definition(n: int, s: int, is_causal: bool, window: int | None) -> None:
    sees = torch.tensor([[oracle.position_sees(i, j, n, s, is_causal, window) for j in range(s)] for i in range(n)])
    mask = position_mask(n, s, is_causal, window, None, torch.device("cpu"))
    assert torch.equal(torch.ones(n, s, dtype=torch.bool) if mask is None else mask, sees)

    for start, stop in itertools.combinations(range(n + 1), 2):
        low, high = visible_keys(start, stop, n, s, is_causal, window, None)
        assert 0 <= low <= high <= s
        block = sees[start:stop]
        seen_by_any = block.any(0).nonzero().flatten().tolist()
        # As tight as can be: not a key more than the block sees.
        assert (low, high) == (seen_by_any[0], seen_by_any[-1] + 1) if seen_by_any else low == high
        if low < high:
            limits = position_limits(start, stop, low, high, s - n, is_causal, window, torch.empty(0))
            for first, last in itertools.combinations(range(low, high + 1), 2):  # of which a mask may leave fewer
                scores = torch.zeros(2, stop - start, last - first)
                hide(scores, first, limits)
                assert torch.equal(scores == 0, block[:, first:last].expand(2, -1, -1))
                assert torch.equal(scores == -torch.inf, ~block[:, first:last].expand(2, -1, -1))


DOCUMENTS = ([0, 7], [0, 3, 7], [0, 0, 2, 2, 3, 7, 7], [0, 1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("ends", DOCUMENTS, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_against_the_definition(ends: list[int], is_causal: bool, window: int | None) -> None:
    n = 7
    sees = torch.tensor(
        [
            [oracle.position_sees(i, j, n, n, is_causal, window) and oracle.document_sees(i, j, ends) for j in range(n)]
            for i in range(n)
        ]
    )
    documents = segment_bounds_from(torch.tensor(ends), n)
    assert documents.dtype == torch.int32
    assert torch.equal(position_mask(n, n, is_causal, window, documents, torch.device("cpu")), sees)
    for start, stop in itertools.combinations(range(n + 1), 2):
        low, high = visible_keys(start, stop, n, n, is_causal, window, documents)
        block = sees[start:stop]
        seen_by_any = block.any(0).nonzero().flatten().tolist()
        # The window's edge is that of the first row and the documents' that of any: not always the tightest together.
        assert 0 <= low <= seen_by_any[0] <= seen_by_any[-1] + 1 == high
        limits = position_limits(start, stop, low, high, 0, is_causal, window, torch.empty(0))
        limits += segment_limits(documents[:, start:stop], low, high, torch.empty(0))
        scores = torch.zeros(2, stop - start, high - low)
        hide(scores, low, limits)
        assert torch.equal(scores == 0, block[:, low:high].expand(2, -1, -1))
        assert torch.equal(scores == -torch.inf, ~block[:, low:high].expand(2, -1, -1))


def test_a_block_within_a_document_has_no_limits() -> None:
    documents = segment_bounds_from(torch.tensor([0, 100, 300, 301]), 301)
    assert segment_limits(documents[:, 100:164], 100, 300, torch.empty(0)) == []
    before, after = segment_limits(documents[:, 64:128], 0, 300, torch.empty(0))
    assert (before.first, before.upper_bound.shape) == (0, (64, 100))
    assert (after.first, after.upper_bound.shape) == (100, (64, 200))


@pytest.mark.parametrize("ends", [[5, 2, 9], [-4, 12], [3], [7, 7], [2**40, -(2**40)], [0, 6, 1, 4, 7]], ids=str)
def test_documents_that_do_not_fit_stay_within_the_keys(ends: list[int]) -> None:
    """Away from the CPU and in a compiled graph nobody looks at their values."""
    documents = segment_bounds_from(torch.tensor(ends), 7)
    assert documents.shape == (2, 7)
    assert documents.min() >= 0
    assert documents.max() <= 7


def test_only_the_edges_of_a_block_have_limits() -> None:
    """64 rows in the middle of 1,000 keys: the diagonal's columns, and those that the window leaves behind."""
    (ahead,) = position_limits(500, 564, 0, 564, 0, True, None, torch.empty(0))
    assert ahead.upper_bound.shape == (64, 63)
    _, behind = position_limits(500, 564, 401, 564, 0, True, 100, torch.empty(0))
    assert behind.upper_bound.shape == (64, 63)
    assert position_limits(563, 564, 0, 564, 0, True, None, torch.empty(0)) == []


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 9), (2, 3, 1, 4, 9), (2, 3, 1, 4, 1), (1, 1, 1, 1, 1)])
def test_seen_keys_is_as_tight_as_can_be(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.02, 0.1, 1.0):
        mask = torch.rand(shape, generator=generator) < share
        seen = mask.expand(*shape[:-1], 9).flatten(0, -2).any(0)[2:7].nonzero().flatten().tolist()
        low, high = seen_keys(mask, 2, 7)
        assert (low, high) == (2 + seen[0], 3 + seen[-1]) if seen else low == high


def test_softmax_of_a_row_of_minus_infinity_is_zero() -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, 0.0], [-torch.inf, -torch.inf]], requires_grad=True)
    weights = softmax_or_zero(scores)
    assert torch.equal(weights, torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]))
    assert torch.equal(softmax_or_zero_(scores.detach().clone(), torch.empty(3, 2)), weights)
    (gradient,) = torch.autograd.grad(weights, [scores], torch.tensor([[1.0, 0.0]] * 3))
    assert torch.equal(gradient, torch.tensor([[0.25, -0.25], [0.0, 0.0], [0.0, 0.0]]))
