"""Small causal language models of every kind, ours and transformers'."""

from typing import Any

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_TYPES
from tiny_model import sizes_for

THEIRS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "diffllama": (DiffLlamaConfig, DiffLlamaForCausalLM),
}


def any_model(kind: str, seed: int = 0, **settings: Any) -> Any:
    """An attention type of ours, or one of `THEIRS`, ready to evaluate."""
    torch.manual_seed(seed)
    if kind in THEIRS:
        configuration, model = THEIRS[kind]
        return model(configuration(**settings)).eval()
    if ATTENTION_TYPES[kind].grouped:
        settings = sizes_for(kind, **{"num_key_value_heads": None, "head_dim": None, **settings})
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **settings)).eval()
