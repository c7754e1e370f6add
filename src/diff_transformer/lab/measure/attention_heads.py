"""Measures how widely each head of a model attends, and chooses heads by it.

DEX (arXiv 2505.16333) corrects a chosen subset of each layer's heads. The paper's text could not be had; accounts of it
name high attention entropy as what heads are chosen by, so that is the measure here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diff_transformer.model import DiffTransformerPreTrainedModel, attention_maps
from diff_transformer.model.interface_attention import attention_implementation


@torch.no_grad()
def applied_maps(model: Any, input_ids: Tensor) -> list[Tensor]:
    """What each layer multiplies its values by, (B, heads, N, N): A1 − λ A2, or the softmax map.

    Takes one of this project's models, or a causal language model of transformers that returns its attentions;
    DiffLlama's are put together as its layers do, with the λ of each. Raises ValueError for one that returns none.
    """
    if isinstance(model, DiffTransformerPreTrainedModel):
        return [layer.difference for layer in attention_maps(model, input_ids)]
    with attention_implementation(model, "eager"):  # the others compute no maps
        maps = _returned_maps(model, input_ids)
    if maps is None:
        raise ValueError(f"The attention to needles cannot be measured: {type(model).__name__} returns no attentions.")
    if model.config.model_type == "diffllama":
        return [_difference(layer.self_attn, both) for layer, both in zip(model.model.layers, maps, strict=True)]
    return maps


def _returned_maps(model: Any, input_ids: Tensor) -> list[Tensor] | None:
    """What the attention implementation that a model is set to returns of each layer, if it does."""
    maps = model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions
    return list(maps) if maps and all(layer is not None for layer in maps) else None


def _difference(layer: Any, both: Tensor) -> Tensor:
    """DiffLlama's maps of a layer: the first half of its heads, less λ times the second."""
    first, second = both.chunk(2, dim=1)
    exponents = (layer.lambda_q1 * layer.lambda_k1).sum(), (layer.lambda_q2 * layer.lambda_k2).sum()
    lam = exponents[0].exp() - exponents[1].exp() + layer.lambda_init
    return first - lam * second


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
        maps = _returned_maps(model, sequence.unsqueeze(0).to(model.device))
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
