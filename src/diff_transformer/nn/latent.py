"""Computes latent differential attention: keys and values are made of a latent, and it alone is cached."""

from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.attention_types import LATENT_SIZES, latent_sizes
from diff_transformer.nn.attention import normed_and_turned
from diff_transformer.nn.differential import GroupedDiffAttentionV2
from diff_transformer.nn.layers import RMSNorm


class LatentDiffAttention(GroupedDiffAttentionV2):
    """Grouped DIFF V2 over a latent cache (GDLA, the attention of Motif-3): (B, N, D) → (B, N, D).

    Queries, keys and values come from latents, as in DeepSeek's MLA, and the maps of a group are subtracted as in V2::

        q = norm(X W_qa) W_qb     [c, k_pe] = X W_kva, c normed     k = [c W_uk, k_pe]     v = c W_uv
        out = attn(q_signal, k, v) − λ · attn(q_noise, k, v)        λ = sigmoid(X W_λ)

    The rotary embedding turns k_pe, one for all heads, and as many channels at the end of q. W_qb, W_uk and W_uv are
    ``q_proj``, ``k_proj`` and ``v_proj``. A cache holds one head of keys, [c, k_pe], and values of width 0. Few queries
    on a longer cache meet c itself: W_uk goes into the queries, and W_uv comes after attention.

    The other arguments are those of :class:`GroupedDiffAttentionV2`, but for the norms of heads, queries and keys,
    ``qk_clip`` and ``exclusive``; biases are those of W_qa, W_kva and W_O.

    Args:
        num_noise_heads: G, which divides A; A / 2 unless given.
        head_dim: width d of a query, ``qk_nope_head_dim`` + ``qk_rope_head_dim``; D / A unless those are given.
        q_lora_rank, kv_lora_rank: widths of the queries' latent, 12d and at most D unless given, and of c, 4d.
        qk_nope_head_dim, qk_rope_head_dim: channels of a query without rotary embedding and with it, an even number and
            the width of the tables; half of d each unless given.
        v_head_dim: width of a value; d unless given.

    Examples:
        >>> attention = LatentDiffAttention(64, num_attention_heads=8, layer=1, head_dim=16, num_noise_heads=2)
        >>> x, rotary = torch.randn(2, 10, 64), RotaryEmbedding(head_dim=8)
        >>> attention(x, rotary.positions(x), is_causal=True).shape
        torch.Size([2, 10, 64])
        >>> attention.project_context(x)[0].shape  # as cached: c of 64 channels and k_pe of 8
        torch.Size([2, 1, 10, 72])
    """

    caches_values = False
    absorbed = ("k_proj", "v_proj")  # the projections whose weights decoding multiplies other things with

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        layer: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
        *,
        num_noise_heads: int | None = None,
        q_lora_rank: int | None = None,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        **options: Any,
    ) -> None:
        for name in ("headwise_norm", "qk_norm", "qk_clip", "exclusive"):
            if options.get(name):
                raise ValueError(f"LatentDiffAttention: {name} must be left out, got {options[name]!r}.")
        given = q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        named = dict(zip(LATENT_SIZES, given, strict=True))
        self.sizes, head_dim = latent_sizes(hidden_size, num_attention_heads, head_dim, named)
        sizes = hidden_size, num_attention_heads, layer, num_key_value_heads, head_dim, norm_eps
        groups = num_attention_heads // 2 if num_noise_heads is None else num_noise_heads
        super().__init__(*sizes, num_noise_heads=groups, **options)
        self.cached_heads = 1

    def make_projections(self, heads: int, kv_heads: int, norm_eps: float, bias: bool) -> None:
        self.heads, (of_queries, self.rank, self.nope, self.rope, self.value_width) = heads, self.sizes.values()
        self.cache_width, self.rotary_width = self.rank + self.rope, self.rope
        self.q_a_proj = nn.Linear(self.hidden_size, of_queries, bias=bias)
        self.q_a_layernorm = RMSNorm(of_queries, norm_eps)
        self.kv_a_proj = nn.Linear(self.context_size, self.cache_width, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank, norm_eps)
        self.q_proj = nn.Linear(of_queries, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.rank, kv_heads * self.nope, bias=False)
        self.v_proj = nn.Linear(self.rank, kv_heads * self.value_width, bias=False)

    def _queries(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        queries = self.q_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))).unflatten(-1, (-1, self.head_dim))
        if queries.shape[2] != self.heads:  # k_pe would get a part of its gradient
            raise ValueError(
                f"this rank has {queries.shape[2]} of {self.heads} query heads: latents are not spread by heads."
            )
        nope, pe = queries.split((self.nope, self.rope), -1)
        return torch.cat((nope, normed_and_turned(pe, None, position_embeddings)), -1)

    def _cached(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        c, k_pe = self.kv_a_proj(hidden_states).unsqueeze(2).split((self.rank, self.rope), -1)
        latents = torch.cat((self.kv_a_layernorm(c), normed_and_turned(k_pe, None, position_embeddings)), -1)
        return latents.transpose(1, 2), latents.transpose(1, 2)[..., :0]  # (B, 1, N, rank + rope), (B, 1, N, 0)

    def absorbs(self, n: int, s: int) -> bool:
        """Return whether N queries meet the S latents themselves, and not keys and values made of them.

        A wider key and value cost each query of each head multiply-adds, and making them costs all weights of W_uk and
        W_uv. An adapter in their place, or a hook, has none; :meth:`transform_heads` tells heads of latents by their
        width; an exported graph, whose lengths are open, absorbs.
        """
        makers = self.k_proj, self.v_proj
        if self.rank == self.value_width or any(type(one) is not nn.Linear or one.weight.is_meta for one in makers):
            return False
        if any(one._forward_hooks or one._forward_pre_hooks for one in makers):
            return False
        wider = self.heads * (2 * self.rank - self.nope - self.value_width)
        return torch.compiler.is_exporting() or (n < s and n * wider <= sum(one.weight.numel() for one in makers))

    def resolve_latents(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the call: of the one head of latents, or of the heads that they make."""
        c, k_pe = keys.split((self.rank, self.rope), -1)
        if self.absorbs(queries.shape[1], keys.shape[2]):
            nope, pe = queries.split((self.nope, self.rope), -1)
            weight = self.k_proj.weight.unflatten(0, (-1, self.nope))
            nope = torch.einsum("bnkhd,kdc->bnkhc", nope.unflatten(2, (len(weight), -1)), weight).flatten(2, 3)
            return torch.cat((nope, pe), -1), keys, c
        nope = self.k_proj(c.squeeze(1)).unflatten(-1, (-1, self.nope)).transpose(1, 2)
        values = self.v_proj(c.squeeze(1)).unflatten(-1, (-1, self.value_width)).transpose(1, 2)
        return queries, torch.cat((nope, k_pe.expand(-1, nope.shape[1], -1, -1)), -1), values

    def transform_heads(self, heads: Tensor) -> Tensor:
        """Apply W_uv to heads of latents (B, N, H, rank); return heads of values (B, N, H, dv) as they are."""
        if heads.shape[-1] == self.value_width:
            return heads
        weight = self.v_proj.weight.unflatten(0, (-1, self.value_width))
        return torch.einsum("bnkhc,kvc->bnkhv", heads.unflatten(2, (len(weight), -1)), weight).flatten(2, 3)
