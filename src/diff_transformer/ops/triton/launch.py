"""Turns a request into launches: chooses kernels and grids, and hands them their arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from diff_transformer.ops.attention_request import Norm
from diff_transformer.ops.triton.backward import keys_kernel, queries_kernel, rows_kernel
from diff_transformer.ops.triton.forward import combine_kernel, forward_kernel, packed_parts_kernel, parts_kernel
from diff_transformer.ops.triton.kernel_arguments import (
    MOST_DECODED,
    ROWS_BLOCKS,
    Blocks,
    Problem,
    SavedForBackward,
    are_wide,
    arguments_of,
    by_kind,
    edge_of,
    empty_log_sums,
    empty_output,
    empty_saved,
    gradient_like,
    of_noise_maps,
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


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up: triton's own takes microseconds outside of a kernel."""
    return -(-a // b)


def _launch(kernel: Any, blocks: Blocks, grid: tuple[int, int, int], arguments: dict[str, Any]) -> Launch:
    """Make a launch with those of the arguments that its kernel names."""
    named = {name: arguments[name] for name in kernel.arg_names}
    return Launch(kernel, grid, named, blocks.num_warps, blocks.num_stages)


def _by_queries(blocks: Blocks) -> dict[str, int]:
    """Return the sizes for a kernel whose programs hold a block of queries each."""
    return {"QUERIES": blocks.rows, "KEYS": blocks.columns, "EDGE_KEYS": edge_of(blocks.columns)}


def plan_forward(p: Problem, norm: Norm | None, save: bool) -> tuple[list[Launch], Tensor, SavedForBackward | None]:
    """Return the forward's launches, its output (B, H, N, dv), and its saved tensors.

    It is one launch; if signal heads share a noise map, one for the noise maps, and one for the signal heads.
    """
    r = p.readable
    batch, noise_maps, _, n, _ = r.q.shape
    out, in_groups = empty_output(r.q, r.v), r.ratio > 1
    blocks = p.blocks("save" if save or in_groups else "forward")
    has_signal = r.signal_weight is not None
    saved = empty_saved(r.q, r.v, r.attn_mask, norm is not None, has_signal) if save else None
    if saved is not None and norm is None:
        saved = saved._replace(plain=out)
    arguments = {
        **arguments_of(r, norm),
        **(dict.fromkeys(SavedForBackward._fields) if saved is None else saved._asdict()),
        "inverse_norms": None if saved is None or norm is None else saved.inverse_norms,
        "a1_v": None if saved is None or not has_signal else saved.a1_v,
        "out": out,
        **strides(out=out),
        **_by_queries(blocks),
        "SAVE": save,
        "TWO_PASSES": blocks.two_passes and not save and not in_groups,  # which do not have A2·V
        "SUBTRACTS": in_groups,
    }
    rows = cdiv(n, blocks.rows)
    if not in_groups:
        return [_launch(forward_kernel, blocks, (rows, r.heads, batch), arguments)], out, saved
    a2_v = saved.a2_v if saved is not None else r.q.new_empty(batch, noise_maps, n, r.v.shape[-1], dtype=torch.float32)
    log_sums, noise_log_sums = (None, None) if saved is None else by_kind(saved.log_sums, r.ratio)
    arguments |= {"a2_v": a2_v, "log_sums": log_sums}
    of_noise = {**arguments, **of_noise_maps(r), "out": a2_v, **strides(out=a2_v), "log_sums": noise_log_sums}
    # A signal head holds A2·V beside its own product with V, as a head of two maps does, and a noise map its own alone.
    noise_blocks = p.blocks("forward")
    of_noise |= {"HAS_NORM": False, "SUBTRACTS": False, **_by_queries(noise_blocks)}
    launches = [
        _launch(forward_kernel, noise_blocks, (cdiv(n, noise_blocks.rows), noise_maps, batch), of_noise),
        _launch(forward_kernel, blocks, (rows, r.heads, batch), arguments),
    ]
    return launches, out, saved


def plan_decode(
    p: Problem, norm: Norm | None, programs: int, return_lse: bool = False
) -> tuple[list[Launch], Tensor, Tensor | None]:
    """Return decoding's launches, its output (B, H, N, dv), and log-sums as in :class:`SavedForBackward` but for their
    rounding errors; the cache in parts, for at least ``programs`` in all.
    """
    r, mask = p.readable, p.readable.attn_mask
    batch, n, s, key_heads, rows = r.q.shape[0], r.n, r.s, r.k.shape[1], r.heads_per_key * r.n
    all_rows = rows + rows // r.ratio  # the noise maps' come after the signal heads'
    out = empty_output(r.q, r.v)
    blocks = p.blocks("decode" if rows <= MOST_DECODED else "chunk")
    start = 0 if r.window is None else max(0, s - n - r.window + 1) // blocks.columns * blocks.columns
    steps = cdiv(s - start, blocks.columns)
    most_parts = max(1, cdiv(programs, batch * key_heads))
    keys_a_part = cdiv(steps, min(steps, most_parts)) * blocks.columns
    parts = cdiv(s - start, keys_a_part)
    log_sums = empty_log_sums(r.q, mask).zero_() if return_lse else None  # rounding errors of 0
    of_noise = None if log_sums is None else log_sums[n:] if r.ratio == 1 else by_kind(log_sums, r.ratio)[1]
    tops, totals = (r.q.new_empty(batch, key_heads, parts, all_rows, dtype=torch.float32) for _ in range(2))
    arguments = {
        **arguments_of(r, norm),
        "SAME_MASK": mask is not None and mask.shape[1] == 1 and mask.shape[3] > 1,
        "tops": tops,
        "totals": totals,
        "sums": r.q.new_empty(batch, key_heads, parts, all_rows, r.v.shape[-1], dtype=torch.float32),
        "log_sums": log_sums,
        "noise_log_sums": of_noise,
        "LOG_SUMS": return_lse,
        "rows": rows,
        "parts": parts,
        "start": start,
        "keys_a_part": keys_a_part,
        "ALIKE": sees_alike(p.original),
        "ROWS": padded(rows),
        "NOISE_ROWS": padded(rows // r.ratio),
        "KEYS": blocks.columns,
        "out": out,
        **strides(out=out),
        # Of the most there can be, so that neither a growing cache nor more sequences need another kernel.
        "PARTS": next_power_of_2(programs),
        "CHUNK": min(16, next_power_of_2(programs)),
    }
    of_parts = packed_parts_kernel if r.k.dtype == torch.int8 else parts_kernel
    launches = [
        _launch(of_parts, blocks, (parts, key_heads, batch), arguments),
        _launch(combine_kernel, Blocks(1, 1, 4, 1), (rows, key_heads, batch), arguments),
    ]
    return launches, out, log_sums


def plan_backward(
    grad_out: Tensor, p: Problem, norm: Norm | None, saved: SavedForBackward
) -> tuple[list[Launch], tuple[Any, ...], Tensor]:
    """Return the backward's launches, in their order, their results, and the row sums, which the first writes.

    The results are the gradients of q, k, v and λ (B, H, N), of the norm's weight in parts (…, dv) that are still to be
    added, or None, and of the signal's weight like λ's, or None. If signal heads share a noise map, those of v, and of
    k for both maps, are two such parts, too, (2, …) in float32: adding them in a kernel takes registers that it does
    not have.
    """
    r, original = p.readable, p.original
    batch, noise_maps, _, n, d = r.q.shape
    heads, in_groups = r.heads, r.ratio > 1
    key_heads, key_maps, s = r.k.shape[1:4]
    dv = r.v.shape[-1]
    grad_out = with_rows(grad_out)
    row_sums = r.q.new_empty(batch * (heads + noise_maps) * n, dtype=torch.float32)
    programs = cdiv(n, ROWS_BLOCKS.rows)
    sources = {"grad_q": original.q, "grad_k": original.k, "grad_v": original.v}
    input_gradients = {name: gradient_like(source) for name, source in sources.items()}
    grad_lam = r.q.new_empty(batch, heads, n, dtype=torch.float32)
    grad_signal = None if r.signal_weight is None else torch.empty_like(grad_lam)
    grad_weight = None if norm is None else r.q.new_empty(batch, heads, programs, dv, dtype=torch.float32)
    grad_plain = grad_out if norm is None else torch.empty_like(saved.plain)
    common = {**arguments_of(r, norm), **saved._asdict(), "row_sums": row_sums, "SHARED": key_maps == 1}
    common |= {"grad_noise": None, "noise_sums": None}
    if in_groups:
        common["row_sums"], common["noise_sums"] = by_kind(row_sums, r.ratio)
        common["log_sums"], noise_log_sums = by_kind(saved.log_sums, r.ratio)
        common["grad_noise"] = r.q.new_empty(batch, noise_maps, n, dv)
    of_rows = {
        **common,
        "inverse_norms": None if norm is None else saved.inverse_norms,
        "grad_out": grad_out,
        "grad_plain": None if norm is None else grad_plain,
        "grad_lam": grad_lam,
        "grad_signal": grad_signal,
        "a1_v": None if r.signal_weight is None else saved.a1_v,
        "grad_weight": grad_weight,
        **strides(grad=grad_out, out=saved.plain),
        "QUERIES": ROWS_BLOCKS.rows,
    }
    if in_groups:
        of_both = [name for name, source in sources.items() if name == "grad_v" or (name == "grad_k" and key_maps == 1)]
        input_gradients |= {name: r.q.new_empty(2, *sources[name].shape, dtype=torch.float32) for name in of_both}
    written = {name: x[1] if x.dim() > sources[name].dim() else x for name, x in input_gradients.items()}
    common |= {"grad_out": grad_plain, **written, **strides(grad=grad_plain, **written)}
    by_map = [common]
    if in_groups:
        grad_noise = common["grad_noise"]
        written = {name: x[0] if x.dim() > sources[name].dim() else x[:, :, -1:] for name, x in input_gradients.items()}
        of_noise = {**common, **of_noise_maps(r), **written, **strides(grad=grad_noise, **written)}
        of_noise |= {"grad_out": grad_noise, "row_sums": common["noise_sums"], "log_sums": noise_log_sums}
        by_map = [of_noise, common]

    def by_keys(of_map: dict[str, Any], kernel: str, *, of_k: bool, of_v: bool) -> Launch:
        blocks = p.blocks(kernel)
        sizes = {"QUERIES": blocks.columns, "KEYS": blocks.rows, "RAGGED": n % blocks.columns != 0}
        arguments = {**of_map, **sizes, "OF_KEYS": of_k, "OF_VALUES": of_v}
        return _launch(keys_kernel, blocks, (cdiv(s, blocks.rows), key_heads, batch), arguments)

    def by_queries(of_map: dict[str, Any]) -> Launch:
        blocks = p.blocks("queries")
        grid = (cdiv(n, blocks.rows), of_map["heads"], batch)
        return _launch(queries_kernel, blocks, grid, of_map | _by_queries(blocks))

    launches = [_launch(rows_kernel, ROWS_BLOCKS, (programs, noise_maps, batch), of_rows)]
    is_wide = are_wide(d, dv)
    for of_map in by_map:
        launches += [by_keys(of_map, "keys", of_k=True, of_v=not is_wide)]
        launches += [by_keys(of_map, "values", of_k=False, of_v=True)] if is_wide else []
    launches += [by_queries(of_map) for of_map in by_map]
    return launches, (*input_gradients.values(), grad_lam, grad_weight, grad_signal), row_sums
