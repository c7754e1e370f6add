"""Says which requests each backend can run, or why not, and which backend ``auto`` takes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request, is_block_mask, isolate_nonfinite, reason_against_dtype
from diff_transformer.ops.blockwise import blockwise_attention
from diff_transformer.ops.cpu.cpu_backend import (
    available_to_auto,
    cpu_attention,
    cpu_log_sums,
    reason_against_cpu_kernel,
)
from diff_transformer.ops.cpu.cpu_build import unavailable_reason
from diff_transformer.ops.flash import PACKAGES, auto_takes_fa4, fa4_log_sums, flash_attention, reason_against_flash
from diff_transformer.ops.flex import flex_attention_backend, reason_against_flex
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.sdpa import sdpa_attention
from diff_transformer.ops.triton.gpu_check import kernels_are_right
from diff_transformer.ops.triton.triton_backend import reason_against_triton, triton_attention, triton_log_sums


class Backend(NamedTuple):
    """How a backend is called: ``attend(request)``, or ``attend(request, norm)`` if it ``fuses_norm``.
    ``log_sums(request)`` returns the output and the log-sums of all maps, (B, G, r + 1, N), if it has them; the request
    then has a signal's weight, so that the kernels have a factor of each map for a gradient.
    """

    attend: Callable[..., Tensor]
    fuses_norm: bool = False
    log_sums: Callable[[Request], tuple[Tensor, Tensor]] | None = None


_BACKENDS = {
    "reference": Backend(isolate_nonfinite(reference_attention)),
    "blockwise": Backend(isolate_nonfinite(blockwise_attention)),
    "sdpa": Backend(isolate_nonfinite(sdpa_attention, drops_nan=True)),
    "flex": Backend(isolate_nonfinite(flex_attention_backend, drops_nan=True)),
    "cpu": Backend(cpu_attention, fuses_norm=True, log_sums=cpu_log_sums),
    "triton": Backend(triton_attention, fuses_norm=True, log_sums=triton_log_sums),
    **{name: Backend(partial(flash_attention, name), fuses_norm=True) for name in ("fa2", "fa3")},
    "fa4": Backend(partial(flash_attention, "fa4"), fuses_norm=True, log_sums=fa4_log_sums),
}
BACKENDS = tuple(_BACKENDS)
_DROPPING = ("reference", "sdpa")  # attend(request, dropout_p)
# These have a backward of their own, which torch.func cannot use, nor torch differentiate, and none in forward mode.
_OPAQUE = ("blockwise", "flex", "cpu", "triton", *PACKAGES)


def is_transformed() -> bool:
    """Return whether torch.func or forward mode is at work, in which an operator of ours would lose derivatives."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _learns_mask(attn_mask: object) -> bool:
    return isinstance(attn_mask, Tensor) and attn_mask.requires_grad and torch.is_grad_enabled()


def _reason_in_request(backend: str, request: Request, dropout_p: float = 0.0) -> str | None:
    """Return why ``backend`` cannot answer the request itself, or None, without looking for the kernel."""
    q, attn_mask = request.q, request.attn_mask
    if dropout_p and backend not in _DROPPING:
        return "it drops no attention weights (dropout); use 'reference' or 'sdpa'"
    if backend in _OPAQUE and is_transformed():
        return "its operator has no place in torch.func or in forward mode; use 'reference', or in torch.func 'sdpa'"
    if backend != "flex" and attn_mask is not None and is_block_mask(attn_mask):
        return "a BlockMask is taken by 'flex' alone"
    if backend in _OPAQUE and _learns_mask(attn_mask):
        return "it computes no gradient for attn_mask; use 'reference' or 'sdpa'"
    if backend == "flex":
        return reason_against_flex(request)
    if backend == "triton":
        return reason_against_triton(request)
    if backend in PACKAGES:
        return reason_against_flash(backend, request)
    if backend == "cpu" and q.device.type != "cpu":
        return f"it needs its tensors on the CPU, got {q.device}"
    return reason_against_dtype(q.dtype) if backend == "cpu" else None


def reason_against(backend: str, request: Request, dropout_p: float = 0.0) -> str | None:
    """Return why ``backend`` cannot answer this request, or None if it can. For "cpu" this may compile the kernel."""
    reason = _reason_in_request(backend, request, dropout_p)
    return reason_against_cpu_kernel() if reason is None and backend == "cpu" else reason


def choose(request: Request, dropout_p: float = 0.0) -> str:
    """Return the backend that ``auto`` takes. The rules and their measurements are in docs/backends.md."""
    q, attn_mask = request.q, request.attn_mask
    if attn_mask is not None and is_block_mask(attn_mask):
        return "flex"
    if is_transformed() or _learns_mask(attn_mask):
        return "reference"
    if dropout_p:
        return "sdpa" if q.device.type == "cuda" else "reference"  # on the CPU torch drops by its plain formula
    if q.device.type == "cuda":
        if auto_takes_fa4(request) and kernels_are_right(request, "fa4"):
            return "fa4"
        takes_triton = _reason_in_request("triton", request) is None and kernels_are_right(request)
        return "triton" if takes_triton else "sdpa"
    if q.device.type == "cpu" and reason_against_dtype(q.dtype) is None and available_to_auto():
        return "cpu"
    return "blockwise"


def decode_rows(backend: str, request: Request, norm: Norm | None) -> Tensor | None:
    """Answer by Triton's kernels a request whose keys and values are :func:`packed_views`, or return None."""
    if backend not in ("auto", "triton") or _reason_in_request("triton", request) is not None:
        return None
    return triton_attention(request, norm) if backend == "triton" or kernels_are_right(request) else None


def resolve(backend: str, request: Request, dropout_p: float = 0.0) -> Backend:
    """Return the backend that answers the request. Raises ValueError for an unknown name or one that cannot run it."""
    if backend == "auto":
        backend = choose(request, dropout_p)
        if backend != "flex":  # which is taken for want of another, and may have a reason against it
            return _BACKENDS[backend]
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
    reason = reason_against(backend, request, dropout_p)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this request: {reason}.")
    return _BACKENDS[backend]


def explain(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, str | None]:
    """Return for each backend None if it runs on ``device`` in ``dtype``, else the reason why it does not. The CPU
    kernel is not compiled for this: one that was not tried yet is taken to run if there is a compiler.
    """
    q = torch.zeros(1, 1, 2, 1, 64, device=device, dtype=dtype)
    v = torch.zeros(1, 1, 1, 128, device=device, dtype=dtype)
    probe = Request(q, q, v, q.new_zeros(1, 1, 1), None, False, 1.0, None, None)
    reasons = {backend: _reason_in_request(backend, probe) for backend in BACKENDS}
    if reasons["cpu"] is None and (error := unavailable_reason()) is not None:
        reasons["cpu"] = str(error)
    return reasons
