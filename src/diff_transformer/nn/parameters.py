"""How parameters are drawn, which stay in float32 and which all heads share; and the learned λ (Equation 2)."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from diff_transformer.ops import lambda_init_schedule, lambda_value

_DRAWN_AT_ONCE = 1 << 20  # numbers, 8 MiB of them beside the weights


def draw_normal(weight: Tensor, std: float) -> Tensor:
    """Fill a weight with numbers from N(0, std²), in place, without a gradient.

    On the CPU they come from torch's global generator in float64 and are rounded once to the weight's dtype. In float32
    torch draws by vectors where the processor has them, and by another formula, so that the numbers of one seed differ
    between processors. Other devices draw with generators of their own. On the meta device nothing is drawn.

    Args:
        weight: any shape, floating; on the CPU contiguous.
        std: the standard deviation.

    Returns:
        ``weight``.
    """
    with torch.no_grad():
        if weight.device.type != "cpu":
            return weight.normal_(std=std)
        for part in weight.view(-1).split(_DRAWN_AT_ONCE):
            part.copy_(torch.randn(part.shape, dtype=torch.float64, device="cpu").mul_(std))
    return weight


Self = TypeVar("Self", bound="KeepsFloat32")


class KeepsFloat32(nn.Module):
    """Mixin: parameters and buffers follow the model's device, and its dtype except below float32."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of every module, but a narrower parameter becomes one of float32: servers set all of them in the model's
        dtype before they load.
        """
        if param is not None and param.is_floating_point() and param.dtype.itemsize < torch.float32.itemsize:
            param = nn.Parameter(param.detach().to(torch.float32), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def in_float32_at_least(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize:
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(in_float32_at_least, recurse)


class ReplicatedAcrossHeads(nn.Module):
    """Mixin: one set of parameters for all heads of a layer.

    Under tensor parallelism a rank computes some of the heads, so that its backward pass gives the part of the gradient
    that comes from those. Whoever spreads the heads sets ``sum_gradient``: a function that returns its argument and, in
    the backward pass, sums the gradient over the ranks.
    """

    sum_gradient: Callable[[Tensor], Tensor] | None = None

    def shared(self, value: Tensor) -> Tensor:
        """A parameter, or what is computed from this module's parameters alone, as the heads are to use it."""
        return value if self.sum_gradient is None else self.sum_gradient(value)


class Lambda(KeepsFloat32, ReplicatedAcrossHeads):
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
