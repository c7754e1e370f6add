"""The independent implementation: the paper's equations in float64, as loops, sharing no code with the package.

Numpy arrays in, numpy arrays out. Nothing here is fast and nothing is clever: one batch entry, one head, one map and
one query at a time, and the gradients are Appendix G's (Equation 7) spelled out, not an automatic derivative. `Rules`
holds the decisions that are easy to get wrong; tests replace one of them by a known mistake to see that the comparison
notices.

Symbols: B batch, H differential heads, Hk key/value heads, N queries, S keys, d and dv widths, D model width, A heads
of the twin Transformer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def grouped_key(h: int, c: int, heads: int, key_heads: int) -> tuple[int, int]:
    """Map c of head h reads key head h // (H / Hk), map c."""
    return h // (heads // key_heads), c


def key_of_the_flattened_heads(h: int, c: int, heads: int, key_heads: int) -> tuple[int, int]:
    """The known mistake: repeat the 2·Hk flattened key heads; under grouping both maps then meet the same key."""
    return divmod((2 * h + c) // (heads // key_heads), 2)


@dataclass(frozen=True)
class Rules:
    """What the operator decides; the defaults are SPEC's, any other value is a mutation."""

    second_map: float = -1.0  # sign in front of λ·A2
    grouped_key: Callable[[int, int, int, int], tuple[int, int]] = grouped_key
    causal_shift: int = 0  # a query sees key j where j ≤ i + S − N + causal_shift
    window_shift: int = 0  # … and j > i + S − N − window − window_shift
    document_shift: int = 0  # … and no document ends between i and j; for keys, documents end document_shift earlier
    lambda_gradient: float = -1.0  # sign in front of Σ rowsum(P2 ⊙ dP)
    swap_maps: bool = False


SPEC = Rules()


@dataclass(frozen=True)
class Forward:
    """Result of `attention`: out (B, H, N, dv); maps, visibility, bias (B, H, N, S); λ and w broadcast to (B, H, N)."""

    out: Array
    first: Array
    second: Array
    visible: NDArray[np.bool_]
    bias: Array
    lam: Array
    scale: float
    signal_weight: Array

    @property
    def difference(self) -> Array:
        return self.signal_weight[..., None] * self.first - self.lam[..., None] * self.second


def position_sees(i: int, j: int, n: int, s: int, is_causal: bool, window: int | None, rules: Rules = SPEC) -> bool:
    """Whether causality (aligned to the end of the keys) and the window let query i see key j."""
    position = i + s - n
    if is_causal and j > position + rules.causal_shift:
        return False
    return not (window is not None and j <= position - window - rules.window_shift)


def document_sees(i: int, j: int, cu_seqlens: Sequence[int] | None, rules: Rules = SPEC) -> bool:
    """Whether tokens i and j stand in one document; document m holds tokens cu_seqlens[m] … cu_seqlens[m + 1] − 1."""
    borders = [] if cu_seqlens is None else cu_seqlens[1:-1]
    return all((i < border) == (j < border - rules.document_shift) for border in borders)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lam: ArrayLike,
    *,
    is_causal: bool = False,
    attn_mask: ArrayLike | None = None,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    signal_weight: ArrayLike = 1.0,
    rules: Rules = SPEC,
) -> Forward:
    """Equation 1: q (B, H, 2, N, d), k (B, Hk, 2 or 1, S, d), v (B, Hk, S, dv), λ and w broadcast to (B, H, N).

    Grouped: q (B, G, r + 1, N, d), and head h = g·r + i has the queries i and r of group g.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    b_, groups, queries, n, d = q.shape
    r = queries - 1
    h_ = groups * r
    hk, maps, s, dv = k.shape[1], k.shape[2], v.shape[2], v.shape[3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    lam, w = (np.broadcast_to(np.asarray(x, np.float64), (b_, h_, n)) for x in (lam, signal_weight))
    allowed, bias = _read_mask(attn_mask, (b_, h_, n, s))
    visible = np.array(allowed)
    for i, j in np.ndindex(n, s):
        if not (position_sees(i, j, n, s, is_causal, window, rules) and document_sees(i, j, cu_seqlens, rules)):
            visible[..., i, j] = False

    weights = np.zeros((2, b_, h_, n, s))
    out = np.zeros((b_, h_, n, dv))
    for b in range(b_):
        for h in range(h_):
            for i in range(n):
                keys = np.flatnonzero(visible[b, h, i])
                if len(keys) == 0:
                    continue
                for c in (0, 1):
                    kh, kc = rules.grouped_key(h, c, h_, hk)
                    key = k[b, kh, kc if maps == 2 else 0, keys]
                    logits = scale * (key @ q[b, h // r, h % r if c == 0 else r, i]) + bias[b, h, i, keys]
                    exponentials = np.exp(logits - logits.max())
                    weights[1 - c if rules.swap_maps else c, b, h, i, keys] = exponentials / exponentials.sum()
                first, second = weights[:, b, h, i, keys]
                difference = w[b, h, i] * first + rules.second_map * lam[b, h, i] * second
                out[b, h, i] = difference @ v[b, h // (h_ // hk), keys]
    return Forward(out, weights[0], weights[1], visible, bias, lam, scale, w)


def _read_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], Array]:
    """A boolean mask (True = may attend) or an additive one, as (may attend, what to add) of the given shape."""
    if mask is None:
        return np.ones(shape, bool), np.zeros(shape)
    mask = np.broadcast_to(np.asarray(mask), shape)
    if mask.dtype == bool:
        return mask, np.zeros(shape)
    hidden = np.isneginf(mask)
    return ~hidden, np.where(hidden, 0.0, mask.astype(np.float64))


def gradients(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, lam: ArrayLike, dout: ArrayLike, forward: Forward, rules: Rules = SPEC
) -> dict[str, Array]:
    """Appendix G (Equation 7): gradients of q, k, v and λ, each in its own shape, for a gradient `dout` of out."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    b_, groups, queries, n, _ = q.shape
    r = queries - 1
    h_ = groups * r
    hk, maps = k.shape[1], k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dlam = np.zeros((b_, h_, n))
    for b in range(b_):
        for h in range(h_):
            vh = h // (h_ // hk)
            for i in range(n):
                keys = np.flatnonzero(forward.visible[b, h, i])
                lam_i = forward.lam[b, h, i]
                p1, p2 = forward.first[b, h, i, keys], forward.second[b, h, i, keys]
                dp = v[b, vh, keys] @ dout[b, h, i]
                dlam[b, h, i] = rules.lambda_gradient * np.sum(p2 * dp)
                dv[b, vh, keys] += np.outer(p1 + rules.second_map * lam_i * p2, dout[b, h, i])
                for c, p, g in ((0, p1, 1.0), (1, p2, rules.second_map * lam_i)):
                    kh, kc = rules.grouped_key(h, c, h_, hk)
                    kc = kc if maps == 2 else 0
                    ds = g * p * (dp - np.sum(p * dp))
                    query = (b, h // r, h % r if c == 0 else r, i)
                    dq[query] += forward.scale * (ds @ k[b, kh, kc, keys])
                    dk[b, kh, kc, keys] += forward.scale * np.outer(ds, q[query])
    return {"q": dq, "k": dk, "v": dv, "lam": sum_to(dlam, np.shape(lam))}


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting: sum x over the axes along which `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    for axis, size in enumerate(shape):
        if size == 1:
            x = x.sum(axis=axis, keepdims=True)
    return np.asarray(x)


def lambda_init(layer: int) -> float:
    """λ_init(l) = 0.8 − 0.6·exp(−0.3·(l − 1)), l = 1 for the first layer."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


def lambda_value(q1: ArrayLike, k1: ArrayLike, q2: ArrayLike, k2: ArrayLike, init: float) -> float:
    """Equation 2 for four d-vectors."""
    first = sum(float(a) * float(b) for a, b in zip(np.asarray(q1), np.asarray(k1), strict=True))
    second = sum(float(a) * float(b) for a, b in zip(np.asarray(q2), np.asarray(k2), strict=True))
    return math.exp(first) - math.exp(second) + init


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = np.empty_like(x)
    for index in np.ndindex(*x.shape[:-1]):
        mean_square = sum(float(a) ** 2 for a in x[index]) / x.shape[-1]
        out[index] = [a / math.sqrt(mean_square + eps) * w for a, w in zip(x[index], weight, strict=True)]
    return out


def rotary(x: ArrayLike, positions: ArrayLike, theta: float = 10000.0) -> Array:
    """Half-split rotary embedding of x (..., N, d): channels m and m + d/2 turn by position · theta^(−2m/d)."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for index in np.ndindex(*x.shape[:-2]):
        for i, position in enumerate(np.asarray(positions)):
            for m in range(half):
                angle = position * theta ** (-2 * m / x.shape[-1])
                a, b = x[(*index, i, m)], x[(*index, i, m + half)]
                out[(*index, i, m)] = a * math.cos(angle) - b * math.sin(angle)
                out[(*index, i, m + half)] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _heads(x: ArrayLike, weight: ArrayLike, *shape: int) -> Array:
    """x (B, N, D) through a Linear weight whose rows are (heads, [maps,] width): (B, heads, [maps,] N, width)."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return np.moveaxis(y.reshape(*y.shape[:2], *shape), 1, -2)


def _layer(
    x: ArrayLike, *weights: ArrayLike, lam: ArrayLike, groups: int, queries: int, key_heads: int, key_maps: int,
    factor: float = 1.0, norm_weight: ArrayLike | None = None, eps: float = 1e-5, positions: ArrayLike | None = None,
    is_causal: bool = True, **options: Any,
) -> Array:  # fmt: skip
    """Attention of x (B, N, D) → (B, N, D): projections, rotary embedding, Equation 1, the norm of each head, W_O.

    Weights of q, k, v and o are nn.Linear's (out, in), rows ordered (group, query, channel) and (head, map, channel).
    One query to a group is ordinary attention, one of two equal maps at λ = 0. `positions` None means no rotary
    embedding, `norm_weight` None neither the headwise norm nor its `factor`.
    """
    wq, wk, wv, wo = weights
    d = np.shape(wk)[0] // (key_heads * key_maps)
    q, k = _heads(x, wq, groups, queries, d), _heads(x, wk, key_heads, key_maps, d)
    v = _heads(x, wv, key_heads, np.shape(wv)[0] // key_heads)
    if positions is not None:
        q, k = rotary(q, positions), rotary(k, positions)
    if queries == 1:
        q = np.concatenate([q, q], 2)
    out = attention(q, k, v, lam, is_causal=is_causal, **options).out
    if norm_weight is not None:
        out = factor * rms_norm(out, norm_weight, eps)
    heads = np.concatenate([out[:, h] for h in range(out.shape[1])], axis=-1)
    return heads @ np.asarray(wo, np.float64).T


def _lambda_of_tokens(x: ArrayLike, w_lambda: ArrayLike) -> Array:
    """sigmoid(X W_λ), (B, heads, N), of W_λ (heads, D)."""
    return 1 / (1 + np.exp(-_heads(x, w_lambda, len(np.asarray(w_lambda)), 1)[..., 0]))


def diff_layer(
    x: ArrayLike, *weights: Any, layer: int, heads: int, key_heads: int, ratio: int = 1, init: float | None = None,
    **options: Any,
) -> Array:  # fmt: skip
    """Equation 3 without its residual.

    `heads` and `key_heads` are *differential* heads (half the twin's). The last of the `weights` are λ's vectors (q1,
    k1, q2, k2), `layer` is 1-based, `init` replaces λ_init(layer). With a `ratio` r, r of the heads share the second
    map, whose query is the last of their group. A matrix W_λ in place of the vectors means λ = sigmoid(X W_λ), with
    λ_init 0.
    """
    *weights, lambda_vectors = weights
    if isinstance(lambda_vectors, tuple):
        init = lambda_init(layer) if init is None else init
        lam: ArrayLike = lambda_value(*lambda_vectors, init)
    else:
        init, lam = 0.0, _lambda_of_tokens(x, lambda_vectors)
    sizes = {"groups": heads // ratio, "queries": ratio + 1, "key_heads": key_heads, "key_maps": 2}
    return _layer(x, *weights, lam=lam, **sizes, factor=1 - init, **options)


def diff_v2_layer(
    x: ArrayLike, *weights: ArrayLike, w_lambda: ArrayLike, heads: int, key_heads: int, ratio: int = 1, **options: Any
) -> Array:
    """DIFF V2: out_i = attn(q_2i, k, v) − λ_i·attn(q_2i+1, k, v), λ = sigmoid(X W_λ); `heads` are those of W_O.

    With a `ratio` r, r of the heads share the second map, whose query is the last of their group. W_λ with two rows for
    each head means DIFF V3: out_i = σ(g_2i)·attn(q_2i, k, v) − σ(g_2i+1)·attn(q_2i+1, k, v), g = X W_λ.
    """
    sizes = {"groups": heads // ratio, "queries": ratio + 1, "key_heads": key_heads, "key_maps": 1}
    gates = _lambda_of_tokens(x, w_lambda)
    if len(np.asarray(w_lambda)) == 2 * heads:
        return _layer(x, *weights, lam=gates[:, 1::2], signal_weight=gates[:, ::2], **sizes, **options)
    return _layer(x, *weights, lam=gates, **sizes, **options)


def latent_layer(x: ArrayLike, weights: Mapping[str, ArrayLike], **options: Any) -> Array:
    """The heads of :func:`latent_attention`, and W_O."""
    out = latent_attention(x, weights, **options).out
    return out.swapaxes(1, 2).reshape(*out.shape[::2], -1) @ np.asarray(weights["o_proj.weight"]).T


def latent_attention(
    x: ArrayLike, weights: Mapping[str, ArrayLike], ratio: int, dv: int, eps: float = 1e-5,
    positions: ArrayLike | None = None, **options: Any,
) -> Forward:  # fmt: skip
    """q = norm(X W_qa) W_qb, [c, k_pe] = X W_kva with c normed, k = [c W_uk, k_pe] and v = c W_uv of each key head.

    `weights` are a module's by name. r of the heads share the map of their group's last query; k_pe turns, and as many
    channels at the end of a query.
    """
    w = {name.removesuffix(".weight"): np.asarray(weight, np.float64) for name, weight in weights.items()}
    rank, lam = len(w["kv_a_layernorm"]), _lambda_of_tokens(x, w["lambda_proj"])
    groups, latent = lam.shape[1] // ratio, rms_norm(np.asarray(x) @ w["q_a_proj"].T, w["q_a_layernorm"], eps)
    q = _heads(latent, w["q_proj"], groups, ratio + 1, len(w["q_proj"]) // (groups * (ratio + 1)))
    both = _heads(x, w["kv_a_proj"], 1, len(w["kv_a_proj"]))
    c, k_pe = rms_norm(both[:, 0, :, :rank], w["kv_a_layernorm"], eps), both[..., rank:]
    v = _heads(c, w["v_proj"], len(w["v_proj"]) // dv, dv)
    if positions is not None:
        nope, pe = np.split(q, [q.shape[-1] - k_pe.shape[-1]], -1)
        q, k_pe = np.concatenate([nope, rotary(pe, positions)], -1), rotary(k_pe, positions)
    k = _heads(c, w["k_proj"], v.shape[1], len(w["k_proj"]) // v.shape[1])
    k = np.concatenate([k, np.repeat(k_pe, v.shape[1], 1)], -1)[:, :, None]
    return attention(q, k, v, lam, **options)


def softmax_layer(x: ArrayLike, *weights: ArrayLike, heads: int, key_heads: int, **options: Any) -> Array:
    """The twin's attention layer: `heads` = A heads of d, each normalised by itself where there is a norm's weight."""
    return _layer(x, *weights, lam=0.0, groups=heads, queries=1, key_heads=key_heads, key_maps=1, **options)


def poly_norm(x: ArrayLike, weight: ArrayLike, bias: ArrayLike, eps: float = 1e-6) -> Array:
    """w0·n(x³) + w1·n(x²) + w2·n(x) + b, n(z) = z / sqrt(mean(z²) + eps) over the last axis."""
    x, weight, bias = (np.asarray(a, np.float64) for a in (x, weight, bias))
    ones = np.ones(x.shape[-1])
    return bias + sum(w * rms_norm(x**power, ones, eps) for w, power in zip(weight, (3, 2, 1), strict=True))


def decoder_layer(
    x: ArrayLike, attention_layer: Callable[[Array], Array], w_gate: ArrayLike, w_up: ArrayLike, w_down: ArrayLike,
    attention_norm: ArrayLike, feed_forward_norm: ArrayLike, eps: float = 1e-5,
    activation: tuple[ArrayLike, ArrayLike] | None = None,
) -> Array:  # fmt: skip
    """Y = MultiHead(RMSNorm(X)) + X, X' = SwiGLU(RMSNorm(Y)) + Y; `attention_layer` maps (B, N, D) to (B, N, D).

    SwiGLU(Z) = (swish(Z W_G) ⊙ Z W_1) W_2, swish(z) = z · sigmoid(z); Linear weights (out, in). With `activation`, the
    weight and bias of a PolyNorm, that is in the place of swish.
    """
    y = attention_layer(rms_norm(x, attention_norm, eps)) + np.asarray(x, np.float64)
    normed = rms_norm(y, feed_forward_norm, eps)
    gate, up = (normed @ np.asarray(weight, np.float64).T for weight in (w_gate, w_up))
    gate = gate / (1 + np.exp(-gate)) if activation is None else poly_norm(gate, *activation)
    return y + (gate * up) @ np.asarray(w_down, np.float64).T
