"""Makes the fused Triton kernels a backend: says which requests they take, and registers them as operators of torch.

Neither triton nor the kernels are imported before they are used.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import (
    REQUEST_SCHEMA,
    SIGNAL_SCHEMA,
    Norm,
    Request,
    constant_when_compiled,
    is_eager,
    may_skip_dispatcher,
    reason_against_dtype,
    refuse_second_order,
    triton_is_installed,
)
from diff_transformer.ops.triton.kernel_arguments import (
    SavedForBackward,
    by_kind,
    empty_log_sums,
    empty_output,
    empty_saved,
    gradient_like,
    has_few_queries,
    problem_of,
    program_count,
    with_rows,
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
    if reason is None and request.k.dtype == torch.int8 and not has_few_queries(problem_of(request)):
        return "it reads rows of int8 for the few queries of decoding alone"
    return reason


@constant_when_compiled
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
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the norm of it if there is one, in the same kernel."""
    differentiable = request.needs_gradient or (
        norm is not None and norm.weight.requires_grad and torch.is_grad_enabled()
    )
    of_norm = (None, 0.0, 1.0) if norm is None else norm
    # Torch's dispatcher in Python would take a visible part of the time, most to save for an operator's gradient.
    if not (is_eager(*request[:5], *request[-2:], of_norm[0]) and may_skip_dispatcher()):
        return forward(*request[:-1], *of_norm, differentiable, request.signal_weight)[0]
    if differentiable:
        return _Eager.apply(*request[:-1], *of_norm, True, request.signal_weight)[0]
    return run_forward(request, norm, save=False)[0]


def triton_log_sums(request: Request) -> tuple[Tensor, Tensor]:
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the log-sums of the scores, (B, G, r + 1, N); w is not None."""
    batch, noise_maps, maps, n, _ = request.q.shape
    out, *saved = forward(*request[:-1], None, 0.0, 1.0, request.needs_gradient, request.signal_weight, True)
    kinds = by_kind(SavedForBackward(*saved).log_sums, request.ratio)
    sizes = [(batch, noise_maps, count, n) for count in ((2,) if maps == 2 else (maps - 1, 1))]
    parts = [x[: math.prod(size)].view(size) for x, size in zip(kinds, sizes, strict=True)]
    log_sums = torch.cat(parts, dim=2)
    return out, torch.where(log_sums < math.inf, log_sums * math.log(2), -math.inf)


# The output, and what the backward needs as in `SavedForBackward`, empty where it is not needed: plain, a2_v, log-sums,
# inverse norms, a1_v.
Results = tuple[Tensor, ...]
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _only(out: Tensor, log_sums: Tensor | None = None) -> Results:
    """Return an output with nothing saved. No two results of an operator may be one tensor, not even an empty one."""
    plain, a2_v, none, inverse_norms, a1_v = (out.new_empty(0) for _ in range(5))
    return out, plain, a2_v, none if log_sums is None else log_sums, inverse_norms, a1_v


def _of_forward(inputs: tuple[Any, ...]) -> tuple[Request, Norm | None, bool, bool]:
    """Return the request, the norm, whether to save for the backward, and whether to return log-sums in any case."""
    weight, eps, factor, save = inputs[9:13]
    signal_weight, return_lse = (*inputs[13:], None, False)[:2]  # may be left out
    norm = None if weight is None else Norm(weight, eps, factor)
    return Request(*[*inputs[:9], signal_weight]), norm, save, bool(return_lse)


def run_forward(request: Request, norm: Norm | None, save: bool, return_lse: bool = False) -> Results:
    """Run the kernels themselves, unknown to autograd. ``return_lse``: the log-sums, too, if nothing is saved."""
    from diff_transformer.ops.triton.launch import plan_decode, plan_forward

    q, v = request.q, request.v
    if q.shape[0] == 0:
        return _only(empty_output(q, v))
    with torch.cuda.device_of(q):  # triton launches on the current one
        problem = problem_of(request)
        if not save and has_few_queries(problem):
            launches, out, log_sums = plan_decode(problem, norm, program_count(q.device), return_lse)
            saved = None
        else:
            launches, out, saved = plan_forward(problem, norm, save or return_lse)
            log_sums = None if saved is None else saved.log_sums
        for launch in launches:
            launch.run()
    if saved is None or not save:
        return _only(out, log_sums)
    return out, q.new_empty(0) if norm is None else saved.plain, *saved[1:]


@torch.library.custom_op(
    "diff_transformer::triton_forward",
    mutates_args=(),
    schema=f"({REQUEST_SCHEMA}, Tensor? norm_weight, float norm_eps, float norm_scale, bool keep, {SIGNAL_SCHEMA}, "
    f"bool return_lse=False) -> {_RESULTS}",
)
def forward(*inputs: Any) -> Results:
    """Run on the fields of a :class:`Request` but the last, those of a :class:`Norm`, and ``save``; see the schema."""
    return run_forward(*_of_forward(inputs))


@forward.register_fake
def _(*inputs: Any) -> Results:
    request, norm, save, return_lse = _of_forward(inputs)
    q, _k, v, _lam, attn_mask, *_, signal_weight = request
    out = empty_output(q, v)
    if q.shape[0] == 0 or not (save or return_lse):
        return _only(out)
    if not save:
        return _only(out, empty_log_sums(q, attn_mask))
    return out, *empty_saved(q, v, attn_mask, norm is not None, signal_weight is not None)


def run_backward(grad_out: Tensor, *inputs: Any) -> Results:
    """Return the gradients of q, k, v, lam, the norm's and the signal's weight (or empty).

    ``plain`` is the output before the norm, ``first`` and ``second`` are A1·V and A2·V.
    """
    from diff_transformer.ops.triton.launch import plan_backward

    q, k, v, lam, attn_mask, segment_bounds, norm_weight, *saved = inputs[:11]
    is_causal, scale, window, norm_eps, norm_factor = inputs[11:16]
    a1_v, grad_log_sums, signal_weight = (*inputs[16:], None, None, None)[:3]  # may be left out
    norm = None if norm_weight is None else Norm(norm_weight, norm_eps, norm_factor)
    if q.shape[0] == 0:
        inputs = (q, k, v, lam, norm_weight, signal_weight)
        return tuple(q.new_zeros(0) if x is None else torch.zeros_like(x) for x in inputs)
    with torch.cuda.device_of(q):
        request = Request(q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, signal_weight)
        of_forward = SavedForBackward(*(x if x is None or x.dim() < 2 else with_rows(x) for x in (*saved, a1_v)))
        (of_rows, *launches), gradients, row_sums = plan_backward(grad_out, problem_of(request), norm, of_forward)
        of_rows.run()
        if grad_log_sums is not None:  # dS_c = P_c ⊙ (g_c dP − row sum), with g_1 = w and g_2 = −λ, and P_c dL_c more
            kinds = (by_kind(x, request.ratio) for x in (row_sums, grad_log_sums))
            for sums, of_sums in zip(*kinds, strict=True):
                sums.sub_(of_sums[: sums.shape[0]], alpha=1 / math.log(2))  # log-sums are in units of log 2
        for launch in launches:
            launch.run()
    grad_q, grad_k, grad_v, grad_lam, weight_parts, grad_signal = gradients
    grad_weight = q.new_empty(0) if norm is None else weight_parts.flatten(0, 2).sum(0).to(norm.weight.dtype)
    grad_signal = q.new_empty(0) if grad_signal is None else grad_signal
    return grad_q, _added(grad_k, k), _added(grad_v, v), grad_lam, grad_weight, grad_signal


def _added(gradient: Tensor, x: Tensor) -> Tensor:
    """Add up the gradient of x, of which there may be two parts, (2, …)."""
    return gradient if gradient.dim() == x.dim() else torch.add(*gradient, out=gradient_like(x))


backward = torch.library.custom_op(
    "diff_transformer::triton_backward",
    run_backward,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, Tensor? documents, "
    "Tensor? norm_weight, Tensor plain, Tensor second, Tensor log_sums, Tensor inverse_norms, bool is_causal, "
    "float scale, SymInt? window, float norm_eps, float norm_scale, Tensor? first=None, Tensor? grad_log_sums=None, "
    f"{SIGNAL_SCHEMA}) -> {_RESULTS}",
)


@backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> Results:
    q, k, v, lam, *_ = inputs
    weights = (lam, inputs[6], inputs[18] if len(inputs) > 18 else None)
    of_weights = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in weights)
    return gradient_like(q), gradient_like(k), gradient_like(v), *of_weights


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    request, norm, *_ = _of_forward(inputs)
    q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, signal_weight = request
    out, plain, a2_v, log_sums, inverse_norms, a1_v = output
    ctx.set_materialize_grads(False)
    # Without a signal's weight the kernels have no place for a gradient of the log-sums.
    ctx.mark_non_differentiable(plain, a2_v, inverse_norms, a1_v, *([log_sums] if signal_weight is None else []))
    plain, norm_weight = (out, None) if norm is None else (plain, norm.weight)
    ctx.save_for_backward(
        q, k, v, lam, attn_mask, segment_bounds, norm_weight, plain, a2_v, log_sums, inverse_norms, a1_v, signal_weight
    )  # fmt: skip
    ctx.settings, ctx.count = (is_causal, scale, window, *inputs[10:12]), len(inputs)


def _differentiate(ctx: Any, grad_out: Tensor | None, *grad_saved: Tensor | None) -> tuple[Tensor | None, ...]:
    # Once: under activation checkpointing, looking again would compute them again.
    *saved, a1_v, signal_weight = ctx.saved_tensors
    if grad_out is None:  # a log-sum alone was asked for
        grad_out = torch.zeros_like(saved[7])
    # An operator refuses to be differentiated in turn.
    eager = is_eager(grad_out, *saved) and may_skip_dispatcher() and not torch.is_grad_enabled()
    differentiate = run_backward if eager else backward
    *gradients, grad_weight, grad_signal = differentiate(
        grad_out, *saved, *ctx.settings, a1_v, grad_saved[2], signal_weight
    )
    grad_weight = None if saved[6] is None else grad_weight
    grad_signal = None if signal_weight is None else grad_signal
    return (*gradients, *[None] * 5, grad_weight, None, None, None, grad_signal, None)[: ctx.count]


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Results:
        results = run_forward(*_of_forward(inputs))
        _save(ctx, inputs, results)
        return results

    backward = staticmethod(_differentiate)


forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_order("triton", backward)
