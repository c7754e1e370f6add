"""Layers of other projects' checkpoints written down head by head, and folders with large random weights for them."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_model import check_rounding

# (x, the attention's weights, settings, the layer's number from 0) → the attention's output.
Attend = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Any], int], Tensor]
# (answer, expected) → fails if they differ by more than rounding in float32 explains.
check = partial(check_rounding, dtype=torch.float32)


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """One head (B, N, d): channels i and i + d/2, or 2i and 2i + 1, are a complex number, turned by n·θ^(−2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    pairs = x.unflatten(-1, (half, 2) if interleaved else (2, half))
    z = torch.complex(*pairs.unbind(-1 if interleaved else -2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)


def one_map(q: Tensor, k: Tensor, may_see: Tensor | None = None) -> Tensor:
    """q, k (B, N, d) → the map (B, N, N), causal unless told otherwise."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return scores.masked_fill(~(causal if may_see is None else may_see), float("-inf")).softmax(-1)


def lambda_of(w: Mapping[str, Tensor], init: float) -> Tensor:
    return (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + init


def part_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whatever the number of files."""
    return {key: x for file in sorted(folder.glob("*.safetensors")) for key, x in load_file(file).items()}


def save_checkpoint(folder: Path, settings: Mapping[str, Any], in_layers: Mapping[str, Any], tied: bool) -> Path:
    """``in_layers``: by name rows, columns and gain of a matrix, or the size of a norm (…weight) or another vector."""
    width, vocabulary = settings["hidden_size"], settings["vocab_size"]
    matrices = {"mlp.gate_proj.weight": (settings["intermediate_size"], width, 1.0)}
    matrices["mlp.up_proj.weight"] = matrices["mlp.gate_proj.weight"]
    matrices["mlp.down_proj.weight"] = (width, settings["intermediate_size"], 1.0)
    norms = {"input_layernorm.weight": width, "post_attention_layernorm.weight": width}
    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, width),
        "model.norm.weight": torch.rand(width) + 0.5,
    }
    if not tied:
        weights["lm_head.weight"] = torch.randn(vocabulary, width) * 2 * width**-0.5
    for layer in range(settings["num_hidden_layers"]):
        for name, shape in {**matrices, **norms, **in_layers}.items():
            if isinstance(shape, tuple):
                rows, columns, gain = shape
                x = torch.randn(rows, columns) * gain * columns**-0.5
            else:
                x = torch.randn(shape) * 0.8 * shape**-0.25 if ".lambda_" in name else torch.rand(shape) + 0.5
            weights[f"model.layers.{layer}.{name}"] = x
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def silu(x: Tensor, _: Mapping[str, Tensor]) -> Tensor:
    return x * x.sigmoid()


def decoder_logits(folder: Path, tokens: Tensor, attend: Attend, activate: Callable[..., Tensor] = silu) -> Tensor:
    """The logits of the model in a folder; ``activate`` takes the gate and the layer's weights."""
    weights = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eps, x = settings["rms_norm_eps"], weights["model.embed_tokens.weight"][tokens]
    for layer in range(settings["num_hidden_layers"]):
        w = part_of(weights, f"model.layers.{layer}.")
        x = x + attend(rms(x, w["input_layernorm.weight"], eps), part_of(w, "self_attn."), settings, layer)
        y = rms(x, w["post_attention_layernorm.weight"], eps)
        gate = activate(y @ w["mlp.gate_proj.weight"].T, w)
        x = x + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return rms(x, weights["model.norm.weight"], eps) @ head.T
