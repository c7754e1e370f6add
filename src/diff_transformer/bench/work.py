"""How much work a case is, and how much of it a device can do: the scale for TFLOP/s."""

import torch

from diff_transformer.bench.clock import kernel_clock
from diff_transformer.bench.problem import Shape
from diff_transformer.bench.records import BACKWARD, DECODE, FORWARD, TRAINING
from diff_transformer.bench.timing import alternate, spread

# Matrix products of the twin: two forward (scores, values), five backward (the scores again, and four gradients).
PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}
PEAK_SIZE = 8192


def flops(shape: Shape, pass_: str) -> int | None:
    """Floating-point operations of the twin in a causal pass, None for decoding, which moves bytes instead.

    A multiply-add is two operations and half of the N × S pairs are visible, the usual count for attention. All
    candidates are given the twin's count, whatever they compute themselves, so that TFLOP/s compare as times do.
    """
    if pass_ == DECODE:
        return None
    pairs = shape.batch * shape.heads * shape.queries * shape.keys // 2
    return PRODUCTS[pass_] * 2 * pairs * shape.head_dim


def matrix_peak(dtype: torch.dtype, device: torch.device, size: int = PEAK_SIZE) -> float:
    """TFLOP/s of one large product of two matrices of random numbers, the median of some rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def product() -> None:
        torch.mm(left, right)

    for _ in range(3):
        product()
    seconds = alternate({"product": product}, kernel_clock(device))["product"]
    return 2 * size**3 / spread(seconds).median / 1e12
