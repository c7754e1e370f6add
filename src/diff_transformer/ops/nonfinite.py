"""Keys and values that hold a NaN or an infinity: they reach the queries that see them, and no others.

A weight of 0 does not hide them, since 0 · NaN is NaN, in the output as in the gradients. So a backend computes with
zeros in place of such rows, and a NaN is added to the outputs of the queries that see one of them. The C++ kernel of
the CPU follows the same rule by itself, as do the decoding kernels of Triton.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.tracing import is_ordinary
from diff_transformer.ops.visibility import key_ranges, position_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def confined(attend: Callable[..., Tensor], *, drops_nan: bool = False) -> Callable[..., Tensor]:
    """``attend(*request, *norm)`` with nothing hidden reaching its output or its gradients.

    A BlockMask is left to ``attend`` itself, because it cannot be read without making it as large as N · S.

    Args:
        attend: a backend.
        drops_nan: it gives 0 and not NaN for a query all of whose scores are NaN, so that keys and values are checked
            where nothing is hidden, too.
    """

    @functools.wraps(attend)
    def attend_confined(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lam: Tensor,
        attn_mask: "Tensor | BlockMask | None",
        is_causal: bool,
        scale: float,
        window: int | None,
        documents: Tensor | None,
        *norm: Any,
    ) -> Tensor:
        addend = None
        if attn_mask is None or isinstance(attn_mask, Tensor):
            (k, v), addend = confine((k, v), q, attn_mask, is_causal, window, documents, always=drops_nan)
        out = attend(q, k, v, lam, attn_mask, is_causal, scale, window, documents, *norm)
        return out if addend is None else out + addend.to(out.dtype)

    return attend_confined


def confine(
    rows: tuple[Tensor, ...],
    q: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    documents: Tensor | None,
    always: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Keys and values with zeros for rows that are not finite, and what to add to the output: (B, H, N, 1).

    That is NaN for the queries that see such a row, and 0 for the others. None where there is nothing to add: nothing
    is hidden (unless ``always``), or a look at the values shows that all are finite.
    """
    hides = attn_mask is not None or window is not None or documents is not None or (is_causal and q.shape[-2] > 1)
    if not (hides or always):
        return rows, None
    separated, flawed = separate(rows)
    if flawed is None:
        return rows, None
    seeing = see_any(flawed, q, attn_mask, is_causal, window, documents)
    return separated, torch.zeros_like(seeing, dtype=q.dtype).masked_fill(seeing, math.nan).unsqueeze(-1)


def separate(rows: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The tensors (B, H_kv, …, S, width) with zeros for rows that are not finite in one of them; which: (B, H_kv, S).

    None for these where a look at the values shows that there are none. Away from the CPU, where looking would wait for
    the device, and where a call is traced or transformed, the rows are always replaced.
    """
    if rows[0].device.type == "cpu" and is_ordinary(*rows):
        # No finite number makes up for a NaN or an infinity in a sum. One that overflows is looked into below.
        sums = (x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in rows)
        if math.isfinite(sum(float(each) for each in sums)):
            return rows, None
    with torch.no_grad():
        largest = [torch.linalg.vector_norm(x.detach(), math.inf, dim=-1) for x in rows]  # NaN where one is
        flawed = [~x.isfinite() if x.dim() == 3 else ~x.isfinite().all(2) for x in largest]
        either = functools.reduce(torch.logical_or, flawed)
    if is_ordinary(*rows):  # the copies keep the strides: a matrix product of another layout may round otherwise
        return tuple(x.clone().masked_fill_(_like_rows(either, x), 0.0) for x in rows), either
    return tuple(x.masked_fill(_like_rows(either, x), 0.0) for x in rows), either


def _like_rows(flawed: Tensor, rows: Tensor) -> Tensor:
    """(B, H_kv, S) as it broadcasts to keys (B, H_kv, maps, S, d) or values (B, H_kv, S, dv)."""
    return (flawed if rows.dim() == 4 else flawed.unsqueeze(2)).unsqueeze(-1)


def see_any(
    keys: Tensor,
    q: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    documents: Tensor | None,
) -> Tensor:
    """Which queries see one of the marked ``keys`` (B, H_kv, S): (B, H, N), boolean."""
    heads, n, s = q.shape[1], q.shape[3], keys.shape[-1]
    groups = heads // keys.shape[1]
    visible = attn_mask
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        visible = attn_mask != -math.inf
    if visible is not None and visible.shape[2] > 1:
        allowed = position_mask(n, s, is_causal, window, documents, q.device)
        visible = visible if allowed is None else visible & allowed
        visible, marks = visible.expand(-1, -1, -1, s).to(q.dtype), keys.to(q.dtype)
        if visible.shape[1] == 1:  # all heads at once: (B, N, S) · (B, S, H_kv), and nothing that is larger
            counts = (visible[:, 0] @ marks.mT).mT.repeat_interleave(groups, dim=1)
        else:
            counts = (visible @ marks.repeat_interleave(groups, dim=1).unsqueeze(-1)).squeeze(-1)
        return counts > 0
    keys = keys.repeat_interleave(groups, dim=1)
    if visible is not None:
        keys = keys & visible[:, :, 0]
    # What position leaves to a query is a range of keys, in which the marks are counted.
    first, past = key_ranges(n, s, is_causal, window, documents, q.device)
    counts = F.pad(keys.cumsum(-1), (1, 0))
    return counts[..., torch.maximum(first, past)] > counts[..., first]
