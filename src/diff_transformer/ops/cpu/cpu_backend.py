"""Makes the fused CPU kernel a backend, whose operators autograd and torch.compile know once they are loaded."""

import functools
import os
import platform
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Request, register_gradient
from diff_transformer.ops.cpu.cpu_build import SWITCH, BuildError, KernelDisabledError, load, unavailable_reason

_lock = threading.Lock()


def _renew_lock() -> None:
    # A thread that was compiling is not there any more in a forked process, and cannot release it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@functools.cache
def _load_operators() -> BuildError | None:
    """Load the kernel, which compiles it if nobody has yet, and tell torch of it; the reason where that cannot be."""
    error = unavailable_reason()
    if error is not None:
        return error
    try:
        load()
    except BuildError as failure:
        return failure
    operators = torch.ops.diff_transformer_cpu
    torch.library.register_fake(operators.forward.default, _fake_forward)
    register_gradient("cpu", operators.forward.default, operators.backward.default)
    return None


@functools.cache
def _kernel_error() -> BuildError | None:
    with _lock:  # threads that call for the kernel at once wait for the first to load it
        return _load_operators()


@functools.cache
def _warn_of_fallback(error: str) -> None:
    """Said once in a process."""
    warnings.warn(
        f"diff_attention takes the backend 'blockwise' instead of its fused CPU kernel: {error}. {SWITCH}=0 in the "
        "environment switches the kernel and this warning off.",
        stacklevel=3,
    )


# torch.compile calls the next two while it traces, and takes their answers as constants.


@torch.compiler.assume_constant_result
def reason_against_cpu_kernel() -> str | None:
    """Why the kernel cannot run in this process, or None. May compile it."""
    error = _kernel_error()
    return None if error is None else str(error)


@torch.compiler.assume_constant_result
def available_to_auto() -> bool:
    """Whether the kernel can run in this process; the first time it should and cannot, a warning says why."""
    error = _kernel_error()
    if error is not None and not isinstance(error, KernelDisabledError):
        _warn_of_fallback(str(error))
    return error is None and is_faster()


@functools.cache
def is_faster() -> bool:
    """Whether the kernel is faster than ``blockwise``: not on x86 without AVX2, where at::vec has no vectors."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return not x86 or torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, maps, n, _width = q.shape
    out = q.new_empty(batch, heads, n, v.shape[-1])
    return out, q.new_empty(batch, heads, maps, 2, n, dtype=torch.float32)


def cpu_attention(request: Request) -> Tensor:
    """(A1 − λA2) V, (B, H, N, dv), by the kernel, which :func:`reason_against_cpu_kernel` has loaded."""
    forward = torch.ops.diff_transformer_cpu.forward.default
    differentiable = request.needs_gradient
    if not differentiable and not torch.compiler.is_compiling():
        # While decoding, the autograd functions in Python would take a visible part of the time.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(*request, False)[0]
    return forward(*request, differentiable)[0]
