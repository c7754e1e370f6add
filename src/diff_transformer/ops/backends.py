"""What each backend can do: a request → None, or the reason why not. And which one ``auto`` takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.blockwise import blockwise_attention
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.sdpa import sdpa_attention

_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "blockwise": blockwise_attention,
    "sdpa": sdpa_attention,
}
BACKENDS = tuple(_IMPLEMENTATIONS)


def reason_against(backend: str, q: Tensor, attn_mask: Tensor | None) -> str | None:
    """Why ``backend`` cannot answer this request, or None if it can."""
    if backend == "blockwise" and attn_mask is not None and attn_mask.requires_grad:
        return "it computes no gradient for attn_mask; use 'reference' or 'sdpa'"
    return None


def choose(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> str:
    """The backend that ``auto`` takes. The rules and their measurements are in docs/backends.md."""
    if attn_mask is not None and attn_mask.requires_grad:
        return "reference"
    if q.device.type == "cuda":
        return "sdpa"
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
    """For each backend None if it runs on ``device`` in ``dtype``, else the reason why it does not."""
    probe = torch.zeros(1, 1, 2, 1, 8, device=device, dtype=dtype)
    return {backend: reason_against(backend, probe, None) for backend in BACKENDS}
