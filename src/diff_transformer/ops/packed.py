"""Rounds keys and values to eight bits, in the rows that a cache holds."""

import torch
from torch import Tensor

_SCALE = 4  # bytes of a float32 behind the numbers of a row


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
    # A copy, also of a single row, which counts as contiguous whatever byte it begins at.
    scale = rows[..., -_SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-_SCALE] * scale).to(dtype)


def unpacked(k: Tensor, v: Tensor, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys (B, H_kv, 2 or 1, S, d) and values that rows of [k1; k2] and of values stand for."""
    return unpack(k, dtype).unflatten(-1, (-1, d)).transpose(2, 3), unpack(v, dtype)


def packed_views(k: Tensor, v: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """View the int8 of rows as such keys and values; the scale of a row stays behind it in memory."""
    return k[..., :-_SCALE].unflatten(-1, (-1, d)).transpose(2, 3), v[..., :-_SCALE]


def rows_are_words(q: Tensor, *rows: Tensor) -> bool:
    """Return whether rows are where q is, near enough for 32 bits to count the bytes of a block, and in words."""
    places = [q.shape[-1], *(place for x in rows for place in (x.data_ptr(), x.shape[-1], *x.stride()[:-1]))]
    are_near = (x.device == q.device and x.stride(-1) == 1 and x.stride(-2) < 1 << 24 for x in rows)
    return all(are_near) and all(x.dtype == torch.int8 for x in rows) and not any(place % _SCALE for place in places)
