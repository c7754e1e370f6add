"""Makes the attention mask of an encoder, in which every token sees all others of its text."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import (
    create_bidirectional_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)

from diff_transformer.model.configuration import DiffTransformerConfig


def encoder_mask(
    config: DiffTransformerConfig, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor | None
) -> Any:
    """The mask of every layer in the form that the attention implementation takes, or None where nothing is hidden.

    Padding, on either side, is hidden. Without a mask of tokens, positions that begin anew in a row begin another
    document, which sees itself alone; transformers reads that off the positions of causal models only.

    Args:
        config: of the model, with its attention implementation.
        inputs_embeds: (B, N, D).
        attention_mask: (B, N), 0 at padding; or (B, 1, N, N) and BlockMasks, which stay as they are; or None.
        position_ids: (B, N) or (1, N), or None.
    """
    documents = None
    if attention_mask is None and position_ids is not None:
        documents = find_packed_sequence_indices(position_ids.expand(inputs_embeds.shape[0], -1))
    return create_bidirectional_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        and_mask_function=None if documents is None else packed_sequence_mask_function(documents),
    )
