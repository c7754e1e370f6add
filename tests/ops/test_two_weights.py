"""w · A1 V − λ · A2 V with a weight on both maps, and the log-sums of their scores, in every backend."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from budget import skip_unless_it_takes
from diff_transformer import diff_attention
from diff_transformer.ops.reference import ROUNDINGS, rounding_band, share_of_allowed

NAMES = ("out", "first", "second", "q", "k", "v", "lam", "signal_weight")
BACKENDS = ("reference", "blockwise", "sdpa", "cpu", "triton")
ADDEND = 30.0
SEEN = torch.arange(21) < torch.tensor([[9], [0]])  # the second sequence sees nothing
# B, H, H_kv, r, N, S, d, dv, maps of keys, and options: odd lengths, N ≠ S, groups, shared keys, a window, rows that
# see nothing, lengths of several blocks, and few enough queries for the kernel of decoding.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((2, 4, 2, 1, 37, 37, 8, 16, 2), {"is_causal": True}),
    "groups, N < S": ((1, 4, 2, 2, 35, 49, 8, 12, 2), {"is_causal": True}),
    "shared keys, window, N > S": ((1, 6, 1, 3, 40, 33, 8, 16, 1), {"is_causal": True, "window": 7}),
    "blocks": ((1, 2, 1, 1, 150, 150, 16, 32, 2), {}),
    "decoding": ((1, 4, 2, 2, 1, 40, 16, 32, 2), {"is_causal": True}),
    "padding": ((2, 2, 1, 1, 21, 21, 8, 16, 2), {"attn_mask": SEEN[:, None, None], "is_causal": True}),
    "addends": ((2, 4, 1, 2, 5, 21, 8, 16, 2), {"attn_mask": torch.where(SEEN, ADDEND, -torch.inf)[:, None, None]}),
}


def tensors(sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    batch, heads, key_heads, ratio, n, s, d, dv, maps = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, heads // ratio, ratio + 1, n, d) * 2, normal(batch, key_heads, maps, s, d) * 2
    v, lam, signal_weight = normal(batch, key_heads, s, dv), normal(batch, heads, n), normal(heads, 1)
    signal_weight[0] = 0.0  # where nothing can be divided by it
    inputs = [x.to(dtype) for x in (q, k, v)]
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(device).requires_grad_() for x in (*inputs, lam.to(wide), signal_weight.to(wide))]


def solve(inputs: list[Tensor], **options: Any) -> dict[str, Tensor]:
    q, k, v, lam, signal_weight = inputs
    results = diff_attention(q, k, v, lam, signal_weight=signal_weight, return_lse=True, **options)
    generator = torch.Generator().manual_seed(1)
    seen = [torch.where(x.isfinite(), x, 0.0) for x in results]
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * weight.to(x.device)).sum() for x, weight in zip(seen, weights, strict=True))
    gradients = torch.autograd.grad(loss, inputs)
    return {name: x.detach() for name, x in zip(NAMES, (*results, *gradients), strict=True)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_weights_and_log_sums(case: str, is_half: bool, backend: str) -> None:
    narrow = torch.float16 if backend == "triton" else torch.bfloat16
    dtype = narrow if is_half else torch.float32
    skip_unless_it_takes(backend, dtype)
    check(backend, dtype, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(case: str) -> None:
    check("triton", torch.bfloat16, case, "cuda")


def check(backend: str, dtype: torch.dtype, case: str, device: str = "cpu") -> None:
    sizes, options = CASES[case]
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    inputs = tensors(sizes, dtype, device)
    exact = solve([x.detach().double().requires_grad_() for x in inputs], backend="reference", **options)
    plain = solve(inputs, backend="reference", **options)
    answer = solve(inputs, backend=backend, **options)
    eps, terms = torch.finfo(dtype).eps, max(sizes[4:6]) * sizes[1] // sizes[2]
    # A score is rounded after the mask is added, which is a relative error of its weight.
    of_scores = torch.finfo(torch.float32).eps * (ADDEND if case == "addends" else 0.0)
    with torch.no_grad():  # other kernels, of decoding among them
        results = diff_attention(*inputs[:4], signal_weight=inputs[4], return_lse=True, backend=backend, **options)
    for name, value in (*answer.items(), *zip(NAMES, results, strict=False)):
        expected = exact[name]
        assert value.shape == expected.shape
        assert (value.isfinite() == expected.isfinite()).all(), name
        error, plain_error = (
            torch.where(expected.isfinite(), x.double() - expected, 0.0).abs() for x in (value, plain[name])
        )
        size = torch.where(expected.isfinite(), expected, 0.0).abs().amax()
        band = rounding_band(size, eps, ROUNDINGS.get(name, 6), terms) + of_scores * size
        assert share_of_allowed(error, plain_error.amax(), band) <= 1, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_weight_it_is_one(backend: str) -> None:
    skip_unless_it_takes(backend, torch.float32)
    sizes, options = CASES["causal"]
    *inputs, _ = (x[:1].detach() for x in tensors(sizes, torch.float32))
    plain, weighted = (diff_attention(*inputs, **options, backend=backend, signal_weight=w) for w in (None, 1.0))
    assert torch.equal(plain, weighted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_the_weight_alone(backend: str) -> None:
    skip_unless_it_takes(backend, torch.float32)
    sizes, options = CASES["causal"]
    *inputs, weight = tensors(sizes, torch.float32)
    gradients = [
        torch.autograd.grad(diff_attention(*x, **options, backend=backend, signal_weight=weight).sum(), weight)[0]
        for x in ((x.detach() for x in inputs), inputs)
    ]
    torch.testing.assert_close(*gradients)


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
    q, k, v, lam, signal_weight = (x[:1].detach() for x in tensors(CASES["causal"][0], torch.float32))
    expected = diff_attention(q, k, v, lam, is_causal=True, signal_weight=signal_weight, return_lse=True)
    k[..., -1, :], v[..., -2, 0] = torch.nan, torch.inf
    results = diff_attention(
        q, k, v, lam, is_causal=True, signal_weight=signal_weight, return_lse=True, backend=backend
    )
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x[:, :, :-2], y[:, :, :-2], rtol=1e-4, atol=1e-5)
        assert x[:, :, -2:].isnan().all()


def test_log_sums_under_a_block_mask_are_refused() -> None:
    q, k, v, lam, _ = (x.detach() for x in tensors(CASES["causal"][0], torch.float32))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 37, 37, device="cpu")
    with pytest.raises(ValueError, match=r"^return_lse needs attn_mask as a tensor or None, got a BlockMask\.$"):
        diff_attention(q, k, v, lam, attn_mask=mask, return_lse=True)
