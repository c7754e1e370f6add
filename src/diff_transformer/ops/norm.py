"""RMSNorm without parameters of its own."""

import torch
from torch import Tensor


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
