"""Computes latent differential attention: keys and values are made of a latent, and it alone is cached."""

import torch
from torch import Tensor, nn

from diff_transformer.attention_types import LATENT_SIZES, latent_sizes
from diff_transformer.nn.differential import GroupedDiffAttentionV2
from diff_transformer.nn.layers import RMSNorm
from diff_transformer.ops import apply_rotary


class LatentDiffAttention(GroupedDiffAttentionV2):
    """Grouped DIFF V2 over a latent cache (GDLA, the attention of Motif-3): (B, N, D) → (B, N, D).

    The maps are those of :class:`GroupedDiffAttentionV2`: A query heads in G groups of r signal heads and one noise
    head, K key heads, λ = sigmoid(X W_λ) for each token and signal head, no headwise norm. Queries, keys and values
    come from latents, as in DeepSeek's MLA::

        q = RMSNorm(X W_qa) W_qb        [c, k_pe] = X W_kva, then c is normalised
        k = [c W_uk, k_pe]              v = c W_uv
        out = attn(q_signal, k, v) − λ · attn(q_noise, k, v)

    The rotary embedding turns the last channels of q, and k_pe, which is one for all heads. Here W_qb, W_uk and W_uv
    are ``q_proj``, ``k_proj`` and ``v_proj``. A cache holds one head, [c, k_pe], and values of width 0. Few queries on
    a longer cache meet c itself: W_uk goes into the queries, and W_uv comes after attention.

    Args:
        num_noise_heads: G, which divides A; A / 2 unless given.
        head_dim: width d of a query, ``qk_nope_head_dim`` + ``qk_rope_head_dim``; D / A unless these are given.
        q_lora_rank: width of the queries' latent; 12d, and at most D, unless given.
        kv_lora_rank: width of c; 4d unless given.
        qk_nope_head_dim, qk_rope_head_dim: channels of a query without and with rotary embedding, whose tables have the
            width of the latter, an even number; half of d each unless given.
        v_head_dim: width of a value; d unless given.
        bias: whether W_qa, W_kva and W_O have biases.
        hidden_size, num_attention_heads, layer, num_key_value_heads, norm_eps, output_gate, rotary, dropout,
            context_size: see :class:`GroupedDiffAttentionV2`; ``norm_eps`` is that of both latents' norms.

    Raises:
        ValueError: sizes that do not fit each other; in a call, some of the query heads alone, as a plan of tensor
            parallelism would have it.

    Examples:
        >>> attention = LatentDiffAttention(64, num_attention_heads=8, layer=1, head_dim=16, num_noise_heads=2)
        >>> x, rotary = torch.randn(2, 10, 64), RotaryEmbedding(head_dim=8)
        >>> attention(x, rotary.positions(x), is_causal=True).shape
        torch.Size([2, 10, 64])
        >>> keys, values = attention.project_context(x)
        >>> keys.shape, values.shape  # of a cache, for all heads: c of 64 channels and k_pe of 8
        (torch.Size([2, 1, 10, 72]), torch.Size([2, 1, 10, 0]))
    """

    caches_values = False

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
        bias: bool = False,
        output_gate: bool = False,
        rotary: bool = True,
        dropout: float = 0.0,
        context_size: int | None = None,
    ) -> None:
        given = q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.sizes: dict[str, int | None] = dict(zip(LATENT_SIZES, given, strict=True))
        if head_dim is None and qk_nope_head_dim is not None and qk_rope_head_dim is not None:
            head_dim = qk_nope_head_dim + qk_rope_head_dim
        super().__init__(
            hidden_size,
            num_attention_heads,
            layer,
            num_key_value_heads,
            head_dim,
            norm_eps,
            num_noise_heads=num_attention_heads // 2 if num_noise_heads is None else num_noise_heads,
            bias=bias,
            output_gate=output_gate,
            rotary=rotary,
            dropout=dropout,
            context_size=context_size,
        )
        self.key_heads, self.cached_heads = self.cached_heads, 1

    def make_projections(self, heads: int, kv_heads: int, norm_eps: float, bias: bool) -> None:
        sizes = latent_sizes(self.hidden_size, self.head_dim, self.sizes)
        self.heads, (of_queries, self.rank, self.nope, self.rope, self.width) = heads, sizes.values()
        self.q_a_proj = nn.Linear(self.hidden_size, of_queries, bias=bias)
        self.q_a_layernorm = RMSNorm(of_queries, norm_eps)
        self.kv_a_proj = nn.Linear(self.context_size, self.rank + self.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank, norm_eps)
        self.q_proj = nn.Linear(of_queries, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.rank, kv_heads * self.nope, bias=False)
        self.v_proj = nn.Linear(self.rank, kv_heads * self.width, bias=False)

    @property
    def cache_width(self) -> int:
        return self.rank + self.rope

    @property
    def value_width(self) -> int:
        return self.width

    @property
    def rotary_width(self) -> int:
        return self.rope

    def _queries(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        queries = self.q_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))).unflatten(-1, (-1, self.head_dim))
        if queries.shape[2] != self.heads:  # k_pe would get a part of its gradient
            raise ValueError(
                f"this rank has {queries.shape[2]} of {self.heads} query heads: tensor parallelism does not spread "
                "latent attention; spread the batch, or the weights by FSDP2."
            )
        if position_embeddings is None:
            return queries
        nope, pe = queries.split((self.nope, self.rope), -1)
        return torch.cat((nope, apply_rotary(pe, *position_embeddings)), -1)

    def _cached(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        c, k_pe = self.kv_a_proj(hidden_states).unsqueeze(2).split((self.rank, self.rope), -1)
        if position_embeddings is not None:
            k_pe = apply_rotary(k_pe, *position_embeddings)
        latents = torch.cat((self.kv_a_layernorm(c), k_pe), -1).transpose(1, 2)  # (B, 1, N, rank + rope)
        return latents, latents[..., :0]

    def absorbs(self, n: int, s: int) -> bool:
        """Return whether N queries meet the S latents themselves, and not keys and values made of them.

        For each of S, wider keys and values cost N queries multiply-adds, and making them costs as many as W_uk and
        W_uv have weights. An exported graph, whose lengths are open, absorbs. An adapter or eight bits in the place of
        W_uk or W_uv have no weight to absorb; and :meth:`transform_heads` tells heads of latents by their width.
        """
        plain = all(type(one) is nn.Linear and not one.weight.is_meta for one in (self.k_proj, self.v_proj))
        if not plain or self.rank == self.width:
            return False
        signal = self.heads - self.heads // (self.ratio + 1)
        wider = self.heads * (self.rank - self.nope) + signal * (self.rank - self.width)
        weights = self.key_heads * self.rank * (self.nope + self.width)
        return torch.compiler.is_exporting() or (n < s and n * wider <= weights)

    def unpacked(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the call: of one head of latents, or as many as K of what they make."""
        c, k_pe = keys.split((self.rank, self.rope), -1)
        if self.absorbs(queries.shape[1], keys.shape[2]):
            nope, pe = queries.split((self.nope, self.rope), -1)
            weight = self.k_proj.weight.unflatten(0, (self.key_heads, -1))
            nope = torch.einsum("bnkhd,kdc->bnkhc", nope.unflatten(2, (self.key_heads, -1)), weight).flatten(2, 3)
            return torch.cat((nope, pe), -1), keys, c
        made = self.k_proj(c.squeeze(1)), self.v_proj(c.squeeze(1))
        nope, values = (x.unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for x in made)
        return queries, torch.cat((nope, k_pe.expand(-1, self.key_heads, -1, -1)), -1), values

    def transform_heads(self, heads: Tensor) -> Tensor:
        """Apply W_uv to heads of latents (B, N, H, rank); return heads of values (B, N, H, dv) as they are."""
        if heads.shape[-1] == self.width:
            return heads
        weight = self.v_proj.weight.unflatten(0, (self.key_heads, -1))
        return torch.einsum("bnkhc,kvc->bnkhv", heads.unflatten(2, (self.key_heads, -1)), weight).flatten(2, 3)
