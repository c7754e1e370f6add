"""The arithmetic of visibility against the definition, pair by pair."""

import itertools

import pytest
import torch

import oracle
from diff_transformer.ops.blockwise import Limit, edge_limits, hide, seen_keys, softmax_or_zero_
from diff_transformer.ops.reference import softmax_or_zero
from diff_transformer.ops.visibility import key_ranges, position_mask, segment_bounds_from

SIZES = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)]
WINDOWS = [None, 1, 2, 4, 100]


def limits_of_block(
    ranges: tuple[torch.Tensor, torch.Tensor], start: int, stop: int
) -> tuple[int, int, list[Limit], list[Limit]]:
    """The keys that rows start … stop − 1 see, with what hides among them: where the values are known, and not."""
    begin, end = (x[start:stop] for x in ranges)
    low, high = int(begin.min()), int(end.max())
    inner = (int(begin.max()), int(end.min()))
    return low, high, *(edge_limits(begin, end, low, high, keys, torch.empty(0)) for keys in (inner, (high, high)))


@pytest.mark.parametrize(("n", "s"), SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_against_the_definition(n: int, s: int, is_causal: bool, window: int | None) -> None:
    sees = torch.tensor([[oracle.position_sees(i, j, n, s, is_causal, window) for j in range(s)] for i in range(n)])
    mask = position_mask(n, s, is_causal, window, None, torch.device("cpu"))
    assert torch.equal(torch.ones(n, s, dtype=torch.bool) if mask is None else mask, sees)
    assert (mask is None) == (window is None and (not is_causal or n == 1))  # the last query alone sees every key

    ranges = key_ranges(n, s, is_causal, window, None, torch.device("cpu"))
    for start, stop in itertools.combinations(range(n + 1), 2):
        low, high, *both_limits = limits_of_block(ranges, start, stop)
        assert 0 <= low <= high <= s
        block = sees[start:stop]
        seen_by_any = block.any(0).nonzero().flatten().tolist()
        # As tight as can be: not a key more than the block sees.
        assert (low, high) == (seen_by_any[0], seen_by_any[-1] + 1) if seen_by_any else low == high
        for limits in both_limits:
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
    ranges = key_ranges(n, n, is_causal, window, documents, torch.device("cpu"))
    for start, stop in itertools.combinations(range(n + 1), 2):
        low, high, *both_limits = limits_of_block(ranges, start, stop)
        block = sees[start:stop]
        seen_by_any = block.any(0).nonzero().flatten().tolist()
        assert (low, high) == (seen_by_any[0], seen_by_any[-1] + 1)
        for limits in both_limits:
            scores = torch.zeros(2, stop - start, high - low)
            hide(scores, low, limits)
            assert torch.equal(scores == 0, block[:, low:high].expand(2, -1, -1))
            assert torch.equal(scores == -torch.inf, ~block[:, low:high].expand(2, -1, -1))


def test_a_block_within_a_document_has_no_limits() -> None:
    documents = segment_bounds_from(torch.tensor([0, 100, 300, 301]), 301)
    ranges = key_ranges(301, 301, False, None, documents, torch.device("cpu"))
    assert limits_of_block(ranges, 100, 164)[:3] == (100, 300, [])
    low, high, (before, after), _ = limits_of_block(ranges, 64, 128)
    assert (low, high) == (0, 300)
    assert (before[0], before[1].shape) == (0, (64, 100))
    assert (after[0], after[1].shape) == (100, (64, 200))


@pytest.mark.parametrize("ends", [[5, 2, 9], [-4, 12], [3], [7, 7], [2**40, -(2**40)], [0, 6, 1, 4, 7]], ids=str)
def test_documents_that_do_not_fit_stay_within_the_keys(ends: list[int]) -> None:
    """Away from the CPU and in a compiled graph nobody looks at their values."""
    documents = segment_bounds_from(torch.tensor(ends), 7)
    assert documents.shape == (2, 7)
    assert documents.min() >= 0
    assert documents.max() <= 7


def test_only_the_edges_of_a_block_have_limits() -> None:
    """64 rows in the middle of 1,000 keys: the diagonal's columns, and those that the window leaves behind."""
    ranges = key_ranges(1000, 1000, True, None, None, torch.device("cpu"))
    low, high, (ahead,), _ = limits_of_block(ranges, 500, 564)
    assert (low, high, ahead[0], ahead[1].shape) == (0, 564, 501, (64, 63))
    assert limits_of_block(ranges, 563, 564)[2] == []
    ranges = key_ranges(1000, 1000, True, 100, None, torch.device("cpu"))
    low, high, (behind, ahead), _ = limits_of_block(ranges, 500, 564)
    assert (low, high, behind[0], behind[1].shape) == (401, 564, 401, (64, 63))
    assert (ahead[0], ahead[1].shape) == (501, (64, 63))


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
