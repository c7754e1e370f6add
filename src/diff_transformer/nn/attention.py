"""Computes the parts that all multi-head attentions share, and the Transformer's attention.

All of them take the *same* ``num_attention_heads``: that of the Transformer with which they are compared, D / d.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.nn.layers import (
    HeadwiseNorm,
    QueryKeyClip,
    QueryKeyNorm,
    ReplicatedAcrossHeads,
    residual_projection,
)
from diff_transformer.ops import apply_rotary
from diff_transformer.ops.attention_request import check_dense
from diff_transformer.ops.cpu.cpu_backend import token_step
from diff_transformer.ops.operator import check_broadcast, check_mask


class KeyValueCache(Protocol):
    """Interface of a KV cache, which every cache of transformers has.

    Examples:
        >>> cache = transformers.DynamicCache()
        >>> heads = DiffAttention(64, num_attention_heads=4, layer=1)(torch.randn(1, 10, 64), cache=cache)
        >>> cache.get_seq_length(0)
        10
    """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append (B, heads, N, width) keys and values of a layer, counted from 0; return all of the layer's."""
        ...

    def get_seq_length(self, layer_idx: int) -> int:
        """Return how many tokens the layer has seen."""
        ...


class Attention(nn.Module):
    """Base of all multi-head attentions: four projections, rotary embedding, an optional cache, one call.

    The other arguments are those of :class:`DiffAttention`, without ``lambda_init``.

    Args:
        headwise_norm: True adds RMSNorm over each head's own d channels before the output projection. Without a λ_init
            (nothing is subtracted, or there is none to a layer) its factor 1 − λ_init is 1.
        num_noise_heads: G, into how many groups the A query heads fall, each of which has one noise map; for types with
            groups, and for them alone.

    Examples:
        >>> issubclass(SoftmaxAttention, Attention) and issubclass(DiffAttention, Attention)
        True
    """

    pairs_kv_heads = False  # whether two key/value heads of the Transformer make one differential head
    queries_per_head = 1  # heads of W_Q to a head of the Transformer
    gates_per_head = 0  # rows of W_λ, a projection of the token, to a head of W_O
    grouped = False  # whether heads fall into groups
    caches_values = True  # as wide as keys; else their width in the cache is 0
    # r, how many signal heads share the map that is subtracted from theirs. Where something is subtracted, W_Q's heads
    # come in stripes of r + 1: the queries of r signal heads, and behind them that of their noise map.
    ratio = 1

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        layer: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
        headwise_norm: bool = False,
        num_noise_heads: int | None = None,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        qk_clip: bool = False,
        output_gate: bool = False,
        exclusive: bool = False,
        rotary: bool = True,
        dropout: float = 0.0,
        context_size: int | None = None,
    ) -> None:
        super().__init__()
        owner, pairs = type(self).__name__, self.pairs_kv_heads
        if self.grouped is (num_noise_heads is None):
            allowed = "given" if self.grouped else "left out, as the heads of this type fall into no groups"
            raise ValueError(f"{owner}: num_noise_heads must be {allowed}, got {num_noise_heads}.")
        sizes = hidden_size, num_attention_heads, num_key_value_heads, head_dim
        kv_heads = checked_key_heads(owner, *sizes, pairs, num_noise_heads)
        if layer < 1:
            raise ValueError(f"layer must be 1 or more (the paper counts layers from 1), got {layer}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"{owner}: dropout must be at least 0 and below 1, got {dropout}.")
        if context_size is not None and context_size < 1:
            raise ValueError(f"{owner}: context_size must be 1 or more, got {context_size}.")
        if qk_norm and qk_clip:
            raise ValueError(f"{owner}: qk_norm and qk_clip exclude each other, got both.")
        self.layer_idx = layer - 1
        self.dropout = float(dropout)
        self.head_norm: nn.Module | None = None
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.scaling = self.head_dim**-0.5
        # The sizes are the layer's own: what stands in the place of a projection need not know any.
        self.hidden_size, self.context_size = hidden_size, context_size or hidden_size
        self.cached_heads = kv_heads // 2 if pairs else kv_heads
        self.value_width = 2 * self.head_dim if pairs else self.head_dim  # of a value, and of a head that W_O reads
        self.cache_width, self.rotary_width = self.value_width, self.head_dim  # of a cached key, and of rotary tables
        self.num_key_value_groups = num_attention_heads * self.queries_per_head // self.cached_heads
        signal = num_attention_heads - (num_noise_heads or 0)
        if num_noise_heads is not None:
            self.ratio = signal // num_noise_heads
        self.make_projections(num_attention_heads * self.queries_per_head, kv_heads, norm_eps, bias)
        heads = signal // 2 if pairs and num_noise_heads is None else signal  # which W_O reads
        self.o_proj = residual_projection(heads * self.value_width, hidden_size, bias)
        self.gate_proj = nn.Linear(hidden_size, heads * self.value_width, bias=False) if output_gate else None
        self.exclusive, self.rotary = exclusive, rotary
        self.q_norm: nn.Module | None = QueryKeyNorm(self.head_dim, norm_eps) if qk_norm else None
        self.k_norm: nn.Module | None = QueryKeyNorm(self.head_dim, norm_eps) if qk_norm else None
        if qk_clip:
            self.q_norm, self.k_norm = QueryKeyClip(norm_eps), QueryKeyClip(norm_eps)
        if self.gates_per_head:
            self.lambda_proj = nn.Linear(hidden_size, signal * self.gates_per_head, bias=False)
        if headwise_norm:
            self.head_norm = HeadwiseNorm(self.head_dim, 0.0, norm_eps)

    def make_projections(self, heads: int, kv_heads: int, norm_eps: float, bias: bool) -> None:
        """Make W_Q of so many heads, and W_K and W_V, once the other sizes are known."""
        self.q_proj = nn.Linear(self.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(self.context_size, kv_heads * self.head_dim, bias=bias)

    def project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, N, D) to queries (B, N, heads of W_Q, d), and keys and values as cached, (B, heads, N, width)."""
        if not self.rotary:
            position_embeddings = None
        if position_embeddings is not None:
            is_decoding = hidden_states.shape[1] == 1 and not (self.training or torch.is_grad_enabled())
            if is_decoding and self.caches_values and self.q_norm is None and self.k_norm is None:
                return self._project_token(hidden_states, *position_embeddings)
            # The same for every head.
            position_embeddings = position_embeddings[0].unsqueeze(-2), position_embeddings[1].unsqueeze(-2)
        queries = self._queries(hidden_states, position_embeddings)
        keys, values = self._cached(hidden_states, position_embeddings)
        count, key_heads = queries.shape[2], keys.shape[1]
        belong = self.num_key_value_groups * key_heads
        if self.caches_values and count != belong and (key_heads > 1 or count > belong):
            raise ValueError(
                f"this rank has {count} query heads and {key_heads} key heads, to which {belong} belong: a plan of "
                "tensor parallelism must split W_Q, W_K and W_V (q_proj, k_proj, v_proj) alike."
            )
        return queries, keys, values

    def resolve_latents(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the call, of those that :meth:`project` and a cache give."""
        return queries, keys, values

    def _project_token(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project one token as :meth:`project`, bit by bit, with queries and keys turned in one call.

        While decoding with a small model, the number of operators costs more than the numbers in them.
        """
        queries, keys, values = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        turned, cached = token_step("rotated", queries, keys, cos, sin, self.cache_width) or (None, None)
        if turned is not None and cached is not None and turned.shape[-1] == self.head_dim:  # as wide as the tables
            return turned, cached, values.reshape(cached.shape)
        count, of_keys = queries.shape[-1] // self.head_dim, keys.shape[-1] // self.head_dim
        heads = torch.cat((queries, keys), -1).view(len(queries), count + of_keys, self.head_dim)
        turned = apply_rotary(heads, cos, sin)
        sizes = len(keys), keys.shape[-1] // self.cache_width, 1, self.cache_width
        return turned[:, None, :count], turned[:, count:].reshape(sizes), values.reshape(sizes)

    def project_context(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Project another sequence (B, S, ``context_size``) to keys and values, (B, heads, S, width) each.

        ``forward`` takes them in place of the sequence: computed once, they serve every call for it, as those of a
        decoder that writes token by token.
        """
        if context.dim() != 3 or context.shape[-1] != self.context_size:
            raise ValueError(f"context must be (B, S, {self.context_size}), got {tuple(context.shape)}.")
        return self._cached(context, None)

    def _queries(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        queries = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        # Its keys may be whole, where their heads are fewer than the ranks.
        if queries.shape[2] != (heads := self.num_key_value_groups * self.cached_heads) and torch.is_grad_enabled():
            self._require_sums(queries.shape[2], heads)
        return normed_and_turned(queries, self.q_norm, position_embeddings)

    def _cached(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        keys = normed_and_turned(keys, self.k_norm, position_embeddings).flatten(-2)
        values = self.v_proj(hidden_states)
        sizes = -1, self.cache_width
        return keys.unflatten(-1, sizes).transpose(1, 2), values.unflatten(-1, sizes).transpose(1, 2)

    def _require_sums(self, part: int, heads: int) -> None:
        """Refuse gradients of some of the heads if nobody sums those of the parameters that all of them share."""
        for name, module in self.named_modules():  # an adapter around one included
            if not isinstance(module, ReplicatedAcrossHeads) or module.sum_gradient is not None:
                continue
            if any(parameter.requires_grad for parameter in module.parameters()):
                raise ValueError(
                    f"this rank has {part} of {heads} query heads, and its part of the gradient of {name!r} that "
                    "nobody adds to the others: spread the model by diff_transformer.parallel.tensor_parallel, or by "
                    "transformers with the plan of its configuration, or compute under torch.no_grad()."
                )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: KeyValueCache | None = None,
        context: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend: N tokens to themselves, to the S tokens of a cache that ends with them, or to another sequence.

        Args:
            hidden_states: (B, N, D), in the dtype of the weights.
            position_embeddings: cos and sin, each broadcastable to (B, N, d), from :class:`RotaryEmbedding`; None for a
                layer that knows no positions.
            attn_mask: broadcastable to (B, heads, N, S), boolean (True = may attend) or additive; ``heads`` are those
                of the layer, A / 2 in :class:`DiffAttention`. It goes along with ``is_causal``. It may be as wide as a
                static cache, whose empty slots nobody sees.
            is_causal: query i sees key j if j ≤ i + S − N; as in the operator, off by default.
            cache: keys and values of earlier tokens, one of transformers' caches or any :class:`KeyValueCache`; those
                of this call are appended. All layers of a model may share it: each has its own entry.
            context: for cross-attention, the other sequence (B, S, ``context_size``), whose keys and values the queries
                meet, or the pair that :meth:`project_context` has made of it. ``attn_mask`` says which of its tokens
                are seen; positions, causality and a cache have no meaning then.

        Returns:
            (B, N, D), in the dtype of the weights.

        Raises:
            ValueError: hidden states or a context of another width; a mask, cosines or sines that do not broadcast; a
                context together with positions, causality, a cache or ``exclusive``, or no context although
                ``context_size`` differs from D.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states must be (B, N, {self.hidden_size}), got {tuple(hidden_states.shape)}.")
        if context is not None:
            others = {"position_embeddings": position_embeddings, "is_causal": is_causal or None, "cache": cache}
            others["exclusive"] = self.exclusive or None
            if given := [name for name, value in others.items() if value is not None]:
                raise ValueError(
                    "context, the other sequence of cross-attention, goes without position_embeddings, is_causal, "
                    f"cache and exclusive, got {', '.join(given)} as well."
                )
            queries = self._queries(hidden_states, None)
            keys, values = self.project_context(context) if isinstance(context, Tensor) else context
            batch, count = len(hidden_states), self.cached_heads
            widths = self.cache_width, self.cache_width * self.caches_values
            if [x.shape for x in (keys, values)] != [(batch, count, *keys.shape[2:3], width) for width in widths]:
                raise ValueError(
                    f"context must be of the batch {batch}, or the keys and values that project_context makes of it, "
                    f"({batch}, {count}, S, {widths[0]}) and ({batch}, {count}, S, {widths[1]}), got "
                    f"{tuple(keys.shape)} and {tuple(values.shape)}."
                )
        elif self.context_size != self.hidden_size:
            raise ValueError(
                f"this layer attends to another sequence, of width {self.context_size} where hidden_size is "
                f"{self.hidden_size}: context must be given, got None."
            )
        else:
            tables = () if position_embeddings is None else position_embeddings
            if not isinstance(tables, tuple | list) or len(tables) not in (0, 2):
                raise ValueError(f"position_embeddings must be a pair, cos and sin, got {position_embeddings!r:.80}.")
            for name, table in zip(("cos", "sin"), tables, strict=False):
                check_broadcast(name, table, "(B, N, d)", (*hidden_states.shape[:2], self.rotary_width))
            queries, keys, values = self.project(hidden_states, position_embeddings)
        if isinstance(attn_mask, Tensor):
            check_dense("attn_mask", attn_mask)
        own = values
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
            # A static cache returns all its slots; those after the tokens it has seen are empty.
            slots, seen = keys.shape[2], int(cache.get_seq_length(self.layer_idx))
            keys, values = keys[:, :, :seen], values[:, :, :seen]
            if isinstance(attn_mask, Tensor) and attn_mask.shape[-1:] == (slots,):
                attn_mask = attn_mask[..., :seen]
        heads = self.attend(hidden_states, *self.resolve_latents(queries, keys, values), attn_mask, is_causal)
        return self.output(hidden_states, heads, own)

    def output(self, hidden_states: Tensor, heads: Tensor, own: Tensor) -> Tensor:
        """Apply the gate that hidden_states (B, N, D) make, if any, and W_O to heads (B, N, H, dv) → (B, N, D).

        ``own`` are the tokens' own values (B, H_kv, N, dv), of which an exclusive layer leaves nothing in their heads.
        """
        if self.exclusive:
            own = own.transpose(1, 2).repeat_interleave(heads.shape[2] // own.shape[1], dim=2)
            heads = without_direction(heads, own)
        flat = heads.flatten(-2)
        if self.gate_proj is not None:
            flat = flat * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(flat)

    @property
    def active_dropout(self) -> float:
        """The share of attention weights that are dropped now: none but in training."""
        return self.dropout if self.training else 0.0

    def attend(
        self, hidden_states: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Compute heads (B, N, H, dv) from queries, cached keys and values. Subclasses fill this in."""
        raise NotImplementedError

    def lambdas(self, hidden_states: Tensor) -> Tensor | None:
        """Return λ of differential attention, broadcastable to (B, H, N); None if nothing is subtracted."""
        return None

    def signal_weights(self, hidden_states: Tensor) -> Tensor | None:
        """Return the weight of the first map, broadcastable to (B, H, N); None if it is 1."""
        return None

    def transform_heads(self, heads: Tensor) -> Tensor:
        """Apply the headwise norm, if any, to heads (…, H, dv) before the output projection."""
        return heads if self.head_norm is None else self.head_norm(heads)


class SoftmaxAttention(Attention):
    """Ordinary multi-head attention of the same sizes, through torch's ``scaled_dot_product_attention``.

    The other arguments are those of :class:`DiffAttention`, without ``lambda_init``; A may be odd.

    Args:
        headwise_norm: True is the control of Table 6: RMSNorm over each head's own d channels, without a factor.

    Examples:
        >>> attention = SoftmaxAttention(64, num_attention_heads=4, layer=1)
        >>> attention(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
    """

    def attend(
        self, hidden_states: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        batch, n, num_heads, _ = queries.shape
        s = keys.shape[2]
        mask = check_mask(mask, queries, (batch, num_heads, n, s))
        if n == 1:  # it is the last, and sees all keys
            is_causal = False
        if is_causal and (n != s or mask is not None):
            # torch aligns its own causality to the start of the keys and takes no mask beside it.
            visible, is_causal = torch.ones(n, s, dtype=torch.bool, device=keys.device).tril(s - n), False
            hidden = 0 if mask is None or mask.dtype == torch.bool else -math.inf
            mask = visible if mask is None else mask.masked_fill(~visible, hidden)
        heads = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            dropout_p=self.active_dropout,
            is_causal=is_causal,
            scale=self.scaling,
            enable_gqa=self.num_key_value_groups > 1,
        )
        return self.transform_heads(heads.transpose(1, 2))


def normed_and_turned(x: Tensor, norm: nn.Module | None, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
    """Apply the layer's norm and rotary embedding (…, 1, d), if it has them, to queries or keys (…, heads, d)."""
    x = x if norm is None else norm(x)
    return x if position_embeddings is None else apply_rotary(x, *position_embeddings)


def without_direction(x: Tensor, direction: Tensor) -> Tensor:
    """Return x − (x·v) v / ‖v‖² over the last axis, of x and ``direction`` v (…, n), in float32; x where v is 0."""
    wide, v = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (x, direction))
    size = v.square().sum(-1, keepdim=True)
    share = (wide * v).sum(-1, keepdim=True) / size.masked_fill(size == 0, 1.0)
    return (wide - share * v).to(x.dtype)


def checked_key_heads(
    owner: str,
    hidden_size: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    pairs_kv_heads: bool,
    noise_heads: int | None,
) -> int:
    """Return the key/value heads of the Transformer: those given, or A; with groups G, or 2G in pairs.

    Sizes that do not fit each other are refused, before any parameter is made.
    """
    if kv_heads is None:
        kv_heads = heads if noise_heads is None else noise_heads * (2 if pairs_kv_heads else 1)
    if noise_heads is not None:
        if noise_heads < 1 or heads < 2 * noise_heads or heads % noise_heads:
            raise ValueError(
                f"{owner}: num_attention_heads must be (r + 1) · num_noise_heads, r signal heads and one noise head to "
                f"a group, with r of 1 or more, got {heads} and {noise_heads}."
            )
        size, keys = (2, "the pairs of keys, num_key_value_heads / 2") if pairs_kv_heads else (1, "num_key_value_heads")
        if kv_heads < size or kv_heads % size or noise_heads % (kv_heads // size):
            raise ValueError(
                f"{owner}: num_noise_heads must be a multiple of {keys}, got {noise_heads} and num_key_value_heads "
                f"{kv_heads}."
            )
    elif heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{owner}: num_attention_heads must be a positive multiple of num_key_value_heads, "
            f"got {heads} and {kv_heads}."
        )
    elif pairs_kv_heads and (heads % 2 or kv_heads % 2):
        raise ValueError(
            f"{owner}: num_attention_heads and num_key_value_heads are the Transformer's and must be even "
            f"(a differential head takes two), got {heads} and {kv_heads}."
        )
    if head_dim is None and hidden_size % heads:
        raise ValueError(
            f"{owner}: hidden_size must be a multiple of num_attention_heads, or head_dim be given, "
            f"got {hidden_size} and {heads}."
        )
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"{owner}: head_dim must be 1 or more, got {head_dim}.")
    return kv_heads
