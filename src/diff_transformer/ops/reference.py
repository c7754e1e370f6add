"""Computes Equation 1 as it is written, the oracle of every other backend, in any floating dtype up to float64.

Memory and time grow with N·S. Differentiable any number of times.

Says, too, how far an answer may be from the exact one: the one budget of the tests, the benchmarks and the check of a
GPU. Nobody guesses a tolerance. An answer in a dtype may be twice as far from float64 as the plain formula is with
every step in that dtype, and besides by a band for rounding, since the plain formula may be right by luck.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.functional import without_autocast

PLAIN_ERRORS = 2
# How often a quantity is rounded on the way, each time by half an eps: the maps, λ, their difference and the result;
# for the other gradients dP and dS too.
ROUNDINGS = {"out": 4, "v": 4, "q": 6, "k": 6, "lam": 6}
_LOG_SUM_ROWS = 128  # queries whose scores are held at a time
_ACCUMULATOR_EPS = torch.finfo(torch.float32).eps


def _scores(request: Request) -> Tensor:
    """Compute the scores of all maps, (B, G, r + 1, N, S), −∞ where a key is hidden, in float32 at least."""
    q, k, attn_mask = request.q, request.k, request.attn_mask
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Head h, map c reads key head h // (H / H_kv), map c: never another map's keys. They are repeated in the wider
    # dtype, so that the gradients of heads that share a key are added up before they are rounded.
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    if request.ratio > 1:  # every signal head of a group meets the first key, its noise map the second
        k = torch.cat((k[:, :, :1].expand(-1, -1, request.ratio, -1, -1), k[:, :, -1:]), dim=2)
    with without_autocast(q.device.type):
        scores = (q.to(dtype) * request.scale) @ k.transpose(-1, -2)
    allowed = request.position_mask()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(-3)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = (scores + attn_mask).masked_fill(attn_mask == float("-inf"), float("-inf"))
    return scores


def log_sums(request: Request) -> Tensor:
    """Compute log Σ exp of each map's scores over the keys that a query sees, (B, G, r + 1, N); −∞ over none.

    A block of queries at a time, whose scores are computed again in the backward: memory is linear in N.
    """
    begin, end = request.key_ranges()
    # torch.func takes no checkpoints, and torch.compile looks for blocks itself.
    whole = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    rows = request.n if whole else _LOG_SUM_ROWS
    parts = []
    for start in range(0, request.n, rows):
        block = slice(start, start + rows)
        mask = request.attn_mask
        part = request._replace(
            q=request.q[:, :, :, block],
            attn_mask=mask if mask is None or mask.shape[2] == 1 else mask[:, :, block],
            is_causal=False,
            window=None,
            segment_bounds=torch.stack((begin[block], end[block])),
        )
        keeps = whole or not request.needs_gradient
        parts.append(_log_sums(part) if keeps else checkpoint(_log_sums, part, use_reentrant=False))
    return torch.cat(parts, dim=-1)


def _log_sums(request: Request) -> Tensor:
    scores = _scores(request)
    sees_none = (scores == float("-inf")).all(-1)
    scores = scores.masked_fill(sees_none.unsqueeze(-1), 0.0)
    # torch's gradient is exp(score − result), and rounding a large result would take all digits of the difference.
    rounded = scores.detach().logsumexp(-1, keepdim=True)
    return ((scores - rounded).logsumexp(-1) + rounded.squeeze(-1)).masked_fill(sees_none, float("-inf"))


def softmax_maps(request: Request) -> tuple[Tensor, Tensor]:
    """Compute A1 and A2 of Equation 1, each (B, H, N, S), in float32 at least."""
    scores = _scores(request)  # (B, G, r + 1, N, S)
    sees_none = (scores == float("-inf")).all(-1, keepdim=True)  # such a row is 0, with gradient 0, instead of NaN
    maps = torch.softmax(scores.masked_fill(sees_none, 0.0), dim=-1).masked_fill(sees_none, 0.0)
    a1, a2 = maps.split((request.ratio, 1), dim=2)
    return a1.flatten(1, 2), a2.expand_as(a1).flatten(1, 2)


def reference_attention(request: Request, dropout_p: float = 0.0) -> Tensor:
    """Compute (w A1 − λA2) V, (B, H, N, dv), w the signal's weight. Of either map a share ``dropout_p`` is dropped."""
    a1, a2 = softmax_maps(request)
    if dropout_p:
        a1, a2 = F.dropout(a1, dropout_p), F.dropout(a2, dropout_p)
    v = request.v.to(a1.dtype).repeat_interleave(request.heads_per_key, dim=1)
    with without_autocast(v.device.type):
        out = request.difference(a1, a2) @ v
    return out.to(request.q.dtype)


def rounding_band(size: Tensor, eps: float, roundings: int, terms: int = 0) -> Tensor:
    """Bound the error of rounding alone in quantities of a ``size``.

    Args:
        size: the quantities' magnitudes.
        eps: of the dtype in which they are rounded.
        roundings: how often, as in :data:`ROUNDINGS`.
        terms: how many terms a sum in float32 has, whose own roundings count if the dtype is no narrower.
    """
    return (roundings * eps + terms**0.5 * _ACCUMULATOR_EPS) / 2 * size


def share_of_allowed(error: Tensor, plain_error: Tensor, band: Tensor) -> float:
    """Return the largest error as a share of the budget; infinite for a NaN, or for an error where none is allowed."""
    shares = torch.where(error == 0, 0.0, error / (PLAIN_ERRORS * plain_error + band))
    return float(shares.nan_to_num(nan=torch.inf).max())


def rms_by_position(values: Tensor, positions: int) -> Tensor:
    """Return the root mean square of (…, N, width) over each block of so many positions.

    The first rows of a causal sequence are hundreds of times as large as the last ones, and would hide an error there.
    """
    squares = values.double().square().movedim(-2, 0).flatten(1).mean(1)
    return torch.stack([block.mean().sqrt() for block in squares.split(positions)])
