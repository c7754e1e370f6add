"""Makes the masks that attention layers get, where transformers would make one, and of those that callers give."""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.ops.attention_request import check_dense, is_floating
from diff_transformer.ops.visibility import causal_bias_mask, check_causal_bias, is_causal_bias


def operator_mask(**arguments: Any) -> Tensor | None:
    """transformers' boolean mask (B, 1, N, S), or None where our operator hides by itself what has to be hidden.

    Beside the future that is what a sliding window leaves behind, for tokens that begin a sequence: no mask of N × N.

    Raises:
        ValueError: the configuration of a model that computes its attention itself, and would add the mask to it.
    """
    config = arguments["config"]
    if not torch.compiler.is_compiling() and _attend_themselves(type(config).__module__):
        raise ValueError(
            f"models of {type(config).__name__} compute attention themselves: attn_implementation must be 'eager', got "
            f"{config._attn_implementation!r}."
        )
    offset = arguments.get("q_offset")  # a tensor, not to be read while it is traced, where a cache is static
    begins = isinstance(offset, int) and offset == 0 and arguments["q_length"] == arguments["kv_length"]
    causal = arguments.get("allow_is_causal_skip", False)  # a window in both directions is not the operator's
    # Any model of transformers may be set to our implementation.
    described = ATTENTION_TYPES.get(getattr(config, "attention_type", ""))
    if begins and causal and described is not None and described.differential:
        arguments = {**arguments, "local_size": None}
    return sdpa_mask(**arguments)


@cache
def _attend_themselves(configuration: str) -> bool:
    """Whether the models beside a module of a configuration do not call the attention interface (BLOOM, LED …)."""
    name = configuration.replace(".configuration_", ".modeling_")
    members = vars(sys.modules[name]) if name in sys.modules else {}
    own = [member for member, value in members.items() if getattr(value, "__module__", None) == name]
    return any("Attention" in member for member in own) and "ALL_ATTENTION_FUNCTIONS" not in members


def dense_mask(attention_mask: Any, inputs: Tensor, past_key_values: Cache | None) -> Any:
    """A mask as a caller gives it to the model, or such masks by name; a CausalBias of torch as (1, 1, N, S) boolean.

    Raises:
        TypeError: a tensor that does not hold its own numbers.
        ValueError: four axes of integers or float8, or a CausalBias that does not fit the inputs (B, N, D) and what the
            cache holds.
    """
    if isinstance(attention_mask, dict):
        return {name: dense_mask(mask, inputs, past_key_values) for name, mask in attention_mask.items()}
    if is_causal_bias(attention_mask):
        n = inputs.shape[1]
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        layers = getattr(past_key_values, "layers", ())
        slots = [getattr(layer, "max_cache_len", past + n) for layer in layers]  # of a static cache
        check_causal_bias(attention_mask, n, [past + n, *slots])
        return causal_bias_mask(attention_mask, inputs.device)[None, None]
    if isinstance(attention_mask, Tensor):
        check_dense("attention_mask", attention_mask)
        if attention_mask.dim() == 4 and attention_mask.dtype != torch.bool and not is_floating(attention_mask):
            raise ValueError(
                "attention_mask of four axes must be boolean, or added to the scores and floating of 16 bits or more, "
                f"got {attention_mask.dtype}."
            )
    return attention_mask
