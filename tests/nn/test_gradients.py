"""Gradients of a differential layer against Appendix G written out; test_options.py has those of every layer."""

from typing import Any

import numpy as np
import pytest
import torch

import oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
