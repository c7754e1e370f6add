"""Computes attentions that subtract a second map: the paper's (Equations 2 and 3), grouped, and the second version."""

from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.nn.attention import Attention
from diff_transformer.nn.layers import DualLambda, HeadwiseNorm, Lambda
from diff_transformer.ops.operator import diff_attention, packed_attention


class DifferentialAttention(Attention):
    """Base of all kinds of differential attention: maps that are subtracted, a λ, one call of the operator.

    Examples:
        >>> attention = DiffAttentionV2(64, num_attention_heads=4, layer=1)
        >>> isinstance(attention, DifferentialAttention), attention.lambdas(torch.randn(2, 10, 64)).shape
        (True, torch.Size([2, 4, 10]))
    """

    def lambdas(self, hidden_states: Tensor) -> Tensor:
        """Return λ, broadcastable to (B, H, N), in float32 at least. Subclasses fill this in."""
        raise NotImplementedError

    def difference(self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **settings: Any) -> Tensor:
        """Compute heads (B, N, H, dv) by :func:`diff_attention`, normalised if the layer has a headwise norm.

        The operator applies the norm itself. A module in the norm's place, such as an adapter around it, is called
        instead. :meth:`transform_heads` is also for heads that something else than our operator has computed.
        Keys and values may be the rows of an eight-bit cache, (B, H_kv, S, width + 4).
        """
        norm, attend = self.head_norm, packed_attention if k.dtype == torch.int8 else diff_attention
        if not isinstance(norm, HeadwiseNorm):
            return self.transform_heads(attend(q, k, v, lam, **settings).transpose(1, 2))
        settings |= {"norm_weight": norm(None), "norm_eps": norm.eps, "norm_scale": norm.factor}
        return attend(q, k, v, lam, **settings).transpose(1, 2)

    def split_keys(self, keys: Tensor) -> Tensor:
        """View keys (B, H_kv, S, width) as (B, H_kv, 2 or 1, S, d): two keys of a head, or a shared one."""
        return keys.unflatten(-1, (2 if self.pairs_kv_heads else 1, -1)).transpose(2, 3)

    def split_queries(self, queries: Tensor) -> Tensor:
        """View queries (B, N, heads of W_Q, d) as the operator takes them, (B, G, r + 1, N, d)."""
        return queries.unflatten(2, (-1, self.ratio + 1)).permute(0, 2, 3, 1, 4)

    def attend(
        self, hidden_states: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        return self.difference(
            self.split_queries(queries),
            self.split_keys(keys),
            values,
            self.lambdas(hidden_states),
            signal_weight=self.signal_weights(hidden_states),
            is_causal=is_causal,
            attn_mask=mask,
            scale=self.scaling,
            dropout_p=self.active_dropout,
        )


class DiffAttention(DifferentialAttention):
    """Multi-head differential attention, Equations 2 and 3: (B, N, D) → (B, N, D).

    The layer replaces a Transformer's attention of the same sizes. Of that layer's A heads it makes A / 2 differential
    ones, each with two queries and two keys of width d and a value of width 2d, so the four projections keep their
    shapes. λ is shared by the heads, and each head's result is normalised and multiplied by 1 − λ_init before the
    output projection. The layer has 4d + 2d parameters more than :class:`SoftmaxAttention` with the same arguments: the
    vectors of λ, and the norm's weight.

    A call takes the tokens, the tables of :class:`RotaryEmbedding` and ``is_causal=True`` for a language model;
    :meth:`forward` has masks, the cache and cross-attention. A cache holds A_kv / 2 heads of keys [k1; k2] and as many
    of values, (B, A_kv / 2, S, 2d) each.

    Examples:
        >>> attention = DiffAttention(hidden_size=256, num_attention_heads=8, layer=1)  # 4 differential heads, d = 32
        >>> rotary = RotaryEmbedding(head_dim=32)
        >>> x = torch.randn(2, 10, 256)
        >>> attention(x, rotary.positions(x), is_causal=True).shape
        torch.Size([2, 10, 256])

    Args:
        hidden_size: width D of input and output.
        num_attention_heads: A, the *Transformer's* count of heads, and even: 8 makes 4 differential heads.
        layer: the layer's number l, counted from 1 as in the paper. It sets λ_init, and the layer's place in a cache,
            which counts from 0 (l − 1).
        num_key_value_heads: A_kv, the Transformer's count of key/value heads, which divides A and is even; A unless
            given. Two of them are the keys and the value of one differential head.
        head_dim: width d of a query or key; D / A unless given.
        lambda_init: "schedule" for 0.8 − 0.6·exp(−0.3·(l − 1)), or one constant.
        norm_eps: eps of the norms: the headwise one, and those of ``qk_norm``.
        headwise_norm: False (the ablation of Table 6) leaves the headwise norm out, and its factor 1 − λ_init.
        dual_lambda: whether λ is made of two numbers, by :class:`DualLambda`, and not of four vectors.
        bias: whether the four projections have biases; the paper's have none.
        qk_norm: whether every query and key is normalised before the rotary embedding, by RMSNorm over its d channels
            with one weight for the queries and one for the keys of the layer.
        qk_clip: whether their root mean square is cut at 3 there, by :class:`QueryKeyClip`; not with ``qk_norm``.
        output_gate: whether a projection of the input, as wide as all heads together, gates them channel by channel
            before the output projection: W_O (heads ⊙ sigmoid(X W_gate)).
        exclusive: whether each head is freed of the direction of the token's own value v, y − (y·v) v / ‖v‖²: exclusive
            self-attention. It comes after the headwise norm and before the gate, and not in cross-attention.
        rotary: False for a layer without rotary embedding in a model that has one: it leaves positions aside.
        dropout: the share of attention weights that are dropped in training, of each map by itself, before the maps
            are subtracted; at least 0 and below 1.
        context_size: the width of the other sequence in cross-attention; ``hidden_size`` unless given.

    Raises:
        ValueError: head counts that are odd or do not divide, a ``hidden_size`` that is no multiple of them without a
            ``head_dim``, a layer below 1, a ``lambda_init`` or a ``dropout`` that is not allowed.
    """

    pairs_kv_heads = True

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        layer: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        lambda_init: float | str = "schedule",
        norm_eps: float = 1e-5,
        headwise_norm: bool = True,
        *,
        dual_lambda: bool = False,
        **options: Any,
    ) -> None:
        sizes = hidden_size, num_attention_heads, layer, num_key_value_heads, head_dim, norm_eps
        super().__init__(*sizes, **options)
        self.lam = layer_lambda(self.head_dim, layer, lambda_init, dual_lambda)
        if headwise_norm:
            self.head_norm = HeadwiseNorm(2 * self.head_dim, self.lam.lambda_init, norm_eps)

    def lambdas(self, hidden_states: Tensor) -> Tensor:
        """Return λ of the layer, a float32 scalar: the same for every token."""
        return self.lam()


class GroupedDiffAttention(DifferentialAttention):
    """Grouped differential attention (arXiv 2510.06949): r signal heads share the noise map that is subtracted.

    The A query heads fall into G groups of r signal heads and one noise head, A = (r + 1)·G, so that r = 1 is
    :class:`DiffAttention`. Keys and values are pairs of the Transformer's heads, as there: two keys of width d and a
    value of width 2d, for one group or more. λ is shared by the heads of the layer, and each of the r·G heads is
    normalised. W_O reads r·G heads of 2d, more than the Transformer's if r > 1.

    The other arguments are those of :class:`DiffAttention`.

    Args:
        num_noise_heads: G, which divides A.
        num_key_value_heads: twice the pairs of keys, of whose number G is a multiple; 2G unless given, a pair to each.
        token_lambda: True makes λ of each signal head and token a projection, sigmoid(X W_λ), as in
            :class:`DiffAttentionV2`. There is no λ_init then, and the factor of the headwise norm is 1.

    Examples:
        >>> attention = GroupedDiffAttention(64, num_attention_heads=4, layer=1, num_noise_heads=1)
        >>> attention(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
    """

    pairs_kv_heads = True
    grouped = True

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        layer: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        lambda_init: float | str = "schedule",
        norm_eps: float = 1e-5,
        headwise_norm: bool = True,
        *,
        num_noise_heads: int,
        token_lambda: bool = False,
        dual_lambda: bool = False,
        **options: Any,
    ) -> None:
        sizes = hidden_size, num_attention_heads, layer, num_key_value_heads, head_dim, norm_eps
        if token_lambda and dual_lambda:
            raise ValueError("GroupedDiffAttention: dual_lambda and token_lambda exclude each other, got both.")
        super().__init__(*sizes, num_noise_heads=num_noise_heads, **options)
        self.token_lambda, constant = token_lambda, 0.0
        if token_lambda:
            self.lambda_proj = nn.Linear(hidden_size, num_attention_heads - num_noise_heads, bias=False)
        else:
            self.lam = layer_lambda(self.head_dim, layer, lambda_init, dual_lambda)
            constant = self.lam.lambda_init
        if headwise_norm:
            self.head_norm = HeadwiseNorm(2 * self.head_dim, constant, norm_eps)

    def lambdas(self, hidden_states: Tensor) -> Tensor:
        """Return λ of the layer, a float32 scalar, or of each signal head and token, (B, r·G, N)."""
        return token_lambdas(self.lambda_proj(hidden_states)) if self.token_lambda else self.lam()


class DiffAttentionV2(DifferentialAttention):
    """DIFF V2 (the authors, January 2026): A heads with two queries each over *shared* keys and values of width d.

    λ = sigmoid(X W_λ), one for each token and head; no headwise norm, no λ_init. W_Q is twice as large as the
    Transformer's, the cache is the same. Both queries of a head use the key/value head of its group.

    The other arguments are those of :class:`DiffAttention`, without ``lambda_init``; A may be odd.

    Args:
        headwise_norm: True adds RMSNorm over each head's own d channels, without a factor.

    Examples:
        >>> attention = DiffAttentionV2(64, num_attention_heads=4, layer=1)
        >>> attention(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
    """

    queries_per_head = 2
    gates_per_head = 1

    def lambdas(self, hidden_states: Tensor) -> Tensor:
        """Return λ of each head and token, (B, H, N), in float32 at least."""
        return token_lambdas(self.lambda_proj(hidden_states))


class DiffAttentionV3(DiffAttentionV2):
    """DIFF V2 with two gates: head i is σ(g_2i) · attn(q_2i, k, v) − σ(g_2i+1) · attn(q_2i+1, k, v), g = X W_λ.

    λ is the second gate, and the first is the weight of the signal, so that a head can be silent for a token. W_λ has
    two rows for each head. Arguments and sizes are otherwise those of :class:`DiffAttentionV2`.

    Examples:
        >>> attention, x = DiffAttentionV3(64, num_attention_heads=4, layer=1), torch.randn(2, 10, 64)
        >>> attention(x, is_causal=True).shape, attention.signal_weights(x).shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 10]))
    """

    gates_per_head = 2

    def lambdas(self, hidden_states: Tensor) -> Tensor:
        return token_lambdas(self.lambda_proj(hidden_states)[..., 1::2])

    def signal_weights(self, hidden_states: Tensor) -> Tensor:
        return token_lambdas(self.lambda_proj(hidden_states)[..., ::2])


class GroupedDiffAttentionV2(DiffAttentionV2):
    """DIFF V2 in groups: r signal heads share the noise map that is subtracted, and all maps the keys of their group.

    The A query heads fall into G groups of r signal heads and one noise head, A = (r + 1)·G. Keys and values have width
    d; their heads, G unless given, divide G. λ = sigmoid(X W_λ) for each token and signal head, and no headwise norm.
    W_O reads r·G heads of d. Motif-3 subtracts so, with ``output_gate``, in heads of :class:`LatentDiffAttention`.

    The other arguments are those of :class:`DiffAttentionV2`.

    Args:
        num_noise_heads: G, which divides A.

    Examples:
        >>> attention = GroupedDiffAttentionV2(64, num_attention_heads=8, layer=1, num_noise_heads=2)
        >>> attention(torch.randn(2, 10, 64), is_causal=True).shape, attention.o_proj.in_features
        (torch.Size([2, 10, 64]), 48)
    """

    queries_per_head = 1
    grouped = True


def layer_lambda(head_dim: int, layer: int, lambda_init: float | str, dual: bool) -> Lambda | DualLambda:
    """Make λ of a layer, of four vectors or of two numbers."""
    return DualLambda(layer, lambda_init) if dual else Lambda(head_dim, layer, lambda_init)


def token_lambdas(logits: Tensor) -> Tensor:
    """Turn logits X W_λ (B, N, heads) into λ of each head and token, (B, heads, N), in float32 at least."""
    return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).transpose(1, 2)
