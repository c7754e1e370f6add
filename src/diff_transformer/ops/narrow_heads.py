"""Trains narrow heads of ordinary attention on a CPU by the operator's kernel, as torch's own attention is slow there.

Ordinary attention is the operator with a λ of 0 and one map twice.
"""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import reason_against_dtype
from diff_transformer.ops.cpu.cpu_backend import is_faster, reason_against_cpu_kernel
from diff_transformer.ops.operator import diff_attention
from diff_transformer.ops.visibility import is_block_mask

# Up to this width, and from so many queries on, the fused kernel takes less time than torch's attention for forward and
# backward together, although it computes the map twice (docs/backends.md). With fewer queries, and without a backward,
# torch is often the faster one.
_WIDEST, _FEWEST = 8, 64


def are_narrow(width: int, queries: int) -> bool:
    """Return whether the kernel, if there is one, is the faster way to train heads of this width."""
    return width <= _WIDEST and queries >= _FEWEST


def attends_to_narrow_heads(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float) -> bool:
    """Return whether :func:`narrow_attention` is to compute attention of these tensors (B, heads, N, d).

    It does if a gradient is needed and the kernel takes the request, but not in an exported or traced program, which
    would need this package's library. May compile the kernel.
    """
    return (
        query.device.type == "cpu"
        and reason_against_dtype(query.dtype) is None
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and not dropout_p
        and not is_block_mask(attn_mask)
        and not (isinstance(attn_mask, Tensor) and attn_mask.requires_grad)
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_exporting()
        and not torch.jit.is_tracing()
        and are_narrow(query.shape[-1], query.shape[2])
        and _has_kernel()
    )


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    return is_faster() and reason_against_cpu_kernel() is None


def narrow_attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """Compute ordinary attention as a map minus 0 times the same map, which is exact for finite values.

    Args:
        query: (B, heads, N, d), float32, bfloat16 or float16.
        key, value: (B, H_kv, S, d), of which several query heads may share one.
        settings: further arguments of :func:`diff_attention`, whose causality is aligned to the end of the keys.

    Returns:
        (B, heads, N, d). Raises as :func:`diff_attention`.
    """
    pairs = query.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    return diff_attention(pairs, key.unsqueeze(2), value, 0.0, **settings)
