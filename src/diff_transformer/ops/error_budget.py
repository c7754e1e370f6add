"""Says how far an answer may be from the exact one: the one budget of the tests, the benchmarks and the check of a GPU.

Nobody guesses a tolerance. An answer in a dtype may be twice as far from float64 as the plain formula is with every
step in that dtype, and besides by a band for rounding, since the plain formula may be right by luck.
"""

import torch
from torch import Tensor

PLAIN_ERRORS = 2
# How often a quantity is rounded on the way, each time by half an eps: the maps, λ, their difference and the result;
# for the other gradients dP and dS too.
ROUNDINGS = {"out": 4, "v": 4, "q": 6, "k": 6, "lam": 6}
_ACCUMULATOR_EPS = torch.finfo(torch.float32).eps


def rounding_band(size: Tensor, eps: float, roundings: int, terms: int = 0) -> Tensor:
    """Bound what rounding alone does to quantities of a ``size``.

    Args:
        size: the quantities' magnitudes.
        eps: of the dtype in which they are rounded.
        roundings: how often, as in :data:`ROUNDINGS`.
        terms: how many terms a sum in float32 has, whose own roundings count where the dtype is no narrower.
    """
    return (roundings * eps + terms**0.5 * _ACCUMULATOR_EPS) / 2 * size


def share_of_allowed(error: Tensor, plain_error: Tensor, band: Tensor) -> float:
    """Return the largest error as a share of what is allowed; infinite for a NaN, or for an error where none may be."""
    shares = torch.where(error == 0, 0.0, error / (PLAIN_ERRORS * plain_error + band))
    return float(shares.nan_to_num(nan=torch.inf).max())


def rms_by_position(values: Tensor, positions: int) -> Tensor:
    """Return the root mean square of (…, N, width) over each block of so many positions.

    The first rows of a causal sequence are hundreds of times as large as the last ones, and would hide an error there.
    """
    squares = values.double().square().movedim(-2, 0).flatten(1).mean(1)
    return torch.stack([block.mean().sqrt() for block in squares.split(positions)])
