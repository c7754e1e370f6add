"""Converts a model that is loaded already, without writing a folder."""

import copy
from pathlib import Path
from typing import Any

import torch

from diff_transformer.convert.layout import Header, plan
from diff_transformer.convert.layout_tables import LAYOUTS
from diff_transformer.model import DiffTransformerForCausalLM


def as_our_model(model: Any) -> DiffTransformerForCausalLM:
    """One of our models that computes what transformers' DiffLlama does, on the same device and in the same dtype.

    λ is in float32 at least. The weights are copied.

    Raises:
        ValueError: the model is no DiffLlama, or has settings that are not covered, such as biases.
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
