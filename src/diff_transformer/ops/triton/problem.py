"""A request as the kernels take it: tensors they can read, numbers they are called with, memory for what they write."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.triton.blocks import Blocks, blocks_for

_FARTHEST_ROW = 1 << 24  # of 128 rows, the most in a tile, the last is then within 31 bits
MOST_DECODED = 16  # rows of queries to a key head that go into one tile of the decoding kernel


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


def with_rows(x: Tensor) -> Tensor:
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
        with_rows(q),
        with_rows(k),
        with_rows(v),
        lam if lam.stride(-1) < _FARTHEST_ROW else lam.contiguous(),
        attn_mask,
        is_causal,
        scale,
        window,
        documents,
        _capability(q.device) if capability is None else capability,
        (q, k, v),
    )


def has_addends(mask: Tensor | None) -> bool:
    """Whether a mask is additive."""
    return mask is not None and mask.is_floating_point()


def has_few_queries(p: Problem) -> bool:
    """Whether decoding's kernel takes the request: all queries of a key head in one tile, against many keys."""
    few = p.groups * p.q.shape[3] <= MOST_DECODED
    return few and p.documents is None


def sees_alike(q: Tensor, k: Tensor, mask: Tensor | None, documents: Tensor | None) -> bool:
    """Whether decoding's kernel takes a request in which all queries of a key head see the same keys.

    Then it reads no values of keys that they do not see.
    """
    groups = q.shape[1] // k.shape[1]
    alike = mask is None or groups == 1 or mask.shape[1] == 1
    return q.shape[3] == 1 and groups <= MOST_DECODED and documents is None and alike


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


def strides(p: Problem) -> dict[str, int]:
    """Of everything but λ."""
    return {
        **named("q", "batch head map row", p.q.stride()[:4]),
        **named("k", "batch head map row", p.k.stride()[:4]),
        "k_map": p.k.stride(2) if p.k.shape[2] == 2 else 0,  # both maps read the same keys otherwise
        **named("v", "batch head row", p.v.stride()[:3]),
        **named("mask", "batch head query key", _broadcast_strides(p.mask)),
    }


def lam_strides(p: Problem) -> dict[str, int]:
    return named("lam", "batch head row", p.lam.stride())


def constants(p: Problem) -> dict[str, Any]:
    d, dv = p.q.shape[-1], p.v.shape[-1]
    kind = 0 if p.mask is None else 1 + has_addends(p.mask)
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": padded(d),
        "BLOCK_DV": padded(dv),
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


@contextlib.contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            yield
    else:
        yield
