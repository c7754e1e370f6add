"""Decoding: a few queries against a long cache, whose keys and values are read once each.

The cache is cut into parts, so that few heads keep the whole device busy; each part has its own softmax of both maps,
and a second kernel puts the parts together, subtracts the maps and normalises. All queries that share a key head go
together: row r of a tile is query r % N of the head's group member r // N.
"""

import triton
import triton.language as tl

from diff_transformer.ops.triton.forward import inverse, normalised, update_softmax
from diff_transformer.ops.triton.tiles import LOG2_E, keys_seen, load_tile, scores_of


@triton.jit
def _load_values(
    values, mask, first, low, high, stride, mask_key,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK): values first …, with zeros for those that the one query does not see, which are not even read.

    A weight of 0 would not do, as 0 · NaN is NaN. Scores are selected and not multiplied: keys need nothing like it.
    """
    keys, columns = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    seen = (keys >= low) & (keys < high)
    if MASK != 0:
        marks = tl.load(mask + keys.to(tl.int64) * mask_key, mask=seen, other=0)
        if MASK == 1:
            seen = seen & (marks != 0)
        else:
            seen = seen & (marks.to(tl.float32) != float("-inf"))
    pointers = values + tl.cast(first, tl.int64) * stride + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=seen[:, None] & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def parts_kernel(
    q, k, v, mask, tops, totals, sums,
    key_heads, groups, n, s, rows, start, keys_a_part, scale, window,
    q_batch, q_head, q_map, q_row, k_batch, k_head, k_map, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_query, mask_key,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, ALIKE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start + part · keys_a_part … of one key head. ALIKE: all queries of the tile see the same of them.

    Highest scores and sums of weights (B, H_kv, parts, 2, rows), products with V (B, H_kv, parts, 2, rows, DV).
    """
    batch, key_head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    part = tl.program_id(0)
    row = tl.arange(0, ROWS)
    member = key_head * groups + tl.minimum(row, rows - 1) // n
    query = row % n
    low, high = keys_seen(query, None, n, s, window, IS_CAUSAL, HAS_WINDOW, False)
    channels = tl.arange(0, BLOCK_D)
    pointers = q + batch * q_batch + member[:, None] * q_head + query[:, None].to(tl.int64) * q_row + channels[None, :]
    inside = (row[:, None] < rows) & (channels[None, :] < D)
    query1 = tl.load(pointers, mask=inside, other=0.0)
    query2 = tl.load(pointers + q_map, mask=inside, other=0.0)
    keys1 = k + batch * k_batch + key_head * k_head
    keys2 = keys1 + k_map
    values = v + batch * v_batch + key_head * v_head
    if MASK != 0:
        mask += batch * mask_batch + (key_head * groups if ALIKE else member[:, None]) * mask_head
    factor = scale * LOG2_E

    top1 = tl.full((ROWS,), float("-inf"), tl.float32)
    top2 = tl.full((ROWS,), float("-inf"), tl.float32)
    total1 = tl.zeros((ROWS,), tl.float32)
    total2 = tl.zeros((ROWS,), tl.float32)
    sum1 = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    first = start + part * keys_a_part
    last = tl.minimum(first + keys_a_part, s)
    lowest, highest = tl.min(low, 0), tl.max(high, 0)
    queries = query[:, None]
    view = (factor, low[:, None], high[:, None], mask, n, s, mask_query, mask_key)
    for at in range(first, last, KEYS):
        keys = (at + tl.arange(0, KEYS))[None, :]
        key1 = load_tile(keys1, at, s, k_row, KEYS, D, BLOCK_D, True)
        key2 = load_tile(keys2, at, s, k_row, KEYS, D, BLOCK_D, True)
        if ALIKE:
            value = _load_values(values, mask, at, lowest, highest, v_row, mask_key, KEYS, DV, BLOCK_DV, MASK)
        else:
            value = load_tile(values, at, s, v_row, KEYS, DV, BLOCK_DV, True)
        scores1 = scores_of(query1, key1, keys, queries, keys, view, MASK, BY_QUERY, True, PRECISION)
        scores2 = scores_of(query2, key2, keys, queries, keys, view, MASK, BY_QUERY, True, PRECISION)
        weights1, top1, total1, shrink1 = update_softmax(scores1, top1, total1)
        weights2, top2, total2, shrink2 = update_softmax(scores2, top2, total2)
        sum1 = tl.dot(weights1.to(value.dtype), value, sum1 * shrink1[:, None], input_precision=PRECISION)
        sum2 = tl.dot(weights2.to(value.dtype), value, sum2 * shrink2[:, None], input_precision=PRECISION)

    offset = ((batch * key_heads + key_head) * tl.num_programs(0) + part) * 2 * rows
    tl.store(tops + offset + row, top1, mask=row < rows)
    tl.store(tops + offset + rows + row, top2, mask=row < rows)
    tl.store(totals + offset + row, total1, mask=row < rows)
    tl.store(totals + offset + rows + row, total2, mask=row < rows)
    channels = tl.arange(0, BLOCK_DV)
    inside = (row[:, None] < rows) & (channels[None, :] < DV)
    pointers = sums + offset * DV + row[:, None] * DV + channels[None, :]
    tl.store(pointers, sum1, mask=inside)
    tl.store(pointers + rows * DV, sum2, mask=inside)


@triton.jit
def _all_parts(tops, totals, parts, rows, PARTS: tl.constexpr):
    """The highest score of all parts (0 where a row sees nothing), and 1 over the sum of all weights below it."""
    part = tl.arange(0, PARTS)
    top = tl.load(tops + part * 2 * rows, mask=part < parts, other=float("-inf"))
    total = tl.load(totals + part * 2 * rows, mask=part < parts, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    all_totals = tl.sum(tl.exp2(top - highest) * total, 0)
    return highest, inverse(all_totals)


@triton.jit
def combine_kernel(
    tops, totals, sums, lam, norm_weight, out,
    key_heads, groups, n, rows, parts, norm_eps, norm_factor,
    lam_batch, lam_head, lam_row, out_batch, out_head, out_row,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Row ``program_id(0)`` of one key head: the parts' sums into one output."""
    batch, key_head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0)
    head, query = key_head * groups + row // n, row % n
    offset = (batch * key_heads + key_head) * parts * 2 * rows + row
    highest1, inverse1 = _all_parts(tops + offset, totals + offset, parts, rows, PARTS)
    highest2, inverse2 = _all_parts(tops + offset + rows, totals + offset + rows, parts, rows, PARTS)
    inverse2 *= tl.load(lam + batch * lam_batch + head * lam_head + query * lam_row)
    channels = tl.arange(0, BLOCK_DV)
    result = tl.zeros((1, BLOCK_DV), tl.float32)
    for first in range(0, parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        top1 = tl.load(tops + offset + part * 2 * rows, mask=part < parts, other=float("-inf"))
        top2 = tl.load(tops + offset + rows + part * 2 * rows, mask=part < parts, other=float("-inf"))
        inside = (part[:, None] < parts) & (channels[None, :] < DV)
        pointers = sums + offset * DV + part[:, None].to(tl.int64) * 2 * rows * DV + channels[None, :]
        sum1 = tl.load(pointers, mask=inside, other=0.0) * (tl.exp2(top1 - highest1) * inverse1)[:, None]
        sum2 = tl.load(pointers + rows * DV, mask=inside, other=0.0) * (tl.exp2(top2 - highest2) * inverse2)[:, None]
        result += tl.sum(sum1 - sum2, 0)[None, :]
    if HAS_NORM:
        result, _ = normalised(result, norm_weight, norm_eps, norm_factor, DV, BLOCK_DV)
    pointers = out + batch * out_batch + head * out_head + query * out_row + channels[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=channels[None, :] < DV)
