"""Calls torch's FlexAttention, compiled, once for each map and subtracts the two results.

Causality, window and documents become a block mask, whose hidden blocks the kernel never touches. A mask held in a
tensor is read as the score is made. A block mask of the caller's own stands alone.
"""

import functools
import itertools
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.attention_request import (
    Request,
    constant_when_compiled,
    is_block_mask,
    is_eager,
    key_ranges,
    reason_against_dtype,
    triton_is_installed,
    zero_nonfinite_rows,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows and keys of a block, as torch chooses them; its kernels want to divide this
# How many compiled functions and how many block masks are cached.
COMPILED, BLOCK_MASKS = 64, 16
# Scores are multiplied by log2 e on the GPU, where float32's lowest number would turn into −∞, hidden instead of far.
_LOWEST = -1e38
_NARROWEST_ON_CUDA = 16

_code_numbers = itertools.count()


def reason_against_flex(request: Request) -> str | None:
    """Return why torch's FlexAttention does not take the request, or None. Nothing is compiled to find out."""
    q = request.q
    device, narrowest = q.device.type, min(q.shape[-1], request.v.shape[-1])
    if device not in ("cpu", "cuda"):
        return f"it runs on the CPU and on CUDA, got {q.device}"
    if (reason := reason_against_dtype(q.dtype)) is not None:
        return reason
    if device == "cuda" and narrowest < _NARROWEST_ON_CUDA:
        return f"on CUDA it needs heads of width {_NARROWEST_ON_CUDA} or more, got {narrowest}"
    if device == "cuda" and not triton_is_installed():
        return "on CUDA it needs Triton, which is not installed"
    if device == "cpu" and not _cpu_has_vectors():
        return "torch compiles it on Linux and Windows alone, and for processors with AVX2"
    if device == "cpu" and request.needs_gradient:
        return "torch's FlexAttention has no backward on the CPU; use torch.no_grad(), or another backend"
    return None


@constant_when_compiled
def _cpu_has_vectors() -> bool:
    """Return whether torch lowers FlexAttention for this processor."""
    return (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and os.getenv("ATEN_CPU_CAPABILITY") != "default"
        and sys.platform != "darwin"
    )


def flex_attention_backend(request: Request) -> Tensor:
    """Compute A1 V − λ A2 V, (B, H, N, dv), with a noise map for each signal head.

    A BlockMask is (B or 1, H or 1, N, S), and nothing else hides keys then.
    """
    request = request.ungrouped()
    q, k, v, _, attn_mask = request[:5]
    scale = request.scale
    score_mod = nonfinite = None
    if is_block_mask(attn_mask):
        blocks: BlockMask | None = attn_mask
        (k, v), nonfinite = zero_nonfinite_rows(k, v)
    else:
        blocks = _position_blocks(request)
        if isinstance(attn_mask, Tensor):
            score_mod = _masked_score(attn_mask)
    # torch's C++ kernel gives wrong numbers for some views whose channels lie apart.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    attend = _attend_for(q, k, v, attn_mask, blocks, scale)
    maps_v = [attend(q[:, :, c], k[:, :, c % k.shape[2]], v, score_mod, blocks, scale) for c in range(2)]
    out = request.difference(*maps_v).to(q.dtype)
    if nonfinite is not None and blocks is not None:
        out = out.masked_fill(_sees_any(nonfinite, q, blocks).unsqueeze(-1), float("nan"))
    return out


def _attend_one_map(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, blocks: "BlockMask | None", scale: float
) -> Tensor:
    """Attend with q (B, H, N, d), k (B, H_kv, S, d) and v (B, H_kv, S, dv) → (B, H, N, dv)."""
    from torch.nn.attention.flex_attention import flex_attention

    if q.device.type == "cpu":
        # torch refuses what a gradient is asked of, even where none is recorded.
        q, k, v = q.detach(), k.detach(), v.detach()
    return flex_attention(q, k, v, score_mod, blocks, scale, enable_gqa=q.shape[1] != k.shape[1])


def _attend_for(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: "Tensor | BlockMask | None", blocks: "BlockMask | None", scale: float
) -> Callable[..., Tensor]:
    """Return :func:`_attend_one_map`, compiled for requests of this kind."""
    if torch.compiler.is_compiling():  # while the caller's compilation is tracing, it becomes a part of that
        return _attend_one_map
    mask: tuple[object, ...] = (blocks is None,)
    if isinstance(attn_mask, Tensor):
        mask = (*mask, attn_mask.dtype, *(size == 1 for size in attn_mask.shape))
    elif attn_mask is not None:
        # Mask functions are often made anew for every call, from the same lines.
        function = attn_mask.mask_mod
        mask = (getattr(function, "__code__", function), attn_mask.BLOCK_SIZE)
    # torch's C++ kernel does not compile with lengths left open where a mask is a tensor. Each layout compiles anew.
    fixed = (*q.shape[-2:], *k.shape[-2:], *q.stride(), *k.stride(), *v.stride()) if q.device.type == "cpu" else None
    return _compiled(fixed, q.device, q.dtype, *q.shape[:2], q.shape[-1], *k.shape[1:3], v.shape[-1], mask, scale)


@functools.lru_cache(maxsize=COMPILED)
def _compiled(fixed: tuple[int, ...] | None, *kind: object) -> Callable[..., Tensor]:
    """Return FlexAttention compiled for one kind of request; lengths are left open once they change, unless ``fixed``.

    torch counts the compilations of a function by its code and, after eight, runs it uncompiled, which would hold all
    scores; with ``fullgraph`` it raises instead. So each kind gets code of its own, whose count stays far below. A name
    of its own keeps torch's record of changing sizes apart as well.
    """
    name = f"one_map_{next(_code_numbers)}"
    copy = types.FunctionType(_attend_one_map.__code__.replace(co_name=name), _attend_one_map.__globals__, name)
    return torch.compile(copy, fullgraph=True, dynamic=None if fixed is None else False)


def _masked_score(attn_mask: Tensor) -> Callable[..., Tensor]:
    """Return the score under a mask (B or 1, H or 1, N or 1, S or 1), boolean or additive."""
    shared = tuple(size == 1 for size in attn_mask.shape)
    boolean = attn_mask.dtype == torch.bool
    dtype = torch.promote_types(attn_mask.dtype, torch.float32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        entry = attn_mask[0 if shared[0] else b, 0 if shared[1] else h, 0 if shared[2] else i, 0 if shared[3] else j]
        if boolean:
            return torch.where(entry, score, float("-inf"))
        entry = entry.to(dtype)
        return score + torch.where(entry == float("-inf"), entry, entry.clamp(min=_LOWEST)).to(score.dtype)

    return score_mod


def _sees_any(keys: Tensor, q: Tensor, blocks: "BlockMask") -> Tensor:
    """Return which queries see one of the marked keys (B, H_kv, S): (B, H, N), boolean.

    A block mask is a function that only FlexAttention evaluates block by block, so that is asked: with equal weights
    for all keys that a query sees, the mean of their marks is above 0 if one is marked.
    """
    narrow = _NARROWEST_ON_CUDA
    queries, marks = q[:, :, 0, :, :1].detach(), keys.to(q.dtype).unsqueeze(-1).expand(*keys.shape, narrow)
    zeros = torch.zeros_like(queries).expand(*queries.shape[:-1], narrow).contiguous()
    attend = _attend_for(zeros, marks, marks, blocks, blocks, 1.0)
    return attend(zeros, torch.zeros_like(marks).contiguous(), marks.contiguous(), None, blocks, 1.0)[..., 0] > 0


def _position_blocks(request: Request) -> "BlockMask | None":
    """Return the block mask of causality, window and documents, or None if they hide nothing."""
    q, is_causal, window, segment_bounds = request.q, request.is_causal, request.window, request.segment_bounds
    if not is_causal and window is None and segment_bounds is None:
        return None
    # Only those that the lengths alone decide are cached, and only real tensors: a transformation of torch.func wraps
    # all that is made inside of it.
    if segment_bounds is not None or not is_eager(q):
        return _blocks(*request.key_ranges(), request.s)
    return _cached_blocks(request.n, request.s, is_causal, window, q.device)


@functools.lru_cache(maxsize=BLOCK_MASKS)
def _cached_blocks(n: int, s: int, is_causal: bool, window: int | None, device: torch.device) -> "BlockMask":
    # A tensor born in inference mode could never be saved for a backward pass.
    with torch.inference_mode(False):
        return _blocks(*key_ranges(n, s, is_causal, window, None, device), s)


def _blocks(begin: Tensor, end: Tensor, s: int) -> "BlockMask":
    """Return the block mask of queries that see keys begin … end − 1 of S, (N,) each.

    From the ranges' ends, in O(N + N·S / BLOCK²); torch's ``create_block_mask`` holds the whole mask. The mask function
    reads the ends, too, so that one kernel serves every kind, window and offset.
    """
    from torch.nn.attention.flex_attention import BlockMask

    begin, end = begin.to(torch.int32), end.to(torch.int32)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (begin[i] <= j) & (j < end[i])

    block_begins = torch.arange(0, s, BLOCK, device=begin.device)
    block_ends = block_begins + BLOCK
    # Some key of a block is seen by some query; or all of them by all. Queries that see nothing, and those added to
    # make whole blocks, take no part in the first and prevent the second.
    sees = begin < end
    any_begin, any_end = _in_blocks(begin.where(sees, s), s).amin(-1), _in_blocks(end.where(sees, 0), 0).amax(-1)
    all_begin, all_end = _in_blocks(begin, s).amax(-1), _in_blocks(end, 0).amin(-1)
    full = (all_begin <= block_begins) & (all_end >= block_ends)
    partial = (any_begin < block_ends) & (any_end > block_begins) & ~full
    return BlockMask.from_kv_blocks(
        *_block_indices(partial),
        *_block_indices(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(begin.shape[0], s),
    )


def _in_blocks(bounds: Tensor, fill: int) -> Tensor:
    """Cut (N,) into (blocks, 1, BLOCK)."""
    return F.pad(bounds, (0, -bounds.shape[0] % BLOCK), value=fill).unflatten(0, (-1, 1, BLOCK))


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count each row's blocks in (rows, columns) boolean, and list their columns before all others."""
    marks = blocks[None, None].to(torch.int32)
    return marks.sum(-1, dtype=torch.int32), torch.argsort(marks, dim=-1, descending=True, stable=True).int()
