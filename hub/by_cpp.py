"""Runs the kernel in C++, and makes its backward the gradient of its forward."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

_FIELDS = "REQUEST_SCHEMA"
_FORWARD, _BACKWARD = map(add_op_namespace_prefix, ("forward", "backward"))
_SIGNAL = "Tensor? signal_weight=None"
torch.library.define(_FORWARD, f"({_FIELDS}, bool differentiable, {_SIGNAL}) -> (Tensor out, Tensor statistics)")
torch.library.define(
    _BACKWARD,
    f"(Tensor grad_out, {_FIELDS.replace('bool is_causal', 'Tensor statistics, bool is_causal')}, "
    f"Tensor? grad_statistics=None, {_SIGNAL}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_lam, Tensor grad_signal)",
)


def _capability() -> str:
    found = torch.backends.cpu.get_cpu_capability()
    if found not in ("AVX2", "AVX512"):
        raise RuntimeError(f"The kernel needs a processor with AVX2 or AVX-512, torch finds {found}.")
    return "AVX512_BF16" if found == "AVX512" and torch.cpu._is_avx512_bf16_supported() else found


ops.use(_capability())


@torch.library.register_fake(_FORWARD)
def _(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *_) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*lam.shape, v.shape[-1])
    return out, q.new_empty(*q.shape[:3], 2, q.shape[3], dtype=torch.float32)


@torch.library.register_fake(_BACKWARD)
def _(grad_out: Tensor, *inputs) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in inputs[:4]), grad_out.new_empty(0)


def _save(ctx, inputs, output) -> None:
    *tensors, is_causal, scale, window, documents = inputs[:9]  # torch leaves out what has its default
    ctx.save_for_backward(*tensors, output[1], documents)
    ctx.mark_non_differentiable(output[1])
    ctx.settings = (is_causal, scale, window)


def _differentiate(ctx, grad_out: Tensor, _) -> tuple[Tensor | None, ...]:
    *tensors, documents = ctx.saved_tensors
    return (*ops.backward(grad_out, *tensors, *ctx.settings, documents)[:4], *(None,) * 6)


torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_save)


def attend(*request) -> Tensor:
    """Compute (A1 − λ A2) V from the fields of a request up to the window, as the operator's schema names them."""
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in request[:4])
    return ops.forward(*request, None, differentiable)[0]
