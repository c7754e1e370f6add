"""Which keys a query may see: causality, look-back window and masks, shared by all backends.

Causality is aligned to the end of the keys: query i of N stands at position i + S − N among S keys.
"""

import torch
from torch import Tensor


def visible_keys(start: int, stop: int, n: int, s: int, is_causal: bool, window: int | None) -> tuple[int, int]:
    """The half-open range of keys outside which no query of rows start … stop − 1 can see anything."""
    offset = s - n
    low = 0 if window is None else min(max(0, start + offset - window + 1), s)
    high = max(0, min(s, stop + offset)) if is_causal else s
    return low, max(low, high)


def position_mask(n: int, s: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """(N, S) boolean, True where causality and the window allow attention, or None where they hide nothing."""
    if not is_causal and window is None:
        return None
    queries = torch.arange(n, device=device).unsqueeze(1) + (s - n)
    keys = torch.arange(s, device=device).unsqueeze(0)
    allowed = torch.ones(n, s, dtype=torch.bool, device=device)
    if is_causal:
        allowed = allowed & (keys <= queries)
    if window is not None:
        allowed = allowed & (keys > queries - window)
    return allowed


def hide_by_position(scores: Tensor, start: int, low: int, n: int, s: int, is_causal: bool, window: int | None) -> None:
    """Set to −∞, in place, what causality and the window hide in a block of scores.

    Only the columns at the two edges of the block can be hidden, and only those are touched.

    Args:
        scores: (…, rows, keys), rows start … of the queries against keys low … of the keys.
    """
    rows, width = scores.shape[-2:]
    first = start + s - n  # position of the block's first query among the keys
    if is_causal:
        edge = min(max(first + 1 - low, 0), width)
        if edge < width:
            queries = torch.arange(first, first + rows, device=scores.device).unsqueeze(1)
            keys = torch.arange(low + edge, low + width, device=scores.device).unsqueeze(0)
            scores[..., edge:].masked_fill_(keys > queries, float("-inf"))
    if window is not None:
        edge = min(max(first + rows - window - low, 0), width)
        if edge > 0:
            queries = torch.arange(first, first + rows, device=scores.device).unsqueeze(1)
            keys = torch.arange(low, low + edge, device=scores.device).unsqueeze(0)
            scores[..., :edge].masked_fill_(keys <= queries - window, float("-inf"))


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax over the last axis in which a row of −∞ alone becomes 0 (and has gradient 0) instead of NaN."""
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
