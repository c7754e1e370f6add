"""Block sizes of the kernels: a small table for each kind of device, and no tuning at run time.

docs/kernels.md says how the numbers were chosen, and `benchmarks/kernel_resources.py` what each costs.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows of the block that a program holds, columns of those that it goes through, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    two_passes: bool = False  # of the forward


Table = dict[str, tuple[Blocks, Blocks]]  # for narrow heads, and for wide ones

# "forward" runs without gradients and "save" with them; "keys" and "values" are the two launches of wide heads, narrow
# ones do both in "keys"; "…, masked" is for requests with a mask, which takes registers.
_HOPPER: Table = {
    "forward": (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2, two_passes=True)),
    "forward, masked": (Blocks(64, 32, 8, 2), Blocks(128, 16, 8, 2, two_passes=True)),
    "save": (Blocks(128, 64, 8, 3), Blocks(64, 32, 8, 3)),
    "save, masked": (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    "keys": (Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2)),
    "values": (Blocks(128, 32, 8, 2), Blocks(128, 32, 8, 2)),
    "queries": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    "queries, masked": (Blocks(128, 64, 8, 2), Blocks(32, 32, 8, 2)),
    "decode": (Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
}
# A100, whose tensor cores take their operands from registers.
_AMPERE: Table = {
    "forward": (Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 2, two_passes=True)),
    "forward, masked": (Blocks(64, 16, 8, 2), Blocks(64, 32, 8, 2, two_passes=True)),
    "save": (Blocks(128, 32, 8, 3), Blocks(32, 32, 8, 2)),
    "save, masked": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 2)),
    "keys": (Blocks(128, 16, 8, 2), Blocks(64, 32, 8, 2)),
    "keys, masked": (Blocks(32, 32, 4, 2), Blocks(64, 16, 8, 2)),
    "values": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    "queries": (Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    "queries, masked": (Blocks(64, 16, 8, 2), Blocks(64, 16, 8, 2)),
    "decode": (Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
}
# GeForce and the like: 99 KiB of shared memory a block.
_SMALL: Table = _AMPERE | {
    "forward": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2, two_passes=True)),
    "save": (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    "keys": (Blocks(128, 16, 8, 2), Blocks(64, 16, 8, 2)),
    "queries": (Blocks(64, 32, 4, 2), Blocks(64, 16, 8, 2)),
    "queries, masked": (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
}
# Not on tensor cores, unless torch allows tf32: for checking, not for speed.
_FLOAT32: Table = {
    "forward": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1, two_passes=True)),
    "save": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "keys": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "values": (Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "queries": (Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 1)),
    "decode": (Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}


ROWS_BLOCKS = Blocks(16, 1, 4, 1)  # of the backward's first kernel, which reads every number once


def edge_of(columns: int) -> int:
    """Steps at the edges: half a block wastes less of what is hidden there. No product takes less than 16."""
    return max(16, columns // 2)


def are_wide(d: int, dv: int) -> bool:
    """Whether heads are too wide for dK and dV, or both maps' products with V, to fit in registers at once."""
    return d > 64 or dv > 128


def blocks_for(kernel: str, d: int, dv: int, dtype: torch.dtype, masked: bool, capability: int) -> Blocks:
    """The blocks of a kernel on a device of this compute capability (90 for 9.0)."""
    if dtype.itemsize > 2:
        table = _FLOAT32
    elif capability in (90, 100, 103):
        table = _HOPPER
    elif capability in (80, 87):
        table = _AMPERE
    else:
        table = _SMALL
    return table.get(f"{kernel}, masked", table[kernel])[are_wide(d, dv)] if masked else table[kernel][are_wide(d, dv)]
