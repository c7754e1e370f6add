"""What each backend can do: a request → None, or the reason why not. And which one ``auto`` takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.blockwise import blockwise_attention
from diff_transformer.ops.cpu.attention import available_to_auto, cpu_attention, unavailable
from diff_transformer.ops.cpu.build import obstacle
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.sdpa import sdpa_attention

_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "blockwise": blockwise_attention,
    "sdpa": sdpa_attention,
    "cpu": cpu_attention,
}
BACKENDS = tuple(_IMPLEMENTATIONS)


def _in_forward_mode() -> bool:
    """Whether derivatives are carried along with the values, which our own operators would silently drop."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def _reason_in_request(backend: str, q: Tensor, attn_mask: Tensor | None) -> str | None:
    """What in the request itself ``backend`` does not do, or None. Costs nothing: the kernel is not looked for."""
    if backend in ("blockwise", "cpu") and _in_forward_mode():
        return "it has no derivative in forward mode; use 'reference'"
    if backend in ("blockwise", "cpu") and attn_mask is not None and attn_mask.requires_grad:
        return "it computes no gradient for attn_mask; use 'reference' or 'sdpa'"
    if backend == "cpu" and q.device.type != "cpu":
        return f"it needs its tensors on the CPU, got {q.device}"
    if backend == "cpu" and q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, got {q.dtype}"
    return None


def reason_against(backend: str, q: Tensor, attn_mask: Tensor | None) -> str | None:
    """Why ``backend`` cannot answer this request, or None if it can. For "cpu" this may compile the kernel."""
    reason = _reason_in_request(backend, q, attn_mask)
    return unavailable() if reason is None and backend == "cpu" else reason


def choose(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> str:
    """The backend that ``auto`` takes. The rules and their measurements are in docs/backends.md."""
    if _in_forward_mode() or (attn_mask is not None and attn_mask.requires_grad):
        return "reference"
    if q.device.type == "cuda":
        return "sdpa"
    if _reason_in_request("cpu", q, attn_mask) is None and available_to_auto():
        return "cpu"
    return "blockwise"


def resolve(backend: str, q: Tensor, k: Tensor, attn_mask: Tensor | None) -> Callable[..., Tensor]:
    """The function that answers the request.

    Raises:
        ValueError: for an unknown name, or a named backend that cannot run this request.
    """
    if backend == "auto":
        return _IMPLEMENTATIONS[choose(q, k, attn_mask)]
    if backend not in _IMPLEMENTATIONS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
    reason = reason_against(backend, q, attn_mask)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run this request: {reason}.")
    return _IMPLEMENTATIONS[backend]


def explain(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, str | None]:
    """For each backend None if it runs on ``device`` in ``dtype``, else the reason why it does not.

    The CPU kernel is not compiled for this: where it has not been tried yet, it is taken to run if a compiler is there.
    """
    probe = torch.zeros(1, 1, 2, 1, 8, device=device, dtype=dtype)
    reasons = {backend: _reason_in_request(backend, probe, None) for backend in BACKENDS}
    if reasons["cpu"] is None and (problem := obstacle()) is not None:
        reasons["cpu"] = str(problem)
    return reasons
