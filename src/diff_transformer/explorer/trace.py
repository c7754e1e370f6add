"""Holds the trace of one run of a model over a text; computes the maps of its heads, their numbers, pictures and bytes.

Maps of all heads at once would take gigabytes at 2,048 tokens. A trace of one of our models keeps each layer's input,
which is small, and computes a head's maps from it with ``diff_attention_maps``.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from diff_transformer.ops import diff_attention_maps
from diff_transformer.utils.suggestions import quoted

MAGIC = b"DTM1"  # of the binary form of a head's maps
_WEIGHTS_AT_ONCE = 1 << 18  # of each map that are measured together


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
        """The weights of the values: A1 − λA2, or the one map, (H, R, N)."""
        if self.second is None or self.lam is None:
            return self.first
        return self.first - self.lam.unsqueeze(-1) * self.second


class Maps(Protocol):
    """The maps of a run, computed when they are asked for."""

    def of(self, layer: int, heads: slice, rows: slice) -> HeadMaps:
        """Return the maps of some heads of a layer (both counted from 0) and of some rows, which are consecutive."""
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
        """Return KL(this ‖ other) of the next token's distributions, in nats."""
        before, after = self.next_log_probabilities.double(), other.next_log_probabilities.double()
        terms = before.exp() * (before - after)
        return max(0.0, terms.where(before > -math.inf, torch.zeros_like(terms)).sum().item())

    @property
    def bytes(self) -> int:
        """The memory that the trace holds, about."""
        return self.maps.bytes + sum(x.nbytes for x in (self.next_log_probabilities, self.token_losses))


@dataclass(frozen=True, eq=False)
class RecomputedMaps:
    """Maps of one of our models, computed from the input of each of its layers.

    Attributes:
        attentions: the attention of each layer.
        normed: the input of each, (1, N, D).
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
        """Project queries and keys of a layer; the last ones are kept, as one head after another is asked for."""
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


def encode_maps(maps: HeadMaps, first_row: int) -> bytes:
    """Write the maps of one head, (1, N − R, N) with R = ``first_row``, as web/src/decode.js reads them.

    Little-endian, without padding:

        4 bytes             "DTM1" uint32 × 3          N, the first row R that is in it, the number of maps M (1 or 2)
        float32 × (N − R)   λ of each row, if M is 2 float16 × …         for each map its rows R … N − 1, of row i the
        weights i + 1 that causality allows

    A weight in float16 is off by 1/2048 of itself at most, or by 3e-8 if it is smaller than 6e-5.
    """
    length = maps.first.shape[-1]
    each = [maps.first] if maps.second is None else [maps.first, maps.second]
    parts = [struct.pack("<4sIII", MAGIC, length, first_row, len(each))]
    if maps.lam is not None:
        parts.append(_little_endian(maps.lam[0].to(torch.float32)))
    rows, columns = torch.tril_indices(length - first_row, length, offset=first_row)
    parts += [_little_endian(weights[0].cpu()[rows, columns].to(torch.float16)) for weights in each]
    return b"".join(parts)


def _little_endian(tensor: Tensor) -> bytes:
    array = tensor.cpu().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


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
        if not isinstance(raw, dict) or set(raw) != {"query", "begin", "end"}:
            raise ValueError('answer must be an object with "query", "begin" and "end".')
        query, begin, end = raw["query"], raw["begin"], raw["end"]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in (query, begin, end)):
            raise ValueError(f"The positions of an answer are whole numbers, got {quoted((query, begin, end))}.")
        if not 0 <= begin < end <= query + 1 <= length:
            raise ValueError(
                f"An answer at tokens {begin} … {end - 1} cannot be seen from token {query} of a text of {length}; "
                "they are counted from 0, and a token sees itself and those before it."
            )
        return cls(query, begin, end)


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """The numbers and pictures in the grid of heads.

    Attributes:
        removed: (layers, H), the part of A1's weight that the subtraction takes away: the mean over rows of Σ min(A1,
            λA2); the row sums of A1 are 1. None for ordinary attention.
        on_answer: (layers, H), the share of the row's absolute weights that lie on the answer; None without one.
        pictures: (layers, H, P, P) int8, the map pooled to P × P and scaled to −127 … 127; P ≤ size.
    """

    removed: Tensor | None
    on_answer: Tensor | None
    pictures: Tensor


def head_numbers(trace: Trace, layers: int, heads: int, answer: Answer | None, size: int) -> HeadNumbers:
    """Measure all heads of a trace. ``size`` is the side of a picture in pixels at most."""
    # Two heads of ordinary attention have as many maps as a differential one.
    together = 2 if trace.lambdas is None else 1
    each = [
        _measured(trace, layer, slice(head, min(head + together, heads)), size)
        for layer in range(layers)
        for head in range(0, heads, together)
    ]
    shape = (layers, heads)
    pictures = pictures_of(torch.cat([extremes for _, extremes in each]))
    removed = [removed for removed, _ in each if removed is not None]
    return HeadNumbers(
        removed=torch.cat(removed).view(shape) if removed else None,
        on_answer=None if answer is None else answer_shares(trace.maps, layers, answer),
        pictures=pictures.unflatten(0, shape),
    )


def _measured(trace: Trace, layer: int, heads: slice, size: int) -> tuple[Tensor | None, Tensor]:
    """Measure the weight that the subtraction removes from some heads, (H,), and pool their maps to (H, P, P). Some
    rows at a time: rows that fit into the processor's cache take half the time.
    """
    length = len(trace.tokens)
    pixel = -(-length // size)
    rows = pixel * max(1, _WEIGHTS_AT_ONCE // (pixel * length))
    removed, extremes = [], []
    for start in range(0, length, rows):
        maps = trace.maps.of(layer, heads, slice(start, min(length, start + rows)))
        difference = maps.difference
        extremes.append(pooled(difference, pixel).cpu())
        if maps.second is not None:
            removed.append(removed_weight(maps.first, difference).cpu())
    return torch.cat(removed, dim=1).mean(1) if removed else None, torch.cat(extremes, dim=1)


def removed_weight(first: Tensor, difference: Tensor) -> Tensor:
    """Return the part of A1's weight that λA2 takes away in each row, (…, R): in 0 … 1; 0 if λ is not positive.

    Σ min(A1, λA2), which is Σ A1 − Σ max(A1 − λA2, 0).
    """
    return (first.sum(-1) - difference.clamp(min=0).sum(-1)).clamp(min=0)


def answer_shares(maps: Maps, layers: int, answer: Answer) -> Tensor:
    """Return the share of the absolute weights of the query's row that lie on the answer, (layers, H), in 0 … 1.

    This is the measure "attention_to_answer_share" of `diff-lab reproduce table3`, head by head. A row without
    any weight, as λ = 1 can leave, gives 0.
    """
    rows = [maps.of(layer, slice(None), slice(answer.query, answer.query + 1)) for layer in range(layers)]
    sizes = torch.stack([row.difference[:, 0].abs().cpu() for row in rows])
    whole = sizes.sum(-1)
    return sizes[..., answer.begin : answer.end].sum(-1) / whole.where(whole > 0, torch.ones_like(whole))


def pooled(rows: Tensor, pixel: int) -> Tensor:
    """Pool (H, R, N) to (H, ⌈R / pixel⌉, ⌈N / pixel⌉): of pixel × pixel weights the largest in size, with its sign.

    A mean would hide the single bright token that a head looks at.
    """
    count, *size = rows.shape
    high, wide = (-(-side // pixel) for side in size)
    padded = torch.nn.functional.pad(rows, (0, wide * pixel - size[1], 0, high * pixel - size[0]))
    blocks = padded.view(count, high, pixel, wide, pixel)
    highest, lowest = blocks.amax(2).amax(-1), blocks.amin(2).amin(-1)
    return torch.where(highest >= -lowest, highest, lowest)


def pictures_of(extremes: Tensor) -> Tensor:
    """Turn pooled maps (H, P, P) into pictures of int8.

    The scale goes by the square root, as most weights are small: a pixel is ±127 · √(weight / scale), and ±127 if the
    weight is larger still. It ends at the largest weight but for the first quarter of the rows: these have few tokens
    to attend to, and their weights, up to 1, would leave no shades for the others.
    """
    scale = extremes[:, extremes.shape[1] // 4 :].abs().amax((-1, -2))
    relative = (extremes / scale.where(scale > 0, torch.ones_like(scale))[:, None, None]).clamp(-1, 1)
    return (relative.sign() * relative.abs().sqrt() * 127).round().to(torch.int8)
