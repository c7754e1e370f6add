"""Computes λ (Equation 2), the normalisation and the rotary embedding as functions of tensors, without modules."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.attention_request import has_autocast, is_floating


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Switch autocast off, on a type of device that has it: "meta" has none."""
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()


def lambda_value(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """Compute λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init (Equation 2).

    Args:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: the layer's four vectors, each (d,), of 16 bits or more.
        lambda_init: the constant λ_init of the layer.

    Returns:
        A scalar, float32 at least whatever the vectors' dtype. It may exceed 1 or be negative; nothing is clamped.

    Raises:
        ValueError: another dtype.

    Examples:
        >>> lambda_value(*torch.zeros(4, 16), lambda_init=0.2)
        tensor(0.2000)
    """
    vectors = lambda_q1, lambda_k1, lambda_q2, lambda_k2
    if refused := [x.dtype for x in vectors if not is_floating(x)]:
        raise ValueError(f"the vectors of λ must be floating, of 16 bits or more, got {refused[0]}.")
    q1, k1, q2, k2 = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in vectors)
    # A product and a sum instead of torch.dot: autocast would run dot in half precision.
    return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + lambda_init


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute x / √(mean(x²) + eps) · weight over the last axis, in float32 at least.

    Args:
        x: (…, n), floating, of 16 bits or more.
        weight: (n,), floating as well, or None for a weight of 1.
        eps: added to the mean square; the paper's code uses 1e-5.

    Returns:
        (…, n) in the dtype of ``x``.

    Raises:
        ValueError: another dtype, or a weight of another shape.

    Examples:
        >>> rms_norm(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is not None and not is_floating(tensor):
            raise ValueError(f"{name} must be floating, of 16 bits or more, got {tensor.dtype}.")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be {tuple(x.shape[-1:])}, the last axis of x, got {tuple(weight.shape)}.")
    if x.device.type == "cpu" and (weight is None or weight.dtype == x.dtype):
        # The operators below in one call, bit by bit. Elsewhere it is a kernel of its own; two dtypes make it warn.
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the rotation angles positions · theta^(−2i / head_dim).

    Args:
        positions: (…, N) token positions, any real dtype.
        head_dim: width d of a head; even.
        theta: base of the frequencies.

    Returns:
        cos and sin, each (…, N, d) in float32; the two halves of the last axis are equal.

    Raises:
        ValueError: if ``head_dim`` is odd.

    Examples:
        >>> cos, sin = rotary_tables(torch.arange(10), head_dim=16)
        >>> cos.shape
        torch.Size([10, 16])
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

    Raises:
        ValueError: an odd d, or ``cos`` or ``sin`` of another width.

    Examples:
        >>> x = torch.randn(10, 16)
        >>> turned = apply_rotary(x, *rotary_tables(torch.arange(10), head_dim=16))
        >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
        True
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even last axis, got {tuple(x.shape)}.")
    if cos.shape[-1] != x.shape[-1] or sin.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"cos and sin must be as wide as x, d = {x.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    # chunk and not slices: its gradient is one concatenation, where torch.compile makes of those of slices a loop that
    # takes four times as long for narrow heads on a CPU (docs/log.md).
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
