"""Causality and the window, by what they mean: what a query may not see cannot move a single bit of its output."""

import itertools

import pytest
import torch
from torch import Tensor

from budget import BACKENDS, skip_unless_it_takes
from diff_transformer import diff_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# One dtype shows which keys a backend reads. The kernel for the CPU multiplies bfloat16 by other instructions.
IN = [
    pytest.param(
        backend,
        dtype,
        marks=() if dtype == torch.float32 or (backend, dtype) == ("cpu", torch.bfloat16) else pytest.mark.all,
    )
    for backend in BACKENDS
    for dtype in DTYPES
]


def in_short_run(backend: str, *way: object) -> bool:
    """Triton's interpreter, which takes long, looks through the window from either side once."""
    return backend != "triton" or way in ((20, 37, 5, True), (37, 20, 5, False))


def inputs(n: int, s: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads over one key head, attention peaked. blockwise takes 128 queries a block: 300 are three blocks."""
    q, k = torch.randn(1, 2, 2, n, 8) * 2, torch.randn(1, 1, 2, s, 8) * 2
    return q.to(dtype), k.to(dtype), torch.randn(1, 1, s, 16).to(dtype)


def changed(x: Tensor, position: int) -> Tensor:
    """x with other, larger numbers at a position of its second axis from the end."""
    x = x.clone()
    x[..., position, :] = torch.randn(x[..., position, :].shape).to(x.dtype) * 50
    return x


@pytest.mark.parametrize(("backend", "dtype"), IN, ids=str)
@pytest.mark.parametrize(("n", "s"), [(300, 300), (37, 37), (20, 37), (37, 20), (1, 9)])
def test_a_change_leaves_all_earlier_outputs_bit_identical(backend: str, n: int, s: int, dtype: torch.dtype) -> None:
    skip_unless_it_takes(backend, dtype, n)
    q, k, v = inputs(n, s, dtype)
    lam = torch.rand(1, 2, n)
    before = diff_attention(q, k, v, lam, is_causal=True, backend=backend)
    for t in {0, 1, s // 3, s // 2, s - 2, s - 1}:
        i = t + n - s  # the query that stands at key t; before the first query if negative
        after = diff_attention(
            changed(q, i) if i >= 0 else q, changed(k, t), changed(v, t), lam, is_causal=True, backend=backend
        )
        assert torch.equal(before[:, :, : max(i, 0)], after[:, :, : max(i, 0)])
        if i >= 0:
            assert (before[:, :, i] != after[:, :, i]).any()


@pytest.mark.parametrize(
    ("backend", "dtype", "n", "s", "window", "is_causal"),
    [
        pytest.param(*of.values, *way, marks=of.marks if in_short_run(of.values[0], *way) else pytest.mark.all)
        for of in IN
        for way in itertools.product((300, 37, 20), (300, 37, 20), (1, 5), (True, False))
        if way[:2] in ((300, 300), (37, 37), (20, 37), (37, 20))
    ],
    ids=str,
)
def test_a_change_beyond_the_window_moves_nothing(
    backend: str, n: int, s: int, window: int, is_causal: bool, dtype: torch.dtype
) -> None:
    skip_unless_it_takes(backend, dtype, n)
    q, k, v = inputs(n, s, dtype)
    options = {"window": window, "is_causal": is_causal, "backend": backend}
    before = diff_attention(q, k, v, 0.7, **options)
    for t in {0, 1, s // 2, s - window - 1}:
        after = diff_attention(q, changed(k, t), changed(v, t), 0.7, **options)
        last = t + window - 1 + n - s  # the last query that sees key t
        assert torch.equal(before[:, :, max(last + 1, 0) :], after[:, :, max(last + 1, 0) :])
        if last >= 0:
            assert (before[:, :, last] != after[:, :, last]).any()
