"""The fused Triton kernels as a backend. Neither triton nor the kernels are imported before they are used."""

import os

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request, is_ordinary, reason_against_dtype, triton_is_installed
from diff_transformer.ops.nonfinite import confined

WIDEST_KEY, WIDEST_VALUE = 128, 256
LARGEST_GRID = 65535  # programs along the second and third axis of a grid
OLDEST = (8, 0)  # compute capability; older tensor cores have no bfloat16 and too little shared memory


def reason_against_triton(request: Request) -> str | None:
    """Why the kernels do not take the request, or None."""
    q = request.q
    reason = _reason_against_device(q.device.type, q.device.index, q.dtype)
    d, dv = q.shape[-1], request.v.shape[-1]
    if reason is None and (q.shape[0] > LARGEST_GRID or q.shape[1] > LARGEST_GRID):
        return f"it takes up to {LARGEST_GRID} sequences and heads, got {q.shape[0]} and {q.shape[1]}"
    if reason is None and (d > WIDEST_KEY or dv > WIDEST_VALUE):  # no constants where torch.compile leaves them open
        return f"it takes d up to {WIDEST_KEY} and dv up to {WIDEST_VALUE}, got d {d} and dv {dv}"
    return reason


@torch.compiler.assume_constant_result
def _reason_against_device(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    if device == "cpu" and not interpreted():
        return "it needs its tensors on a CUDA device, got cpu"
    if device not in ("cpu", "cuda"):
        return f"it needs its tensors on a CUDA device, got {device}"
    if (reason := reason_against_dtype(dtype)) is not None:
        return reason
    if device == "cpu" and dtype == torch.bfloat16:
        return "triton's interpreter, TRITON_INTERPRET=1, does not multiply bfloat16"
    if not triton_is_installed():
        return "the package triton is not installed"
    if device == "cuda" and torch.version.hip is not None:
        return "it is made for CUDA, and this torch is for ROCm"
    if device == "cuda" and torch.cuda.get_device_capability(index) < OLDEST:
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        return f"it needs compute capability {'.'.join(map(str, OLDEST))} or more, got {capability}"
    return None


def interpreted() -> bool:
    """Whether triton runs its kernels in its interpreter, which takes tensors on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_attention(request: Request, norm: Norm | None = None) -> Tensor:
    """(A1 − λA2) V, (B, H, N, dv), and the norm of it where there is one, in one kernel."""
    from diff_transformer.ops.triton.kernel_arguments import sees_alike

    differentiable = request.needs_gradient or (
        norm is not None and norm.weight.requires_grad and torch.is_grad_enabled()
    )
    if not differentiable and sees_alike(request):
        return _attend(request, norm, False)
    return _attend_confined(request, norm, differentiable)


def _attend(request: Request, norm: Norm | None, differentiable: bool) -> Tensor:
    from diff_transformer.ops.triton.torch_ops import forward, run_forward

    norm_weight, norm_eps, norm_factor = (None, 0.0, 1.0) if norm is None else norm
    ordinary = is_ordinary(*request[:5], request.segment_bounds, norm_weight)
    if differentiable or not ordinary or torch._C._len_torch_dispatch_stack():  # whose modes must see the operator
        return forward(*request, norm_weight, norm_eps, norm_factor, differentiable)[0]
    # While decoding, torch's dispatcher in Python would take a visible part of the time.
    return run_forward(request, norm, save=False)[0]


_attend_confined = confined(_attend)
