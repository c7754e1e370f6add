"""The learned λ of a layer (Equation 2)."""

import math

import torch
from torch import Tensor, nn

from diff_transformer.nn.drawing import draw_normal
from diff_transformer.nn.precision import KeepsFloat32
from diff_transformer.nn.sharing import SharedByHeads
from diff_transformer.ops import lambda_init_schedule, lambda_value


class Lambda(KeepsFloat32, SharedByHeads):
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init: four d-vectors shared by the heads of a layer.

    The vectors stay in float32 when the model around them is cast to a half-precision type: λ is an exponential of
    their products, and its steps during training are smaller than what bfloat16 resolves.

    Args:
        head_dim: width d of the vectors.
        layer: the layer's number l, counted from 1.
        lambda_init: "schedule" for 0.8 − 0.6·exp(−0.3·(l − 1)), or one constant.
    """

    STD = 0.1  # of the vectors at the start (Section 2.1)

    def __init__(self, head_dim: int, layer: int, lambda_init: float | str = "schedule") -> None:
        super().__init__()
        self.lambda_init = constant_lambda(layer, lambda_init)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(head_dim, dtype=dtype)) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the four vectors from N(0, 0.1²)."""
        for vector in self.parameters():
            draw_normal(vector, self.STD)

    def forward(self) -> Tensor:
        """λ as a scalar, float32."""
        return self.shared(lambda_value(self.q1, self.k1, self.q2, self.k2, self.lambda_init))

    def extra_repr(self) -> str:
        return f"head_dim={self.q1.numel()}, lambda_init={self.lambda_init:.4f}"


def constant_lambda(layer: int, lambda_init: float | str) -> float:
    """λ_init of layer l, counted from 1: by the schedule, or the one constant.

    Raises:
        ValueError: neither "schedule" nor a finite number.
    """
    if isinstance(lambda_init, str):
        if lambda_init != "schedule":
            raise ValueError(f"lambda_init must be 'schedule' or a number, got {lambda_init!r}.")
        return lambda_init_schedule(layer)
    if isinstance(lambda_init, bool) or not math.isfinite(lambda_init):
        raise ValueError(f"lambda_init must be 'schedule' or a finite number, got {lambda_init!r}.")
    return float(lambda_init)
