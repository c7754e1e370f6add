"""Measures each head of a trace, and makes the small picture of its map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diff_transformer.explorer.trace import Maps, Trace
from diff_transformer.utils.suggestions import quoted

_WEIGHTS_AT_ONCE = 1 << 18  # of each map


@dataclass(frozen=True)
class Answer:
    """Where the answer to a question stands.

    Attributes:
        query: the position whose prediction is the answer, counted from 0.
        begin, end: the answer's tokens in the context, the end not included.
    """

    query: int
    begin: int
    end: int

    @classmethod
    def read(cls, raw: object, length: int) -> "Answer | None":
        """From JSON, {"query": 9, "begin": 3, "end": 4}, in a text of so many tokens.

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
    """What the grid of heads shows.

    Attributes:
        removed: (layers, H), the part of A1's weight that the subtraction takes away: the mean over rows of
            Σ min(A1, λA2), where the row sums of A1 are 1. None for ordinary attention.
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
    """What the subtraction removes from some heads, (H,), and their pooled maps (H, P, P).

    Some rows at a time: what fits into the processor's cache takes half the time.
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
    """The part of A1's weight that λA2 takes away in each row, (…, R): in 0 … 1; 0 where λ is not positive.

    Σ min(A1, λA2), which is Σ A1 − Σ max(A1 − λA2, 0).
    """
    return (first.sum(-1) - difference.clamp(min=0).sum(-1)).clamp(min=0)


def answer_shares(maps: Maps, layers: int, answer: Answer) -> Tensor:
    """The share of the absolute weights of the query's row that lie on the answer, (layers, H), in 0 … 1.

    This is the measure "attention_to_answer_share" of `diff-lab reproduce table3`, head by head. A row without
    any weight, as λ = 1 can leave, gives 0.
    """
    rows = [maps.of(layer, slice(None), slice(answer.query, answer.query + 1)) for layer in range(layers)]
    sizes = torch.stack([row.difference[:, 0].abs().cpu() for row in rows])
    whole = sizes.sum(-1)
    return sizes[..., answer.begin : answer.end].sum(-1) / whole.where(whole > 0, torch.ones_like(whole))


def pooled(rows: Tensor, pixel: int) -> Tensor:
    """(H, R, N) → (H, ⌈R / pixel⌉, ⌈N / pixel⌉): of each pixel × pixel weights the one of largest size, with its sign.

    A mean would hide the single bright token that a head looks at.
    """
    count, *size = rows.shape
    high, wide = (-(-side // pixel) for side in size)
    padded = torch.nn.functional.pad(rows, (0, wide * pixel - size[1], 0, high * pixel - size[0]))
    blocks = padded.view(count, high, pixel, wide, pixel)
    highest, lowest = blocks.amax(2).amax(-1), blocks.amin(2).amin(-1)
    return torch.where(highest >= -lowest, highest, lowest)


def pictures_of(extremes: Tensor) -> Tensor:
    """Pooled maps (H, P, P) → pictures of int8.

    The scale goes by the square root, as most weights are small: a pixel is ±127 · √(weight / scale), and ±127 where
    the weight is larger still. It ends at the largest weight but for the first quarter of the rows: these have few
    tokens to attend to, and their weights, up to 1, would leave no shades for the others.
    """
    scale = extremes[:, extremes.shape[1] // 4 :].abs().amax((-1, -2))
    relative = (extremes / scale.where(scale > 0, torch.ones_like(scale))[:, None, None]).clamp(-1, 1)
    return (relative.sign() * relative.abs().sqrt() * 127).round().to(torch.int8)
