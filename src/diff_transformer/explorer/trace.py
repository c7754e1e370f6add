"""Holds what one run of a model over a text leaves, from which the map of any head is computed when it is asked for.

Maps of all heads at once would take gigabytes at 2,048 tokens. A trace of one of our models keeps what each layer
received, which is small, and computes a head's maps from it with ``diff_attention_maps``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from diff_transformer.ops import diff_attention_maps


class HeadMaps(NamedTuple):
    """Maps of some heads of a layer for some rows.

    Attributes:
        first: A1, or the one map of ordinary attention, (H, R, N).
        second: A2, (H, R, N), or None for ordinary attention.
        lam: λ of each head and row, (H, R), or None.
    """

    first: Tensor
    second: Tensor | None
    lam: Tensor | None

    @property
    def difference(self) -> Tensor:
        """What the values are multiplied by: A1 − λA2, or the one map, (H, R, N)."""
        if self.second is None or self.lam is None:
            return self.first
        return self.first - self.lam.unsqueeze(-1) * self.second


class Maps(Protocol):
    """The maps of a run, computed when they are asked for."""

    def of(self, layer: int, heads: slice, rows: slice) -> HeadMaps:
        """Maps of some heads of a layer (both counted from 0) and of some rows, which are consecutive."""
        ...

    @property
    def bytes(self) -> int:
        """The memory that is held for them."""
        ...


@dataclass(frozen=True, eq=False)
class Trace:
    """One run over N tokens.

    Attributes:
        tokens: N of them.
        next_log_probabilities: (V,), of the token after the last.
        token_losses: (N − 1,) in nats, of the tokens from the second on.
        lambdas: mean over the tokens of each head's λ, (layers, H); None for ordinary attention.
        maps: the maps of any head.
    """

    tokens: tuple[int, ...]
    next_log_probabilities: Tensor
    token_losses: Tensor
    lambdas: Tensor | None
    maps: Maps

    @property
    def loss(self) -> float | None:
        """Mean loss of a token, in nats; None for a text of one token."""
        return self.token_losses.mean().item() if self.token_losses.numel() else None

    def divergence(self, other: "Trace") -> float:
        """KL(this ‖ other) of the next token's distributions, in nats."""
        before, after = self.next_log_probabilities.double(), other.next_log_probabilities.double()
        terms = before.exp() * (before - after)
        return max(0.0, terms.where(before > -math.inf, torch.zeros_like(terms)).sum().item())

    @property
    def bytes(self) -> int:
        """The memory that the trace holds, about."""
        return self.maps.bytes + sum(x.nbytes for x in (self.next_log_probabilities, self.token_losses))


@dataclass(frozen=True, eq=False)
class RecomputedMaps:
    """Maps of one of our models from what each of its layers received.

    Attributes:
        attentions: the attention of each layer.
        normed: what each received, (1, N, D).
        lambdas: λ of each layer in this run, broadcastable to (1, H, N), or None.
        position_embeddings: cos and sin.
    """

    attentions: Sequence[Any]
    normed: Sequence[Tensor]
    lambdas: Sequence[Tensor | None]
    position_embeddings: tuple[Tensor, Tensor]
    _last: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def of(self, layer: int, heads: slice, rows: slice) -> HeadMaps:
        attention, lam = self.attentions[layer], self.lambdas[layer]
        queries, keys = self._projected(layer)
        if lam is None:
            q = queries.transpose(1, 2).unsqueeze(2)  # (1, A, 1, N, d)
            k = keys.unsqueeze(2)
        else:
            q = attention.split_queries(queries)  # (1, G, r + 1, N, d)
            k = attention.split_keys(keys)  # (1, H_kv, 1 or 2, S, d)
        ratio, length = attention.ratio, q.shape[3]
        count = q.shape[1] * ratio
        first_row, last_row, _ = rows.indices(length)
        chosen = torch.arange(count, device=q.device)[heads]
        # Causality is counted from the end of the keys, so the last row asked for is the last key.
        q = q[:, :, :, first_row:last_row]
        k = k[:, chosen // (count // k.shape[1]), :, :last_row]
        if lam is None:
            # Two heads take the places of the two maps, so that no map is computed for nothing.
            pairs = torch.arange(chosen.numel() + chosen.numel() % 2).clamp(max=chosen.numel() - 1).view(-1, 2)
            q, k = q[:, chosen][:, pairs, 0], k[:, pairs, 0]
        else:
            signal, noise = q[:, chosen // ratio, chosen % ratio], q[:, chosen // ratio, -1]
            q = torch.stack((signal, noise), dim=2)  # (1, chosen, 2, rows, d)
            lam = lam.expand(1, -1, length) if lam.dim() else lam.expand(1, count, length)
            lam = lam[:, chosen, first_row:last_row]
        maps = diff_attention_maps(
            q,
            k,
            0.0 if lam is None else lam,
            is_causal=True,
            scale=attention.scaling,
            window=attention.sliding_window,
        )
        first, second = (a[0] if last_row == length else pad(a[0], (0, length - last_row)) for a in maps[:2])
        if lam is None:
            return HeadMaps(torch.stack((first, second), dim=1).flatten(0, 1)[: chosen.numel()], None, None)
        return HeadMaps(first, second, lam[0])

    def _projected(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of a layer; those of the last one are kept, as one head after another is asked for."""
        if layer not in self._last:
            queries, keys, _ = self.attentions[layer].project(self.normed[layer], self.position_embeddings)
            self._last.clear()
            self._last[layer] = queries, keys
        return self._last[layer]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.normed)


@dataclass(frozen=True, eq=False)
class ReturnedMaps:
    """The maps that a model of transformers returned, each (A, N, N) of a layer."""

    layers: Sequence[Tensor]

    def of(self, layer: int, heads: slice, rows: slice) -> HeadMaps:
        maps = self.layers[layer][heads, rows]
        return HeadMaps(maps.to(torch.promote_types(maps.dtype, torch.float32)), None, None)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.layers)
