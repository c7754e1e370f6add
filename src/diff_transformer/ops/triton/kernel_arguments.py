"""Turns a request into the kernels' arguments: tensors that they can read, numbers, block sizes and memory for results.

The block sizes are a small table for each kind of device, and nothing is tuned at run time. docs/kernels.md says how
they were chosen, and `lab/benchmarks/kernel_resources.py` the cost of each. Those that `gpu_record.py` there has timed
on a device, in `measured_blocks.json`, come before the table. Does not import triton.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request

_FARTHEST_ROW = 1 << 24  # of 128 rows, the most in a tile, the last is then within 31 bits
MOST_DECODED = 16  # rows of queries to a key head that go into one tile of the decoding kernel
# A block of "chunk" goes into it in half precision if there are so many keys: the forward's programs would be too few.
LONG_CACHE = 1024
MEASURED_BLOCKS = Path(__file__).with_name("measured_blocks.json")


class Blocks(NamedTuple):
    """Rows of the block that a program holds, columns of those that it goes through, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    two_passes: bool = False  # of the forward


Table = dict[str, tuple[Blocks, Blocks]]  # for narrow heads, and for wide ones

# "forward" runs without gradients and "save" with them; "keys" and "values" are the two launches of wide heads, narrow
# ones do both in "keys"; "…, masked" is for requests with a mask, which takes registers, "…, full mask" for one with a
# row for each query, and "…, one map, masked" for groups, if the former would spill, as "…, two weights" for one with
# a signal's weight and no mask, and "…, in eight bits" for rows of int8. "decode" and "chunk" are the decoding kernel
# for up to 16 rows of queries, and for up to as many as its block has.
_HOPPER: Table = {
    "forward": (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2, two_passes=True)),
    "forward, masked": (Blocks(64, 32, 8, 2), Blocks(128, 16, 8, 2, two_passes=True)),
    "save": (Blocks(128, 64, 8, 3), Blocks(64, 32, 8, 3)),
    "save, masked": (Blocks(64, 32, 8, 2), Blocks(64, 16, 8, 2)),
    "keys": (Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2)),
    "keys, full mask": (Blocks(128, 16, 8, 2), Blocks(128, 16, 8, 2)),
    "values": (Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2)),
    "queries": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    "queries, masked": (Blocks(128, 64, 8, 2), Blocks(32, 32, 8, 2)),
    "queries, two weights": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 1)),
    "decode": (Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
    "decode, masked": (Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 3)),
    "chunk": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    "chunk, masked": (Blocks(64, 32, 8, 2), Blocks(64, 16, 8, 2)),
    "chunk, in eight bits": (Blocks(64, 32, 8, 2), Blocks(32, 16, 8, 2)),
}
_BLACKWELL: Table = _HOPPER | {
    "forward": (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3, two_passes=True)),
    "keys": (Blocks(128, 32, 8, 2), Blocks(128, 16, 8, 2)),
    "queries, one map, masked": (Blocks(64, 64, 8, 2), Blocks(32, 32, 8, 2)),
    "decode, in eight bits": (Blocks(16, 32, 4, 3), Blocks(16, 16, 4, 3)),
}
# A100, whose tensor cores take their operands from registers.
_AMPERE: Table = {
    "forward": (Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 2, two_passes=True)),
    "forward, masked": (Blocks(64, 16, 8, 2), Blocks(64, 16, 8, 2, two_passes=True)),
    "save": (Blocks(128, 32, 8, 3), Blocks(32, 32, 8, 2)),
    "save, masked": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 2)),
    "keys": (Blocks(128, 16, 8, 2), Blocks(64, 32, 8, 2)),
    "keys, masked": (Blocks(32, 32, 8, 2), Blocks(64, 16, 8, 2)),
    "values": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    "queries": (Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    "queries, masked": (Blocks(32, 32, 8, 2), Blocks(64, 16, 8, 2)),
    "queries, two weights": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    "decode": (Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
    "chunk": (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    "chunk, masked": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 2)),
    "chunk, in eight bits": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 2)),
}
# GeForce and the like: 99 KiB of shared memory a block.
_SMALL: Table = _AMPERE | {
    "forward": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2, two_passes=True)),
    "forward, two weights": (Blocks(64, 16, 8, 2), Blocks(64, 16, 8, 2, two_passes=True)),
    "save, two weights": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 2)),
    "save": (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    "keys": (Blocks(128, 16, 8, 2), Blocks(64, 16, 8, 1)),
    "queries": (Blocks(64, 32, 4, 2), Blocks(64, 16, 8, 2)),
    "queries, masked": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    "queries, two weights": (Blocks(64, 32, 8, 2), Blocks(64, 16, 8, 2)),
    "keys, one map, masked": (Blocks(32, 32, 8, 2), Blocks(64, 16, 4, 2)),
    "queries, one map, masked": (Blocks(64, 16, 8, 2), Blocks(64, 16, 8, 2)),
    "decode, masked": (Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 3)),
    "decode, one map, masked": (Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
}
# Not on tensor cores: for checking, not for speed.
_FLOAT32: Table = {
    "forward": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1, two_passes=True)),
    "save": (Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 1)),
    "save, two weights": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "keys": (Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 1)),
    "values": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "queries": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "decode": (Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}
# On tensor cores, each number twice as wide in shared memory. The same for all devices: it fits the smallest.
_TF32: Table = {
    "forward": (Blocks(64, 16, 8, 2), Blocks(32, 16, 8, 1, two_passes=True)),
    "save": (Blocks(64, 16, 8, 2), Blocks(32, 16, 8, 1)),
    "keys": (Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 1)),
    "values": (Blocks(32, 16, 8, 1), Blocks(32, 16, 8, 1)),
    "queries": (Blocks(32, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "queries, two weights": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "decode": (Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}
ROWS_BLOCKS = Blocks(16, 1, 4, 1)  # of the backward's first kernel, which reads every number once


def edge_of(columns: int) -> int:
    """Return the steps at the edges: half a block wastes less of its hidden keys. No product takes less than 16."""
    return max(16, columns // 2)


def are_wide(d: int, dv: int) -> bool:
    """Return whether heads are too wide for dK and dV, or both maps' products with V, to fit in registers at once."""
    return d > 64 or dv > 128


class Problem(NamedTuple):
    """A request, and the same in a form that the kernels read."""

    original: Request
    readable: Request  # last axes contiguous, a boolean mask as bytes, no window that hides nothing
    capability: int  # of the device to compute on, 90 for 9.0

    def blocks(self, kernel: str) -> Blocks:
        r = self.readable
        if r.q.dtype.itemsize > 2:
            table = _TF32 if precision_of(r.q.dtype) == "tf32" else _FLOAT32
        elif self.capability in (100, 103):
            table = _BLACKWELL
        elif self.capability == 90:
            table = _HOPPER
        elif self.capability in (80, 87):
            table = _AMPERE
        else:
            table = _SMALL
        is_wide = are_wide(r.q.shape[-1], r.v.shape[-1])
        if r.k.dtype == torch.int8 and (name := f"{kernel}, in eight bits") in table:
            return table[name][is_wide]
        if r.attn_mask is not None:
            kinds = [", one map, masked"] * (r.ratio > 1) + [", full mask"] * (r.attn_mask.shape[2] > 1)
            names = (f"{kernel}{kind}" for kind in (*kinds, ", masked", ""))
            return next(table[name] for name in names if name in table)[is_wide]
        if r.signal_weight is not None and (name := f"{kernel}, two weights") in table:
            return table[name][is_wide]
        is_measured = r.k.dtype.itemsize == 2 and r.signal_weight is None
        measured = measured_blocks(self.capability) if is_measured else {}
        return measured.get(measured_name(kernel, is_wide), table[kernel][is_wide])


def measured_name(kernel: str, is_wide: bool) -> str:
    """Return the name of a kernel in `measured_blocks.json`: measured in half precision, with λ alone and no mask."""
    return f"{kernel}, {'wide' if is_wide else 'narrow'} heads"


@functools.cache
def measured_blocks(capability: int) -> Mapping[str, Blocks]:
    """Return the fastest block sizes by the kernel's name, of those timed on a device of this compute capability."""
    if not MEASURED_BLOCKS.is_file():
        return {}
    of_capability = json.loads(MEASURED_BLOCKS.read_text(encoding="utf-8")).get(str(capability), {})
    return {name: Blocks(*sizes) for name, sizes in of_capability.items()}


def _is_readable(x: Tensor) -> bool:
    """Return whether the kernels read x in place: a tile's offsets are computed in 32 bits."""
    *_, row, channel = x.stride()
    return channel == 1 and row < _FARTHEST_ROW


def with_rows(x: Tensor) -> Tensor:
    return x if _is_readable(x) else x.contiguous()


def problem_of(request: Request, capability: int | None = None) -> Problem:
    """Prepare the request for a device of this compute capability; copy only if the last axis is not contiguous."""
    q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, signal = request
    if window is not None and window >= request.s:
        window = None  # it hides nothing: no query looks back further than the first key
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    lam = lam if lam.stride(-1) < _FARTHEST_ROW else lam.contiguous()
    if signal is not None and signal.stride() != lam.stride():  # the kernels read both by the strides of λ
        lam, signal = lam.contiguous(), signal.contiguous()
    readable = Request(
        with_rows(q), with_rows(k), with_rows(v), lam, attn_mask, is_causal, scale, window, segment_bounds, signal
    )  # fmt: skip
    if capability is None and q.device.type == "cuda":
        capability = capability_of(q.device)
    return Problem(request, readable, capability or 80)  # the interpreter has no device


def capability_of(device: torch.device | int) -> int:
    """Return the compute capability of a CUDA device, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_few_queries(p: Problem) -> bool:
    """Return whether decoding's kernel takes the request: all queries of a key head in one tile, against many keys."""
    r = p.original
    rows = r.heads_per_key * r.n
    if r.segment_bounds is not None or rows <= MOST_DECODED:
        return r.segment_bounds is None
    return r.q.dtype.itemsize == 2 and r.s >= LONG_CACHE and rows <= p.blocks("chunk").rows


def sees_alike(request: Request) -> bool:
    """Return whether decoding's kernel takes the request, and all queries of a key head see the same keys.

    Then it reads no values of keys that they do not see.
    """
    mask, heads_per_key = request.attn_mask, request.heads_per_key
    same_mask = mask is None or heads_per_key == 1 or mask.shape[1] == 1
    return request.n == 1 and heads_per_key <= MOST_DECODED and request.segment_bounds is None and same_mask


def padded(width: int) -> int:
    """Return the next power of 2, and at least 16, the narrowest that tensor cores multiply."""
    return max(16, 1 << (width - 1).bit_length())


def precision_of(dtype: torch.dtype) -> str:
    """Return how float32 is multiplied, by torch's own setting for its matrix products."""
    if dtype != torch.float32:
        return "ieee"  # without a meaning for narrower types
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return "tf32" if settings.fp32_precision == "tf32" else "ieee"
    return "tf32" if settings.allow_tf32 else "ieee"


def strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of all axes but the last, which is contiguous; λ (B, H, N) has one for each of its axes."""
    named: dict[str, int] = {}
    for name, x in tensors.items():
        named.update(zip(_axes(name, x.dim()), x.stride(), strict=False))
    return named


@functools.cache
def _axes(name: str, count: int) -> list[str]:
    axes = ("batch", "head", "map", "row") if count == 5 else ("batch", "head", "row")
    return [f"{name}_{axis}" for axis in axes]


def arguments_of(r: Request, norm: Norm | None) -> dict[str, Any]:
    """Return the arguments of a request and its norm, of which each kernel takes those that it names."""
    d, dv, mask = r.q.shape[-1], r.v.shape[-1], r.attn_mask
    weight, eps, factor = (None, 0.0, 1.0) if norm is None else (norm.weight.contiguous(), norm.eps, norm.factor)
    tensors = {"q": r.q, "k": r.k, "v": r.v, "lam": r.lam, "mask": mask, "segment_bounds": r.segment_bounds}
    counts = {"heads": r.heads, "key_heads": r.k.shape[1], "heads_per_key": r.heads_per_key, "n": r.n, "s": r.s}
    of_mask = dict.fromkeys(("mask_batch", "mask_head", "mask_query", "mask_key"), 0)
    if mask is not None:
        sizes = zip(of_mask, mask.shape, mask.stride(), strict=True)
        of_mask = {name: stride if size > 1 else 0 for name, size, stride in sizes}
    return {
        **tensors,
        "signal": r.signal_weight,
        **counts,
        "scale": r.scale,
        "window": r.window or 0,
        **strides(q=r.q, k=r.k, v=r.v, lam=r.lam),
        "k_map": r.k.stride(2) if r.k.shape[2] == 2 else 0,  # both maps read the same keys otherwise
        **of_mask,
        "mask_count": 0 if mask is None else r.s,
        "RATIO": r.ratio,
        "MAPS": 2 if r.ratio == 1 else 1,
        "D": d,
        "DV": dv,
        "BLOCK_D": padded(d),
        "BLOCK_DV": padded(dv),
        "IS_CAUSAL": r.is_causal,
        "HAS_WINDOW": r.window is not None,
        "HAS_SEGMENTS": r.segment_bounds is not None,
        "MASK": 0 if mask is None else 1 + mask.is_floating_point(),
        "BY_QUERY": mask is not None and mask.shape[-2] > 1,
        "PRECISION": precision_of(r.q.dtype),
        "norm_weight": weight,
        "norm_eps": eps,
        "norm_factor": factor,
        "HAS_NORM": norm is not None,
        "HAS_SIGNAL": r.signal_weight is not None,
    }


def of_noise_maps(r: Request) -> dict[str, Any]:
    """Return the arguments that differ if a group's noise map is a head of one map, like each of its signal heads."""
    noise_maps = r.q.shape[1]
    heads_per_key = noise_maps // r.k.shape[1]
    tensors = {"q": r.q[:, :, -1:], "k": r.k[:, :, -1:], "signal": None, "a1_v": None}
    return {**tensors, "heads": noise_maps, "heads_per_key": heads_per_key, "RATIO": 1, "HAS_SIGNAL": False}


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Allocate (B, H, N, dv), with the heads of a token side by side, as the projection after it wants them."""
    batch, noise_maps, maps, n, _ = q.shape
    heads, dv = noise_maps * (maps - 1), v.shape[-1]
    return q.new_empty_strided((batch, heads, n, dv), (n * heads * dv, dv, heads * dv, 1))


class SavedForBackward(NamedTuple):
    """The tensors that the forward saves for the backward.

    log_sums (1 or 2, B, H, 2, N), as one axis, and inverse_norms (B, H, N) float32; the second half of log_sums, which
    additive masks need, is the rounding error of the first. a2_v = A2·V, a1_v = A1·V and plain, the output before the
    norm, like the output. Without a norm plain is the output itself, and inverse_norms is empty, as is a1_v without a
    signal's weight.

    If r > 1 signal heads share a noise map, a2_v is (B, G, N, dv) float32, and log_sums are (1 or 2, B, H, N) of the
    signal heads and behind them (1 or 2, B, G, N) of the noise maps.
    """

    plain: Tensor
    a2_v: Tensor
    log_sums: Tensor
    inverse_norms: Tensor
    a1_v: Tensor


def by_kind(numbers: Tensor, ratio: int) -> tuple[Tensor, ...]:
    """Cut a tensor of one axis into the parts of signal heads and of the noise maps behind them: one part for r = 1."""
    if ratio == 1:
        return (numbers,)
    of_noise = numbers.shape[0] // (ratio + 1)
    return numbers[:-of_noise], numbers[-of_noise:]


def empty_log_sums(q: Tensor, attn_mask: Tensor | None) -> Tensor:
    has_addends = attn_mask is not None and attn_mask.is_floating_point()
    return q.new_empty((1 + has_addends) * q.shape[:-1].numel(), dtype=torch.float32)


def empty_saved(q: Tensor, v: Tensor, attn_mask: Tensor | None, has_norm: bool, has_signal: bool) -> SavedForBackward:
    """Allocate them; ``plain`` is empty, too, without a norm."""
    batch, noise_maps, maps, n, _ = q.shape
    of_a2_v = (batch, noise_maps, n, v.shape[-1])
    return SavedForBackward(
        empty_output(q, v) if has_norm else q.new_empty(0),
        empty_output(q, v) if maps == 2 else q.new_empty(of_a2_v, dtype=torch.float32),
        empty_log_sums(q, attn_mask),
        q.new_empty(batch, noise_maps * (maps - 1), n, dtype=torch.float32) if has_norm else q.new_empty(0),
        empty_output(q, v) if has_signal else q.new_empty(0),
    )


def gradient_like(x: Tensor) -> Tensor:
    """Allocate the gradient of x, in the layout of x if the kernels can write it."""
    like = torch.empty_like(x)
    return like if _is_readable(x) and _is_readable(like) else x.new_empty(x.shape)


def program_count(device: torch.device) -> int:
    """Return how many programs keep the device busy."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
