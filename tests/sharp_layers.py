"""Attention modules whose attention is peaked, and the same layers by the float64 oracle.

At the usual initial weights attention is nearly uniform and most mistakes pass; here logits have a standard deviation
of about 4, and λ and the norm weights are far from where they start.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

import oracle
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.nn import Attention, DiffAttention, DiffAttentionV2, GroupedDiffAttention, LatentDiffAttention
from tiny_model import fitted, sharpen

WIDTH, HEADS = 24, 8

# How many eps of its dtype an answer may be off, relative to its largest entry. Logits reach about 20, so rounding them
# moves every weight by up to 10 eps; the projections, the subtraction and the norm add a few eps each, and a sum of
# twenty products as much again. In half precision the softmax, the norm and all sums run in float32, and what is left
# is the rounding of queries, keys, values, heads and output. The mistakes looked for are off by a percent or more.
ROUNDINGS, HALF_ROUNDINGS = 64, 8


def build(kind: str, layer: int = 3, dtype: torch.dtype = torch.float64, **arguments: Any) -> Attention:
    """A module with large weights."""
    sizes = fitted(kind, {"hidden_size": WIDTH, "num_attention_heads": HEADS, "head_dim": 4, **arguments})
    if ATTENTION_TYPES[kind].grouped:  # three signal heads to a noise map, or two, or DIFF's one
        heads, keys = sizes["num_attention_heads"], sizes.get("num_key_value_heads", 4) // 2
        sizes.setdefault("num_noise_heads", next(g for g in (2, 3, 4, 6) if heads % g == 0 == g % keys))
        if "num_key_value_heads" in sizes and not ATTENTION_TYPES[kind].pairs_heads:
            sizes["num_key_value_heads"] = keys
    module = ATTENTION_TYPES[kind].layer_class()(layer=layer, **sizes).to(dtype)
    sharpen(module)
    return module


def inputs(batch: int = 2, length: int = 7) -> Tensor:
    """Hidden states (batch, length, WIDTH) in float64."""
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def tables(positions: range, head_dim: int = 4, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin in float64 (RotaryEmbedding's own are float32 and tested elsewhere)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * frequencies.repeat(2)
    return angles.cos(), angles.sin()


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def by_oracle(module: Attention, x: Tensor, attn_mask: Tensor | None = None, **options: Any) -> np.ndarray:
    """What the layer should give, from nothing but the module's parameters."""
    options["attn_mask"] = None if attn_mask is None else attn_mask.numpy()
    options.setdefault("is_causal", False)
    weights = {name: array(parameter) for name, parameter in module.named_parameters()}
    wq, wk, wv, wo = (weights[f"{name}_proj.weight"] for name in "qkvo")
    if isinstance(module, LatentDiffAttention):
        return oracle.latent_layer(array(x), weights, ratio=module.ratio, dv=module.value_width, **options)
    d, options["norm_weight"] = module.head_dim, weights.get("head_norm.weight")
    if isinstance(module, DiffAttention | GroupedDiffAttention):
        options.setdefault("layer", module.layer_idx + 1)
        heads, key_heads = len(wq) // ((module.ratio + 1) * d) * module.ratio, len(wk) // (2 * d)
        vectors = weights.get("lambda_proj.weight")
        if vectors is None:
            vectors = tuple(weights[f"lam.{name}"] for name in ("q1", "k1", "q2", "k2"))
        options |= {"heads": heads, "key_heads": key_heads, "ratio": module.ratio}
        return oracle.diff_layer(array(x), wq, wk, wv, wo, vectors, **options)
    options["key_heads"] = len(wk) // d
    if isinstance(module, DiffAttentionV2):
        heads = len(wq) // ((module.ratio + 1) * d) * module.ratio
        options |= {"heads": heads, "ratio": module.ratio, "w_lambda": weights["lambda_proj.weight"]}
        return oracle.diff_v2_layer(array(x), wq, wk, wv, wo, **options)
    return oracle.softmax_layer(array(x), wq, wk, wv, wo, heads=len(wq) // d, **options)


def check(answer: Tensor, expected: np.ndarray | Tensor, least: float = 0.0) -> None:
    """Fails if any entry is off by more than rounding in the answer's dtype explains.

    Rounding is relative to the largest expected entry, or to ``least`` where that is larger.
    """
    expected = array(expected) if isinstance(expected, Tensor) else expected
    assert answer.shape == expected.shape
    info = torch.finfo(answer.dtype)
    largest = max(least, np.abs(expected).max())
    limit = (HALF_ROUNDINGS if info.bits == 16 else ROUNDINGS) * info.eps * largest
    error = np.abs(array(answer) - expected).max()
    assert error <= limit, f"error {error:.3g} over the limit {limit:.3g}"
