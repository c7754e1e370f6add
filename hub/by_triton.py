"""Runs the kernels in Triton, whose sources are beside this file."""

from torch import Tensor

from .attention_request import Request
from .triton_backend import reason_against_triton, triton_attention


def attend(*fields) -> Tensor:
    """Compute (A1 − λ A2) V from the fields of a request up to the window."""
    request = Request(*fields, None)
    if (reason := reason_against_triton(request)) is not None:
        raise ValueError(f"The kernels cannot run this request: {reason}.")
    return triton_attention(request)
