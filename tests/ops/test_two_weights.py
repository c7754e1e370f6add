"""w · A1 V − λ · A2 V with a weight on both maps, and the log-sums of their scores, in every backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from budget import skip_unless_it_takes
from diff_transformer import diff_attention
from diff_transformer.ops.reference import ROUNDINGS, rounding_band, share_of_allowed

NAMES = ("out", "first", "second", "q", "k", "v", "lam", "signal_weight")
BACKENDS = ("reference", "blockwise", "sdpa", "cpu")
# B, H, H_kv, r, N, S, d, dv, maps of keys, and options: odd lengths, N ≠ S, groups, shared keys, a window, rows that
# see nothing, lengths of several blocks, and few enough queries for the kernel of decoding.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((2, 4, 2, 1, 37, 37, 8, 16, 2), {"is_causal": True}),
    "groups, N < S": ((1, 4, 2, 2, 35, 49, 8, 12, 2), {"is_causal": True}),
    "shared keys, window, N > S": ((1, 6, 1, 3, 40, 33, 8, 16, 1), {"is_causal": True, "window": 7}),
    "blocks": ((1, 2, 1, 1, 150, 150, 16, 32, 2), {}),
    "decoding": ((2, 4, 2, 2, 1, 60, 16, 32, 2), {"is_causal": True}),
}


def tensors(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, heads, key_heads, ratio, n, s, d, dv, maps = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, heads // ratio, ratio + 1, n, d) * 2, normal(batch, key_heads, maps, s, d) * 2
    v, lam, signal_weight = normal(batch, key_heads, s, dv), normal(batch, heads, n), normal(heads, 1)
    signal_weight[0] = 0.0  # where nothing can be divided by it
    inputs = [x.to(dtype) for x in (q, k, v)]
    wide = torch.promote_types(dtype, torch.float32)
    return [x.requires_grad_() for x in (*inputs, lam.to(wide), signal_weight.to(wide))]


def solve(inputs: list[Tensor], **options: Any) -> dict[str, Tensor]:
    q, k, v, lam, signal_weight = inputs
    results = diff_attention(q, k, v, lam, signal_weight=signal_weight, return_lse=True, **options)
    generator = torch.Generator().manual_seed(1)
    seen = [torch.where(x.isfinite(), x, 0.0) for x in results]
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * weight).sum() for x, weight in zip(seen, weights, strict=True))
    gradients = torch.autograd.grad(loss, inputs)
    return {name: x.detach() for name, x in zip(NAMES, (*results, *gradients), strict=True)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_weights_and_log_sums(case: str, dtype: torch.dtype, backend: str) -> None:
    sizes, options = CASES[case]
    skip_unless_it_takes(backend, dtype)
    inputs = tensors(sizes, dtype)
    exact = solve([x.detach().double().requires_grad_() for x in inputs], backend="reference", **options)
    plain = solve(inputs, backend="reference", **options)
    answer = solve(inputs, backend=backend, **options)
    eps, terms = torch.finfo(dtype).eps, max(sizes[4:6]) * sizes[1] // sizes[2]
    for name, expected in exact.items():
        assert answer[name].shape == expected.shape
        assert (answer[name].isfinite() == expected.isfinite()).all(), name
        error, plain_error = (
            torch.where(expected.isfinite(), x[name].double() - expected, 0.0).abs() for x in (answer, plain)
        )
        size = torch.where(expected.isfinite(), expected, 0.0).abs().amax()
        band = rounding_band(size, eps, ROUNDINGS.get(name, 6), terms)
        assert share_of_allowed(error, plain_error.amax(), band) <= 1, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_weight_it_is_one(backend: str) -> None:
    skip_unless_it_takes(backend, torch.float32)
    sizes, options = CASES["causal"]
    *inputs, _ = tensors(sizes, torch.float32)
    plain, weighted = (diff_attention(*inputs, **options, backend=backend, signal_weight=w) for w in (None, 1.0))
    assert torch.equal(plain, weighted)


def test_a_learned_sink_is_a_weight_of_the_log_sum() -> None:
    """softmax with s in its sum is the plain one times σ(L − s): the docs say it of learned sinks."""
    sizes, options = CASES["causal"]
    q, k, v, lam, _ = (x.detach().double() for x in tensors(sizes, torch.float32))
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)[:, None]
    _, first, second = diff_attention(q, k, v, lam, **options, return_lse=True)
    weights = [torch.sigmoid(log_sum - sink) for log_sum in (first, second)]
    out = diff_attention(q, k, v, lam * weights[1], **options, signal_weight=weights[0])
    scores = q @ k.repeat_interleave(2, dim=1).mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    maps = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink[:, :, None, None].exp())
    expected = (maps[:, :, 0] - lam[..., None] * maps[:, :, 1]) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_gradients_of_log_sums_by_torch_func() -> None:
    q, k, v, lam, signal_weight = (x.detach().double() for x in tensors(CASES["causal"][0], torch.float32))

    def total(q: Tensor) -> Tensor:
        results = diff_attention(q, k, v, lam, is_causal=True, signal_weight=signal_weight, return_lse=True)
        return torch.stack([x.sum() for x in results]).sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(q), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_that_are_not_finite_do_not_count(backend: str) -> None:
    skip_unless_it_takes(backend, torch.float32)
    q, k, v, lam, signal_weight = (x.detach() for x in tensors(CASES["causal"][0], torch.float32))
    expected = diff_attention(q, k, v, lam, is_causal=True, signal_weight=signal_weight, return_lse=True)
    k[..., -1, :], v[..., -2, 0] = torch.nan, torch.inf
    results = diff_attention(
        q, k, v, lam, is_causal=True, signal_weight=signal_weight, return_lse=True, backend=backend
    )
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x[:, :, :-2], y[:, :, :-2], rtol=1e-4, atol=1e-5)
        assert x[:, :, -2:].isnan().all()


def test_kernels_for_cuda_refuse_the_weight_by_name() -> None:
    inputs = [x.detach() for x in tensors(CASES["causal"][0], torch.float32)]
    with pytest.raises(ValueError, match="takes no signal_weight"):
        diff_attention(*inputs[:4], signal_weight=inputs[4], backend="triton")
