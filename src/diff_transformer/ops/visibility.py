"""Says which keys a query may see, by causality, window and documents, for all backends.

Causality is aligned to the end of the keys: query i of N stands at position i + S − N among S keys.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def is_block_mask(mask: object) -> "TypeGuard[BlockMask]":
    """Return whether a mask is one of FlexAttention's. Its module is imported for neither a tensor nor None."""
    if mask is None or isinstance(mask, Tensor):
        return False
    from torch.nn.attention.flex_attention import BlockMask

    return isinstance(mask, BlockMask)


def segment_bounds_from(cu_seqlens: Tensor, n: int) -> Tensor:
    """Return the first key of each query's document and the one past its last, (2, N) int32.

    ``cu_seqlens`` cuts positions 0 … N − 1: whatever its values, the bounds stay between 0 and N.
    """
    ends = cu_seqlens.clamp(0, n).to(torch.int32)
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), n)))
    tokens = torch.arange(n, device=ends.device, dtype=torch.int32)
    following = torch.searchsorted(ends, tokens, right=True, out_int32=True)
    return torch.stack((ends[following - 1], ends[following]))


def key_ranges(
    n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first key that position leaves to each query and the one past the last, (N,) int64 each, from 0 to S.

    A query sees nothing if the second is not above the first. ``segment_bounds`` is (2, N), as
    :func:`segment_bounds_from` gives it.
    """
    positions = torch.arange(s - n, s, device=device)
    begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    end = (positions + 1).clamp(min=0) if is_causal else torch.full_like(positions, s)
    if segment_bounds is not None:
        begin, end = torch.maximum(begin, segment_bounds[0]), torch.minimum(end, segment_bounds[1])
    return begin, end


def position_mask(
    n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the (N, S) boolean mask of causality, window and documents, or None if they hide nothing."""
    causality_hides = is_causal and n > 1  # a single query is the last, and sees all keys
    if not causality_hides and window is None and segment_bounds is None:
        return None
    begin, end = key_ranges(n, s, is_causal, window, segment_bounds, device)
    keys = torch.arange(s, device=device)
    return (begin.unsqueeze(1) <= keys) & (keys < end.unsqueeze(1))
