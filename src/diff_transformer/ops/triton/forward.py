"""Computes both maps of a block of queries, their difference times V, and the headwise norm; decodes, too.

One pass reads K and V once and keeps a running sum for each map. Two passes find both maps' sums first and then
multiply P1 − λP2 with V, with one accumulator instead of two: for wide values, where two would not fit in registers.

If a group of signal heads shares a noise map, a launch takes one map alone (MAPS is 1): first A2·V of each group, then
A1·V of each signal head, from which λ times the former is subtracted before the norm.

While decoding, a few queries meet a long cache, whose keys and values are read once each. The cache is cut into parts,
so that few heads keep the whole device busy; each part has its own softmax of both maps, and a second kernel puts the
parts together, subtracts the maps and normalises. All queries that share a key head go together: row i of the signal
heads' tile is query i % N of the i // N-th of them, and row i of the noise maps' tile likewise. Keys and values may be
rows of int8, each with a float32 behind it that its numbers are to be multiplied with.
"""

import triton
import triton.language as tl

from diff_transformer.ops.triton.tiles import (
    COUNTS,
    LOG2_E,
    MASK_BLOCK,
    PARTS_COUNTS,
    block_ranges,
    block_start,
    is_finite,
    keys_seen,
    load_tile,
    load_vector,
    narrowed,
    scores_of,
    steps_of,
    store_tile,
    store_vector,
    weights_of,
    widened,
    without_nan,
)


@triton.jit
def update_softmax(scores, old_max, total):
    """Make one step of the online softmax: the weights below the new maximum, that maximum, the sum of all weights so
    far, and the factor by which the earlier ones shrink.
    """
    new_max = tl.maximum(old_max, tl.max(scores, 1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet stays at weight 0
    shrink = tl.exp2(old_max - finite_max)
    weights = tl.exp2(scores - finite_max[:, None])
    return weights, new_max, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _load_finite(values, first, s, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of values, with 0 for those that are not finite, and which keys have finite ones alone, (1, ROWS)."""
    value = load_tile(values, first, s, stride, ROWS, WIDTH, BLOCK, True)
    return without_nan(value), is_finite(value)[None, :]


@triton.jit
def _with_nan(numbers, scores, finite):
    """Scores or weights (queries, keys), NaN where a query sees a key whose values are not all ``finite``."""
    return tl.where(finite | (scores == float("-inf")), numbers, float("nan"))


@triton.jit
def _online_softmax(
    state, inputs, ranges, view, queries, s, key_stride, value_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """Add blocks of keys into the running softmax of both maps (or the first), and with VALUES into products with V."""
    max1, max2, total1, total2, sum1, sum2 = state
    query1, query2, keys1, keys2, values = inputs
    HIDES: tl.constexpr = VALUES and (EDGE or MASK != 0)  # from some queries of the block what others see
    first, last = steps_of(ranges, KEYS, EDGE)
    for i in range(first, last):
        start = block_start(i, ranges, KEYS, EDGE)
        keys = (start + tl.arange(0, KEYS))[None, :]
        if HIDES:
            value, finite = _load_finite(values, start, s, value_stride, KEYS, DV, BLOCK_DV)
        key1 = load_tile(keys1, start, s, key_stride, KEYS, D, BLOCK_D, EDGE)
        scores1 = scores_of(query1, key1, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
        if HIDES:
            scores1 = _with_nan(scores1, scores1, finite)
        weights1, max1, total1, shrink1 = update_softmax(scores1, max1, total1)
        if VALUES:
            if not HIDES:
                value = load_tile(values, start, s, value_stride, KEYS, DV, BLOCK_DV, EDGE)
            sum1 = tl.dot(weights1.to(value.dtype), value, sum1 * shrink1[:, None], input_precision=PRECISION)
        if MAPS == 2:
            key2 = load_tile(keys2, start, s, key_stride, KEYS, D, BLOCK_D, EDGE)
            scores2 = scores_of(query2, key2, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
            weights2, max2, total2, shrink2 = update_softmax(scores2, max2, total2)
            if VALUES:
                sum2 = tl.dot(weights2.to(value.dtype), value, sum2 * shrink2[:, None], input_precision=PRECISION)
    return max1, max2, total1, total2, sum1, sum2


@triton.jit
def _second_pass(
    total, sums, inputs, ranges, view, queries, s, key_stride, value_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Add (w P1 − λP2) V over blocks of keys to ``total``, with the factor of :func:`narrowed`."""
    log_sum1, log_sum2, residue1, residue2, lam, signals = sums
    query1, query2, keys1, keys2, values = inputs
    first, last = steps_of(ranges, KEYS, EDGE)
    for i in range(first, last):
        start = block_start(i, ranges, KEYS, EDGE)
        keys = (start + tl.arange(0, KEYS))[None, :]
        key1 = load_tile(keys1, start, s, key_stride, KEYS, D, BLOCK_D, EDGE)
        scores1 = scores_of(query1, key1, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
        weights = weights_of(scores1, log_sum1[:, None], residue1[:, None], MASK)
        if HAS_SIGNAL:
            weights *= signals[:, None]
        key2 = load_tile(keys2, start, s, key_stride, KEYS, D, BLOCK_D, EDGE)
        scores2 = scores_of(query2, key2, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
        weights -= lam[:, None] * weights_of(scores2, log_sum2[:, None], residue2[:, None], MASK)
        if EDGE or MASK != 0:
            value, finite = _load_finite(values, start, s, value_stride, KEYS, DV, BLOCK_DV)
            weights = _with_nan(weights, scores1, finite)
        else:
            value = load_tile(values, start, s, value_stride, KEYS, DV, BLOCK_DV, EDGE)
        total = tl.dot(narrowed(weights, value.dtype), value, total, input_precision=PRECISION)
    return total


@triton.jit
def inverse(total):
    """Compute 1 / total, and 0 for a total of 0."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def log_sum(row_max, total):
    """Compute log2 of the sum of exponentials, and its rounding error; +∞ for a row that sees nothing: weights of 0."""
    log_total = tl.log2(tl.where(total > 0, total, 1.0))
    rounded = row_max + log_total
    seen = total > 0
    residue = tl.where(seen, (tl.where(seen, row_max, 0.0) - tl.where(seen, rounded, 0.0)) + log_total, 0.0)
    return tl.where(seen, rounded, float("inf")), residue


@triton.jit
def normalised(rows, weight, eps, factor, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Compute factor · RMSNorm(rows) · weight over the DV channels, and 1 / √(mean square + eps)."""
    channels = tl.arange(0, BLOCK_DV)
    inverse_norm = tl.rsqrt(tl.sum(rows * rows, 1) / DV + eps)
    scale = tl.load(weight + channels, mask=channels < DV, other=0.0).to(tl.float32) * factor
    return rows * inverse_norm[:, None] * scale[None, :], inverse_norm


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, lam, signal, mask, segment_bounds, norm_weight,
    out, plain, a2_v, log_sums, inverse_norms, a1_v,
    heads, heads_per_key, n, s, scale, window, norm_eps, norm_factor,
    q_batch, q_head, q_map, q_row, k_batch, k_head, k_map, k_row, v_batch, v_head, v_row,
    lam_batch, lam_head, lam_row, mask_batch, mask_head, mask_query, mask_key, mask_count,
    out_batch, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr,
    HAS_NORM: tl.constexpr, SAVE: tl.constexpr, TWO_PASSES: tl.constexpr, PRECISION: tl.constexpr,
    MAPS: tl.constexpr, RATIO: tl.constexpr, SUBTRACTS: tl.constexpr, HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Attend with a block of queries of one head.

    SAVE: write for the backward both log-sums, A2·V (``a2_v``), with a norm the output before it (``plain``) and its
    divisor, and with a signal's weight A1·V (``a1_v``). ``out`` and these share their strides, as do both weights.

    With MAPS of 1 only the first map is computed. RATIO heads are side by side on the axis of maps of q. With SUBTRACTS
    they share the A2·V in ``a2_v`` (B, heads / RATIO, N, DV), which is read, contiguous. Of a log-sum there is one.
    """
    batch, head = tl.program_id(2), tl.program_id(1)
    block = tl.program_id(0)
    if IS_CAUSAL:  # the longest rows first, so that no long block starts when the others are done
        block = tl.num_programs(0) - 1 - block
    first = block * QUERIES
    batch, head = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    key_head = head // heads_per_key

    queries = first + tl.arange(0, QUERIES)
    low, high = keys_seen(
        tl.minimum(queries, n - 1), segment_bounds, n, s, window, IS_CAUSAL, HAS_WINDOW, HAS_SEGMENTS
    )  # fmt: skip
    ranges = block_ranges(low, high, KEYS, EDGE_KEYS)
    queries, low, high = queries[:, None], low[:, None], high[:, None]

    q += batch * q_batch + head // RATIO * q_head + head % RATIO * q_map
    query1 = load_tile(q, first, n, q_row, QUERIES, D, BLOCK_D, True)
    query2 = query1
    if MAPS == 2:
        query2 = load_tile(q + q_map, first, n, q_row, QUERIES, D, BLOCK_D, True)
    keys1 = k + batch * k_batch + key_head * k_head
    keys2 = keys1 + k_map
    values = v + batch * v_batch + key_head * v_head
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head
    factor = scale * LOG2_E
    lambdas = load_vector(lam + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)

    max1 = tl.full((QUERIES,), float("-inf"), tl.float32)
    max2 = tl.full((QUERIES,), float("-inf"), tl.float32)
    total1 = tl.zeros((QUERIES,), tl.float32)
    total2 = tl.zeros((QUERIES,), tl.float32)
    sum1 = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
    inputs, state = (query1, query2, keys1, keys2, values), (max1, max2, total1, total2, sum1, sum1)
    view = (factor, low, high, mask, n, mask_count, mask_query, mask_key)
    state = _online_softmax(
        state, inputs, ranges, view, queries, s, k_row, v_row,
        D, DV, BLOCK_D, BLOCK_DV, EDGE_KEYS, MASK, BY_QUERY, True, PRECISION, not TWO_PASSES, MAPS,
    )  # fmt: skip
    max1, max2, total1, total2, sum1, sum2 = _online_softmax(
        state, inputs, ranges, view, queries, s, k_row, v_row,
        D, DV, BLOCK_D, BLOCK_DV, KEYS, MASK, BY_QUERY, False, PRECISION, not TWO_PASSES, MAPS,
    )  # fmt: skip
    log_sum1, residue1 = log_sum(max1, total1)
    log_sum2, residue2 = log_sum(max2, total2)
    signals = lambdas  # not read
    if HAS_SIGNAL:  # not before the loops: it would hold registers
        signals = load_vector(signal + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)
    if TWO_PASSES:
        sums = (log_sum1, log_sum2, residue1, residue2, lambdas, signals)
        sum1 = _second_pass(
            sum1, sums, inputs, ranges, view, queries, s, k_row, v_row,
            D, DV, BLOCK_D, BLOCK_DV, EDGE_KEYS, MASK, BY_QUERY, True, PRECISION, HAS_SIGNAL,
        )  # fmt: skip
        difference = _second_pass(
            sum1, sums, inputs, ranges, view, queries, s, k_row, v_row,
            D, DV, BLOCK_D, BLOCK_DV, KEYS, MASK, BY_QUERY, False, PRECISION, HAS_SIGNAL,
        )  # fmt: skip
        difference = widened(difference, v.dtype.element_ty)
    else:
        if MAPS == 2:
            sum2 *= inverse(total2)[:, None]
        sum1 *= inverse(total1)[:, None]
        if HAS_SIGNAL:
            if SAVE:
                a1_v += batch * out_batch + head * out_head
                store_tile(a1_v, first, n, out_row, sum1, QUERIES, DV, BLOCK_DV)
            sum1 *= signals[:, None]
        difference = sum1
        if MAPS == 2:
            difference -= lambdas[:, None] * sum2
        if SUBTRACTS:
            a2_v += (batch * (heads // RATIO) + head // RATIO) * n * DV
            difference -= lambdas[:, None] * load_tile(a2_v, first, n, DV, QUERIES, DV, BLOCK_DV, True)

    offset = batch * out_batch + head * out_head
    if SAVE:
        seen = is_finite(difference)  # in the backward, rows that see a NaN weigh nothing, like those that see nothing
        log_sum1, log_sum2 = tl.where(seen, log_sum1, float("inf")), tl.where(seen, log_sum2, float("inf"))
        row = batch * heads + head
        residues = log_sums + tl.num_programs(2).to(tl.int64) * heads * MAPS * n
        store_vector(log_sums + row * MAPS * n, first, n, log_sum1, QUERIES)
        if MASK == 2:
            store_vector(residues + row * MAPS * n, first, n, residue1, QUERIES)
        if MAPS == 2:
            store_vector(log_sums + (row * 2 + 1) * n, first, n, log_sum2, QUERIES)
            if MASK == 2:
                store_vector(residues + (row * 2 + 1) * n, first, n, residue2, QUERIES)
            store_tile(a2_v + offset, first, n, out_row, sum2, QUERIES, DV, BLOCK_DV)
    if HAS_NORM:
        if SAVE:
            store_tile(plain + offset, first, n, out_row, difference, QUERIES, DV, BLOCK_DV)
        difference, inverse_norm = normalised(difference, norm_weight, norm_eps, norm_factor, DV, BLOCK_DV)
        if SAVE:
            store_vector(inverse_norms + row * n, first, n, inverse_norm, QUERIES)
    store_tile(out + offset, first, n, out_row, difference, QUERIES, DV, BLOCK_DV)


# Decoding. What changes with every token is not specialised: a length that 16 divides would be another kernel. Strides
# of keys and values are, as they are multiples of a head's width, and tell how wide loads may be.


@triton.jit
def _keys_left(mask, rows, s, mask_query, mask_key, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Find the first key that the mask leaves to any of its ``rows`` of queries, and one past the last.

    The device finds them, so that a CUDA graph of decoding into a cache of fixed size reads the slots in use by then.
    Each part looks for itself: that is a byte a key beside hundreds, and a kernel for all would be one more launch.
    """
    lowest = tl.zeros((BLOCK,), tl.int32) + s
    past = tl.zeros((BLOCK,), tl.int32)
    steps = (s + (BLOCK - 1)) // BLOCK
    for i in range(rows * steps):
        row = i // steps
        keys = (i - row * steps) * BLOCK + tl.arange(0, BLOCK)
        marks = tl.load(
            mask + tl.cast(row, tl.int64) * mask_query + keys.to(tl.int64) * mask_key, mask=keys < s, other=0
        )
        if MASK == 1:
            seen = (marks != 0) & (keys < s)
        else:
            seen = (marks.to(tl.float32) != float("-inf")) & (keys < s)
        lowest = tl.where(seen, tl.minimum(lowest, keys), lowest)
        past = tl.where(seen, tl.maximum(past, keys + 1), past)
    return tl.min(lowest, 0), tl.max(past, 0)


@triton.jit
def _load_scales(rows, width, first, seen, stride, ROWS: tl.constexpr):
    """Load the float32 behind each of the rows first … of int8, ``width`` bytes from its begin, (ROWS,)."""
    scales = (rows + tl.cast(first, tl.int64) * stride + width).to(tl.pointer_type(tl.float32))
    return tl.load(scales + tl.arange(0, ROWS) * (stride // 4), mask=seen, other=0.0)


@triton.jit
def _load_values(
    values, mask, first, low, high, stride, mask_key, dtype: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Load values first …, (ROWS, BLOCK), with zeros for those outside of low … high − 1 and those that the mask of one
    query hides, which are not read.

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
    if values.dtype.element_ty == tl.int8:
        pointers = tl.multiple_of(pointers, (4, 4))
    value = tl.load(pointers, mask=seen[:, None] & (columns[None, :] < WIDTH), other=0.0)
    if value.dtype == tl.int8:
        scales = _load_scales(values, WIDTH, first, seen, stride, ROWS)
        value = (value.to(tl.float32) * scales[:, None]).to(dtype)
    return value


@triton.jit
def _load_queries(q, offsets, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the queries at these offsets, (ROWS, BLOCK), and 0 for rows that do not exist."""
    channels = tl.arange(0, BLOCK)[None, :]
    return tl.load(q + offsets[:, None] + channels, mask=exists[:, None] & (channels < WIDTH), other=0.0)


@triton.jit(do_not_specialize=PARTS_COUNTS)
def parts_kernel(
    q, k, v, mask, tops, totals, sums,
    key_heads, heads_per_key, n, s, rows, start, keys_a_part, scale, window,
    q_batch, q_head, q_map, q_row, k_batch, k_head, k_map, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_query, mask_key,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, NOISE_ROWS: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, ALIKE: tl.constexpr,
    SAME_MASK: tl.constexpr, PRECISION: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Attend to keys start + part · keys_a_part … of one key head. ALIKE: all queries of the tile see the same of them.

    SAME_MASK: all heads share the mask, and the parts divide the keys that it leaves, and not all of them.

    RATIO signal heads share a noise map. Behind the ``rows`` of the signal heads come the rows / RATIO of the noise
    maps, R in all: highest scores and sums of weights (B, H_kv, parts, R), products with V (B, H_kv, parts, R, DV).
    """
    batch, key_head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    part = tl.program_id(0)
    if MASK != 0:
        mask += batch * mask_batch + key_head * heads_per_key * mask_head
    past = s
    if SAME_MASK:
        lowest, past = _keys_left(mask, n if BY_QUERY else 1, s, mask_query, mask_key, MASK, MASK_BLOCK)
        start = tl.maximum(start, lowest // KEYS * KEYS)
        steps = (tl.maximum(past - start, 0) + (KEYS - 1)) // KEYS
        keys_a_part = (steps + tl.num_programs(0) - 1) // tl.num_programs(0) * KEYS
    row1, row2 = tl.arange(0, ROWS), tl.arange(0, NOISE_ROWS)
    noise_rows = rows // RATIO
    member1 = key_head * heads_per_key + tl.minimum(row1, rows - 1) // n
    member2 = key_head * (heads_per_key // RATIO) + tl.minimum(row2, noise_rows - 1) // n
    number1, number2 = row1 % n, row2 % n
    low1, high1 = keys_seen(number1, None, n, s, window, IS_CAUSAL, HAS_WINDOW, False)
    low2, high2 = keys_seen(number2, None, n, s, window, IS_CAUSAL, HAS_WINDOW, False)
    q += batch * q_batch
    offsets1 = member1 // RATIO * q_head + member1 % RATIO * q_map + number1.to(tl.int64) * q_row
    offsets2 = member2 * q_head + RATIO * q_map + number2.to(tl.int64) * q_row
    query1 = _load_queries(q, offsets1, row1 < rows, D, BLOCK_D)
    query2 = _load_queries(q, offsets2, row2 < noise_rows, D, BLOCK_D)
    keys1 = k + batch * k_batch + key_head * k_head
    keys2 = keys1 + k_map
    values = v + batch * v_batch + key_head * v_head
    mask1, mask2 = mask, mask
    if MASK != 0 and not ALIKE:  # with RATIO above 1 a mask has no axis of heads, and mask_head is 0
        mask1 += (member1 - key_head * heads_per_key)[:, None] * mask_head
        mask2 += (member2 - key_head * (heads_per_key // RATIO))[:, None] * mask_head
    factor = scale * LOG2_E

    top1 = tl.full((ROWS,), float("-inf"), tl.float32)
    top2 = tl.full((NOISE_ROWS,), float("-inf"), tl.float32)
    total1 = tl.zeros((ROWS,), tl.float32)
    total2 = tl.zeros((NOISE_ROWS,), tl.float32)
    sum1 = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    sum2 = tl.zeros((NOISE_ROWS, BLOCK_DV), tl.float32)
    first = start + part * keys_a_part
    last = tl.minimum(first + keys_a_part, past)
    lowest, highest = tl.min(low1, 0), tl.max(high1, 0)
    queries1, queries2 = number1[:, None], number2[:, None]
    # Not from ``first`` to ``last``: triton reads single numbers where a loop begins at what a reduction gave.
    for i in range((last - first + (KEYS - 1)) // KEYS):
        at = first + i * KEYS
        keys = (at + tl.arange(0, KEYS))[None, :]
        key1 = load_tile(keys1, at, s, k_row, KEYS, D, BLOCK_D, True).to(query1.dtype)
        key2 = load_tile(keys2, at, s, k_row, KEYS, D, BLOCK_D, True).to(query1.dtype)
        factors = factor
        if k.dtype.element_ty == tl.int8:  # scores are multiplied, and no number of a key is rounded again
            factors *= _load_scales(keys1, D + k_map, at, at + tl.arange(0, KEYS) < s, k_row, KEYS)[None, :]
        view1 = (factors, low1[:, None], high1[:, None], mask1, n, s, mask_query, mask_key)
        view2 = (factors, low2[:, None], high2[:, None], mask2, n, s, mask_query, mask_key)
        value = _load_values(
            values, mask, at, lowest, highest, v_row, mask_key, query1.dtype, KEYS, DV, BLOCK_DV, MASK if ALIKE else 0
        )
        if not ALIKE:
            value, finite = without_nan(value), is_finite(value)[None, :]
        scores1 = scores_of(query1, key1, keys, queries1, keys, view1, MASK, BY_QUERY, True, PRECISION)
        if not ALIKE:
            scores1 = _with_nan(scores1, scores1, finite)
        scores2 = scores_of(query2, key2, keys, queries2, keys, view2, MASK, BY_QUERY, True, PRECISION)
        weights1, top1, total1, shrink1 = update_softmax(scores1, top1, total1)
        weights2, top2, total2, shrink2 = update_softmax(scores2, top2, total2)
        sum1 = tl.dot(weights1.to(value.dtype), value, sum1 * shrink1[:, None], input_precision=PRECISION)
        sum2 = tl.dot(weights2.to(value.dtype), value, sum2 * shrink2[:, None], input_precision=PRECISION)

    offset = ((batch * key_heads + key_head) * tl.num_programs(0) + part) * (rows + noise_rows)
    tl.store(tops + offset + row1, top1, mask=row1 < rows)
    tl.store(tops + offset + rows + row2, top2, mask=row2 < noise_rows)
    tl.store(totals + offset + row1, total1, mask=row1 < rows)
    tl.store(totals + offset + rows + row2, total2, mask=row2 < noise_rows)
    channels = tl.arange(0, BLOCK_DV)[None, :]
    sums += offset * DV
    tl.store(sums + row1[:, None] * DV + channels, sum1, mask=(row1[:, None] < rows) & (channels < DV))
    sums += rows * DV
    tl.store(sums + row2[:, None] * DV + channels, sum2, mask=(row2[:, None] < noise_rows) & (channels < DV))


# For rows of int8: one kernel, whatever their addresses and strides, of which it takes that they are whole words.
packed_parts_kernel = triton.jit(
    parts_kernel.fn,
    do_not_specialize=[*PARTS_COUNTS, "k_batch", "k_head", "k_map", "k_row", "v_batch", "v_head", "v_row"],
    do_not_specialize_on_alignment=["k", "v"],
)


@triton.jit
def _all_parts(tops, totals, parts, stride, PARTS: tl.constexpr):
    """Return the highest score of all parts (0 if a row sees none), the sum of all weights below it, and 1 over it."""
    part = tl.arange(0, PARTS)
    top = tl.load(tops + part * stride, mask=part < parts, other=float("-inf"))
    total = tl.load(totals + part * stride, mask=part < parts, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    all_totals = tl.sum(tl.exp2(top - highest) * total, 0)
    return highest, all_totals, inverse(all_totals)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "parts", "noise_log_sums"])
def combine_kernel(
    tops, totals, sums, lam, signal, norm_weight, out, log_sums, noise_log_sums,
    key_heads, heads_per_key, n, rows, parts, norm_eps, norm_factor,
    lam_batch, lam_head, lam_row, out_batch, out_head, out_row,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr, RATIO: tl.constexpr, MAPS: tl.constexpr, HAS_SIGNAL: tl.constexpr, LOG_SUMS: tl.constexpr,
):  # fmt: skip
    """Combine the parts' sums of row ``program_id(0)`` of one key head into one output. LOG_SUMS: store these, too."""
    batch, key_head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0)
    head, query = key_head * heads_per_key + row // n, row % n
    all_rows = rows + rows // RATIO  # of a part: the signal heads' and behind them the noise maps'
    offset1 = (batch * key_heads + key_head) * parts * all_rows + row
    offset2 = offset1 - row + rows + row // n // RATIO * n + query
    highest1, total1, inverse1 = _all_parts(tops + offset1, totals + offset1, parts, all_rows, PARTS)
    highest2, total2, inverse2 = _all_parts(tops + offset2, totals + offset2, parts, all_rows, PARTS)
    inverse2 *= tl.load(lam + batch * lam_batch + head * lam_head + query * lam_row)
    if HAS_SIGNAL:
        inverse1 *= tl.load(signal + batch * lam_batch + head * lam_head + query * lam_row)
    if LOG_SUMS:
        row1 = batch * key_heads * heads_per_key + head
        log_sum1, _ = log_sum(highest1, total1)
        log_sum2, _ = log_sum(highest2, total2)
        tl.store(log_sums + row1 * MAPS * n + query, log_sum1)
        tl.store(noise_log_sums + row1 // RATIO * MAPS * n + query, log_sum2)
    channels = tl.arange(0, BLOCK_DV)
    result = tl.zeros((1, BLOCK_DV), tl.float32)
    for first in range(0, parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        top1 = tl.load(tops + offset1 + part * all_rows, mask=part < parts, other=float("-inf"))
        top2 = tl.load(tops + offset2 + part * all_rows, mask=part < parts, other=float("-inf"))
        inside = (part[:, None] < parts) & (channels[None, :] < DV)
        pointers = sums + part[:, None].to(tl.int64) * all_rows * DV + channels[None, :]
        sum1 = tl.load(pointers + offset1 * DV, mask=inside, other=0.0) * (tl.exp2(top1 - highest1) * inverse1)[:, None]
        sum2 = tl.load(pointers + offset2 * DV, mask=inside, other=0.0) * (tl.exp2(top2 - highest2) * inverse2)[:, None]
        result += tl.sum(sum1 - sum2, 0)[None, :]
    if HAS_NORM:
        result, _ = normalised(result, norm_weight, norm_eps, norm_factor, DV, BLOCK_DV)
    pointers = out + batch * out_batch + head * out_head + query * out_row + channels[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=channels[None, :] < DV)
