"""Writes the maps of one head in a compact binary form, which web/src/decode.js reads.

Little-endian, without padding:

    4 bytes             "DTM1"
    uint32 × 3          N, the first row R that is in it, the number of maps M (1 or 2)
    float32 × (N − R)   λ of each row, where M is 2
    float16 × …         for each map its rows R … N − 1, of row i the weights i + 1 that causality allows

A weight in float16 is off by 1/2048 of itself at most, or by 3e-8 where it is smaller than 6e-5.
"""

import struct

import torch
from torch import Tensor

from diff_transformer.explorer.trace import HeadMaps

MAGIC = b"DTM1"


def encode_maps(maps: HeadMaps, first_row: int) -> bytes:
    """The maps of one head, (1, N − R, N) with R = ``first_row``."""
    length = maps.first.shape[-1]
    each = [maps.first] if maps.second is None else [maps.first, maps.second]
    parts = [struct.pack("<4sIII", MAGIC, length, first_row, len(each))]
    if maps.lam is not None:
        parts.append(_little_endian(maps.lam[0].to(torch.float32)))
    rows, columns = torch.tril_indices(length - first_row, length, offset=first_row)
    parts += [_little_endian(weights[0].cpu()[rows, columns].to(torch.float16)) for weights in each]
    return b"".join(parts)


def _little_endian(tensor: Tensor) -> bytes:
    array = tensor.cpu().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
