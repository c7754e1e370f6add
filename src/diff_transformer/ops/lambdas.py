"""λ: how much of the second map is subtracted (Section 2.1, Equation 2)."""

import math

import torch
from torch import Tensor


def lambda_init_schedule(layer: int) -> float:
    """λ_init of a layer, 0.8 − 0.6·exp(−0.3·(l − 1)), the paper's default.

    Args:
        layer: the layer's number l, counted from 1 as in the paper.

    Raises:
        ValueError: if ``layer`` is smaller than 1.
    """
    if layer < 1:
        raise ValueError(f"layer must be 1 or more (the paper counts layers from 1), got {layer}.")
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


def lambda_value(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init (Equation 2).

    Args:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: the layer's four vectors, each (d,).
        lambda_init: the constant λ_init of the layer.

    Returns:
        A scalar, float32 at least whatever the vectors' dtype. It may exceed 1 or be negative; nothing is clamped.
    """
    dtype = torch.promote_types(lambda_q1.dtype, torch.float32)
    # A product and a sum instead of torch.dot: autocast would run dot in half precision.
    first = (lambda_q1.to(dtype) * lambda_k1.to(dtype)).sum()
    second = (lambda_q2.to(dtype) * lambda_k2.to(dtype)).sum()
    return first.exp() - second.exp() + lambda_init
