"""Confines a NaN or an infinity in keys and values to the queries that see it.

A weight of 0 does not hide them, since 0 · NaN is NaN, in the output as in the gradients. So a backend computes with
zeros in place of such rows, and a NaN is added to the outputs of the queries that see one of them. The C++ kernel of
the CPU follows the same rule by itself, as do those of Triton.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.attention_request import Request, is_eager


def isolate_nonfinite(attend: Callable[..., Tensor], *, drops_nan: bool = False) -> Callable[..., Tensor]:
    """Wrap ``attend(request, …)`` so that nothing hidden reaches its output or its gradients.

    A BlockMask is left to ``attend`` itself, because it cannot be read without making it as large as N · S. One that
    ``drops_nan`` gives 0 for a query all of whose scores are NaN, so keys and values are checked for it in any case.
    """

    @functools.wraps(attend)
    def attend_isolated(request: Request, *more: Any) -> Tensor:
        addend = None
        if request.attn_mask is None or isinstance(request.attn_mask, Tensor):
            request, addend = confine(request, always=drops_nan)
        out = attend(request, *more)
        return out if addend is None else out + addend.to(out.dtype)

    return attend_isolated


def confine(request: Request, always: bool = False) -> tuple[Request, Tensor | None]:
    """Return the request with zeros in place of keys and values that are not finite, and an addend of its output.

    The addend, (B, H, N, 1), is NaN for the queries that see such a row and 0 for the others. It is None if nothing is
    hidden (unless ``always``), or if a look at the values shows that all are finite.
    """
    hides_by_position = request.window is not None or (request.is_causal and request.n > 1)
    if not (always or hides_by_position or request.attn_mask is not None or request.segment_bounds is not None):
        return request, None
    (k, v), nonfinite = zero_nonfinite_rows(request.k, request.v)
    if nonfinite is None:
        return request, None
    seen = queries_with_visible_keys(nonfinite, request)
    addend = torch.zeros_like(seen, dtype=request.q.dtype).masked_fill(seen, math.nan).unsqueeze(-1)
    return request._replace(k=k, v=v), addend


def zero_nonfinite_rows(k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Zero keys and values of tokens at which one of them is not finite; return these tokens, (B, H_kv, S), too.

    They are None if a look at the values shows that there are none. The rows are always replaced away from the CPU, as
    looking would wait for the device, and in a call that is traced or transformed.
    """
    if k.device.type == "cpu" and is_eager(k, v):
        # No finite number makes up for a NaN or an infinity in a sum. One that overflows is looked into below.
        sums = (x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
        if math.isfinite(sum(float(each) for each in sums)):
            return (k, v), None
    with torch.no_grad():
        largest_k, largest_v = (torch.linalg.vector_norm(x.detach(), math.inf, dim=-1) for x in (k, v))  # NaN stays NaN
        nonfinite = ~largest_k.isfinite().all(2) | ~largest_v.isfinite()
    in_k, in_v = nonfinite.unsqueeze(2).unsqueeze(-1), nonfinite.unsqueeze(-1)
    if is_eager(k, v):  # the copies keep the strides: a matrix product of another layout may round otherwise
        return (k.clone().masked_fill_(in_k, 0.0), v.clone().masked_fill_(in_v, 0.0)), nonfinite
    return (k.masked_fill(in_k, 0.0), v.masked_fill(in_v, 0.0)), nonfinite


def queries_with_visible_keys(keys: Tensor, request: Request) -> Tensor:
    """Return which queries see one of the marked ``keys`` (B, H_kv, S): (B, H, N), boolean."""
    heads_per_key, dtype, attn_mask = request.heads_per_key, request.q.dtype, request.attn_mask
    visible = attn_mask
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        visible = attn_mask != -math.inf
    if visible is not None and visible.shape[2] > 1:
        allowed = request.position_mask()
        visible = visible if allowed is None else visible & allowed
        visible, marks = visible.expand(-1, -1, -1, request.s).to(dtype), keys.to(dtype)
        if visible.shape[1] == 1:  # all heads at once: (B, N, S) · (B, S, H_kv), and nothing that is larger
            counts = (visible[:, 0] @ marks.mT).mT.repeat_interleave(heads_per_key, dim=1)
        else:
            counts = (visible @ marks.repeat_interleave(heads_per_key, dim=1).unsqueeze(-1)).squeeze(-1)
        return counts > 0
    keys = keys.repeat_interleave(heads_per_key, dim=1)
    if visible is not None:
        keys = keys & visible[:, :, 0]
    # What position leaves to a query is a range of keys, in which the marks are counted.
    begin, end = request.key_ranges()
    counts = F.pad(keys.cumsum(-1), (1, 0))
    return counts[..., torch.maximum(begin, end)] > counts[..., begin]
