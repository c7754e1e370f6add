"""First weights that are the same on every processor that was tried."""

import torch
from torch import Tensor

_AT_ONCE = 1 << 20  # numbers, 8 MiB of them beside the weights


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
        for part in weight.view(-1).split(_AT_ONCE):
            part.copy_(torch.randn(part.shape, dtype=torch.float64, device="cpu").mul_(std))
    return weight
