"""Differential attention (arXiv 2410.05258): (A1 − λ A2) V by fused kernels, forward and backward."""

import torch
from torch import Tensor

from .backend import attend

__all__ = ["diff_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute (A1 − λ A2) V, where A1 and A2 are softmax maps over the same values.

    Args:
        q: (B, G, r + 1, N, d): the queries of r signal heads, then those of the noise map that they share; float32,
            bfloat16 or float16.
        k: (B, H_kv, 2 or 1, S, d), H_kv a divisor of G.
        v: (B, H_kv, S, dv).
        lam: λ, broadcast to (B, r·G, N).
        attn_mask: broadcast to (B, r·G, N, S): boolean, True where a key is visible, or added to the scores. It gets no
            gradient.
        is_causal: whether queries, the last N positions, see no later keys.
        scale: of the scores; d ** -0.5 by default.
        window: how many keys a query sees up to its own position; all by default.

    Returns:
        (B, r·G, N, dv), of the dtype of q.

    Raises:
        ValueError: where the arguments do not fit together.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if (q.dim(), k.dim(), v.dim()) != (5, 5, 4):
        raise ValueError(f"q, k and v must have 5, 5 and 4 axes, got {shapes}.")
    fits = q.shape[0] == k.shape[0] and q.shape[4] == k.shape[4] and (*k.shape[:2], k.shape[3]) == tuple(v.shape[:3])
    if not fits or q.shape[2] < 2 or k.shape[2] not in (1, 2) or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q must be (B, G, r + 1, N, d), k (B, H_kv, 2 or 1, S, d), v (B, H_kv, S, dv), got {shapes}.")
    if q.dtype not in _DTYPES or {q.dtype, k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must share one dtype of {_DTYPES}, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    lam = torch.as_tensor(lam, dtype=torch.float32, device=q.device)
    lam = lam.expand(q.shape[0], q.shape[1] * (q.shape[2] - 1), q.shape[3])
    if attn_mask is not None:
        if attn_mask.requires_grad or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
            raise ValueError("attn_mask must be boolean, or floating without a gradient.")
        attn_mask = attn_mask.expand(*lam.shape, k.shape[3])
    return attend(q, k, v, lam, attn_mask, is_causal, q.shape[4] ** -0.5 if scale is None else scale, window)
