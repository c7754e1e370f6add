"""Equation 1 as it is written: the oracle of every other backend, in any floating dtype up to float64.

Memory and time grow with N·S. Differentiable any number of times.
"""

import torch
from torch import Tensor

from diff_transformer.ops.visibility import position_mask, softmax_or_zero


def softmax_maps(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A1 and A2 of Equation 1, each (B, H, N, S), in float32 at least.

    Args:
        q: (B, H, 2, N, d).
        k: (B, H_kv, 2 or 1, S, d).
        attn_mask: broadcastable to (B, H, N, S), boolean (True = may attend) or additive, or None.
        documents: (2, N), the first key of each query's document and the one past its last, or None.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    n, s = q.shape[-2], k.shape[-2]
    # Head h, map c reads key head h // (H / H_kv), map c: never another map's keys. They are repeated in the wider
    # dtype, so that the gradients of heads that share a key are added up before they are rounded.
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    with torch.autocast(q.device.type, enabled=False):
        scores = (q.to(dtype) * scale) @ k.transpose(-1, -2)
    allowed = position_mask(n, s, is_causal, window, documents, q.device)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(-3)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = (scores + attn_mask).masked_fill(attn_mask == float("-inf"), float("-inf"))
    first, second = softmax_or_zero(scores).unbind(2)
    return first, second


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
) -> Tensor:
    """(A1 − λA2) V. Shapes as in :func:`diff_transformer.diff_attention`; ``lam`` is (B, H, N)."""
    first, second = softmax_maps(q, k, attn_mask, is_causal, scale, window, documents)
    v = v.to(first.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    with torch.autocast(q.device.type, enabled=False):
        out = (first - lam.unsqueeze(-1).to(first.dtype) * second) @ v
    return out.to(q.dtype)
