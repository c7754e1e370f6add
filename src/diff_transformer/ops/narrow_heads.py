"""Computes ordinary attention of narrow heads, which torch's own attention is slow with on a CPU, by the operator."""

from typing import Any

from torch import Tensor

from diff_transformer.ops.attention_request import reason_against_dtype
from diff_transformer.ops.cpu.cpu_backend import available_to_auto
from diff_transformer.ops.flex import is_block_mask
from diff_transformer.ops.operator import diff_attention

# Heads as wide as this, and wider ones, are left to torch. With narrower ones the fused kernel takes .3 to .8 of the
# time of torch's attention, forward and backward, although it computes the map twice (benchmarks/narrow_heads.json).
_WIDE = 16


def attends_to_narrow_heads(query: Tensor, attn_mask: Any, dropout_p: float) -> bool:
    """Whether :func:`narrow_attention` is the faster way for these queries (B, heads, N, d). May compile the kernel."""
    return (
        query.device.type == "cpu"
        and query.shape[-1] < _WIDE
        and not dropout_p
        and not is_block_mask(attn_mask)
        and reason_against_dtype(query.dtype) is None
        and available_to_auto()
    )


def narrow_attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """Ordinary attention as the difference of a map and 0 times the same map, which is exact.

    Queries (B, heads, N, d), keys and values (B, H_kv, S, d); ``settings`` are further arguments of
    :func:`diff_attention`, whose causality is aligned to the end of the keys. Returns (B, heads, N, d).
    """
    pairs = query.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    return diff_attention(pairs, key.unsqueeze(2), value, 0.0, **settings)
