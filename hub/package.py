"""Differential attention (arXiv 2410.05258) on the CPU: (A1 − λ A2) V by one fused kernel, forward and backward."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

__all__ = ["diff_attention"]

_FIELDS = "REQUEST_SCHEMA"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute (A1 − λ A2) V, where A1 and A2 are softmax maps over the same values.

    Args:
        q: (B, G, r + 1, N, d): the queries of r signal heads, then those of the noise map that they share; float32,
            bfloat16 or float16.
        k: (B, H_kv, 2 or 1, S, d), H_kv a divisor of G.
        v: (B, H_kv, S, dv).
        lam: λ, broadcast to (B, r·G, N).
        attn_mask: broadcast to (B, r·G, N, S): boolean, True where a key is visible, or added to the scores. It gets no
            gradient.
        is_causal: whether queries, the last N positions, see no later keys.
        scale: of the scores; d ** -0.5 by default.
        window: how many keys a query sees up to its own position; all by default.

    Returns:
        (B, r·G, N, dv), of the dtype of q.

    Raises:
        ValueError: where the arguments do not fit together.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if (q.dim(), k.dim(), v.dim()) != (5, 5, 4):
        raise ValueError(f"q, k and v must have 5, 5 and 4 axes, got {shapes}.")
    fits = q.shape[0] == k.shape[0] and q.shape[4] == k.shape[4] and (*k.shape[:2], k.shape[3]) == tuple(v.shape[:3])
    if not fits or q.shape[2] < 2 or k.shape[2] not in (1, 2) or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q must be (B, G, r + 1, N, d), k (B, H_kv, 2 or 1, S, d), v (B, H_kv, S, dv), got {shapes}.")
    if q.dtype not in _DTYPES or {q.dtype, k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must share one dtype of {_DTYPES}, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    lam = torch.as_tensor(lam, dtype=torch.float32).expand(q.shape[0], q.shape[1] * (q.shape[2] - 1), q.shape[3])
    if attn_mask is not None:
        if attn_mask.requires_grad or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
            raise ValueError("attn_mask must be boolean, or floating without a gradient.")
        attn_mask = attn_mask.expand(*lam.shape, k.shape[3])
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, lam))
    scale = q.shape[4] ** -0.5 if scale is None else scale
    return ops.forward(q, k, v, lam, attn_mask, is_causal, scale, window, None, differentiable)[0]
