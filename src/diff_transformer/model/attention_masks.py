"""Makes the masks that a forward pass needs: one for each type of layer, or none."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from diff_transformer.model.configuration import DiffTransformerConfig
from diff_transformer.model.interface_attention import OWN_IMPLEMENTATIONS
from diff_transformer.model.packed_documents import check_cu_seqlens

# By type of layer, as transformers' configurations, masks and caches name them.
MASK_FUNCTIONS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def attends_by_document(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration, as it is now, is cheaper on documents packed into one row than on a batch.

    That is so with our own implementations, which make no mask of them.
    """
    return isinstance(config, DiffTransformerConfig) and config._attn_implementation in OWN_IMPLEMENTATIONS


def packed_cu_seqlens(
    config: DiffTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    **kwargs: Any,
) -> Tensor | None:
    """``cu_seq_lens_q``, if documents are packed into one row and our own attention tells them apart without a mask.

    Raises:
        ValueError, TypeError: as :func:`check_cu_seqlens`.
    """
    if not attends_by_document(config):
        return None
    return check_cu_seqlens(inputs_embeds, attention_mask, past_key_values, **kwargs)


def layer_masks(
    config: DiffTransformerConfig,
    layer_types: Collection[str],
    inputs_embeds: Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Any]:
    """The mask of each type of layer, as the attention implementation in use wants it; None for plain causality.

    Args:
        config: the model's.
        layer_types: each layer's type.
        inputs_embeds: (B, N, D).
        attention_mask: (B, S) of tokens; or (B, 1, N, S), or a BlockMask, or masks by type, which are used as they are.
        past_key_values: what is cached, or None. Without it and a mask, positions tell documents apart.
        position_ids: (B, N), as the caller gave them.
        cu_seqlens: what :func:`packed_cu_seqlens` gave. The layers get it too, and need no mask.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    if cu_seqlens is not None:
        return dict.fromkeys(layer_types)
    return {
        layer_type: MASK_FUNCTIONS[layer_type](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        for layer_type in dict.fromkeys(layer_types)
    }
