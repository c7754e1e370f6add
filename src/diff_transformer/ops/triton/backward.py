"""Computes all gradients (Appendix G, Equation 7).

The first kernel undoes the norm and finds the row sums rowsum(P_c ⊙ dP) = dO · (A_c V) from the saved tensors; one of
them is also the gradient of λ. The second adds up dK and dV of a block of keys over the queries, the third dQ of a
block of queries over the keys. Both compute the maps again from the log-sums, and dP = dO·Vᵀ once for both maps. None
of them uses atomics, so the same input gives the same bits.

If a group of signal heads shares a noise map, a launch takes one map alone (MAPS is 1). The output is linear in A2·V,
so the gradient that arrives at the noise map is −Σ λ dO over its group. The first kernel computes that, and from there
on the noise map is a head like the others.
"""

import triton
import triton.language as tl

from diff_transformer.ops.triton.tiles import (
    COUNTS,
    LOG2_E,
    block_ranges,
    block_start,
    is_finite,
    keys_seen,
    load_tile,
    load_vector,
    narrowed,
    queries_seeing,
    scores_of,
    steps_of,
    store_tile,
    store_vector,
    weights_of,
    widened,
)


@triton.jit(do_not_specialize=COUNTS)
def rows_kernel(
    grad_out, plain, a2_v, a1_v, lam, signal, norm_weight, log_sums, inverse_norms,
    grad_plain, row_sums, grad_lam, grad_signal, grad_weight, grad_noise, noise_sums,
    heads, n, norm_factor,
    grad_batch, grad_head, grad_row, out_batch, out_head, out_row, lam_batch, lam_head, lam_row,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, HAS_NORM: tl.constexpr, RATIO: tl.constexpr,
    HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Go back through the norm: ``grad_plain``, this block's part of ``grad_weight`` (programs, DV), and the row sums.

    RATIO heads share A2·V. If several do, the gradient of that, ``grad_noise`` (B, heads / RATIO, N, DV) contiguous, is
    added up, and its row sum goes to ``noise_sums``; if not, each head has both of its row sums in ``row_sums``.
    """
    batch, group = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    first = tl.program_id(0) * QUERIES
    noise_row = (batch * (heads // RATIO) + group) * n
    if RATIO == 1:
        a2_v += batch * out_batch + group * out_head
        rows_a2 = load_tile(a2_v, first, n, out_row, QUERIES, DV, BLOCK_DV, True).to(tl.float32)
    else:
        rows_a2 = load_tile(a2_v + noise_row * DV, first, n, DV, QUERIES, DV, BLOCK_DV, True, True)
    grad2 = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
    for member in range(RATIO):
        head = group * RATIO + member
        row = batch * heads + head
        offset = batch * out_batch + head * out_head
        grad = load_tile(
            grad_out + batch * grad_batch + head * grad_head, first, n, grad_row, QUERIES, DV, BLOCK_DV, True
        ).to(tl.float32)  # fmt: skip
        rows = load_tile(plain + offset, first, n, out_row, QUERIES, DV, BLOCK_DV, True).to(tl.float32)
        # Rows that see a NaN count as 0, so that a gradient of 0 stays one.
        seen = load_vector(log_sums + row * (2 if RATIO == 1 else 1) * n, first, n, 1, QUERIES) < float("inf")
        rows = tl.where(seen[:, None], rows, 0.0)
        if HAS_NORM:
            channels = tl.arange(0, BLOCK_DV)
            inverse = tl.where(seen, load_vector(inverse_norms + row * n, first, n, 1, QUERIES), 0.0)
            weight = tl.load(norm_weight + channels, mask=channels < DV, other=0.0).to(tl.float32) * norm_factor
            unit = rows * inverse[:, None]
            program = (row * tl.num_programs(0) + tl.program_id(0)) * DV
            tl.store(grad_weight + program + channels, tl.sum(grad * unit, 0) * norm_factor, mask=channels < DV)
            grad *= weight[None, :]
            grad = (grad - unit * (tl.sum(grad * unit, 1) / DV)[:, None]) * inverse[:, None]
            store_tile(grad_plain + offset, first, n, out_row, grad, QUERIES, DV, BLOCK_DV)
            grad = grad.to(grad_plain.dtype.element_ty).to(tl.float32)  # what the other kernels will read
        lambdas = load_vector(lam + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)
        sum2 = tl.sum(grad * tl.where(seen[:, None], rows_a2, 0.0), 1)
        if HAS_SIGNAL:
            rows_a1 = load_tile(a1_v + offset, first, n, out_row, QUERIES, DV, BLOCK_DV, True).to(tl.float32)
            sum1 = tl.sum(grad * tl.where(seen[:, None], rows_a1, 0.0), 1)
            store_vector(grad_signal + row * n, first, n, sum1, QUERIES)
            sum1 *= load_vector(signal + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)
        else:
            sum1 = tl.sum(grad * rows, 1) + lambdas * sum2
        store_vector(grad_lam + row * n, first, n, -sum2, QUERIES)
        sum2 = -lambdas * sum2 if HAS_SIGNAL else sum2
        if RATIO == 1:
            store_vector(row_sums + row * 2 * n, first, n, sum1, QUERIES)
            store_vector(row_sums + (row * 2 + 1) * n, first, n, sum2, QUERIES)
        else:
            store_vector(row_sums + row * n, first, n, sum1, QUERIES)
            grad2 -= lambdas[:, None] * grad
    if RATIO > 1:
        store_tile(grad_noise + noise_row * DV, first, n, DV, grad2, QUERIES, DV, BLOCK_DV)
        grad2 = grad2.to(grad_noise.dtype.element_ty).to(tl.float32)
        store_vector(noise_sums + noise_row, first, n, tl.sum(grad2 * rows_a2, 1), QUERIES)


@triton.jit(do_not_specialize=COUNTS)
def keys_kernel(
    grad_out, q, k, v, lam, signal, mask, segment_bounds, log_sums, row_sums, grad_k, grad_v,
    heads, heads_per_key, n, s, scale, window,
    grad_batch, grad_head, grad_row,
    grad_k_batch, grad_k_head, grad_k_map, grad_k_row, grad_v_batch, grad_v_head, grad_v_row,
    q_batch, q_head, q_map, q_row, k_batch, k_head, k_map, k_row, v_batch, v_head, v_row,
    lam_batch, lam_head, lam_row, mask_batch, mask_head, mask_query, mask_key, mask_count,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr, RAGGED: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, PRECISION: tl.constexpr, MAPS: tl.constexpr, RATIO: tl.constexpr,
    HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Compute dK (B, H_kv, 2 or 1, S, D) and dV (B, H_kv, S, DV) of a block of keys of one key head, over all queries.

    OF_KEYS, OF_VALUES: which of the two; wide heads take two launches, whose sums fit in registers. RAGGED: N is no
    multiple of QUERIES. Tiles of scores are (keys, queries).

    With MAPS of 1 only the first map counts, without λ. RATIO heads are side by side on the axis of maps of q.
    """
    batch, key_head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    first = tl.program_id(0) * KEYS
    keys = first + tl.arange(0, KEYS)
    low, high = queries_seeing(
        tl.minimum(keys, s - 1), segment_bounds, n, s, window, IS_CAUSAL, HAS_WINDOW, HAS_SEGMENTS
    )  # fmt: skip
    begin, end = tl.min(low, 0) // QUERIES * QUERIES, tl.max(high, 0)
    high = tl.where(keys < s, high, 0)  # keys that do not exist are seen by nobody
    keys, low, high = keys[:, None], low[:, None], high[:, None]

    k += batch * k_batch + key_head * k_head
    key1 = load_tile(k, first, s, k_row, KEYS, D, BLOCK_D, True)
    key2 = key1
    if MAPS == 2 and not SHARED:
        key2 = load_tile(k + k_map, first, s, k_row, KEYS, D, BLOCK_D, True)
    value = load_tile(v + batch * v_batch + key_head * v_head, first, s, v_row, KEYS, DV, BLOCK_DV, True)
    # Keys that are not finite count as seen by nobody, too: queries that do see them weigh nothing in the backward.
    finite = is_finite(key1) & is_finite(key2)
    if OF_KEYS:
        finite = finite & is_finite(value)
    finite = finite[:, None]
    high = tl.where(finite, high, 0)
    grad_k1 = tl.zeros((KEYS, BLOCK_D), tl.float32)
    grad_k2 = tl.zeros((KEYS, BLOCK_D), tl.float32)
    grad_values = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    factor = scale * LOG2_E
    residues = log_sums + tl.num_programs(2).to(tl.int64) * heads * MAPS * n  # of additive masks
    count = tl.maximum(end - begin + (QUERIES - 1), 0) // QUERIES
    head = key_head * heads_per_key
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head
    q += batch * q_batch + head // RATIO * q_head  # a key head's heads are whole groups
    grad_out += batch * grad_batch + head * grad_head
    first_row = (batch * heads + head) * MAPS * n
    first_lam = batch * lam_batch + head * lam_head
    # One loop over heads and blocks, which compares positions everywhere: the sums leave no registers for a second one.
    for i in range(heads_per_key * count):
        group = i // count
        start = begin + (i - group * count) * QUERIES
        group64 = tl.cast(group, tl.int64)
        group_q = q + group64 // RATIO * q_head + group64 % RATIO * q_map
        group_grad, group_lam = grad_out + group64 * grad_head, first_lam + group64 * lam_head
        row = first_row + group64 * MAPS * n
        group_mask = 0  # not read
        if MASK != 0:
            group_mask = mask + group64 * mask_head
        view = (factor, low, high, group_mask, n, mask_count, mask_query, mask_key)
        queries = (start + tl.arange(0, QUERIES))[None, :]
        grad = load_tile(group_grad, start, n, grad_row, QUERIES, DV, BLOCK_DV, RAGGED)
        if OF_KEYS:
            grad_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        query1 = load_tile(group_q, start, n, q_row, QUERIES, D, BLOCK_D, RAGGED)
        scores1 = scores_of(key1, query1, queries, queries, keys, view, MASK, BY_QUERY, True, PRECISION)
        residue1 = 0.0
        if MASK == 2:
            residue1 = load_vector(residues + row, start, n, 1, QUERIES)[None, :]
        log_sum1 = load_vector(log_sums + row, start, n, 1, QUERIES)[None, :]
        weights1 = weights_of(scores1, log_sum1, residue1, MASK)
        if HAS_SIGNAL:
            signals = load_vector(signal + group_lam, start, n, lam_row, QUERIES)[None, :]
        if OF_KEYS:  # as soon as it can be: what is finished holds no registers
            grad_weights1 = grad_weights * signals if HAS_SIGNAL else grad_weights
            grad_scores1 = weights1 * (grad_weights1 - load_vector(row_sums + row, start, n, 1, QUERIES)[None, :])
            grad_scores1 = grad_scores1.to(query1.dtype)
            grad_k1 = tl.dot(grad_scores1, query1, grad_k1, input_precision=PRECISION)
        weights = weights1 * signals if HAS_SIGNAL else weights1
        if MAPS == 2:
            query2 = load_tile(group_q + q_map, start, n, q_row, QUERIES, D, BLOCK_D, RAGGED)
            scores2 = scores_of(key2, query2, queries, queries, keys, view, MASK, BY_QUERY, True, PRECISION)
            residue2 = 0.0
            if MASK == 2:
                residue2 = load_vector(residues + row + n, start, n, 1, QUERIES)[None, :]
            log_sum2 = load_vector(log_sums + row + n, start, n, 1, QUERIES)[None, :]
            weights2 = weights_of(scores2, log_sum2, residue2, MASK)
            lambdas = load_vector(lam + group_lam, start, n, lam_row, QUERIES)[None, :]
            weighted2 = weights2 * lambdas
            weights -= weighted2
        if OF_VALUES:
            weights = narrowed(weights, grad.dtype)
            grad_values = tl.dot(weights, grad, grad_values, input_precision=PRECISION)
        if OF_KEYS and MAPS == 2:
            row_sum2 = load_vector(row_sums + row + n, start, n, 1, QUERIES)[None, :]
            if HAS_SIGNAL:
                grad_scores2 = weights2 * (-lambdas * grad_weights - row_sum2)
            else:
                grad_scores2 = weighted2 * (row_sum2 - grad_weights)
            grad_scores2 = grad_scores2.to(query2.dtype)
            if SHARED:
                grad_k1 = tl.dot(grad_scores2, query2, grad_k1, input_precision=PRECISION)
            else:
                grad_k2 = tl.dot(grad_scores2, query2, grad_k2, input_precision=PRECISION)
    if OF_KEYS:
        # The sums of a row that is not finite, and no others, hold 0 · NaN.
        grad_k += batch * grad_k_batch + key_head * grad_k_head
        grad_k1 = tl.where(finite, grad_k1 * scale, 0.0)
        store_tile(grad_k, first, s, grad_k_row, grad_k1, KEYS, D, BLOCK_D)
        if MAPS == 2 and not SHARED:
            grad_k2 = tl.where(finite, grad_k2 * scale, 0.0)
            store_tile(grad_k + grad_k_map, first, s, grad_k_row, grad_k2, KEYS, D, BLOCK_D)
    if OF_VALUES:
        grad_v += batch * grad_v_batch + key_head * grad_v_head
        grad_values = widened(grad_values, v.dtype.element_ty)
        store_tile(grad_v, first, s, grad_v_row, grad_values, KEYS, DV, BLOCK_DV)


@triton.jit
def _over_keys(
    state, sums, inputs, ranges, view, queries, s, k_row, v_row,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, MAPS: tl.constexpr,
    HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Add blocks of keys into dQ of a block of queries, without scale and, if λ is the only weight, without −λ: these
    are one to a row.
    """
    grad_q1, grad_q2 = state
    log_sum1, log_sum2, residue1, residue2, row_sum1, row_sum2, signals, lambdas = sums
    query1, query2, grad, keys1, keys2, values = inputs
    CLEAN: tl.constexpr = EDGE or MASK != 0  # elsewhere all queries of the block see a NaN
    first, last = steps_of(ranges, KEYS, EDGE)
    for i in range(first, last):
        start = block_start(i, ranges, KEYS, EDGE)
        keys = (start + tl.arange(0, KEYS))[None, :]
        value = load_tile(values, start, s, v_row, KEYS, DV, BLOCK_DV, EDGE, CLEAN)
        grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        key1 = load_tile(keys1, start, s, k_row, KEYS, D, BLOCK_D, EDGE, CLEAN)
        scores1 = scores_of(query1, key1, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
        weights1 = weights_of(scores1, log_sum1[:, None], residue1[:, None], MASK)
        grad_weights1 = grad_weights * signals[:, None] if HAS_SIGNAL else grad_weights
        grad_scores1 = weights1 * (grad_weights1 - row_sum1[:, None])
        grad_q1 = tl.dot(grad_scores1.to(key1.dtype), key1, grad_q1, input_precision=PRECISION)
        if MAPS == 2:
            key2 = load_tile(keys2, start, s, k_row, KEYS, D, BLOCK_D, EDGE, CLEAN)
            scores2 = scores_of(query2, key2, keys, queries, keys, view, MASK, BY_QUERY, EDGE, PRECISION)
            weights2 = weights_of(scores2, log_sum2[:, None], residue2[:, None], MASK)
            grad_weights2 = grad_weights * -lambdas[:, None] if HAS_SIGNAL else grad_weights
            grad_scores2 = weights2 * (grad_weights2 - row_sum2[:, None])
            grad_q2 = tl.dot(grad_scores2.to(key2.dtype), key2, grad_q2, input_precision=PRECISION)
    return grad_q1, grad_q2


# But N, whose alignment saves registers: dQ of wide heads spills on Hopper without.
@triton.jit(do_not_specialize=[name for name in COUNTS if name != "n"])
def queries_kernel(
    grad_out, q, k, v, lam, signal, mask, segment_bounds, log_sums, row_sums, grad_q,
    heads, heads_per_key, n, s, scale, window,
    grad_batch, grad_head, grad_row, grad_q_batch, grad_q_head, grad_q_map, grad_q_row,
    q_batch, q_head, q_map, q_row, k_batch, k_head, k_map, k_row, v_batch, v_head, v_row,
    lam_batch, lam_head, lam_row, mask_batch, mask_head, mask_query, mask_key, mask_count,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr,
    PRECISION: tl.constexpr, MAPS: tl.constexpr, RATIO: tl.constexpr, HAS_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Compute dQ (B, H, 2, N, D) of a block of queries of one head. MAPS and RATIO as of :func:`keys_kernel`."""
    batch, head = tl.cast(tl.program_id(2), tl.int64), tl.cast(tl.program_id(1), tl.int64)
    block = tl.program_id(0)
    if IS_CAUSAL:  # the longest rows first
        block = tl.num_programs(0) - 1 - block
    first = block * QUERIES
    key_head = head // heads_per_key
    queries = first + tl.arange(0, QUERIES)
    low, high = keys_seen(
        tl.minimum(queries, n - 1), segment_bounds, n, s, window, IS_CAUSAL, HAS_WINDOW, HAS_SEGMENTS
    )  # fmt: skip
    ranges = block_ranges(low, high, KEYS, EDGE_KEYS)
    queries, low, high = queries[:, None], low[:, None], high[:, None]

    in_q, in_grad_q = head // RATIO * q_head + head % RATIO * q_map, head // RATIO * grad_q_head
    in_grad_q += head % RATIO * grad_q_map
    q += batch * q_batch + in_q
    query1 = load_tile(q, first, n, q_row, QUERIES, D, BLOCK_D, True)
    grad = load_tile(
        grad_out + batch * grad_batch + head * grad_head, first, n, grad_row, QUERIES, DV, BLOCK_DV, True
    )  # fmt: skip
    row = (batch * heads + head) * MAPS * n
    residues = log_sums + tl.num_programs(2).to(tl.int64) * heads * MAPS * n
    # Rows that do not exist get weights of 0, like those that see nothing.
    log_sum1 = load_vector(log_sums + row, first, n, 1, QUERIES, float("inf"))
    residue1 = log_sum1
    if MASK == 2:
        residue1 = load_vector(residues + row, first, n, 1, QUERIES)
    row_sum1 = load_vector(row_sums + row, first, n, 1, QUERIES)
    query2, log_sum2, residue2, row_sum2 = query1, log_sum1, residue1, row_sum1
    if MAPS == 2:
        query2 = load_tile(q + q_map, first, n, q_row, QUERIES, D, BLOCK_D, True)
        log_sum2 = load_vector(log_sums + row + n, first, n, 1, QUERIES, float("inf"))
        if MASK == 2:
            residue2 = load_vector(residues + row + n, first, n, 1, QUERIES)
        row_sum2 = load_vector(row_sums + row + n, first, n, 1, QUERIES)
    keys1 = k + batch * k_batch + key_head * k_head
    keys2 = keys1 + k_map
    values = v + batch * v_batch + key_head * v_head
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head
    state = (tl.zeros((QUERIES, BLOCK_D), tl.float32), tl.zeros((QUERIES, BLOCK_D), tl.float32))
    signals, lambdas = row_sum1, row_sum1
    if HAS_SIGNAL:
        signals = load_vector(signal + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)
        lambdas = load_vector(lam + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)
    sums = (log_sum1, log_sum2, residue1, residue2, row_sum1, row_sum2, signals, lambdas)
    inputs = (query1, query2, grad, keys1, keys2, values)
    view = (scale * LOG2_E, low, high, mask, n, mask_count, mask_query, mask_key)
    state = _over_keys(
        state, sums, inputs, ranges, view, queries, s, k_row, v_row,
        D, DV, BLOCK_D, BLOCK_DV, EDGE_KEYS, MASK, BY_QUERY, True, PRECISION, MAPS, HAS_SIGNAL,
    )  # fmt: skip
    grad_q1, grad_q2 = _over_keys(
        state, sums, inputs, ranges, view, queries, s, k_row, v_row,
        D, DV, BLOCK_D, BLOCK_DV, KEYS, MASK, BY_QUERY, False, PRECISION, MAPS, HAS_SIGNAL,
    )  # fmt: skip
    seen = log_sum1[:, None] < float("inf")  # what else the sums hold comes from a NaN in K or V
    grad_q += batch * grad_q_batch + in_grad_q
    store_tile(grad_q, first, n, grad_q_row, tl.where(seen, grad_q1 * scale, 0.0), QUERIES, D, BLOCK_D)
    if MAPS == 2:
        lambdas = load_vector(lam + batch * lam_batch + head * lam_head, first, n, lam_row, QUERIES)[:, None]
        grad_q2 = tl.where(seen, grad_q2 * (scale if HAS_SIGNAL else -scale * lambdas), 0.0)
        store_tile(grad_q + grad_q_map, first, n, grad_q_row, grad_q2, QUERIES, D, BLOCK_D)
