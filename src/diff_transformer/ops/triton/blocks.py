"""Block sizes of the kernels: a small table for each architecture, and nothing that is found out at run time.

docs/kernels.md says how the numbers were chosen.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows of the block that a program keeps, columns of those that it goes through, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    two_passes: bool = False


# (kernel, wide heads: d > 64 or dv > 128) → blocks, for inputs of 16 bits. "keep" is the forward of training.
_SIXTEEN_BITS = {
    ("forward", False): Blocks(128, 64, 8, 3),
    ("forward", True): Blocks(128, 32, 8, 3, two_passes=True),
    ("keep", False): Blocks(128, 64, 8, 3),
    ("keep", True): Blocks(64, 32, 8, 3),
    ("keys", False): Blocks(64, 32, 4, 2),
    ("keys", True): Blocks(64, 32, 8, 2),
    ("queries", False): Blocks(128, 64, 8, 2),
    ("queries", True): Blocks(64, 32, 8, 2),
    ("decode", False): Blocks(16, 64, 4, 3),
    ("decode", True): Blocks(16, 32, 4, 3),
}
_FLOAT32 = {
    ("forward", False): Blocks(64, 32, 8, 1),
    ("forward", True): Blocks(32, 32, 8, 1, two_passes=True),
    ("keep", False): Blocks(64, 32, 8, 1),
    ("keep", True): Blocks(32, 16, 8, 1),
    ("keys", False): Blocks(32, 32, 8, 1),
    ("keys", True): Blocks(16, 16, 8, 1),
    ("queries", False): Blocks(32, 32, 8, 1),
    ("queries", True): Blocks(16, 16, 8, 1),
    ("decode", False): Blocks(16, 32, 4, 1),
    ("decode", True): Blocks(16, 16, 4, 1),
}


def blocks_for(kernel: str, d: int, dv: int, dtype: torch.dtype, capability: int) -> Blocks:
    """The blocks of a kernel on a device of this compute capability (90 for 9.0)."""
    table = _SIXTEEN_BITS if dtype.itemsize == 2 else _FLOAT32
    return table[kernel, d > 64 or dv > 128]
