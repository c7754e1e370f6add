"""Runs the kernels in Triton, whose sources are beside this file."""

from torch import Tensor

from .attention_request import Request
from .triton_backend import reason_against_triton, triton_attention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    request = Request(q, k, v, lam, attn_mask, is_causal, scale, window, None)
    if (reason := reason_against_triton(request)) is not None:
        raise ValueError(f"The kernels cannot run this request: {reason}.")
    return triton_attention(request)
