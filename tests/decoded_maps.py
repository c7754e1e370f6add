"""Reads the binary form of a head's maps, as the page does."""

import struct

import numpy as np
import torch

from diff_transformer.explorer.trace import MAGIC, HeadMaps


def decode_maps(data: bytes) -> tuple[HeadMaps, int]:
    """The maps of one head, (1, N − R, N) in float32, and their first row R."""
    magic, length, first_row, count, is_causal = struct.unpack("<4sIIII", data[:20])
    assert magic == MAGIC
    height = length - first_row
    sent = torch.ones(height, length, dtype=torch.bool)
    sent = sent.tril(first_row) if is_causal else sent
    weights = int(sent.sum())
    assert len(data) == 20 + (4 * height if count == 2 else 0) + 2 * count * weights
    offset, lam = 20, None
    if count == 2:
        lam = torch.from_numpy(np.frombuffer(data, "<f4", height, offset).astype(np.float32)).unsqueeze(0)
        offset += 4 * height
    maps = torch.zeros(count, height, length)
    for index in range(count):
        values = np.frombuffer(data, "<f2", weights, offset + 2 * weights * index).astype(np.float32)
        maps[index, sent] = torch.from_numpy(values)
    return HeadMaps(maps[:1], maps[1:2] if count == 2 else None, lam), first_row
