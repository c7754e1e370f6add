"""Attention maps of a model, for looking at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diff_transformer.model.attention import OWN_IMPLEMENTATION, OWN_IMPLEMENTATIONS, AttentionMaps

if TYPE_CHECKING:
    from diff_transformer.model.modeling import DiffTransformerPreTrainedModel


@torch.no_grad()
def attention_maps(
    model: DiffTransformerPreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None
) -> list[AttentionMaps]:
    """The maps of every layer for one batch, whatever attention implementation the model is set to.

    Args:
        model: a DIFF Transformer, its second version or the twin.
        input_ids: (B, N) tokens.
        attention_mask: (B, N), 0 at padding, or None.

    Returns:
        One :class:`AttentionMaps` a layer.
    """
    before = model.config._attn_implementation
    maps: list[AttentionMaps] = []
    if before not in OWN_IMPLEMENTATIONS:
        model.set_attn_implementation(OWN_IMPLEMENTATION)
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, maps=maps)
    finally:
        if before not in OWN_IMPLEMENTATIONS:
            model.set_attn_implementation(before)
    return maps
