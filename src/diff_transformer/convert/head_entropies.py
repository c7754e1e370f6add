"""Measures how widely each head of a model attends, and chooses heads for DEX by it.

DEX (arXiv 2505.16333) corrects a chosen subset of each layer's heads. The paper's text could not be had; accounts of it
name high attention entropy as what heads are chosen by, so that is the measure here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def returned_maps(model: Any, input_ids: Tensor) -> list[Tensor] | None:
    """What the attention implementation that a model is set to returns of each layer, if it does."""
    maps = model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions
    return list(maps) if maps and all(layer is not None for layer in maps) else None


@torch.no_grad()
def head_entropies(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    """The mean entropy of each head's attention, (layers, heads), in nats: 0 for one that looks at one token, log n for
    all n equally.

    Takes any causal language model of transformers whose attention implementation returns weights ("eager" does), and
    tokens (N,) without padding; every row of every sequence counts the same. Raises ValueError for others, and for no
    sequence.
    """
    if not sequences:
        raise ValueError("head_entropies needs one sequence or more, got none.")
    total, rows = torch.zeros(()), 0
    for sequence in sequences:
        maps = returned_maps(model, sequence.unsqueeze(0).to(model.device))
        if maps is None:
            raise ValueError(
                f"{type(model).__name__} returns no attention weights as {model.config._attn_implementation!r}; "
                "set_attn_implementation('eager') makes it."
            )
        total = total + torch.stack([torch.special.entr(layer[0].float()).sum((-1, -2)).cpu() for layer in maps])
        rows += sequence.numel()
    return total / rows


def widest_heads(entropies: Tensor, share: float) -> list[list[int]]:
    """The heads of highest entropy in each layer, ascending: a share of (layers, heads), rounded, but one or more.
    Raises ValueError for a share that is not more than 0 and up to 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be more than 0 and up to 1, got {share}.")
    count = max(1, round(share * entropies.shape[1]))
    return entropies.topk(count, dim=1).indices.sort(dim=1).values.tolist()
