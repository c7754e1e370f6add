"""Grows a DIFF Transformer into a grouped one by copying its signal heads; it answers as before, and is trained on.

A copy of a signal head computes what its original does. W_O of the original is divided among the copies, so that their
outputs add up to the same. Copies with equal weights would have equal gradients and stay equal for ever: what each of
them gets of W_O differs by numbers that add up to 0 over the copies.
"""

import copy

import torch
from torch import Tensor

from diff_transformer.attention_types import head_dim
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM


def grow_signal_heads(
    model: DiffTransformerForCausalLM, signal_heads: int, *, spread: float = 0.1, seed: int = 0
) -> DiffTransformerForCausalLM:
    """A model of attention type "diff_grouped" with more signal heads to each noise map, which computes the same.

    Keys, values, λ, norms and all that is outside of attention are those of ``model``, which is left alone; W_Q and W_O
    grow, and so do the bias of W_Q, the output gate and the projection of a λ of each token, where there are such.
    Logits are the same but for rounding: for a power of 2 copies, W_O is divided without any where ``spread`` is 0.

    Args:
        model: of type "diff", whose heads have a noise map each, or "diff_grouped".
        signal_heads: r, how many share a noise map afterwards; a multiple of how many do now.
        spread: how far the copies of W_O differ, as a share of its standard deviation; with 0 copies never part.
        seed: of the differences.

    Raises:
        ValueError: a model without paired heads, a number that is no multiple, or a spread that is negative.
    """
    config = model.config
    described = config.described
    if not (described.differential and described.pairs_heads):
        raise ValueError(
            "signal heads are copied in models whose attention_type is 'diff' or 'diff_grouped', got "
            f"{config.attention_type!r}."
        )
    if spread < 0:
        raise ValueError(f"spread must be 0 or more, got {spread}.")
    heads = described.heads(config)
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
    """W_Q (A·d, D) or its bias, in stripes of r signal heads and a noise head, with so many copies of a signal head."""
    stripes = weight.unflatten(0, (-1, ratio + 1, width))
    signal, noise = stripes.split((ratio, 1), dim=1)
    return torch.cat((signal.repeat_interleave(copies, dim=1), noise), dim=1).flatten(0, 2)


def _divided_output(weight: Tensor, heads: int, copies: int, spread: float, generator: torch.Generator) -> Tensor:
    """W_O (D, H·2d) for so many copies of each head, which add up to it."""
    wide = weight.to("cpu", torch.float64).unflatten(1, (heads, 1, -1))
    differences = torch.randn(*wide.shape[:2], copies, wide.shape[3], dtype=torch.float64, generator=generator)
    differences = (differences - differences.mean(2, keepdim=True)) * (spread * wide.std())
    return (wide / copies + differences).flatten(1).to(weight)
