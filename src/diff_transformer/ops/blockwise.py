"""Blocks of queries with exact row softmax and a backward of their own: any device, memory linear in N.

Because a block of queries sees its whole rows, the two maps are subtracted before the one product with V, and the
backward (Appendix G, Equation 7) needs the products dP = dO·Vᵀ and dV = (P1 − λP2)ᵀ·dO once for both maps.
The maps are computed again in the backward; nothing but the inputs is saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diff_transformer.ops.visibility import hide_by_position, softmax_or_zero, visible_keys

# Rows of queries to a block: few enough that the scores of a block stay near the processor, many enough that the
# matrix products are efficient. docs/backends.md says how the numbers were measured.
MAX_ROWS = 128
MIN_ROWS = 64
BLOCK_SCORES = 1 << 21


def rows_per_block(heads: int, n: int, s: int) -> int:
    """How many queries to take at a time, for ``heads`` heads in the whole batch."""
    rows = BLOCK_SCORES // max(1, heads * s)
    return min(n, max(MIN_ROWS, min(MAX_ROWS, rows - rows % MIN_ROWS)))


@dataclass
class _Problem:
    """The inputs seen as (B·H_kv, …) matrices. ``reshape`` copies only where the strides leave no other way."""

    q: Tensor
    lam: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    window: int | None
    keys: tuple[Tensor, Tensor]  # each (B·H_kv, S, d)
    values: Tensor  # (B·H_kv, S, dv)
    groups: int  # query heads to a key head
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lam: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float,
        window: int | None,
    ) -> "_Problem":
        dtype = torch.promote_types(q.dtype, torch.float32)
        first = k[:, :, 0].flatten(0, 1).to(dtype)
        second = first if k.shape[2] == 1 else k[:, :, 1].flatten(0, 1).to(dtype)
        values = v.flatten(0, 1).to(dtype)
        return cls(
            q,
            lam.to(dtype),
            attn_mask,
            is_causal,
            scale,
            window,
            (first, second),
            values,
            q.shape[1] // k.shape[1],
            dtype,
        )

    def grouped(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows start … stop − 1 of x (B, H, N, e) as (B·H_kv, G·rows, e): a group's heads share keys and values."""
        rows = self.groups * (stop - start)
        return x[:, :, start:stop].to(self.dtype).reshape(self.values.shape[0], rows, x.shape[-1])

    def lambdas(self, start: int, stop: int) -> Tensor:
        return self.grouped(self.lam.unsqueeze(-1), start, stop)

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, low, high): rows of queries and the range of keys that they can see; blind blocks left out."""
        n, s = self.q.shape[-2], self.values.shape[-2]
        rows = rows_per_block(self.q.shape[0] * self.q.shape[1], n, s)
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            low, high = visible_keys(start, stop, n, s, self.is_causal, self.window)
            if low < high:
                yield start, stop, low, high

    def mask_block(self, start: int, stop: int, low: int, high: int) -> Tensor | None:
        """The part of the mask (B or 1, H or 1, N or 1, S or 1) that meets a block, as (…, H_kv or 1, G or 1, …)."""
        mask = self.attn_mask
        if mask is None:
            return None
        mask = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
        mask = mask if mask.shape[-1] == 1 else mask[..., low:high]
        if mask.shape[1] == 1:
            return mask.unsqueeze(2)
        return mask.unflatten(1, (-1, self.groups))

    def maps(self, block: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """P1 and P2 of a block, each (B·H_kv, G·rows, keys)."""
        start, stop, low, high = block
        n, s = self.q.shape[-2], self.values.shape[-2]
        batch, heads = self.q.shape[:2]
        mask = self.mask_block(*block)
        may_be_blind = mask is not None or (self.is_causal and n > s)
        maps = []
        for c in range(2):
            queries = self.grouped(self.q[:, :, c], start, stop) * self.scale
            scores = queries @ self.keys[c][:, low:high].transpose(1, 2)
            tiles = scores.view(batch, heads // self.groups, self.groups, stop - start, high - low)
            hide_by_position(tiles, start, low, n, s, self.is_causal, self.window)
            if mask is not None and mask.dtype == torch.bool:
                tiles.masked_fill_(~mask, float("-inf"))
            elif mask is not None:
                tiles += mask
            maps.append(softmax_or_zero(scores) if may_be_blind else torch.softmax(scores, dim=-1))
        return maps[0], maps[1]


@torch.library.custom_op("diff_transformer::blockwise", mutates_args=())
def blockwise_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """q (B, H, 2, N, d), k (B, H_kv, 2 or 1, S, d), v (B, H_kv, S, dv), lam (B, H, N) → (B, H, N, dv)."""
    out = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        problem = _Problem.of(q, k, v, lam, attn_mask, is_causal, scale, window)
        for block in problem.blocks():
            start, stop, low, high = block
            first, second = problem.maps(block)
            weights = first.addcmul_(problem.lambdas(start, stop), second, value=-1)
            result = weights @ problem.values[:, low:high]
            out[:, :, start:stop] = result.view(*out.shape[:2], stop - start, out.shape[-1])
    return out


@blockwise_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[3], v.shape[-1])


@torch.library.custom_op("diff_transformer::blockwise_backward", mutates_args=())
def blockwise_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and lam, each of its input's shape and dtype (Appendix G, Equation 7)."""
    batch, heads = q.shape[:2]
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_lam = torch.zeros_like(lam, memory_format=torch.contiguous_format)
    with torch.autocast(q.device.type, enabled=False):
        problem = _Problem.of(q, k, v, lam, attn_mask, is_causal, scale, window)
        key_sums = [torch.zeros_like(problem.keys[c]) for c in range(k.shape[2])]
        value_sum = torch.zeros_like(problem.values)
        for block in problem.blocks():
            start, stop, low, high = block
            first, second = problem.maps(block)
            lambdas = problem.lambdas(start, stop)
            grad_block = problem.grouped(grad_out, start, stop)
            grad_weights = grad_block @ problem.values[:, low:high].transpose(1, 2)  # dP, of both maps
            weights = torch.addcmul(first, lambdas, second, value=-1)
            value_sum[:, low:high].baddbmm_(weights.transpose(1, 2), grad_block)
            rows = torch.mul(second, grad_weights, out=weights).sum(-1)
            grad_lam[:, :, start:stop] = -rows.view(batch, heads, stop - start)
            # dS_c = g_c · P_c ⊙ (dP − rowsum(P_c ⊙ dP)), with g_1 = 1 and g_2 = −λ. g_c is one number to a row: it is
            # applied to the rows of dQ_c and Q_c instead, which are d wide and not as wide as the keys.
            for c, weights in enumerate((first, second)):
                factors = lambdas * -scale if c else scale
                grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, problem.dtype)
                keys = problem.keys[c][:, low:high]
                grad_queries = (grad_scores @ keys) * factors
                grad_q[:, :, c, start:stop] = grad_queries.view(batch, heads, stop - start, q.shape[-1])
                queries = problem.grouped(q[:, :, c], start, stop) * factors
                key_sums[c % k.shape[2]][:, low:high].baddbmm_(grad_scores.transpose(1, 2), queries)
    grad_k = torch.stack([sums.view(k.shape[0], k.shape[1], *sums.shape[1:]) for sums in key_sums], dim=2)
    return grad_q, grad_k.to(k.dtype), value_sum.view(v.shape).to(v.dtype), grad_lam


@blockwise_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), lam.new_empty(lam.shape)


def _save_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    q, k, v, lam, attn_mask, is_causal, scale, window = inputs
    ctx.save_for_backward(q, k, v, lam, attn_mask)
    ctx.settings = (is_causal, scale, window)  # type: ignore[attr-defined]  # how torch.library passes settings on


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, lam, attn_mask = ctx.saved_tensors  # type: ignore[attr-defined]
    gradients = blockwise_backward(grad_out, q, k, v, lam, attn_mask, *ctx.settings)  # type: ignore[attr-defined]
    return (*gradients, None, None, None, None)


def _refuse_second_order(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> None:
    raise RuntimeError(
        "backend 'blockwise' cannot be differentiated twice; use backend='reference' for second-order gradients."
    )


blockwise_forward.register_autograd(_differentiate, setup_context=_save_inputs)
blockwise_backward.register_autograd(_refuse_second_order)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """(P1 − λP2) V by blocks. Shapes as in :func:`diff_transformer.diff_attention`; ``lam`` is (B, H, N)."""
    return blockwise_forward(q, k, v, lam, attn_mask, is_causal, scale, window)
