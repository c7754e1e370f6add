"""Which keys a query may see: causality, look-back window and masks, shared by all backends.

Causality is aligned to the end of the keys: query i of N stands at position i + S − N among S keys.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Limit(NamedTuple):
    """An upper bound of scores: ∞ where a query may see a key, −∞ where not."""

    first: int  # the key of the first column
    upper_bound: Tensor  # (rows, keys)


def visible_keys(
    start: int, stop: int, n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None
) -> tuple[int, int]:
    """The half-open range of keys outside which no query of rows start … stop − 1 can see anything.

    ``segment_bounds`` is (2, N), as :func:`segment_bounds_from` gives it. Away from the CPU it narrows nothing: looking
    at its values would wait for all the work before.
    """
    offset = s - n
    low = 0 if window is None else min(max(0, start + offset - window + 1), s)
    high = max(0, min(s, stop + offset)) if is_causal else s
    if segment_bounds is not None and segment_bounds.device.type == "cpu":
        begin, end = segment_bounds[:, start:stop]
        low, high = max(low, int(begin.min())), min(high, int(end.max()))
    return low, max(low, high)


def segment_bounds_from(cu_seqlens: Tensor, n: int) -> Tensor:
    """The first key of each query's document and the one past its last, (2, N) int32.

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
    if not is_causal and window is None and segment_bounds is None:
        return None
    begin, end = key_ranges(n, s, is_causal, window, segment_bounds, device)
    keys = torch.arange(s, device=device)
    return (begin.unsqueeze(1) <= keys) & (keys < end.unsqueeze(1))


def position_limits(
    start: int, stop: int, low: int, high: int, offset: int, is_causal: bool, window: int | None, like: Tensor
) -> list[Limit]:
    """What causality and the window hide in a block: rows start … stop − 1 of the queries, keys low … high − 1.

    Only the columns at the two edges of the block can be hidden, and only these are in the limits, which have the dtype
    and device of ``like``. Query i stands at i + ``offset`` among the keys.
    """
    start, stop = start + offset, stop + offset
    limits = []
    if is_causal:
        limits += _limit(max(low, start + 1), high, range(start + 1, stop + 1), like, before=False)
    if window is not None:
        begins = range(start - window + 1, stop - window + 1)
        limits += _limit(low, min(high, stop - window), begins, like, before=True)
    return limits


def segment_limits(segment_bounds: Tensor, low: int, high: int, like: Tensor) -> list[Limit]:
    """What ``segment_bounds`` (2, rows) hide from the queries of a block among keys low … high − 1, as above.

    On the CPU only columns in which something is hidden are in the limits.
    """
    begin, end = segment_bounds.unsqueeze(-1)
    on_cpu = segment_bounds.device.type == "cpu"
    last_begin, first_end = (int(begin.max()), int(end.min())) if on_cpu else (high, low)
    before = _limit(low, min(last_begin, high), begin, like, before=True)
    return before + _limit(max(first_end, low), high, end, like, before=False)


def _limit(low: int, high: int, bounds: Tensor | range, like: Tensor, *, before: bool) -> list[Limit]:
    """Of keys low … high − 1, if there are any, those ``before`` each query's bound are hidden, or those from it on.

    ``bounds`` is (rows, 1), or the range of its numbers.
    """
    if low >= high:
        return []
    if isinstance(bounds, range):
        bounds = torch.arange(bounds.start, bounds.stop, device=like.device).unsqueeze(1)
    keys = torch.arange(low, high, device=like.device)
    hidden = keys < bounds if before else keys >= bounds
    return [Limit(low, like.new_full(hidden.shape, math.inf).masked_fill_(hidden, -math.inf))]


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
    if mask.shape[-1] == 1:
        return (low, high) if seen.item() else (low, low)
    columns = seen.nonzero()
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
