"""The arithmetic of visibility against the definition, pair by pair."""

import pytest
import torch

import oracle
from diff_transformer.ops.attention_request import key_ranges, position_mask, segment_bounds_from

SIZES = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)]
WINDOWS = [None, 1, 2, 4, 100]


def check_ranges(ranges: tuple[torch.Tensor, torch.Tensor], sees: torch.Tensor) -> None:
    """The range of a query has all the keys that it sees, and no other."""
    begin, end = (bound.unsqueeze(1) for bound in ranges)
    keys = torch.arange(sees.shape[1])
    assert 0 <= int(begin.min()) <= int(end.max()) <= sees.shape[1]
    assert torch.equal((begin <= keys) & (keys < end), sees)


@pytest.mark.parametrize(("n", "s"), SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_against_the_definition(n: int, s: int, is_causal: bool, window: int | None) -> None:
    sees = torch.tensor([[oracle.position_sees(i, j, n, s, is_causal, window) for j in range(s)] for i in range(n)])
    mask = position_mask(n, s, is_causal, window, None, torch.device("cpu"))
    assert torch.equal(torch.ones(n, s, dtype=torch.bool) if mask is None else mask, sees)
    assert (mask is None) == (window is None and (not is_causal or n == 1))  # the last query alone sees every key

    check_ranges(key_ranges(n, s, is_causal, window, None, torch.device("cpu")), sees)


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
    check_ranges(key_ranges(n, n, is_causal, window, documents, torch.device("cpu")), sees)


@pytest.mark.parametrize("ends", [[5, 2, 9], [-4, 12], [3], [7, 7], [2**40, -(2**40)], [0, 6, 1, 4, 7]], ids=str)
def test_documents_that_do_not_fit_stay_within_the_keys(ends: list[int]) -> None:
    """Away from the CPU and in a compiled graph nobody looks at their values."""
    documents = segment_bounds_from(torch.tensor(ends), 7)
    assert documents.shape == (2, 7)
    assert documents.min() >= 0
    assert documents.max() <= 7
