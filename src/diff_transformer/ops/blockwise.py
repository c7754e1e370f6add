"""Attends in blocks of queries, with exact row softmax and its own backward: any device, memory linear in N.

Because a block of queries sees its whole rows, the two maps are subtracted before the one product with V, and the
backward (Appendix G, Equation 7) needs the products dP = dO·Vᵀ and dV = (P1 − λP2)ᵀ·dO once for both maps.
The maps are computed again in the backward; nothing but the inputs is saved.

Only a few heads are taken at a time, so that the scores of a block are still in the processor's cache when the next
step reads them, and all blocks use the same buffers.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import REQUEST_SCHEMA, SIGNAL_SCHEMA, Request, key_ranges, register_gradient
from diff_transformer.ops.functional import without_autocast

# Rows of queries to a block, and scores of one map to hold at a time: few enough for the caches, enough for
# efficient matrix products. docs/backends.md says how the numbers were measured.
MAX_ROWS = 128
MIN_ROWS = 64
CORE_SCORES = 1 << 19  # on the CPU, for each thread
DEVICE_SCORES = 1 << 24  # away from the CPU every step is a launch: few, large blocks

# An upper bound of scores (rows, keys), ∞ where a query may see a key and −∞ where not, after its first key.
Limit = tuple[int, Tensor]


class _Block(NamedTuple):
    """Rows start … stop − 1 of the queries, keys low … high − 1, and those among them that all of the rows see."""

    start: int
    stop: int
    low: int
    high: int
    inner: tuple[int, int]


@dataclass
class _Part:
    """Some key heads of some sequences, C in all, with their M heads each; in the dtype of the computation.

    The M heads are M / r groups of r signal heads, and a group has one noise map.
    """

    slices: tuple[slice, slice]  # of the sequences, and of the key heads
    shape: tuple[int, ...]  # (sequences, key heads)
    queries: list[Tensor]  # of each map, (C, M, N, d) and (C, M / r, N, d), scaled
    keys: list[Tensor]  # of each map, or one for both: (C, S, d)
    values: Tensor  # (C, S, dv)
    lam: Tensor  # (C, M, N, 1)
    signal: Tensor | None  # as λ: the factors of the signal maps
    mask: Tensor | None  # (sequences, key heads, M, N, S), any of these or 1


def _take(x: Tensor, slices: tuple[slice, slice]) -> Tensor:
    """Return a part of x (sequences or 1, key heads or 1, …)."""
    for axis, rows in enumerate(slices):
        if x.shape[axis] > rows.stop - rows.start:
            x = x.narrow(axis, rows.start, rows.stop - rows.start)
    return x


def _rows(x: Tensor, block: _Block) -> Tensor:
    """Return the block's rows of x (C, M, N, e) as (C, M·rows, e): a key head's heads share keys and values."""
    return x[:, :, block.start : block.stop].flatten(1, 2)


def _by_group(x: Tensor, ratio: int, block: _Block) -> Tensor:
    """View the block's rows of x (C, M·rows, e) as (C, M / r, r, rows, e); those of P2, one map for r heads, by 1."""
    return x.unflatten(1, (-1, ratio, block.stop - block.start))


class _Problem:
    """The inputs, cut into parts and blocks, and buffers for ``buffers`` maps of a block."""

    def __init__(self, buffers: int, request: Request) -> None:
        self.request = request
        q, n, s, self.ratio = request.q, request.n, request.s, request.ratio
        heads_per_key = request.heads_per_key
        is_causal, window = request.is_causal, request.window
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.may_be_fully_masked = request.attn_mask is not None or (is_causal and n > s)
        scores = CORE_SCORES * torch.get_num_threads() if q.device.type == "cpu" else DEVICE_SCORES
        # A causal block computes the half of its last columns that is hidden: a short sequence takes fewer rows.
        rows = min(scores, s * s // 8) // (heads_per_key * s)
        rows = min(n, max(MIN_ROWS, min(MAX_ROWS, rows - rows % MIN_ROWS)))
        self.ranges, bounds = request.key_ranges(), request.segment_bounds
        # Away from the CPU, looking at the documents would wait for all the work before.
        looks_at_documents = q.device.type == "cpu" or bounds is None
        visible = self.ranges
        if q.device.type != "cpu":
            visible = key_ranges(n, s, is_causal, window, None, torch.device("cpu"))
        begins, ends = (keys.tolist() for keys in visible)
        self.blocks = []  # in which anything is seen
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            low, high = min(begins[start:stop]), max(ends[start:stop])
            inner = (max(begins[start:stop]), min(ends[start:stop])) if looks_at_documents else (high, high)
            if low < high:
                self.blocks.append(_Block(start, stop, low, high, inner))
        largest = heads_per_key * rows * max((block.high - block.low for block in self.blocks), default=1)
        self.size = max(1, min(request.k.shape[0] * request.k.shape[1], scores // largest))
        self.buffers = q.new_empty((buffers, self.size * largest), dtype=self.dtype).unbind()
        # What documents hide may be as wide as the keys, so it is found when it is applied.
        self.limits = {block.start: self.limits_of(block) for block in self.blocks} if bounds is None else {}

    def cut(self, x: Tensor, slices: tuple[slice, slice]) -> Tensor:
        """Return a part's (sequences, key heads, M, …) of x (B, H, …), or M / r of (B, G, …); an axis of 1 stays."""
        key_heads = self.request.k.shape[1]
        x = x.unsqueeze(2) if x.shape[1] == 1 else x.view(x.shape[0], key_heads, -1, *x.shape[2:])
        return _take(x, slices)

    def parts(self) -> Iterator[_Part]:
        """Yield all key heads, a few at a time. ``flatten`` copies only if the strides leave no other way."""
        q, k, v, lam, attn_mask = self.request[:5]
        batch, key_heads = k.shape[:2]
        # Of whole sequences if one fits, else of one.
        sequences, heads = max(1, self.size // key_heads), min(key_heads, self.size)
        for first, head in itertools.product(range(0, batch, sequences), range(0, key_heads, heads)):
            slices = slice(first, min(batch, first + sequences)), slice(head, min(key_heads, head + heads))
            both = self.cut(q, slices)  # (sequences, key heads, M / r, r + 1, N, d)
            shape = both.shape[:2]
            queries = [
                x.flatten(2, 3).flatten(0, 1).to(self.dtype) * self.request.scale
                for x in (both[:, :, :, :-1], both[:, :, :, -1:])
            ]
            keys = [_take(k[:, :, c], slices).flatten(0, 1).to(self.dtype) for c in range(k.shape[2])]
            values = _take(v, slices).flatten(0, 1).to(self.dtype)
            if len(self.blocks) > 1:  # what is read again and again is faster to read with its rows side by side
                keys, values = [x.contiguous() for x in keys], values.contiguous()
            lambdas = self.cut(lam, slices).flatten(0, 1).to(self.dtype).unsqueeze(-1)
            signals = self.request.signal_weight
            if signals is not None:
                signals = self.cut(signals, slices).flatten(0, 1).to(self.dtype).unsqueeze(-1)
            mask = None if attn_mask is None else self.cut(attn_mask, slices)
            yield _Part(slices, shape, queries, keys, values, lambdas, signals, mask)

    def maps(self, part: _Part, block: _Block) -> tuple[Tensor, Tensor]:
        """Compute P1 (C, M·rows, keys) and P2 (C, M / r·rows, keys) of a block, in buffers 0 and 1."""
        mask = part.mask
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., block.start : block.stop, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., block.low : block.high]
        if mask is not None and mask.dtype == torch.bool:
            upper_bound = mask.to(self.dtype).sub_(0.5).mul_(math.inf)  # ∞ where it is True, −∞ where not
        limits = self.limits[block.start] if self.limits else self.limits_of(block)
        maps = []
        for c in range(2):
            queries, keys = _rows(part.queries[c], block), part.keys[c % len(part.keys)][:, block.low : block.high]
            scores = self.buffer(2, queries.shape[0], queries.shape[1], keys.shape[1])
            if queries.shape[1] == 1:  # twice as fast this way round with the keys of a cache
                torch.bmm(keys, queries.mT, out=scores.mT)
            else:
                torch.bmm(queries, keys.mT, out=scores)
            tiles = scores.view(*part.shape, -1, block.stop - block.start, keys.shape[1])
            for first, limit in limits:
                column = first - block.low
                tiles[..., column : column + limit.shape[-1]].clamp_(max=limit)
            if mask is not None and mask.dtype == torch.bool:
                tiles.clamp_(max=upper_bound)
            elif mask is not None:
                tiles.add_(mask)
            weights = self.buffer(c, *scores.shape)
            if self.may_be_fully_masked:  # a row of −∞ alone becomes 0, in steps that are faster than masked_fill
                sees_none = scores.amax(-1, keepdim=True) == -math.inf
                scores.clamp_(min=torch.where(sees_none, 0.0, -math.inf))
                maps.append(torch.softmax(scores, -1, out=weights).mul_(~sees_none))
            else:
                maps.append(torch.softmax(scores, -1, out=weights))
        return maps[0], maps[1]

    def limits_of(self, block: _Block) -> list[Limit]:
        """Return the limits that position sets: columns before and after those that all rows of the block see."""
        begin, end = (bound[block.start : block.stop].unsqueeze(1) for bound in self.ranges)
        limits, like = [], self.buffers[0]
        for first, stop in ((block.low, min(block.inner[0], block.high)), (max(*block.inner, block.low), block.high)):
            if first < stop:
                keys = torch.arange(first, stop, device=like.device)
                seen = (begin <= keys) & (keys < end)
                limits.append((first, like.new_full(seen.shape, -math.inf).masked_fill_(seen, math.inf)))
        return limits

    def buffer(self, i: int, *shape: int) -> Tensor:
        return self.buffers[i][: math.prod(shape)].view(shape)


@torch.library.custom_op(
    "diff_transformer::blockwise", mutates_args=(), schema=f"({REQUEST_SCHEMA}, {SIGNAL_SCHEMA}) -> Tensor"
)
def blockwise_forward(*inputs: Any) -> Tensor:
    """Compute (w A1 − λA2) V, (B, H, N, dv), of the fields of a :class:`Request`."""
    request = Request(*inputs)
    q, v = request.q, request.v
    out = q.new_zeros(q.shape[0], request.heads, request.n, v.shape[-1])
    with without_autocast(q.device.type):
        problem = _Problem(3, request)
        for part in problem.parts():
            part_out = problem.cut(out, part.slices)
            for block in problem.blocks:
                a1, a2 = problem.maps(part, block)
                lambdas = _by_group(_rows(part.lam, block), request.ratio, block)
                if part.signal is not None:
                    a1.mul_(_rows(part.signal, block))
                _by_group(a1, request.ratio, block).addcmul_(lambdas, _by_group(a2, 1, block), value=-1)
                result = a1 @ part.values[:, block.low : block.high]
                of_block = part_out[..., block.start : block.stop, :]
                of_block.copy_(result.view(of_block.shape))
    return out


@blockwise_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*lam.shape, v.shape[-1])


@torch.library.custom_op(
    "diff_transformer::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {REQUEST_SCHEMA}, {SIGNAL_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def blockwise_backward(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, lam and the signal's weight, or an empty one (Appendix G, Equation 7)."""
    request = Request(*inputs)
    q, k, v, lam = request[:4]
    ratio = request.ratio
    grad_q, grad_k, grad_v, grad_lam, grad_signal = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, lam, lam)
    )
    with without_autocast(q.device.type):
        problem = _Problem(4, request)
        for part in problem.parts():
            part_grad = problem.cut(grad_out, part.slices).flatten(0, 1).to(problem.dtype).contiguous()
            part_grad_q, part_grad_lam, part_grad_signal = (
                problem.cut(x, part.slices) for x in (grad_q, grad_lam, grad_signal)
            )
            key_sums, value_sum = [torch.zeros_like(x) for x in part.keys], torch.zeros_like(part.values)
            for block in problem.blocks:
                maps = problem.maps(part, block)
                rows, keys = slice(block.start, block.stop), slice(block.low, block.high)
                lambdas, grad_block = _rows(part.lam, block), _rows(part_grad, block)
                shape = maps[0].shape
                grad_weights, scratch = problem.buffer(2, *shape), problem.buffer(3, *shape)
                torch.bmm(grad_block, part.values[:, keys].mT, out=grad_weights)  # dP, of both maps
                signals = None if part.signal is None else _rows(part.signal, block)
                if signals is not None:
                    row_sums = torch.mul(maps[0], grad_weights, out=scratch).sum(-1)
                    part_grad_signal[..., rows] = row_sums.view(*part.shape, -1, block.stop - block.start)
                # By group: (C, M / r, r, rows, keys), and of what a group has one of, with 1 in the place of r.
                a1, a2, factors = (
                    _by_group(x, r, block) for x, r in zip((*maps, lambdas), (ratio, 1, ratio), strict=True)
                )
                of_group, grads = _by_group(scratch, ratio, block), _by_group(grad_weights, ratio, block)
                first = a1 if signals is None else torch.mul(a1, _by_group(signals, ratio, block), out=of_group)
                torch.addcmul(first, factors, a2, value=-1, out=of_group)
                value_sum[:, keys].baddbmm_(scratch.mT, grad_block)
                row_sums = torch.mul(a2, grads, out=of_group).sum(-1)
                part_grad_lam[..., rows] = -row_sums.view(*part.shape, -1, row_sums.shape[-1])
                # dS_c = g_c · P_c ⊙ (dP − rowsum(P_c ⊙ dP)), with g_1 = w and g_2 = −λ. g_c is one number to a row: it
                # is applied to the rows of dQ_c and Q_c instead, which are d wide and not as wide as the keys. A noise
                # map of several signal heads takes −Σ λ dP of all of them in the place of dP, and no factor after it.
                for c, weights in enumerate(maps):
                    if c == 1 and ratio > 1:
                        torch.mul(grads, -factors, out=of_group)
                        grad_weights = problem.buffer(0, *weights.shape)  # P1 is done with
                        torch.sum(of_group, 2, keepdim=True, out=_by_group(grad_weights, 1, block))
                        scratch = problem.buffer(3, *weights.shape)
                    torch.ops.aten._softmax_backward_data.out(
                        grad_weights, weights, -1, problem.dtype, grad_input=scratch
                    )
                    grad_queries = scratch @ part.keys[c % k.shape[2]][:, keys]
                    queries = _rows(part.queries[c], block)  # scaled
                    factor = signals if c == 0 else -lambdas if ratio == 1 else None
                    if factor is not None:
                        grad_queries, queries = grad_queries * factor, queries * factor
                    grad_queries = _by_group(grad_queries, 1 if c else ratio, block) * request.scale
                    to = part_grad_q[:, :, :, :-1, rows] if c == 0 else part_grad_q[:, :, :, -1:, rows]
                    to.copy_(grad_queries.view(to.shape))
                    key_sums[c % k.shape[2]][:, keys].baddbmm_(scratch.mT, queries)
            grad_v[part.slices] = value_sum.view(grad_v[part.slices].shape)
            for c, sums in enumerate(key_sums):
                grad_k[part.slices][:, :, c] = sums.view(*part.shape[:2], *sums.shape[1:])
    return grad_q, grad_k, grad_v, grad_lam, grad_lam.new_empty(0) if request.signal_weight is None else grad_signal


register_gradient("blockwise", blockwise_forward, blockwise_backward)


def blockwise_attention(request: Request) -> Tensor:
    """Compute (w A1 − λA2) V, (B, H, N, dv), w the signal's weight, by blocks."""
    return blockwise_forward(*request)
