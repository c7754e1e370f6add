"""Small causal language models of every kind, ours and transformers'."""

from typing import Any

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

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
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **settings)).eval()
