"""Both of Appendix A's compositions over torch's ``scaled_dot_product_attention``.

Where the kernel that torch would use takes values wider than the keys (dv ≠ d), each map is one call; where it does
not, V is cut into pieces of width d and each map is one call a piece.
"""

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.visibility import position_mask


@torch.compiler.assume_constant_result
def wide_values_allowed(device: str, dtype: torch.dtype, d: int, dv: int, masked: bool) -> bool:
    """Whether a fused kernel of torch's takes values of width ``dv`` with keys of width ``d``, by asking torch."""
    return _ask(device, dtype, d, dv, masked)


@functools.cache
def _ask(device: str, dtype: torch.dtype, d: int, dv: int, masked: bool) -> bool:
    if d == dv:
        return True
    shape = (1, 1, 64)
    q, k = (torch.zeros(*shape, d, device=device, dtype=dtype) for _ in range(2))
    v = torch.zeros(*shape, dv, device=device, dtype=dtype)
    mask = torch.ones(1, 1, 64, 64, device=device, dtype=torch.bool) if masked else None
    if device == "cuda":
        params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, False, False)
        asks = (
            torch.backends.cuda.can_use_flash_attention,
            torch.backends.cuda.can_use_efficient_attention,
            torch.backends.cuda.can_use_cudnn_attention,
        )
        return any(ask(params) for ask in asks)
    return torch._fused_sdp_choice(q, k, v, mask) != torch.nn.attention.SDPBackend.MATH.value


def _combined_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """One mask for everything that hides keys, and which rows see nothing (those let all through, to stay finite)."""
    n, s = q.shape[-2], k.shape[-2]
    allowed = position_mask(n, s, is_causal, window, documents, q.device)
    if attn_mask is None:
        if allowed is None:
            return None, None
        if n <= s:
            return allowed, None
        blind = ~allowed.any(-1, keepdim=True)
        return allowed | blind, blind
    if attn_mask.dtype == torch.bool:
        mask = attn_mask if allowed is None else attn_mask & allowed
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    mask = attn_mask.to(torch.promote_types(attn_mask.dtype, q.dtype))
    if mask.dtype != q.dtype:
        # A finite value that q's dtype cannot hold, such as float32's lowest in float16, must not turn into −∞.
        info = torch.finfo(q.dtype)
        mask = torch.where(mask == float("-inf"), mask, mask.clamp(info.min, info.max)).to(q.dtype)
    if allowed is not None:
        mask = mask.masked_fill(~allowed, float("-inf"))
    blind = (mask == float("-inf")).all(-1, keepdim=True)
    return mask.masked_fill(blind, 0.0), blind


def sdpa_attention(
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
    """A1 V − λ A2 V. Shapes as in :func:`diff_transformer.diff_attention`; ``lam`` is (B, H, N)."""
    n, s, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    # torch aligns its own causality to the start of the keys: the same thing only where N = S. Its fused kernels hide
    # keys before they scale, which a scale of 0 or less undoes.
    plain_causal = is_causal and n == s and window is None and attn_mask is None and documents is None and scale > 0
    mask, blind = (None, None) if plain_causal else _combined_mask(q, k, attn_mask, is_causal, window, documents)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.device.type != "cuda":
        # Outside CUDA torch answers enable_gqa with its plain formula.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    # index() fixes a size that torch.compile would leave open.
    if wide_values_allowed(q.device.type, q.dtype, operator.index(d), operator.index(dv), mask is not None):
        pieces: tuple[Tensor, ...] = (v,)
    else:
        pieces = tuple(F.pad(piece, (0, d - piece.shape[-1])) for piece in v.split(d, dim=-1))
    outputs = []
    for c in range(2):
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, c],
                k[:, :, c % k.shape[2]],
                piece,
                attn_mask=mask,
                is_causal=plain_causal,
                scale=scale,
                enable_gqa=groups > 1,
            )
            for piece in pieces
        ]
        outputs.append((parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))[..., :dv])
    out = outputs[0] - lam.unsqueeze(-1) * outputs[1]
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
    return out.to(q.dtype)
