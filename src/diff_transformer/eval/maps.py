"""The attention that a layer applies, as one map for each head: of this project's models, and of transformers' own."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.model import DiffTransformerPreTrainedModel, attention_maps


@torch.no_grad()
def applied_maps(model: Any, input_ids: Tensor) -> list[Tensor]:
    """What each layer multiplies its values by: A1 − λ A2 of differential attention, the softmax map of others.

    Args:
        model: one of this project's models, or a causal language model of transformers that returns its attentions;
            DiffLlama's are put together as its layers do, with the λ of each.
        input_ids: (B, N) tokens.

    Returns:
        One map a layer, (B, heads, N, N).

    Raises:
        ValueError: the model does not return its attentions.
    """
    if isinstance(model, DiffTransformerPreTrainedModel):
        return [layer.difference for layer in attention_maps(model, input_ids)]
    before = model.config._attn_implementation
    if before != "eager":
        model.set_attn_implementation("eager")  # the others compute no maps
    try:
        maps = model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions
    finally:
        if before != "eager":
            model.set_attn_implementation(before)
    if not maps or any(layer is None for layer in maps):
        raise ValueError(f"The attention to needles cannot be measured: {type(model).__name__} returns no attentions.")
    if model.config.model_type == "diffllama":
        layers = [layer.self_attn for layer in model.model.layers]
        return [_difference(layer, both) for layer, both in zip(layers, maps, strict=True)]
    return list(maps)


def _difference(layer: Any, both: Tensor) -> Tensor:
    """DiffLlama's maps of a layer: the first half of its heads, less λ times the second."""
    first, second = both.chunk(2, dim=1)
    added = torch.exp((layer.lambda_q1 * layer.lambda_k1).sum())
    taken = torch.exp((layer.lambda_q2 * layer.lambda_k2).sum())
    return first - (added - taken + layer.lambda_init) * second
