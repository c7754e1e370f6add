"""Computes the normalisation, the rotary embedding and λ (Equation 2) as functions of tensors, without modules."""

import torch
from torch import Tensor

from diff_transformer.ops.cpu.cpu_backend import lambda_without_gradient


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis, computed in float32 at least.

    Args:
        x: (…, n), any floating dtype.
        weight: (n,) or None for a weight of 1.
        eps: added to the mean square; the paper's code uses 1e-5.

    Returns:
        (…, n) in the dtype of ``x``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles positions · theta^(−2i / head_dim).

    Args:
        positions: (…, N) token positions, any real dtype.
        head_dim: width d of a head; even.
        theta: base of the frequencies.

    Returns:
        cos and sin, each (…, N, d) in float32; the two halves of the last axis are equal.

    Raises:
        ValueError: if ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for a rotary embedding, got {head_dim}.")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x_i, x_{i + d/2}) of the last axis by its angle.

    Args:
        x: (…, N, d).
        cos, sin: (…, N, d), broadcastable to ``x``.

    Returns:
        Like ``x``.
    """
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def lambda_value(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init (Equation 2).

    Args:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: the layer's four vectors, each (d,).
        lambda_init: the constant λ_init of the layer.

    Returns:
        A scalar, float32 at least whatever the vectors' dtype. It may exceed 1 or be negative; nothing is clamped.
    """
    lam = lambda_without_gradient(lambda_q1, lambda_k1, lambda_q2, lambda_k2, lambda_init)
    if lam is not None:
        return lam
    dtype = torch.promote_types(lambda_q1.dtype, torch.float32)
    # A product and a sum instead of torch.dot: autocast would run dot in half precision.
    first = (lambda_q1.to(dtype) * lambda_k1.to(dtype)).sum()
    second = (lambda_q2.to(dtype) * lambda_k2.to(dtype)).sum()
    return first.exp() - second.exp() + lambda_init
