"""Turns a request into what the kernels take: tensors that they can read, numbers, and memory for their results."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.triton.block_sizes import Blocks, blocks_for

_FARTHEST_ROW = 1 << 24  # of 128 rows, the most in a tile, the last is then within 31 bits
MOST_DECODED = 16  # rows of queries to a key head that go into one tile of the decoding kernel


class Problem(NamedTuple):
    """A request, and the same in a form that the kernels read."""

    original: Request
    readable: Request  # last axes contiguous, a boolean mask as bytes, no window that hides nothing
    capability: int

    def blocks(self, kernel: str) -> Blocks:
        r = self.readable
        masked = r.attn_mask is not None
        return blocks_for(kernel, r.q.shape[-1], r.v.shape[-1], r.q.dtype, masked, self.capability)


def _rows_together(x: Tensor) -> bool:
    """Whether the kernels read x where it lies: a tile's offsets are computed in 32 bits."""
    return x.stride(-1) == 1 and x.stride(-2) < _FARTHEST_ROW


def with_rows(x: Tensor) -> Tensor:
    return x if _rows_together(x) else x.contiguous()


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 80  # the interpreter has no device
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def problem_of(request: Request, capability: int | None = None) -> Problem:
    """The request for a device of this compute capability; copies only where the last axis is not contiguous."""
    q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds = request
    if window is not None and window >= request.s:
        window = None  # it hides nothing: no query looks back further than the first key
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    elif attn_mask is not None and attn_mask.dtype == torch.float64:
        info = torch.finfo(torch.float32)  # whose lowest number a finite addend becomes, and not −∞
        finite = attn_mask.clamp(info.min, info.max)
        attn_mask = torch.where(attn_mask == float("-inf"), attn_mask, finite).to(torch.float32)
    lam = lam if lam.stride(-1) < _FARTHEST_ROW else lam.contiguous()
    readable = Request(
        with_rows(q), with_rows(k), with_rows(v), lam, attn_mask, is_causal, scale, window, segment_bounds
    )  # fmt: skip
    return Problem(request, readable, _capability(q.device) if capability is None else capability)


def has_addends(mask: Tensor | None) -> bool:
    """Whether a mask is additive."""
    return mask is not None and mask.is_floating_point()


def has_few_queries(request: Request) -> bool:
    """Whether decoding's kernel takes the request: all queries of a key head in one tile, against many keys."""
    return request.groups * request.n <= MOST_DECODED and request.segment_bounds is None


def sees_alike(request: Request) -> bool:
    """Whether decoding's kernel takes the request, and all queries of a key head see the same keys.

    Then it reads no values of keys that they do not see.
    """
    mask, groups = request.attn_mask, request.groups
    same_mask = mask is None or groups == 1 or mask.shape[1] == 1
    return request.n == 1 and groups <= MOST_DECODED and request.segment_bounds is None and same_mask


def padded(width: int) -> int:
    """The next power of 2, and at least 16, the narrowest that tensor cores multiply."""
    return max(16, triton.next_power_of_2(width))


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


def named(name: str, axes: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes.split(), strides, strict=True)}


def arguments_of(r: Request) -> dict[str, Any]:
    """What every kernel takes that reads keys."""
    d, dv, mask = r.q.shape[-1], r.v.shape[-1], r.attn_mask
    mask_kind = 0 if mask is None else 1 + has_addends(mask)
    return {
        "q": r.q,
        "k": r.k,
        "v": r.v,
        "mask": mask,
        "groups": r.groups,
        "n": r.n,
        "s": r.s,
        "window": r.window or 0,
        **named("q", "batch head map row", r.q.stride()[:4]),
        **named("k", "batch head map row", r.k.stride()[:4]),
        "k_map": r.k.stride(2) if r.k.shape[2] == 2 else 0,  # both maps read the same keys otherwise
        **named("v", "batch head row", r.v.stride()[:3]),
        **named("mask", "batch head query key", _broadcast_strides(mask)),
        "D": d,
        "DV": dv,
        "BLOCK_D": padded(d),
        "BLOCK_DV": padded(dv),
        "IS_CAUSAL": r.is_causal,
        "HAS_WINDOW": r.window is not None,
        "MASK": mask_kind,
        "BY_QUERY": mask is not None and mask.shape[-2] > 1,
        "PRECISION": _precision(r.q.dtype),
    }


def lambda_arguments(r: Request) -> dict[str, Any]:
    return {"lam": r.lam, **named("lam", "batch head row", r.lam.stride())}


def block_arguments(r: Request) -> dict[str, Any]:
    """What the kernels take that go through blocks of queries and keys: all but decoding's."""
    segments = {"segment_bounds": r.segment_bounds, "HAS_SEGMENTS": r.segment_bounds is not None}
    return {**arguments_of(r), **lambda_arguments(r), **segments, "heads": r.q.shape[1]}


def norm_arguments(norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {"norm_weight": None, "norm_eps": 0.0, "norm_factor": 1.0, "HAS_NORM": False}
    return {
        "norm_weight": norm.weight.contiguous(),
        "norm_eps": norm.eps,
        "norm_factor": norm.factor,
        "HAS_NORM": True,
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


@contextlib.contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            yield
    else:
        yield
