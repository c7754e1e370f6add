"""Registers the kernels as operators of torch: schema, fake, gradient. Imports triton."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import REQUEST_SCHEMA, Norm, Request, refuse_second_order
from diff_transformer.ops.triton.kernel_arguments import (
    empty_output,
    gradient_like,
    has_addends,
    has_few_queries,
    on_device_of,
    problem_of,
    programs_wanted,
)
from diff_transformer.ops.triton.launch import SavedForBackward, plan_backward, plan_decode, plan_forward

# The output, and what the backward needs as in `SavedForBackward`, empty where it is not needed: plain, a2_v, log-sums,
# inverse norms.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


def _only(out: Tensor) -> Results:
    """An output with nothing saved. No two results of an operator may be the same tensor, not even an empty one."""
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0), out.new_empty(0)


def _norm(weight: Tensor | None, eps: float, factor: float) -> Norm | None:
    return None if weight is None else Norm(weight, eps, factor)


def run_forward(request: Request, norm: Norm | None, save: bool) -> Results:
    """The kernels themselves, unknown to autograd."""
    q, v = request.q, request.v
    if q.shape[0] == 0:
        return _only(empty_output(q, v))
    with on_device_of(q):
        problem = problem_of(request)
        if not save and has_few_queries(request):
            launches, out = plan_decode(problem, norm, programs_wanted(q.device))
            saved = None
        else:
            launches, out, saved = plan_forward(problem, norm, save)
        for launch in launches:
            launch.run()
    if saved is None:
        return _only(out)
    if saved.inverse_norms is None:
        return out, q.new_empty(0), saved.a2_v, saved.log_sums, q.new_empty(0)
    return out, saved.plain, saved.a2_v, saved.log_sums, saved.inverse_norms


@torch.library.custom_op(
    "diff_transformer::triton_forward",
    mutates_args=(),
    schema=f"({REQUEST_SCHEMA}, Tensor? norm_weight, float norm_eps, float norm_scale, bool keep) -> {_RESULTS}",
)
def forward(*inputs: Any) -> Results:
    """The fields of a :class:`Request`, those of a :class:`Norm`, and whether to save what the backward needs."""
    *fields, norm_weight, norm_eps, norm_factor, save = inputs
    return run_forward(Request(*fields), _norm(norm_weight, norm_eps, norm_factor), save)


@forward.register_fake
def _(*inputs: Any) -> Results:
    *fields, norm_weight, _norm_eps, _norm_factor, save = inputs
    q, _k, v, _lam, attn_mask, *_ = fields
    batch, heads, _, n, _ = q.shape
    if not save or batch == 0:
        return _only(empty_output(q, v))
    log_sums = q.new_empty(1 + has_addends(attn_mask), batch, heads, 2, n, dtype=torch.float32)
    if norm_weight is None:
        return empty_output(q, v), q.new_empty(0), empty_output(q, v), log_sums, q.new_empty(0)
    inverse_norms = q.new_empty(batch, heads, n, dtype=torch.float32)
    return empty_output(q, v), empty_output(q, v), empty_output(q, v), log_sums, inverse_norms


@torch.library.custom_op(
    "diff_transformer::triton_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, Tensor? documents, "
    "Tensor? norm_weight, Tensor plain, Tensor second, Tensor log_sums, Tensor inverse_norms, bool is_causal, "
    f"float scale, SymInt? window, float norm_eps, float norm_scale) -> {_RESULTS}",
)
def backward(grad_out: Tensor, *inputs: Any) -> Results:
    """Gradients of q, k, v and lam, and of the norm's weight (empty without one); ``plain`` is the output before it."""
    q, k, v, lam, attn_mask, segment_bounds, norm_weight, *of_forward = inputs
    plain, a2_v, log_sums, inverse_norms, is_causal, scale, window, norm_eps, norm_factor = of_forward
    if q.shape[0] == 0:
        weight = q.new_zeros(0) if norm_weight is None else torch.zeros_like(norm_weight)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(lam), weight
    norm = _norm(norm_weight, norm_eps, norm_factor)
    saved = SavedForBackward(plain, a2_v, log_sums, None if norm is None else inverse_norms)
    with on_device_of(q):
        problem = problem_of(Request(q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds))
        launches, gradients = plan_backward(grad_out, problem, norm, saved)
        for launch in launches:
            launch.run()
    if norm_weight is None or gradients.norm_weight is None:
        grad_weight = q.new_empty(0)
    else:
        grad_weight = gradients.norm_weight.flatten(0, 2).sum(0).to(norm_weight.dtype)
    return gradients.q, gradients.k, gradients.v, gradients.lam, grad_weight


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
backward.register_autograd(refuse_second_order("triton"))
