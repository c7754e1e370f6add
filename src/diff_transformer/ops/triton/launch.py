"""Requests into launches: which kernel, over which grid, with which arguments."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.attention_request import Norm
from diff_transformer.ops.triton.backward import keys_kernel, queries_kernel, rows_kernel
from diff_transformer.ops.triton.block_sizes import ROWS_BLOCKS, are_wide, edge_of
from diff_transformer.ops.triton.decode import combine_kernel, parts_kernel
from diff_transformer.ops.triton.forward import forward_kernel
from diff_transformer.ops.triton.kernel_arguments import (
    Problem,
    arguments_of,
    block_arguments,
    empty_output,
    gradient_like,
    has_addends,
    lambda_arguments,
    named,
    norm_arguments,
    padded,
    sees_alike,
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


class SavedForBackward(NamedTuple):
    """What the forward saves for the backward.

    log_sums (1 or 2, B, H, 2, N) and inverse_norms (B, H, N) float32; the second half of log_sums, which additive masks
    need, is what rounding took from the first. a2_v = A2·V and plain, the output before the norm, like the output.
    Without a norm plain is the output itself, and inverse_norms None.
    """

    plain: Tensor
    a2_v: Tensor
    log_sums: Tensor
    inverse_norms: Tensor | None


def plan_forward(p: Problem, norm: Norm | None, save: bool) -> tuple[list[Launch], Tensor, SavedForBackward | None]:
    """The forward's launch, its output (B, H, N, dv), and what it saves."""
    q, v = p.readable.q, p.readable.v
    batch, heads, _, n, _ = q.shape
    out = empty_output(q, v)
    blocks = p.blocks("save" if save else "forward")
    saved = None
    if save:
        floats: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        saved = SavedForBackward(
            out if norm is None else empty_output(q, v),
            empty_output(q, v),
            torch.empty(1 + has_addends(p.readable.attn_mask), batch, heads, 2, n, **floats),
            None if norm is None else torch.empty(batch, heads, n, **floats),
        )
    arguments = {
        **block_arguments(p.readable),
        **norm_arguments(norm),
        "factor": p.readable.scale,
        "out": out,
        **(dict.fromkeys(SavedForBackward._fields) if saved is None else saved._asdict()),
        **named("out", "batch head row", out.stride()[:3]),
        "QUERIES": blocks.rows,
        "KEYS": blocks.columns,
        "EDGE_KEYS": edge_of(blocks.columns),
        "SAVE": save,
        "TWO_PASSES": blocks.two_passes and not save,  # which do not have A2·V
    }
    grid = (triton.cdiv(n, blocks.rows), heads, batch)
    return [Launch(forward_kernel, grid, arguments, blocks.num_warps, blocks.num_stages)], out, saved


def plan_decode(p: Problem, norm: Norm | None, programs: int) -> tuple[list[Launch], Tensor]:
    """Decoding's two launches and its output (B, H, N, dv); the cache in parts, for at least ``programs`` in all."""
    r = p.readable
    batch, n, s, key_heads, dv = r.q.shape[0], r.n, r.s, r.k.shape[1], r.v.shape[-1]
    rows = r.groups * n
    out = empty_output(r.q, r.v)
    blocks = p.blocks("decode")
    start = 0 if r.window is None else max(0, s - n - r.window + 1) // blocks.columns * blocks.columns
    steps = triton.cdiv(s - start, blocks.columns)
    most_parts = max(1, triton.cdiv(programs, batch * key_heads))
    parts = min(steps, most_parts)
    keys_a_part = triton.cdiv(steps, parts) * blocks.columns
    parts = triton.cdiv(s - start, keys_a_part)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": r.q.device}
    tops, totals = (torch.empty(batch, key_heads, parts, 2, rows, **floats) for _ in range(2))
    sums = torch.empty(batch, key_heads, parts, 2, rows, dv, **floats)
    partial = {"tops": tops, "totals": totals, "sums": sums, "key_heads": key_heads, "rows": rows}
    of_parts = {
        **arguments_of(r),
        **partial,
        "start": start,
        "keys_a_part": keys_a_part,
        "factor": r.scale,
        "ALIKE": sees_alike(p.original),
        "ROWS": blocks.rows,
        "KEYS": blocks.columns,
    }
    of_combination = {
        **partial,
        **lambda_arguments(r),
        **norm_arguments(norm),
        "out": out,
        "groups": r.groups,
        "n": n,
        "parts": parts,
        **named("out", "batch head row", out.stride()[:3]),
        "DV": dv,
        "BLOCK_DV": padded(dv),
        # Of the most there can be, so that a growing cache needs no other kernel.
        "PARTS": triton.next_power_of_2(most_parts),
        "CHUNK": min(16, triton.next_power_of_2(most_parts)),
    }
    launches = [
        Launch(parts_kernel, (parts, key_heads, batch), of_parts, blocks.num_warps, blocks.num_stages),
        Launch(combine_kernel, (rows, key_heads, batch), of_combination, 4, 1),
    ]
    return launches, out


class Gradients(NamedTuple):
    """Of q, k, v and λ (B, H, N), and of the norm's weight in parts (…, dv) that are still to be added, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    norm_weight: Tensor | None


def plan_backward(
    grad_out: Tensor, p: Problem, norm: Norm | None, saved: SavedForBackward
) -> tuple[list[Launch], Gradients]:
    """The backward's launches, which go in this order, and where they write."""
    r, original = p.readable, p.original
    batch, heads, _, n, d = r.q.shape
    key_heads, key_maps, s = r.k.shape[1:4]
    dv = r.v.shape[-1]
    grad_out = with_rows(grad_out)
    by_rows, by_queries = ROWS_BLOCKS, p.blocks("queries")
    floats: dict[str, Any] = {"dtype": torch.float32, "device": r.q.device}
    row_sums = torch.empty(batch, heads, 2, n, **floats)
    gradients = Gradients(
        gradient_like(original.q),
        gradient_like(original.k),
        gradient_like(original.v),
        torch.empty(batch, heads, n, **floats),
        None if norm is None else torch.empty(batch, heads, triton.cdiv(n, by_rows.rows), dv, **floats),
    )
    grad_plain = grad_out if norm is None else torch.empty_like(saved.plain)
    of_norm = norm_arguments(norm)
    del of_norm["norm_eps"]  # the forward has saved what came of it
    of_rows = {
        "grad_out": grad_out,
        "plain": saved.plain,
        "a2_v": saved.a2_v,
        "inverse_norms": saved.inverse_norms,
        **lambda_arguments(r),
        **of_norm,
        "grad_plain": None if norm is None else grad_plain,
        "row_sums": row_sums,
        "grad_lam": gradients.lam,
        "grad_weight": gradients.norm_weight,
        "heads": heads,
        "n": n,
        **named("grad", "batch head row", grad_out.stride()[:3]),
        **named("out", "batch head row", saved.plain.stride()[:3]),
        "DV": dv,
        "BLOCK_DV": padded(dv),
        "QUERIES": by_rows.rows,
    }
    common = {
        **block_arguments(r),
        "grad_out": grad_plain,
        "log_sums": saved.log_sums,
        "row_sums": row_sums,
        "scale": r.scale,
        **named("grad", "batch head row", grad_plain.stride()[:3]),
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
    rows_grid, queries_grid = ((triton.cdiv(n, blocks.rows), heads, batch) for blocks in (by_rows, by_queries))
    launches = [
        Launch(rows_kernel, rows_grid, of_rows, by_rows.num_warps, by_rows.num_stages),
        *launches_by_keys,
        Launch(queries_kernel, queries_grid, of_queries, by_queries.num_warps, by_queries.num_stages),
    ]
    return launches, gradients
