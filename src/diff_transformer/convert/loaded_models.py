"""Converts and grows models that are loaded already."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diff_transformer.attention_types import head_dim
from diff_transformer.convert.layout import Header, plan
from diff_transformer.convert.layout_tables import LAYOUTS
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM


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


def grow_signal_heads(
    model: DiffTransformerForCausalLM, signal_heads: int, *, spread: float = 0.1, seed: int = 0
) -> DiffTransformerForCausalLM:
    """Return a "diff_grouped" model that computes the same with more signal heads to each noise map.

    Keys, values, λ, norms and all that is outside of attention are those of ``model``, which is left alone; W_Q and W_O
    grow, and so do the bias of W_Q, the output gate and the projection of a λ of each token, if there are such. Logits
    are the same but for rounding: for a power of 2 copies and a ``spread`` of 0, W_O is divided without any.

    Args:
        model: of type "diff", whose heads have a noise map each, or "diff_grouped".
        signal_heads: r, how many share a noise map afterwards; a multiple of how many do now.
        spread: how far the copies of W_O differ, as a share of its standard deviation; with 0 copies never part.
        seed: of the differences.

    Raises:
        ValueError: a model without paired heads, a number that is no multiple, or a spread that is negative.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> grown = grow_signal_heads(DiffTransformerForCausalLM(config), signal_heads=3)
        >>> grown.config.num_attention_heads, grown.config.num_noise_heads
        (8, 2)
    """
    config = model.config
    spec = config.spec
    if not (spec.differential and spec.pairs_heads):
        raise ValueError(
            "signal heads are copied in models whose attention_type is 'diff' or 'diff_grouped', got "
            f"{config.attention_type!r}."
        )
    if spread < 0:
        raise ValueError(f"spread must be 0 or more, got {spread}.")
    heads = spec.heads(config)
    groups = config.num_attention_heads - heads
    ratio = heads // groups
    if signal_heads < 1 or signal_heads % ratio:
        raise ValueError(
            f"signal_heads must be a positive multiple of the {ratio} that share a noise map in the model, got "
            f"{signal_heads}."
        )
    copies = signal_heads // ratio
    sizes = {"num_attention_heads": (signal_heads + 1) * groups, "num_noise_heads": groups}
    grown_config = DiffTransformerConfig.from_dict(config.to_dict() | sizes | {"attention_type": "diff_grouped"})
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        grown = DiffTransformerForCausalLM(grown_config)
    generator = torch.Generator().manual_seed(seed)
    weights = model.state_dict()
    for key, weight in weights.items():
        if key.endswith((".self_attn.q_proj.weight", ".self_attn.q_proj.bias")):
            weights[key] = _copied_queries(weight, ratio, copies, head_dim(config))
        elif key.endswith((".self_attn.gate_proj.weight", ".self_attn.lambda_proj.weight")):  # of each signal head
            weights[key] = weight.unflatten(0, (heads, -1)).repeat_interleave(copies, dim=0).flatten(0, 1)
        elif key.endswith(".self_attn.o_proj.weight"):
            weights[key] = _divided_output(weight, heads, copies, spread, generator)
    grown.to(device=model.device, dtype=model.dtype).load_state_dict(weights)
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in grown.named_parameters():
        parameter.requires_grad_(is_trained[name])
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown.train(model.training)


def _copied_queries(weight: Tensor, ratio: int, copies: int, width: int) -> Tensor:
    """Copy each signal head of W_Q (A·d, D) or its bias, in stripes of r signal heads and a noise head."""
    stripes = weight.unflatten(0, (-1, ratio + 1, width))
    signal, noise = stripes.split((ratio, 1), dim=1)
    return torch.cat((signal.repeat_interleave(copies, dim=1), noise), dim=1).flatten(0, 2)


def _divided_output(weight: Tensor, heads: int, copies: int, spread: float, generator: torch.Generator) -> Tensor:
    """Divide W_O (D, H·2d) among so many copies of each head, which add up to it."""
    wide = weight.to("cpu", torch.float64).unflatten(1, (heads, 1, -1))
    differences = torch.randn(*wide.shape[:2], copies, wide.shape[3], dtype=torch.float64, generator=generator)
    differences = (differences - differences.mean(2, keepdim=True)) * (spread * wide.std())
    return (wide / copies + differences).flatten(1).to(weight)


def returned_maps(model: Any, input_ids: Tensor) -> list[Tensor] | None:
    """Return the attention weights of each layer, or None if the model's attention implementation returns none."""
    maps = model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions
    return list(maps) if maps and all(layer is not None for layer in maps) else None
