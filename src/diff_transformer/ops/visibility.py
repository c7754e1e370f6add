"""Says which keys a query may see, by causality, look-back window and masks, for all backends alike.

Causality is aligned to the end of the keys: query i of N stands at position i + S − N among S keys.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# An upper bound of scores (rows, keys), ∞ where a query may see a key and −∞ where not, after its first key.
Limit = tuple[int, Tensor]


def segment_bounds_from(cu_seqlens: Tensor, n: int) -> Tensor:
    """The first key of each query's document and the one past its last, (2, N) int32.

    ``cu_seqlens`` cuts positions 0 … N − 1: whatever its values, the bounds stay between 0 and N.
    """
    ends = cu_seqlens.clamp(0, n).to(torch.int32)
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), n)))
    tokens = torch.arange(n, device=ends.device, dtype=torch.int32)
    following = torch.searchsorted(ends, tokens, right=True, out_int32=True)
    return torch.stack((ends[following - 1], ends[following]))


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether a mask is torch's CausalBias, whose storage is memory that nobody has written to.

    What comes of indexing one is not: it has lost what it means.
    """
    return type(attn_mask).__name__ == "CausalBias" and hasattr(attn_mask, "variant")


def check_causal_bias(bias: Any, n: int, widths: Sequence[int] | None) -> None:
    """Refuse a CausalBias that is not for N queries and S keys.

    Args:
        widths: the values that S may have, such as the tokens and the slots of a cache; None where they cannot be read.
    """
    # ``in`` compares a size that is symbolic under torch.compile by identity.
    fits = bias.seq_len_q == n and (widths is None or any(bias.seq_len_kv == width for width in widths))
    if not fits:
        fitting = "S" if widths is None else " or ".join(str(width) for width in dict.fromkeys(widths))
        got = (bias.seq_len_q, bias.seq_len_kv)
        raise ValueError(f"a CausalBias as mask must be of (N, S) = ({n}, {fitting}), got {got}.")


def causal_bias_mask(bias: Any, device: torch.device) -> Tensor:
    """Make the boolean mask (N, S) that a CausalBias means."""
    n, s = bias.seq_len_q, bias.seq_len_kv
    return torch.ones(n, s, dtype=torch.bool, device=device).tril(s - n if _aligns_to_end(bias) else 0)


def without_causal_bias(attn_mask: Any, is_causal: bool, n: int, s: int, device: torch.device) -> tuple[Any, bool]:
    """A mask and causality, in which a CausalBias has become what it means: causality wherever that says it.

    Raises:
        ValueError: one of other lengths than N and S.
    """
    if not is_causal_bias(attn_mask):
        return attn_mask, is_causal
    check_causal_bias(attn_mask, n, [s])
    if n == s or _aligns_to_end(attn_mask):
        return None, True
    return causal_bias_mask(attn_mask, device), is_causal


def _aligns_to_end(bias: Any) -> bool:
    return bias.variant.name == "LOWER_RIGHT"


def key_ranges(
    n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The first key that position leaves to each query and the one past the last, (N,) int64 each, from 0 to S.

    A query sees nothing where the second is not above the first. ``segment_bounds`` is (2, N), as
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
    """(N, S) boolean, True where position alone allows attention, or None where it hides nothing."""
    causality_hides = is_causal and n > 1  # a single query is the last, and sees all keys
    if not causality_hides and window is None and segment_bounds is None:
        return None
    begin, end = key_ranges(n, s, is_causal, window, segment_bounds, device)
    keys = torch.arange(s, device=device)
    return (begin.unsqueeze(1) <= keys) & (keys < end.unsqueeze(1))


def edge_limits(begin: Tensor, end: Tensor, low: int, high: int, inner: tuple[int, int], like: Tensor) -> list[Limit]:
    """What position hides from a block of queries, which see keys begin … end − 1, among keys low … high − 1.

    ``begin`` and ``end`` are (rows,). All queries see the keys of ``inner``, so only the columns before and after these
    are in the limits, which have the dtype and device of ``like``.
    """
    limits = []
    for first, stop in ((low, min(inner[0], high)), (max(inner[0], inner[1], low), high)):
        if first < stop:
            keys = torch.arange(first, stop, device=like.device)
            seen = (begin.unsqueeze(1) <= keys) & (keys < end.unsqueeze(1))
            limits.append((first, like.new_full(seen.shape, -math.inf).masked_fill_(seen, math.inf)))
    return limits


def hide(scores: Tensor, low: int, limits: list[Limit]) -> None:
    """Apply limits, in place, to scores (…, rows, keys) whose first column is key ``low``."""
    for first, upper_bound in limits:
        begin, end = max(first, low), min(first + upper_bound.shape[-1], low + scores.shape[-1])
        if begin < end:
            scores[..., begin - low : end - low].clamp_(max=upper_bound[:, begin - first : end - first])


def seen_keys(mask: Tensor, low: int, high: int) -> tuple[int, int]:
    """The half-open range of keys low … high − 1 outside which a boolean mask (…, S or 1) hides all from every row."""
    mask = mask if mask.shape[-1] == 1 else mask[..., low:high]
    seen = mask.view(torch.uint8).amax(dim=tuple(range(mask.dim() - 1)))  # many times as fast as `any`
    columns = seen.expand(high - low).nonzero()
    return (low + int(columns[0]), low + int(columns[-1]) + 1) if len(columns) else (low, low)


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax over the last axis in which a row of −∞ alone becomes 0 (and has gradient 0) instead of NaN."""
    fully_masked = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(fully_masked, 0.0), dim=-1).masked_fill(fully_masked, 0.0)


def softmax_or_zero_(scores: Tensor, out: Tensor) -> Tensor:
    """The same into ``out``, in steps that are faster than masked_fill; changes ``scores``."""
    fully_masked = scores.amax(-1, keepdim=True) == -math.inf
    scores.clamp_(min=torch.where(fully_masked, 0.0, -math.inf))
    return torch.softmax(scores, dim=-1, out=out).mul_(~fully_masked)
