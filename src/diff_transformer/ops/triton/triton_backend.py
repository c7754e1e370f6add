"""Makes the fused Triton kernels a backend: says which requests they take, and registers them as operators of torch.

Neither triton nor the kernels are imported before they are used.
"""

import os
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import (
    REQUEST_SCHEMA,
    Norm,
    Request,
    is_eager,
    may_skip_dispatcher,
    reason_against_dtype,
    refuse_second_order,
    triton_is_installed,
)
from diff_transformer.ops.triton.kernel_arguments import (
    SavedForBackward,
    empty_output,
    empty_saved,
    gradient_like,
    has_few_queries,
    problem_of,
    program_count,
)

WIDEST_KEY, WIDEST_VALUE = 128, 256
LARGEST_GRID = 65535  # programs along the second and third axis of a grid
OLDEST = (8, 0)  # compute capability; older tensor cores have no bfloat16 and too little shared memory


def reason_against_triton(request: Request) -> str | None:
    """Return why the kernels do not take the request, or None."""
    q = request.q
    reason = _reason_against_device(q.device.type, q.device.index, q.dtype)
    d, dv = q.shape[-1], request.v.shape[-1]
    if reason is None and (q.shape[0] > LARGEST_GRID or request.heads > LARGEST_GRID):
        return f"it takes up to {LARGEST_GRID} sequences and heads, got {q.shape[0]} and {request.heads}"
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
    """Return whether triton runs its kernels in its interpreter, which takes tensors on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_attention(request: Request, norm: Norm | None = None) -> Tensor:
    """Compute (A1 − λA2) V, (B, H, N, dv), and the norm of it if there is one, in the same kernel."""
    differentiable = request.needs_gradient or (
        norm is not None and norm.weight.requires_grad and torch.is_grad_enabled()
    )
    norm_weight, norm_eps, norm_factor = (None, 0.0, 1.0) if norm is None else norm
    eager = is_eager(*request[:5], request.segment_bounds, norm_weight)
    if differentiable or not (eager and may_skip_dispatcher()):
        return forward(*request[:-1], norm_weight, norm_eps, norm_factor, differentiable)[0]
    # While decoding, torch's dispatcher in Python would take a visible part of the time.
    return run_forward(request, norm, save=False)[0]


# The output, and what the backward needs as in `SavedForBackward`, empty where it is not needed: plain, a2_v, log-sums,
# inverse norms.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


def _only(out: Tensor) -> Results:
    """Return an output with nothing saved. No two results of an operator may be one tensor, not even an empty one."""
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0), out.new_empty(0)


def _norm(weight: Tensor | None, eps: float, factor: float) -> Norm | None:
    return None if weight is None else Norm(weight, eps, factor)


def run_forward(request: Request, norm: Norm | None, save: bool) -> Results:
    """Run the kernels themselves, unknown to autograd."""
    from diff_transformer.ops.triton.launch import plan_decode, plan_forward

    q, v = request.q, request.v
    if q.shape[0] == 0:
        return _only(empty_output(q, v))
    with torch.cuda.device_of(q):  # triton launches on the current one
        problem = problem_of(request)
        if not save and has_few_queries(problem):
            launches, out = plan_decode(problem, norm, program_count(q.device))
            saved = None
        else:
            launches, out, saved = plan_forward(problem, norm, save)
        for launch in launches:
            launch.run()
    if saved is None:
        return _only(out)
    return out, q.new_empty(0) if norm is None else saved.plain, *saved[1:]


@torch.library.custom_op(
    "diff_transformer::triton_forward",
    mutates_args=(),
    schema=f"({REQUEST_SCHEMA}, Tensor? norm_weight, float norm_eps, float norm_scale, bool keep) -> {_RESULTS}",
)
def forward(*inputs: Any) -> Results:
    """Run on the fields of a :class:`Request`, those of a :class:`Norm`, and whether to save for the backward."""
    *fields, norm_weight, norm_eps, norm_factor, save = inputs
    return run_forward(Request(*fields), _norm(norm_weight, norm_eps, norm_factor), save)


@forward.register_fake
def _(*inputs: Any) -> Results:
    *fields, norm_weight, _norm_eps, _norm_factor, save = inputs
    q, _k, v, _lam, attn_mask, *_ = fields
    if not save or q.shape[0] == 0:
        return _only(empty_output(q, v))
    return empty_output(q, v), *empty_saved(q, v, attn_mask, norm_weight is not None)


@torch.library.custom_op(
    "diff_transformer::triton_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, Tensor? documents, "
    "Tensor? norm_weight, Tensor plain, Tensor second, Tensor log_sums, Tensor inverse_norms, bool is_causal, "
    f"float scale, SymInt? window, float norm_eps, float norm_scale) -> {_RESULTS}",
)
def backward(grad_out: Tensor, *inputs: Any) -> Results:
    """Return the gradients of q, k, v, lam and the norm's weight (or empty); ``plain`` is the output before it."""
    from diff_transformer.ops.triton.launch import plan_backward

    q, k, v, lam, attn_mask, segment_bounds, norm_weight, *of_forward = inputs
    plain, a2_v, log_sums, inverse_norms, is_causal, scale, window, norm_eps, norm_factor = of_forward
    if q.shape[0] == 0:
        weight = q.new_zeros(0) if norm_weight is None else torch.zeros_like(norm_weight)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(lam), weight
    norm = _norm(norm_weight, norm_eps, norm_factor)
    saved = SavedForBackward(plain, a2_v, log_sums, inverse_norms)
    with torch.cuda.device_of(q):
        problem = problem_of(Request(q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds))
        launches, gradients = plan_backward(grad_out, problem, norm, saved)
        for launch in launches:
            launch.run()
    grad_q, grad_k, grad_v, grad_lam, weight_parts = gradients
    input_gradients = grad_q, _added(grad_k, k), _added(grad_v, v), grad_lam
    if norm is None:
        return *input_gradients, q.new_empty(0)
    return *input_gradients, weight_parts.flatten(0, 2).sum(0).to(norm.weight.dtype)


def _added(gradient: Tensor, x: Tensor) -> Tensor:
    """Add up the gradient of x, of which there may be two parts, (2, …)."""
    return gradient if gradient.dim() == x.dim() else torch.add(*gradient, out=gradient_like(x))


@backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> Results:
    q, k, v, lam, _attn_mask, _segment_bounds, norm_weight, *_ = inputs
    grad_weight = q.new_empty(0) if norm_weight is None else norm_weight.new_empty(norm_weight.shape)
    return gradient_like(q), gradient_like(k), gradient_like(v), lam.new_empty(lam.shape), grad_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, norm_weight, norm_eps, norm_factor, _ = inputs
    out, plain, a2_v, log_sums, inverse_norms = output
    ctx.mark_non_differentiable(plain, a2_v, log_sums, inverse_norms)
    plain = out if norm_weight is None else plain
    ctx.save_for_backward(
        q, k, v, lam, attn_mask, segment_bounds, norm_weight, plain, a2_v, log_sums, inverse_norms
    )  # fmt: skip
    ctx.settings = (is_causal, scale, window, norm_eps, norm_factor)


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: under activation checkpointing, looking again would compute them again
    *gradients, grad_weight = backward(grad_out, *saved, *ctx.settings)
    has_norm = saved[6] is not None
    return (*gradients, None, None, None, None, None, grad_weight if has_norm else None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_order("triton", backward)
