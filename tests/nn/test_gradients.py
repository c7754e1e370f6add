"""Gradients of the attention modules: against another formulation's autograd, and Appendix G written out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from diff_transformer import DiffAttention
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.nn import Attention, DiffAttentionV2, GroupedDiffAttention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def turned(x: Tensor, positions: range) -> Tensor:
    """Rotary embedding as a product of complex numbers, x (B, N, d)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * frequencies
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


def a_map(q: Tensor, k: Tensor, may: Tensor) -> Tensor:
    exponentials = torch.exp(q @ k.mT / q.shape[-1] ** 0.5) * may
    return exponentials / exponentials.sum(-1, keepdim=True)


def plainly(module: Attention, p: dict[str, Tensor], x: Tensor, may: Tensor, sizes: list[float]) -> Tensor:
    """The layer one head at a time: slices of the weights, no view, no axis for heads or maps.

    The smallest root mean square that a norm divides by is added to `sizes`, for each head.
    """
    d, out, weight = module.head_dim, 0, p.get("head_norm.weight")
    wq, wk, wv, wo = (p[f"{name}_proj.weight"] for name in "qkvo")

    def part(w: Tensor, number: int, width: int = d) -> Tensor:
        return x @ w[number * width : (number + 1) * width].T

    def normed(head: Tensor, factor: float = 1.0) -> Tensor:
        if weight is None:
            return head
        size = torch.sqrt((head * head).mean(-1, keepdim=True) + 1e-5)
        sizes.append(size.min().item())
        return factor * head / size * weight

    def rotated(w: Tensor, number: int) -> Tensor:
        return turned(part(w, number), range(x.shape[1]))

    if isinstance(module, DiffAttention | GroupedDiffAttention):
        init = 0.8 - 0.6 * np.exp(-0.3 * module.layer_idx)
        lam = torch.exp(p["lam.q1"] @ p["lam.k1"]) - torch.exp(p["lam.q2"] @ p["lam.k2"]) + init
        heads, r = wo.shape[1] // (2 * d), module.ratio
        for h in range(heads):
            kv = h // (heads // (len(wk) // (2 * d)))
            stripe = h // r * (r + 1)
            first = a_map(rotated(wq, stripe + h % r), rotated(wk, 2 * kv), may)
            second = a_map(rotated(wq, stripe + r), rotated(wk, 2 * kv + 1), may)
            head = (first - lam * second) @ part(wv, kv, 2 * d)
            out = out + normed(head, 1 - init) @ wo[:, 2 * d * h : 2 * d * (h + 1)].T
        return out
    version_2 = isinstance(module, DiffAttentionV2)
    heads = wo.shape[1] // d
    for h in range(heads):
        kv = h // (heads * d // len(wk))
        if version_2:
            lam = 1 / (1 + torch.exp(-(x @ p["lambda_proj.weight"][h])))[..., None]
            first, second = (a_map(rotated(wq, 2 * h + c), rotated(wk, kv), may) for c in (0, 1))
            weights = first - lam * second
        else:
            weights = a_map(rotated(wq, h), rotated(wk, kv), may)
        out = out + normed(weights @ part(wv, kv)) @ wo[:, d * h : d * (h + 1)].T
    return out


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("ablated", [False, True], ids=["", "the other way with the headwise norm"])
def test_every_gradient(
    kind: str,
    kv_heads: int,
    is_causal: bool,
    ablated: bool,
    build: Any,
    by_oracle: Any,
    inputs: Any,
    tables: Any,
    check: Any,
) -> None:
    """Table 6's controls too: DIFF without its headwise norm, the others with one."""
    norm = ATTENTION_TYPES[kind].headwise_norm != ablated
    arguments: dict[str, Any] = {"headwise_norm": norm} if ablated else {}
    module, x = build(kind, num_key_value_heads=kv_heads, **arguments), inputs().requires_grad_()
    may = torch.ones(7, 7, dtype=torch.float64)
    may = may.tril() if is_causal else may
    out = module(x, tables(range(7)), is_causal=is_causal)
    sizes = [1.0]
    expected = plainly(module, dict(module.named_parameters()), x, may, sizes)
    check(expected, by_oracle(module, x, positions=range(7), is_causal=is_causal))
    names, leaves = ["x"], [x]
    for name, parameter in module.named_parameters():
        names.append(name)
        leaves.append(parameter)
    direction = torch.randn_like(out)
    answers, expected_gradients = (torch.autograd.grad(o, leaves, direction) for o in (out, expected))
    assert len(names) == 1 + 4 + {"diff_v2": 1, "softmax": 0}.get(kind, 4) + norm
    for name, answer, value in zip(names, answers, expected_gradients, strict=True):
        assert value.abs().max() > 1e-3, f"the gradient of {name} is too small to say anything"
        # λ's gradient is a sum of terms of order 1 that nearly cancel: rounding is that of the terms.
        # A norm of few channels divides a head, whose terms are of order 1 too, by what may be much less.
        check(answer, value, least=max(1.0, value.abs().max().item()) / min(sizes))


@pytest.mark.parametrize("with_norm", [False, True], ids=["as printed", "with the headwise norm"])
def test_appendix_g(with_norm: bool, build: Any, check: Any) -> None:
    """Equation 7 for one head, in the paper's orientation (W is D × d and stands right of X).

    As printed, ∂L/∂O (W^O)ᵀ arrives at (A1 − λA2)V unchanged: the norm is left out. With the norm, it
    passes through the derivative of (1 − λ_init)·RMSNorm first. λ's gradient follows through Equation 2.
    """
    n, d, width = 6, 4, 10
    module = build("diff", hidden_size=width, num_attention_heads=2)
    if not with_norm:
        module.head_norm = None
    x = torch.randn(1, n, width, dtype=torch.float64)
    dO = torch.randn(n, width, dtype=torch.float64)
    module(x).backward(dO[None])

    X, dO = x[0].numpy(), dO.numpy()
    weights = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    WQ, WK, WV, WO = (weights[f"{name}_proj.weight"].T for name in "qkvo")
    WQ1, WQ2, WK1, WK2 = WQ[:, :d], WQ[:, d:], WK[:, :d], WK[:, d:]
    assert WQ2.shape == WK2.shape == (width, d)
    assert WV.shape == (width, 2 * d)
    assert WO.shape == (2 * d, width)
    Q1, Q2, K1, K2, V = X @ WQ1, X @ WQ2, X @ WK1, X @ WK2, X @ WV
    vectors = [weights[f"lam.{name}"] for name in ("q1", "k1", "q2", "k2")]
    init = oracle.lambda_init(3)
    lam = oracle.lambda_value(*vectors, init)

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    A1, A2 = softmax(Q1 @ K1.T / np.sqrt(d)), softmax(Q2 @ K2.T / np.sqrt(d))
    J = np.ones((n, n))
    head = (A1 - lam * A2) @ V
    incoming = dO @ WO.T
    normed = head
    if with_norm:
        w, r = weights["head_norm.weight"], np.sqrt((head**2).mean(-1, keepdims=True) + 1e-5)
        normed = (1 - init) * w * head / r
        norm_gradient = ((1 - init) * incoming * head / r).sum(0)
        incoming = (1 - init) / r * (w * incoming - head * (head * w * incoming).mean(-1, keepdims=True) / r**2)
    dP = incoming @ V.T
    dS1, dS2 = (A * (dP - (A * dP) @ J) for A in (A1, A2))
    s = 1 / np.sqrt(d)

    expected = {
        "o_proj.weight": normed.T @ dO,
        "v_proj.weight": X.T @ (A1 - lam * A2).T @ incoming,
        "q_proj.weight": np.hstack([s * X.T @ dS1 @ K1, -lam * s * X.T @ dS2 @ K2]),
        "k_proj.weight": np.hstack([s * X.T @ dS1.T @ Q1, -lam * s * X.T @ dS2.T @ Q2]),
    }
    for name, value in expected.items():
        check(module.get_parameter(name).grad.T, value)
    dlam, (q1, k1, q2, k2) = -(A2 * dP).sum(), vectors
    check(module.lam.q1.grad, dlam * np.exp(q1 @ k1) * k1)
    check(module.lam.k1.grad, dlam * np.exp(q1 @ k1) * q1)
    check(module.lam.q2.grad, -dlam * np.exp(q2 @ k2) * k2)
    check(module.lam.k2.grad, -dlam * np.exp(q2 @ k2) * q2)
    if with_norm:
        check(module.head_norm.weight.grad, norm_gradient)
