"""Attends to keys and values in eight bits, as a cache of them holds their rows."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.backends import fast_path_of
from diff_transformer.ops.operator import diff_attention

_SCALE = 4  # bytes of a float32 behind the numbers of a row
# The arguments of the CPU kernel after λ, in its order, with the operator's defaults.
_ARGUMENTS: dict[str, Any] = {"attn_mask": None, "is_causal": False, "scale": None, "window": None}
_ARGUMENTS |= {"norm_weight": None, "norm_eps": 1e-5, "norm_scale": 1.0, "signal_weight": None}


def pack(x: Tensor) -> Tensor:
    """Round rows (…, width) to int8 (…, width + 4), the last four bytes of which are the row's float32 scale.

    The scale is the largest entry over 127. That of a row with a NaN or an infinity is one too, and so are its numbers.
    A row of width 0, as beside latents, stays empty.
    """
    x = x.detach().float()
    if x.shape[-1] == 0:
        return x.to(torch.int8)
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 127
    return torch.cat(((x / scale).round_().to(torch.int8), scale.view(torch.int8)), -1)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that rows (…, width + 4) stand for, (…, width)."""
    if rows.shape[-1] == 0:
        return rows.to(dtype)
    scale = rows[..., -_SCALE:].contiguous().view(torch.float32)
    return (rows[..., :-_SCALE] * scale).to(dtype)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, backend: str = "auto", **settings: Any) -> Tensor:
    """Compute :func:`diff_transformer.diff_attention` of packed keys (B, H_kv, S, [k1; k2]) and values.

    The CPU kernel reads the rows as they are for the few queries of decoding. For anything else they are unpacked.
    """
    fast_path = fast_path_of(backend)
    if fast_path is not None and settings.get("cu_seqlens") is None and not settings.get("dropout_p"):
        arguments = (settings.get(name, default) for name, default in _ARGUMENTS.items())
        out = fast_path(backend, q, k, v, lam, *arguments, packed=True)
        if out is not None:
            return out
    keys = unpack(k, q.dtype).unflatten(-1, (-1, q.shape[-1])).transpose(2, 3)
    return diff_attention(q, keys, unpack(v, q.dtype), lam, backend=backend, **settings)
