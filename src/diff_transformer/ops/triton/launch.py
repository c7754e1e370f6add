"""Requests into launches: which kernel, over which grid, with which arguments."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.triton.backward import keys_kernel, queries_kernel, rows_kernel
from diff_transformer.ops.triton.blocks import ROWS_BLOCKS, are_wide, edge_of
from diff_transformer.ops.triton.decode import combine_kernel, parts_kernel
from diff_transformer.ops.triton.forward import forward_kernel
from diff_transformer.ops.triton.problem import (
    Norm,
    Problem,
    constants,
    empty_output,
    gradient_like,
    has_addends,
    lam_strides,
    named,
    padded,
    sees_alike,
    strides,
    with_rows,
)


class Launch(NamedTuple):
    """One kernel with its grid, its arguments by name, and how it is compiled."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's: multiply-adds are meant, whatever triton's default for them is."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


class Kept(NamedTuple):
    """What the forward leaves for the backward.

    log_sums (1 or 2, B, H, 2, N) and inverse_norms (B, H, N) float32; the second half of log_sums, which additive masks
    need, is what rounding took from the first. second = A2·V and plain, the output before the norm, like the output.
    Without a norm plain is the output itself, and inverse_norms None.
    """

    plain: Tensor
    second: Tensor
    log_sums: Tensor
    inverse_norms: Tensor | None


def plan_forward(p: Problem, norm: Norm | None, keep: bool) -> tuple[list[Launch], Tensor, Kept | None]:
    """The forward's launch, its output (B, H, N, dv), and what it keeps."""
    batch, heads, _, n, _ = p.q.shape
    out = empty_output(p.q, p.v)
    blocks = p.blocks("keep" if keep else "forward")
    kept = None
    if keep:
        floats: dict[str, Any] = {"dtype": torch.float32, "device": p.q.device}
        kept = Kept(
            out if norm is None else empty_output(p.q, p.v),
            empty_output(p.q, p.v),
            torch.empty(1 + has_addends(p.mask), batch, heads, 2, n, **floats),
            None if norm is None else torch.empty(batch, heads, n, **floats),
        )
    arguments = {
        "q": p.q,
        "k": p.k,
        "v": p.v,
        "lam": p.lam,
        "mask": p.mask,
        "documents": p.documents,
        "norm_weight": None if norm is None else norm.weight,
        "out": out,
        "plain": None if kept is None else kept.plain,
        "second": None if kept is None else kept.second,
        "log_sums": None if kept is None else kept.log_sums,
        "inverse_norms": None if kept is None else kept.inverse_norms,
        "heads": heads,
        "groups": p.groups,
        "n": n,
        "s": p.k.shape[3],
        "factor": p.scale,
        "window": p.window or 0,
        "norm_eps": 0.0 if norm is None else norm.eps,
        "norm_factor": 1.0 if norm is None else norm.factor,
        **strides(p),
        **lam_strides(p),
        **named("out", "batch head row", out.stride()[:3]),
        **constants(p),
        "QUERIES": blocks.rows,
        "KEYS": blocks.columns,
        "EDGE_KEYS": edge_of(blocks.columns),
        "HAS_DOCUMENTS": p.documents is not None,
        "HAS_NORM": norm is not None,
        "KEEP": keep,
        "TWO_PASSES": blocks.two_passes and not keep,  # which do not have A2·V
    }
    grid = (triton.cdiv(n, blocks.rows), heads, batch)
    return [Launch(forward_kernel, grid, arguments, blocks.num_warps, blocks.num_stages)], out, kept


def plan_decode(p: Problem, norm: Norm | None, programs: int) -> tuple[list[Launch], Tensor]:
    """Decoding's two launches and its output (B, H, N, dv); the cache in parts, for at least ``programs`` in all."""
    batch, n = p.q.shape[0], p.q.shape[3]
    key_heads, s = p.k.shape[1], p.k.shape[3]
    dv, rows = p.v.shape[-1], p.groups * n
    out = empty_output(p.q, p.v)
    blocks = p.blocks("decode")
    start = 0 if p.window is None else max(0, s - n - p.window + 1) // blocks.columns * blocks.columns
    steps = triton.cdiv(s - start, blocks.columns)
    most_parts = max(1, triton.cdiv(programs, batch * key_heads))
    parts = min(steps, most_parts)
    keys_a_part = triton.cdiv(steps, parts) * blocks.columns
    parts = triton.cdiv(s - start, keys_a_part)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": p.q.device}
    tops, totals = (torch.empty(batch, key_heads, parts, 2, rows, **floats) for _ in range(2))
    sums = torch.empty(batch, key_heads, parts, 2, rows, dv, **floats)
    partial = {"tops": tops, "totals": totals, "sums": sums}
    first = {
        "q": p.q,
        "k": p.k,
        "v": p.v,
        "mask": p.mask,
        **partial,
        "key_heads": key_heads,
        "groups": p.groups,
        "n": n,
        "s": s,
        "rows": rows,
        "start": start,
        "keys_a_part": keys_a_part,
        "factor": p.scale,
        "window": p.window or 0,
        **strides(p),
        **constants(p),
        "ALIKE": sees_alike(*p.given[:2], p.mask, p.documents),
        "ROWS": blocks.rows,
        "KEYS": blocks.columns,
    }
    second = {
        **partial,
        "lam": p.lam,
        "norm_weight": None if norm is None else norm.weight,
        "out": out,
        "key_heads": key_heads,
        "groups": p.groups,
        "n": n,
        "rows": rows,
        "parts": parts,
        "norm_eps": 0.0 if norm is None else norm.eps,
        "norm_factor": 1.0 if norm is None else norm.factor,
        **lam_strides(p),
        **named("out", "batch head row", out.stride()[:3]),
        "DV": dv,
        "BLOCK_DV": padded(dv),
        # Of the most there can be, so that a growing cache needs no other kernel.
        "PARTS": triton.next_power_of_2(most_parts),
        "CHUNK": min(16, triton.next_power_of_2(most_parts)),
        "HAS_NORM": norm is not None,
    }
    launches = [
        Launch(parts_kernel, (parts, key_heads, batch), first, blocks.num_warps, blocks.num_stages),
        Launch(combine_kernel, (rows, key_heads, batch), second, 4, 1),
    ]
    return launches, out


class Gradients(NamedTuple):
    """Of q, k, v and λ (B, H, N), and of the norm's weight in parts (…, dv) that are still to be added, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    norm_weight: Tensor | None


def plan_backward(grad_out: Tensor, p: Problem, norm: Norm | None, kept: Kept) -> tuple[list[Launch], Gradients]:
    """The backward's launches, which go in this order, and where they write."""
    batch, heads, _, n, d = p.q.shape
    key_heads, key_maps, s = p.k.shape[1:4]
    dv = p.v.shape[-1]
    grad_out = with_rows(grad_out)
    by_rows, by_queries = ROWS_BLOCKS, p.blocks("queries")
    floats: dict[str, Any] = {"dtype": torch.float32, "device": p.q.device}
    row_sums = torch.empty(batch, heads, 2, n, **floats)
    gradients = Gradients(
        gradient_like(p.given[0]),
        gradient_like(p.given[1]),
        gradient_like(p.given[2]),
        torch.empty(batch, heads, n, **floats),
        None if norm is None else torch.empty(batch, heads, triton.cdiv(n, by_rows.rows), dv, **floats),
    )
    grad_plain = grad_out if norm is None else torch.empty_like(kept.plain)
    rows = {
        "grad_out": grad_out,
        "plain": kept.plain,
        "second": kept.second,
        "lam": p.lam,
        "norm_weight": None if norm is None else norm.weight,
        "inverse_norms": kept.inverse_norms,
        "grad_plain": None if norm is None else grad_plain,
        "row_sums": row_sums,
        "grad_lam": gradients.lam,
        "grad_weight": gradients.norm_weight,
        "heads": heads,
        "n": n,
        "norm_factor": 1.0 if norm is None else norm.factor,
        **named("grad", "batch head row", grad_out.stride()[:3]),
        **named("out", "batch head row", kept.plain.stride()[:3]),
        **lam_strides(p),
        "DV": dv,
        "BLOCK_DV": padded(dv),
        "QUERIES": by_rows.rows,
        "HAS_NORM": norm is not None,
    }
    common = {
        "grad_out": grad_plain,
        "q": p.q,
        "k": p.k,
        "v": p.v,
        "lam": p.lam,
        "mask": p.mask,
        "documents": p.documents,
        "log_sums": kept.log_sums,
        "row_sums": row_sums,
        "heads": heads,
        "groups": p.groups,
        "n": n,
        "s": s,
        "scale": p.scale,
        "window": p.window or 0,
        **named("grad", "batch head row", grad_plain.stride()[:3]),
        **strides(p),
        **lam_strides(p),
        **constants(p),
        "HAS_DOCUMENTS": p.documents is not None,
    }
    of_keys = {
        **common,
        "grad_k": gradients.k,
        "grad_v": gradients.v,
        **named("grad_k", "batch head map row", gradients.k.stride()[:4]),
        **named("grad_v", "batch head row", gradients.v.stride()[:3]),
        "SHARED": key_maps == 1,
    }

    def by_keys(kernel: str, of_k: bool, of_v: bool) -> Launch:
        blocks = p.blocks(kernel)
        sizes = {"QUERIES": blocks.columns, "KEYS": blocks.rows, "RAGGED": n % blocks.columns != 0}
        arguments = {**of_keys, **sizes, "OF_KEYS": of_k, "OF_VALUES": of_v}
        grid = (triton.cdiv(s, blocks.rows), key_heads, batch)
        return Launch(keys_kernel, grid, arguments, blocks.num_warps, blocks.num_stages)

    if are_wide(d, dv):
        launches_by_keys = [by_keys("keys", True, False), by_keys("values", False, True)]
    else:
        launches_by_keys = [by_keys("keys", True, True)]
    of_queries = {
        **common,
        "grad_q": gradients.q,
        **named("grad_q", "batch head map row", gradients.q.stride()[:4]),
        "QUERIES": by_queries.rows,
        "KEYS": by_queries.columns,
        "EDGE_KEYS": edge_of(by_queries.columns),
    }
    launches = [
        Launch(rows_kernel, (triton.cdiv(n, by_rows.rows), heads, batch), rows, by_rows.num_warps, by_rows.num_stages),
        *launches_by_keys,
        Launch(
            queries_kernel,
            (triton.cdiv(n, by_queries.rows), heads, batch),
            of_queries,
            by_queries.num_warps,
            by_queries.num_stages,
        ),
    ]
    return launches, gradients
