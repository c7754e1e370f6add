"""Computes λ (Equation 2) as a function of tensors, without modules."""

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import is_floating
from diff_transformer.ops.cpu.cpu_backend import lambda_without_gradient


def lambda_value(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init (Equation 2).

    Args:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: the layer's four vectors, each (d,), of 16 bits or more.
        lambda_init: the constant λ_init of the layer.

    Returns:
        A scalar, float32 at least whatever the vectors' dtype. It may exceed 1 or be negative; nothing is clamped.

    Raises:
        ValueError: another dtype.
    """
    lam = lambda_without_gradient(lambda_q1, lambda_k1, lambda_q2, lambda_k2, lambda_init)
    if lam is not None:
        return lam
    for vector in (lambda_q1, lambda_k1, lambda_q2, lambda_k2):
        if not is_floating(vector):
            raise ValueError(f"the vectors of λ must be floating, of 16 bits or more, got {vector.dtype}.")
    dtype = torch.promote_types(lambda_q1.dtype, torch.float32)
    # A product and a sum instead of torch.dot: autocast would run dot in half precision.
    first = (lambda_q1.to(dtype) * lambda_k1.to(dtype)).sum()
    second = (lambda_q2.to(dtype) * lambda_k2.to(dtype)).sum()
    return first.exp() - second.exp() + lambda_init
