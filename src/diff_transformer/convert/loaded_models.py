"""Converts models that are loaded already."""

import copy
from pathlib import Path
from typing import Any

import torch

from diff_transformer.convert.layout import Header, plan
from diff_transformer.convert.layout_tables import LAYOUTS
from diff_transformer.model import DiffTransformerForCausalLM


def as_our_model(model: Any) -> DiffTransformerForCausalLM:
    """Convert transformers' DiffLlama into a model of ours, on the same device and in the same dtype.

    λ is in float32 at least. The weights are copied.

    Raises:
        ValueError: the model is no DiffLlama, or has settings that are not covered, such as biases.

    Examples:
        >>> config = transformers.DiffLlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> as_our_model(transformers.DiffLlamaForCausalLM(config)).config.attention_type
        'diff'
    """
    if model.config.model_type != "diffllama":
        raise ValueError(f"Only a DiffLlama is converted without a folder, got {type(model).__name__}.")
    layout = LAYOUTS["diffllama"]["diff"]
    config = layout.read(model.config.to_dict())
    weights = model.state_dict()
    headers = {key: Header(Path(key), tuple(weight.shape), weight.dtype) for key, weight in weights.items()}
    converted = {
        output.key: output.make(*(weights[key].cpu() for key in output.inputs))
        for output in plan(layout, config, headers, backwards=False)
    }
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        ours = DiffTransformerForCausalLM(config)
    ours.to(model.dtype).load_state_dict(converted)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours.to(model.device).eval()
