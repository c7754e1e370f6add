"""Makes the fused CPU kernel a backend, whose operators torch knows before the kernel is loaded."""

import contextlib
import functools
import math
import os
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import (
    PLAIN,
    REQUEST_SCHEMA,
    SIGNAL_SCHEMA,
    WIDEST_WINDOW,
    Norm,
    Request,
    constant_when_compiled,
    may_skip_dispatcher,
    register_gradient,
)
from diff_transformer.ops.cpu.cpu_build import SWITCH, BuildError, KernelDisabledError, capability, is_faster, load
from diff_transformer.ops.functional import rms_norm

_lock = threading.Lock()
# The names of backends under which a request meets the kernel, once that is loaded.
_loaded: set[str] = set()


def _renew_lock() -> None:
    # A thread that was compiling is not there any more in a forked process, and cannot release it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@functools.cache
def _kernel_error() -> BuildError | None:
    """Load the kernel, which compiles it if nobody has yet; return the reason if that fails."""
    try:
        with _lock:  # threads that call for the kernel at once wait for the first to load it
            load()
    except BuildError as error:
        return error
    try:
        _operators.use(capability())
    except (AttributeError, RuntimeError):  # of the operator, which only a library that somebody has named can lack
        return BuildError(
            f"the library that {SWITCH} names must have kernels for {capability()}, which torch takes this processor "
            "to have (ATEN_CPU_CAPABILITY in the environment lowers it), and has none"
        )
    _loaded.update({"cpu", "auto"} if is_faster() else {"cpu"})
    return None


@functools.cache
def _warn_of_fallback(error: str) -> None:
    """Warn once in a process."""
    warnings.warn(
        f"diff_attention takes the backend 'blockwise' instead of its fused CPU kernel: {error}. {SWITCH}=0 in the "
        "environment switches the kernel and this warning off.",
        stacklevel=3,
    )


# torch.compile calls the next two while it traces, and takes their answers as constants.


@constant_when_compiled
def reason_against_cpu_kernel() -> str | None:
    """Return why the kernel cannot run in this process, or None. May compile it."""
    error = _kernel_error()
    return None if error is None else str(error)


@constant_when_compiled
def available_to_auto() -> bool:
    """Return whether the kernel can run in this process; the first time it should and cannot, a warning says why."""
    error = _kernel_error()
    if error is not None and not isinstance(error, KernelDisabledError):
        _warn_of_fallback(str(error))
    return error is None and is_faster()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*lam.shape, v.shape[-1])
    return out, q.new_empty(*q.shape[:3], 2, q.shape[3], dtype=torch.float32)


_FIELDS = REQUEST_SCHEMA.replace("SymInt", "int")
torch.library.define(
    "diff_transformer_cpu::forward",
    f"({_FIELDS}, bool differentiable, {SIGNAL_SCHEMA}) -> (Tensor out, Tensor statistics)",
)
torch.library.define(
    "diff_transformer_cpu::backward",
    f"(Tensor grad_out, {_FIELDS.replace('bool is_causal', 'Tensor statistics, bool is_causal')}, "
    f"Tensor? grad_statistics, {SIGNAL_SCHEMA}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_lam, "
    "Tensor grad_signal)",
)
_operators = torch.ops.diff_transformer_cpu
torch.library.register_fake(_operators.forward.default, _fake_forward)
register_gradient("cpu", _operators.forward.default, _operators.backward.default, statistics=1)


def decode_fast_path(backend: str, *arguments: Any, packed: bool = False) -> Tensor | None:
    """Answer the few queries of decoding in one step, as :func:`diff_transformer.diff_attention` would.

    Checking a request takes longer than the work for a single token. The kernel does both, and the norm. The arguments
    are the operator's as they come, of which its schema names the order; ``backend`` is the name that the caller gave.
    ``packed`` keys and values are rows of :func:`diff_transformer.ops.packed.pack`.

    Returns:
        The operator's result. None if a gradient is needed, for a request that cannot be answered or asks for more than
        the kernel's own checks know, and before the kernel has been loaded.
    """
    # A trace must not depend on `_loaded`, which changes while it loads the kernel.
    if torch.is_grad_enabled() or not may_skip_dispatcher() or backend not in _loaded:
        return None
    q, k, v, lam, attn_mask, is_causal, scale, window, norm_weight, norm_eps, norm_scale, signal_weight = arguments
    for x in (q, k, v, lam):  # loops, as each microsecond counts
        if type(x) not in PLAIN:  # a subclass may hold something else than it means
            return None
    for x in (attn_mask, norm_weight, signal_weight):
        if x is not None and type(x) not in PLAIN:
            return None
    if not type(norm_eps) is type(norm_scale) is float or (scale is not None and type(scale) is not float):
        return None
    if type(is_causal) is not bool or (attn_mask is not None and attn_mask.dtype == torch.float64):
        return None
    if window is not None:
        if type(window) is not int or window < 1:
            return None
        window = min(window, WIDEST_WINDOW)
    try:
        answer: Tensor | None = _operators.decode_fast_path.default(
            q, k, v, lam, attn_mask, is_causal, scale, window, norm_weight, norm_eps, norm_scale, signal_weight, packed
        )
    except NotImplementedError:  # a nested tensor, which is refused by name
        return None
    return answer


def token_step(operator: str, *arguments: Any) -> Any:
    """Take a layer's step for a token by the kernel's ``operator``, which has the bits of several operators of torch.

    None in place of each result, or of all, if the operator or :func:`decode_fast_path` could not answer.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not may_skip_dispatcher():
        return None
    for x in arguments:
        if type(x) not in (int, float) and (type(x) not in PLAIN or x.is_nested or not x.is_cpu):  # or a proxy of fx
            return None
    return getattr(_operators, operator).default(*arguments) if "auto" in _loaded else None


def cpu_attention(request: Request, norm: Norm | None = None) -> Tensor:
    """Compute (A1 − λA2) V, (B, H, N, dv), and the norm of it if there is one, by the kernel.

    :func:`reason_against_cpu_kernel` has loaded it.
    """
    if norm is not None and not request.needs_gradient and not torch.compiler.is_compiling():
        answer = _few_normed(request, norm)
        if answer is not None:
            return answer
    out = _forward(request)[0]
    return out if norm is None else rms_norm(out, norm.weight, norm.eps) * norm.factor


def cpu_log_sums(request: Request) -> tuple[Tensor, Tensor]:
    """Compute (A1 − λA2) V, (B, H, N, dv), and the log-sums of the scores, (B, G, r + 1, N), by the kernel."""
    out, statistics = _forward(request)
    highest, inverse = statistics.unbind(3)
    sees = inverse > 0
    return out, torch.where(sees, highest - inverse.where(sees, 1.0).detach().log(), -math.inf)


def _forward(request: Request) -> tuple[Tensor, Tensor]:
    *fields, signal_weight = request
    differentiable = request.needs_gradient
    is_seen = differentiable or torch.compiler.is_compiling()
    # While decoding, the autograd functions in Python would take a visible part of the time.
    with contextlib.nullcontext() if is_seen else torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, Tensor] = _operators.forward.default(*fields, differentiable, signal_weight)
    return results


def _few_normed(request: Request, norm: Norm) -> Tensor | None:
    """Answer as :func:`decode_fast_path`: a call that is the first, or not in its form, shall give the same bits."""
    *fields, segment_bounds, signal_weight = request
    needs_gradient = torch.is_grad_enabled() and norm.weight.requires_grad
    if segment_bounds is not None or needs_gradient or not may_skip_dispatcher():
        return None
    with torch.no_grad():
        answer: Tensor | None = _operators.decode_fast_path.default(*fields, *norm, signal_weight)
    return answer
