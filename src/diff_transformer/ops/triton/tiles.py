"""Reads tiles of memory, tells which keys a query sees, and computes scores, for all kernels alike.

Position hides keys by intervals alone: query i sees keys low_i … high_i − 1 by causality, window and document together,
and key j is seen by queries low_j … high_j − 1. So a block of queries meets three ranges of blocks of keys: those at
the lower edge, those that every query sees whole, and those at the upper edge; only edges are compared key by key. One
loop goes through both edges, in smaller steps, and another through the rest: a third loop would cost registers.

Scores are in units of log 2, so that weights are powers of 2, which the hardware has an instruction for.
"""

import triton
import triton.language as tl

# A finite addend of a mask stays finite in units of log 2: a row whose addends are all float32's lowest is a mean.
LARGEST = tl.constexpr(2.3e38)
LOG2_E = tl.constexpr(1.4426950408889634)
# What normalised weights are multiplied with in float16, whose smallest normal number a row of 2^14 equal weights
# reaches. A weight is at most 1 + |λ|, so none overflows up to |λ| of 250.
FLOAT16_FACTOR = tl.constexpr(256.0)
MASK_BLOCK = tl.constexpr(4096)  # keys of a mask that are looked at in one step before decoding
# Numbers of a request that make no kernel faster: a kernel for those that are 1 or that 16 divides would be another
# than the one that was checked. S does with a mask, whose loads may be wider: as ``mask_count``.
COUNTS = ["heads", "key_heads", "heads_per_key", "n", "s", "lam_batch", "lam_head", "lam_row"]
PARTS_COUNTS = [*COUNTS, "rows", "start", "keys_a_part", "mask_batch", "mask_head", "mask_query"]  # of decoding's parts


@triton.jit
def without_nan(tile):
    """Return the tile with 0 in place of numbers that are not finite."""
    return tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), tile, 0.0).to(tile.dtype)


@triton.jit
def load_tile(
    base, first, count, stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr, CLEAN: tl.constexpr = False,
):  # fmt: skip
    """Load rows first … of a matrix (count, WIDTH), (ROWS, BLOCK), 0 outside of it. CHECK: some may be outside.

    CLEAN: 0 for what is not finite, too, since a weight of 0 does not hide a NaN from a product.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    # The offset of a tile needs 64 bits for a long sequence; those inside it do not.
    pointers = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if base.dtype.element_ty == tl.int8:
        pointers = tl.multiple_of(pointers, (4, 4))  # a float32 stands behind each row
    if CHECK:
        inside = rows[:, None] < count - first
        if WIDTH != BLOCK:
            inside = inside & (columns[None, :] < WIDTH)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    if CLEAN:
        tile = without_nan(tile)
    return tile


@triton.jit
def store_tile(base, first, count, stride, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store as the inverse of :func:`load_tile`, in the dtype of ``base``."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    pointers = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < count - first) & (columns[None, :] < WIDTH)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(base, first, count, stride, ROWS: tl.constexpr, BEYOND: tl.constexpr = 0.0):
    """Load entries first … of a vector of ``count``, (ROWS,); BEYOND after its end."""
    rows = tl.arange(0, ROWS)
    return tl.load(base + tl.cast(first, tl.int64) * stride + rows * stride, mask=rows < count - first, other=BEYOND)


@triton.jit
def store_vector(base, first, count, vector, ROWS: tl.constexpr):
    """Store (ROWS,) to entries first … of a contiguous vector of ``count``."""
    rows = tl.arange(0, ROWS)
    tl.store(base + first + rows, vector, mask=rows < count - first)


@triton.jit
def keys_seen(
    queries, segment_bounds, n, s, window,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Return low and high: each query sees keys low … high − 1 by position, none if low ≥ high."""
    position = queries + (s - n)
    low, high = position * 0, position * 0 + s
    if IS_CAUSAL:
        high = tl.minimum(high, position + 1)
    if HAS_WINDOW:
        low = tl.maximum(low, position - window + 1)
    if HAS_SEGMENTS:
        low = tl.maximum(low, tl.load(segment_bounds + queries))
        high = tl.minimum(high, tl.load(segment_bounds + n + queries))
    return low, high


@triton.jit
def queries_seeing(
    keys, segment_bounds, n, s, window,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Return low and high: each key is seen by queries low … high − 1 by position, by none if low ≥ high."""
    position = keys - (s - n)
    low, high = position * 0, position * 0 + n
    if IS_CAUSAL:
        low = tl.maximum(low, position)
    if HAS_WINDOW:
        high = tl.minimum(high, position + window)
    if HAS_SEGMENTS:  # n = s there, and a document's tokens see each other
        low = tl.maximum(low, tl.load(segment_bounds + keys))
        high = tl.minimum(high, tl.load(segment_bounds + n + keys))
    return low, high


@triton.jit
def block_ranges(low, high, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Return which keys a block of queries meets: (begin, lower, edges, inner_begin, inner_end).

    Blocks inner_begin // BLOCK … inner_end // BLOCK − 1 are seen by all of them. Before these, ``lower`` steps from
    ``begin`` on are an edge, and after them those from ``inner_end`` on; there are ``edges`` steps in both together.
    BLOCK is a multiple of STEP.
    """
    begin = tl.min(low, 0) // STEP * STEP
    end = tl.maximum(tl.max(high, 0), 0)
    inner_begin = (tl.minimum(tl.max(low, 0), end) + (BLOCK - 1)) // BLOCK * BLOCK
    inner_end = tl.maximum(inner_begin, tl.min(high, 0) // BLOCK * BLOCK)
    lower = tl.maximum(inner_begin - begin, 0) // STEP
    edges = lower + (tl.maximum(end - inner_end, 0) + (STEP - 1)) // STEP
    return begin, lower, edges, inner_begin, inner_end


@triton.jit
def steps_of(ranges, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return the first step of the loop over the edges, or over the blocks seen whole, and the one past its last."""
    _begin, _lower, edges, inner_begin, inner_end = ranges
    if EDGE:
        first, last = 0, edges
    else:
        first, last = inner_begin // BLOCK, inner_end // BLOCK
    return first, last


@triton.jit
def block_start(i, ranges, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return the begin of the i-th step of the edges, or of the i-th block of all."""
    begin, lower, _edges, _inner_begin, inner_end = ranges
    if EDGE:
        start = tl.where(i < lower, begin + i * BLOCK, inner_end + (i - lower) * BLOCK)
    else:
        start = i * BLOCK
    return start


@triton.jit
def scores_of(
    rows, columns, positions, queries, keys, view,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute rows · columnsᵀ · factor under the mask, −∞ if hidden. ``view`` is the same for all blocks.

    Of the ``positions`` (1, …) of the columns, those from low to high − 1 (…, 1) are seen; EDGE: some may not be.
    ``queries`` and ``keys`` are numbers along the axes of the scores, with an axis of 1 for the other. MASK is 0 for
    none, 1 for a boolean one (as bytes), 2 for an additive one. BY_QUERY: the mask differs between queries; if not, one
    row of it serves them all.
    """
    factor, low, high, mask, n, mask_count, mask_query, mask_key = view
    scores = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * factor
    if MASK != 0:
        if BY_QUERY:
            offsets = queries.to(tl.int64) * mask_query + keys.to(tl.int64) * mask_key
            values = tl.load(mask + offsets, mask=(queries < n) & (keys < mask_count), other=0)
        else:
            values = tl.load(mask + keys.to(tl.int64) * mask_key, mask=keys < mask_count, other=0)
        if MASK == 1:
            scores = tl.where(values != 0, scores, float("-inf"))
        else:
            addends = values.to(tl.float32)
            finite = tl.minimum(tl.maximum(addends, -LARGEST), LARGEST) * LOG2_E
            scores = tl.where(addends == float("-inf"), addends, scores + finite)  # a NaN would stay one in a sum
    if EDGE:
        scores = tl.where((positions >= low) & (positions < high), scores, float("-inf"))
    return scores


@triton.jit
def is_finite(tile):
    """Return whether all numbers of a row are finite, (ROWS,)."""
    return tl.min((tl.abs(tile.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def weights_of(scores, log_sum, residue, MASK: tl.constexpr):
    """Compute 2^(scores − log_sum). Addends can make both so large that the sum's log2 is rounded away: ``residue``."""
    scores -= log_sum
    if MASK == 2:
        scores -= residue
    return tl.exp2(scores)


@triton.jit
def narrowed(weights, dtype: tl.constexpr):
    """Narrow normalised weights for a product in ``dtype``; :func:`widened` undoes the factor in its sum."""
    if dtype == tl.float16:
        weights *= FLOAT16_FACTOR
    return weights.to(dtype)


@triton.jit
def widened(total, dtype: tl.constexpr):
    """Return a sum of products with :func:`narrowed` weights as if they had not been multiplied."""
    if dtype == tl.float16:
        total *= 1.0 / FLOAT16_FACTOR
    return total
