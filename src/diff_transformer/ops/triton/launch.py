"""Requests into launches: which kernel, over which grid, with which arguments."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.triton.backward import keys_kernel, queries_kernel, rows_kernel
from diff_transformer.ops.triton.blocks import Blocks, are_wide, blocks_for
from diff_transformer.ops.triton.decode import combine_kernel, parts_kernel
from diff_transformer.ops.triton.forward import forward_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as triton saw it when it made the kernels
_FARTHEST_ROW = 1 << 24  # of 128 rows, the most in a tile, the last is then within 31 bits
MOST_DECODED = 16  # rows of queries to a key head that go into one tile of the decoding kernel


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


class Norm(NamedTuple):
    """The headwise norm: weight (dv,), eps, and the factor behind it."""

    weight: Tensor
    eps: float
    factor: float


class Problem(NamedTuple):
    """A request as the kernels take it: last axes contiguous, documents (2, N) contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    window: int | None
    documents: Tensor | None
    capability: int
    given: tuple[Tensor, Tensor, Tensor]  # q, k and v before they were brought into that form

    @property
    def groups(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def blocks(self, kernel: str) -> Blocks:
        return blocks_for(
            kernel, self.q.shape[-1], self.v.shape[-1], self.q.dtype, self.mask is not None, self.capability
        )


def _rows_together(x: Tensor) -> bool:
    """Whether the kernels read x where it lies: a tile's offsets are computed in 32 bits."""
    return x.stride(-1) == 1 and x.stride(-2) < _FARTHEST_ROW


def _with_rows(x: Tensor) -> Tensor:
    return x if _rows_together(x) else x.contiguous()


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 80  # the interpreter has no device
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
    capability: int | None = None,
) -> Problem:
    """The request with what the kernels need of its tensors; copies only where the last axis is not contiguous."""
    if window is not None and window >= k.shape[3]:
        window = None  # it hides nothing: no query looks back further than the first key
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    elif attn_mask is not None and attn_mask.dtype == torch.float64:
        info = torch.finfo(torch.float32)  # whose lowest number a finite addend becomes, and not −∞
        finite = attn_mask.clamp(info.min, info.max)
        attn_mask = torch.where(attn_mask == float("-inf"), attn_mask, finite).to(torch.float32)
    return Problem(
        _with_rows(q),
        _with_rows(k),
        _with_rows(v),
        lam if lam.stride(-1) < _FARTHEST_ROW else lam.contiguous(),
        attn_mask,
        is_causal,
        scale,
        window,
        documents,
        _capability(q.device) if capability is None else capability,
        (q, k, v),
    )


def _padded(width: int) -> int:
    """The next power of 2, and at least 16, the narrowest that tensor cores multiply."""
    return max(16, triton.next_power_of_2(width))


def _edge(columns: int) -> int:
    """Steps at the edges: half a block wastes less of what is hidden there."""
    return max(16, columns // 2)


def _precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied, by torch's own setting for its matrix products."""
    if dtype != torch.float32:
        return "ieee"  # without a meaning for narrower types
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return "tf32" if settings.fp32_precision == "tf32" else "ieee"
    return "tf32" if settings.allow_tf32 else "ieee"


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides with 0 for axes of size 1."""
    if x is None:
        return (0, 0, 0, 0)
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _named(name: str, axes: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes.split(), strides, strict=True)}


def _strides(p: Problem) -> dict[str, int]:
    """Of everything but λ."""
    mask = _broadcast_strides(p.mask)
    return {
        **_named("q", "batch head map row", p.q.stride()[:4]),
        **_named("k", "batch head map row", _broadcast_strides(p.k)[:2] + p.k.stride()[2:4]),
        **_named("v", "batch head row", p.v.stride()[:3]),
        **dict(zip(("mask_batch", "mask_head", "mask_query", "mask_key"), mask, strict=True)),
        "k_map": p.k.stride(2) if p.k.shape[2] == 2 else 0,
    }


def _lam_strides(p: Problem) -> dict[str, int]:
    return _named("lam", "batch head row", p.lam.stride())


def _constants(p: Problem) -> dict[str, Any]:
    d, dv = p.q.shape[-1], p.v.shape[-1]
    kind = 0 if p.mask is None else 1 + has_addends(p.mask)
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": _padded(d),
        "BLOCK_DV": _padded(dv),
        "IS_CAUSAL": p.is_causal,
        "HAS_WINDOW": p.window is not None,
        "MASK": kind,
        "BY_QUERY": kind != 0 and p.mask is not None and p.mask.shape[-2] > 1,
        "PRECISION": _precision(p.q.dtype),
    }


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, N, dv), the heads of a token side by side, as the projection after it wants them."""
    batch, heads, _, n, _ = q.shape
    dv = v.shape[-1]
    return q.new_empty_strided((batch, heads, n, dv), (n * heads * dv, dv, heads * dv, 1))


def gradient_like(x: Tensor) -> Tensor:
    """Memory for the gradient of x, in the layout of x where the kernels can write it."""
    like = torch.empty_like(x)
    return like if _rows_together(x) and _rows_together(like) else x.new_empty(x.shape)


def programs_wanted(device: torch.device) -> int:
    """How many programs keep the device busy."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


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
        **_strides(p),
        **_lam_strides(p),
        **_named("out", "batch head row", out.stride()[:3]),
        **_constants(p),
        "QUERIES": blocks.rows,
        "KEYS": blocks.columns,
        "EDGE_KEYS": _edge(blocks.columns),
        "HAS_DOCUMENTS": p.documents is not None,
        "HAS_NORM": norm is not None,
        "KEEP": keep,
        "TWO_PASSES": blocks.two_passes and not keep,  # which do not have A2·V
    }
    grid = (triton.cdiv(n, blocks.rows), heads, batch)
    return [Launch(forward_kernel, grid, arguments, blocks.num_warps, blocks.num_stages)], out, kept


def has_addends(mask: Tensor | None) -> bool:
    """Whether a mask is additive."""
    return mask is not None and mask.is_floating_point()


def has_few_queries(p: Problem) -> bool:
    """Whether decoding's kernel takes the request: all queries of a key head in one tile, against many keys."""
    few = p.groups * p.q.shape[3] <= MOST_DECODED
    return few and p.documents is None


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
        **_strides(p),
        **_constants(p),
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
        **_lam_strides(p),
        **_named("out", "batch head row", out.stride()[:3]),
        "DV": dv,
        "BLOCK_DV": _padded(dv),
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
    grad_out = _with_rows(grad_out)
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
        **_named("grad", "batch head row", grad_out.stride()[:3]),
        **_named("out", "batch head row", kept.plain.stride()[:3]),
        **_lam_strides(p),
        "DV": dv,
        "BLOCK_DV": _padded(dv),
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
        **_named("grad", "batch head row", grad_plain.stride()[:3]),
        **_strides(p),
        **_lam_strides(p),
        **_constants(p),
        "HAS_DOCUMENTS": p.documents is not None,
    }
    of_keys = {
        **common,
        "grad_k": gradients.k,
        "grad_v": gradients.v,
        **_named("grad_k", "batch head map row", gradients.k.stride()[:4]),
        **_named("grad_v", "batch head row", gradients.v.stride()[:3]),
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
        **_named("grad_q", "batch head map row", gradients.q.stride()[:4]),
        "QUERIES": by_queries.rows,
        "KEYS": by_queries.columns,
        "EDGE_KEYS": _edge(by_queries.columns),
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


ROWS_BLOCKS = Blocks(16, 1, 4, 1)


@contextlib.contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            yield
    else:
        yield
