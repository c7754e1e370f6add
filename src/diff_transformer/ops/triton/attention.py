"""The fused Triton kernels as a backend. Neither triton nor the kernels are imported before they are used."""

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.nonfinite import confined
from diff_transformer.ops.tracing import is_ordinary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_KEY, WIDEST_VALUE = 128, 256
MOST = 65535  # programs along the second and third axis of a grid
OLDEST = (8, 0)  # compute capability; older tensor cores have no bfloat16 and too little shared memory


def reason_against_triton(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not take these tensors, or None."""
    reason = _reason_against_device(q.device.type, q.device.index, q.dtype)
    d, dv = q.shape[-1], v.shape[-1]
    if reason is None and (q.shape[0] > MOST or q.shape[1] > MOST):
        return f"it takes up to {MOST} sequences and heads, got {q.shape[0]} and {q.shape[1]}"
    if reason is None and (d > WIDEST_KEY or dv > WIDEST_VALUE):  # no constants where torch.compile leaves them open
        return f"it takes d up to {WIDEST_KEY} and dv up to {WIDEST_VALUE}, got d {d} and dv {dv}"
    return reason


@torch.compiler.assume_constant_result
def _reason_against_device(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    if device == "cpu" and not interpreted():
        return "it needs its tensors on a CUDA device, got cpu"
    if device not in ("cpu", "cuda"):
        return f"it needs its tensors on a CUDA device, got {device}"
    if dtype not in DTYPES:
        return f"it computes float32, bfloat16 and float16, got {dtype}"
    if device == "cpu" and dtype == torch.bfloat16:
        return "triton's interpreter, TRITON_INTERPRET=1, does not multiply bfloat16"
    if not _installed():
        return "the package triton is not installed"
    if device == "cuda" and torch.version.hip is not None:
        return "it is made for CUDA, and this torch is for ROCm"
    if device == "cuda" and torch.cuda.get_device_capability(index) < OLDEST:
        found = ".".join(map(str, torch.cuda.get_device_capability(index)))
        return f"it needs compute capability {'.'.join(map(str, OLDEST))} or more, got {found}"
    return None


def interpreted() -> bool:
    """Whether triton runs its kernels in its interpreter, which takes tensors on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: made unimportable
        return False


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_scale: float = 1.0,
) -> Tensor:
    """(P1 − λP2) V, and with a weight norm_scale · RMSNorm(…) · weight, in one kernel.

    Shapes as in :func:`diff_transformer.diff_attention`; ``lam`` is (B, H, N).
    """
    from diff_transformer.ops.triton.problem import sees_alike

    tensors = (q, k, v, lam, norm_weight)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    request = (q, k, v, lam, attn_mask, is_causal, scale, window, documents, norm_weight, norm_eps, norm_scale)
    if not differentiable and sees_alike(q, k, attn_mask, documents):
        return _attend(*request, False)
    return _attend_confined(*request, differentiable)


def _attend(*request: Any) -> Tensor:
    """The kernels on a request of :func:`triton_attention`, and whether a gradient is wanted."""
    from diff_transformer.ops.triton.operators import forward, run_forward

    *inputs, differentiable = request
    ordinary = is_ordinary(*(x for x in inputs if isinstance(x, Tensor)))
    if differentiable or not ordinary or torch._C._len_torch_dispatch_stack():  # whose modes want to know of it
        return forward(*request)[0]
    # While decoding, the way through torch's dispatcher in Python would be a part of the time that one sees.
    return run_forward(*request)[0]


_attend_confined = confined(_attend)
