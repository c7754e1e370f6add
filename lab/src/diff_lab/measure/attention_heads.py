"""Computes what each head of a model multiplies its values by, whatever the model."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.convert.loaded_models import returned_maps
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
        maps = returned_maps(model, input_ids)
    if maps is None:
        raise ValueError(f"The attention to needles cannot be measured: {type(model).__name__} returns no attentions.")
    if model.config.model_type == "diffllama":
        return [_difference(layer.self_attn, both) for layer, both in zip(model.model.layers, maps, strict=True)]
    return maps


def _difference(layer: Any, both: Tensor) -> Tensor:
    """DiffLlama's maps of a layer: the first half of its heads, less λ times the second."""
    first, second = both.chunk(2, dim=1)
    exponents = (layer.lambda_q1 * layer.lambda_k1).sum(), (layer.lambda_q2 * layer.lambda_k2).sum()
    lam = exponents[0].exp() - exponents[1].exp() + layer.lambda_init
    return first - lam * second
