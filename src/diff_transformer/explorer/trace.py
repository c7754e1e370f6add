"""Holds the trace of a model's run over a text; computes the maps of its heads, their numbers, pictures and bytes."""

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from diff_transformer.ops import diff_attention_maps
from diff_transformer.utils.suggestions import quoted

MAGIC = b"DTM2"  # of the binary form of a head's maps


class HeadMaps(NamedTuple):
    """Maps of some heads of a layer for some rows.

    Attributes:
        first: A1 times its weight, if it has one, or the one map of ordinary attention, (H, R, N).
        second: A2, (H, R, N), or None for ordinary attention.
        lam: λ of each head and row, (H, R), or None.
    """

    first: Tensor
    second: Tensor | None
    lam: Tensor | None

    @property
    def difference(self) -> Tensor:
        """The weights of the values: A1 − λA2, or the one map, (H, R, N)."""
        if self.second is None or self.lam is None:
            return self.first
        return self.first - self.lam.unsqueeze(-1) * self.second


@dataclass(frozen=True, eq=False)
class RecomputedMaps:
    """Maps of one of our models, computed from the input of each of its layers.

    Attributes:
        attentions: the attention of each layer.
        held: the input of each, (1, N, D).
        positions: cos and sin that each was given, or None.
        lambdas: λ of each in this run, (1, H, N); none if nothing is subtracted.
        is_causal: whether a token sees those before it alone.
    """

    attentions: Sequence[Any]
    held: Sequence[Tensor]
    positions: Sequence[tuple[Tensor, Tensor] | None]
    lambdas: Sequence[Tensor]
    is_causal: bool
    _last: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def of(self, layer: int, heads: slice, first_row: int = 0) -> HeadMaps:
        """Return the maps of some heads of a layer, both counted from 0, from a row on."""
        attention, normed = self.attentions[layer], self.held[layer]
        if layer not in self._last:  # as one head after another is asked for
            projected = attention.resolve_latents(*attention.project(normed, self.positions[layer]))
            self._last.clear()
            self._last[layer] = projected[:2]
        queries, keys = self._last[layer]
        if not self.lambdas:  # the one query of a head stands for both
            q, k = queries.transpose(1, 2).unsqueeze(2), keys.unsqueeze(2)
        else:
            q = attention.split_queries(queries)  # (1, G, r + 1, N, d)
            k = attention.split_keys(keys)  # (1, H_kv, 1 or 2, N, d)
        ratio = attention.ratio
        count = q.shape[1] * ratio
        chosen = torch.arange(count, device=q.device)[heads]
        group = chosen // ratio
        q = torch.stack((q[:, group, chosen % ratio], q[:, group, -1]), dim=2)
        lam = self.lambdas[layer][:, chosen, first_row:] if self.lambdas else None
        maps = diff_attention_maps(
            q[:, :, :, first_row:],
            k[:, chosen // (count // k.shape[1])],
            0.0 if lam is None else lam,
            is_causal=self.is_causal,
            scale=attention.scaling,
            window=getattr(attention, "sliding_window", None),  # which a layer outside of our models has not
        )
        if (weight := attention.signal_weights(normed)) is not None:
            maps[0].mul_(weight[:, chosen, first_row:].unsqueeze(-1))
        return HeadMaps(maps[0][0], None, None) if lam is None else HeadMaps(maps[0][0], maps[1][0], lam[0])


class ReturnedMaps(NamedTuple):
    """The maps that a model of transformers returned, each (A, N, N) of a layer."""

    held: Sequence[Tensor]
    lambdas: Sequence[Tensor] = ()
    is_causal: bool = True

    def of(self, layer: int, heads: slice, first_row: int = 0) -> HeadMaps:
        """Return the maps of some heads of a layer, both counted from 0, from a row on."""
        maps = self.held[layer][heads, first_row:]
        return HeadMaps(maps.to(torch.promote_types(maps.dtype, torch.float32)), None, None)


Maps: TypeAlias = RecomputedMaps | ReturnedMaps


class Trace(NamedTuple):
    """One run over N tokens.

    Attributes:
        tokens: N of them.
        next_log_probabilities: (V,), of the token after the last.
        token_losses: (N − 1,) in nats, of the tokens from the second on.
        maps: the maps of any head.
    """

    tokens: tuple[int, ...]
    next_log_probabilities: Tensor
    token_losses: Tensor
    maps: Maps

    @property
    def lambdas(self) -> Tensor | None:
        """Mean over the tokens of each head's λ, (layers, H); None for ordinary attention."""
        means = [lam.mean((0, 2)) for lam in self.maps.lambdas]
        return torch.stack(means).cpu() if means else None

    @property
    def loss(self) -> float | None:
        """Mean loss of a token, in nats; None for a text of one token."""
        return self.token_losses.mean().item() if self.token_losses.numel() else None

    def divergence(self, other: "Trace") -> float:
        """Return KL(this ‖ other) of the next token's distributions, in nats."""
        before, after = self.next_log_probabilities.double(), other.next_log_probabilities.double()
        terms = before.exp() * (before - after)
        return max(0.0, terms.where(before > -math.inf, torch.zeros_like(terms)).sum().item())


def encode_maps(maps: HeadMaps, first_row: int, is_causal: bool = True) -> bytes:
    """Write the maps of one head, (1, N − R, N) with R = ``first_row``, as web/src/decode.js reads them.

    Little-endian, without padding: "DTM2"; as uint32 N, the first row R, the number of maps M, 1 or 2, and 1 if they
    are causal, else 0; if M is 2, λ of each row in float32; then for each map its rows R … N − 1 in float16, of row i
    the i + 1 weights that causality allows, or all N.

    A weight in float16 is off by 1/2048 of itself at most, or by 3e-8 if it is smaller than 6e-5.
    """
    length = maps.first.shape[-1]
    each = [maps.first] if maps.second is None else [maps.first, maps.second]
    parts = [struct.pack("<4sIIII", MAGIC, length, first_row, len(each), is_causal)]
    if maps.lam is not None:
        parts.append(maps.lam[0].float().cpu().numpy().astype("<f4").tobytes())
    sent = torch.ones(length - first_row, length, dtype=torch.bool).tril(first_row if is_causal else length)
    parts += [weights[0].cpu()[sent].half().numpy().astype("<f2").tobytes() for weights in each]
    return b"".join(parts)


@dataclass(frozen=True)
class Answer:
    """The place of the answer to a question.

    Attributes:
        query: the position whose prediction is the answer, counted from 0.
        begin, end: the answer's tokens in the context, the end not included.
    """

    query: int
    begin: int
    end: int

    @classmethod
    def read(cls, raw: object, length: int) -> "Answer | None":
        """Read JSON, {"query": 9, "begin": 3, "end": 4}, for a text of so many tokens.

        Raises:
            ValueError: other keys, or positions that do not fit each other or the text.
        """
        if raw is None:
            return None
        place: list[Any] = [raw.get(name) if isinstance(raw, dict) else None for name in ("query", "begin", "end")]
        query, begin, end = place
        if any(type(x) is not int for x in place) or not 0 <= begin < end <= query + 1 <= length:
            raise ValueError(
                'answer must have "query", "begin" and "end", positions with 0 ≤ begin < end ≤ query + 1 ≤ '
                f"{length}, as the text has {length} tokens and one sees itself and those before it; got {quoted(raw)}."
            )
        return cls(query, begin, end)


def head_numbers(trace: Trace, layers: int, heads: int, answer: Answer | None, size: int) -> dict[str, Any]:
    """Measure all heads for the grid of heads.

    Returns:
        "removed": by layer and head, the part of A1's weight that the subtraction takes away: the mean over rows of
        Σ min(A1, λA2), which is Σ A1 − Σ max(A1 − λA2, 0); the row sums of A1 are 1. None for ordinary attention.
        "on_answer": the share of the answer's row that lies on it (`answer_shares`); None without one. "pictures": of
        each head the map pooled to at most size × size and scaled to −127 … 127, as int8 in base64; "picture_size":
        their side. "rollout": of maps that are not causal, as :func:`rollout`; else None.
    """
    pixel = -(-len(trace.tokens) // size)
    removed, extremes = [], []
    for layer in range(layers):
        for head in range(heads):
            maps = trace.maps.of(layer, slice(head, head + 1))
            difference = maps.difference
            extremes.append(pooled(difference, pixel).cpu())
            if maps.second is not None:
                taken = maps.first.sum(-1) - difference.clamp(min=0).sum(-1)
                removed.append(taken.clamp(min=0).mean().item())
    pictures = pictures_of(torch.cat(extremes), trace.maps.is_causal)
    return {
        "removed": [removed[heads * layer : heads * (layer + 1)] for layer in range(layers)] if removed else None,
        "on_answer": None if answer is None else answer_shares(trace.maps, layers, answer).tolist(),
        "rollout": None if trace.maps.is_causal else rollout(trace.maps, layers).round(decimals=6).tolist(),
        "picture_size": pictures.shape[-1],
        "pictures": base64.b64encode(pictures.numpy().tobytes()).decode(),
    }


def answer_shares(maps: Maps, layers: int, answer: Answer) -> Tensor:
    """Return the share of the query's absolute weights that lies on the answer, (layers, H): Table 3's measure.

    A row without any weight, as λ = 1 can leave, gives 0.
    """
    rows = [maps.of(layer, slice(None), answer.query) for layer in range(layers)]
    sizes = torch.stack([row.difference[:, 0].abs().cpu() for row in rows])
    whole = sizes.sum(-1)
    return sizes[..., answer.begin : answer.end].sum(-1) / whole.where(whole > 0, torch.ones_like(whole))


def rollout(maps: Maps, layers: int) -> Tensor:
    """Return attention rollout (docs/explorer.md): how much of each token reaches each through all layers, (N, N)."""
    reached = itself = torch.eye(maps.held[0].shape[-2], dtype=torch.float64)
    for layer in range(layers):
        sizes = maps.of(layer, slice(None)).difference.abs().cpu()
        shares = (sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-12)).mean(0)
        reached = (shares + itself) / 2 @ reached
    return reached


def pooled(maps: Tensor, pixel: int) -> Tensor:
    """Pool (H, N, N) to (H, ⌈N / pixel⌉, ⌈N / pixel⌉): of pixel × pixel weights the largest in size, with its sign."""
    highest, lowest = max_pool2d(maps, pixel, ceil_mode=True), -max_pool2d(-maps, pixel, ceil_mode=True)
    return torch.where(highest >= -lowest, highest, lowest)


def pictures_of(extremes: Tensor, is_causal: bool = True) -> Tensor:
    """Turn pooled maps (H, P, P) into pictures of int8, ±127 · √(weight / scale); docs/explorer.md says why so.

    The scale is the largest weight, of causal maps but for the first quarter of the rows. Larger weights are ±127.
    """
    scale = extremes[:, extremes.shape[1] // 4 if is_causal else 0 :].abs().amax((-1, -2))
    relative = (extremes / scale.where(scale > 0, torch.ones_like(scale))[:, None, None]).clamp(-1, 1)
    return (relative.sign() * relative.abs().sqrt() * 127).round().to(torch.int8)
