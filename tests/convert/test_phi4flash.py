"""The attention layers of a Phi-4-mini-flash compute what a forward does that is written down here.

That forward goes head by head, from what was published of the model: queries, keys and values one below the other in a
matrix with a bias; heads of a pair side by side; no rotary embedding; λ_init from a layer's number, counted from 0; a
window in the first half of the layers; in the second half all share the keys and values of its second layer.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diff_transformer.convert import phi4flash_attention
from diff_transformer.nn import DiffAttention
from layers_by_hand import check, lambda_of, one_map, part_of, rms

WIDTH, HEADS, KV_HEADS, LAYERS, WINDOW = 24, 6, 2, 8, 4
D = WIDTH // HEADS
SETTINGS: dict[str, Any] = {
    "model_type": "phi4flash",
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "mb_per_layer": 2,
    "sliding_window": WINDOW,
    "layer_norm_eps": 1e-5,
}
ATTENTION = (1, 3, 5, 7)
CONTEXT = 5  # the layer whose keys and values those behind it share


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    """A folder with the weights of all attention layers, and one of a state-space layer's."""
    weights = {"model.layers.0.attn.A_log": torch.randn(2 * WIDTH, 16)}
    for layer in ATTENTION:
        prefix = f"model.layers.{layer}.attn."
        rows = HEADS * D + (0 if layer > CONTEXT else 2 * KV_HEADS * D)
        gains = torch.ones(rows, 1)
        gains[: (HEADS + KV_HEADS) * D] = 2.0
        weights |= {
            f"{prefix}Wqkv.weight": gains * torch.randn(rows, WIDTH) * WIDTH**-0.5,
            f"{prefix}Wqkv.bias": torch.randn(rows),
            f"{prefix}out_proj.weight": torch.randn(WIDTH, HEADS * D) * WIDTH**-0.5,
            f"{prefix}out_proj.bias": torch.randn(WIDTH),
            f"{prefix}inner_cross_attn.subln.weight": torch.rand(2 * D) + 0.5,
        }
        for name in ("q1", "k1", "q2", "k2"):
            weights[f"{prefix}inner_cross_attn.lambda_{name}"] = torch.randn(D) * 0.6
    save_file(weights, tmp_path / "model.safetensors")
    write(tmp_path)
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **changes}), encoding="utf-8")


def visible(length: int, window: int | None) -> Tensor:
    """(N, N), True where a token sees another: itself and those before it, so many in all."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def forward(folder: Path, layer: int, x: Tensor, context: Tensor, may_see: Tensor) -> Tensor:
    """An attention layer's output for x (B, N, D), where keys and values are those of `context` (B, N, D)."""
    weights = load_file(folder / "model.safetensors")
    own, owner = (part_of(weights, f"model.layers.{number}.attn.") for number in (layer, min(layer, CONTEXT)))
    inner = part_of(own, "inner_cross_attn.")

    def head(w: Mapping[str, Tensor], of: Tensor, number: int) -> Tensor:
        rows = slice(number * D, (number + 1) * D)
        return of @ w["Wqkv.weight"][rows].T + w["Wqkv.bias"][rows]

    init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    out = []
    for pair in range(HEADS // 2):
        shared = pair // (HEADS // KV_HEADS)
        values = [head(owner, context, HEADS + KV_HEADS + 2 * shared + i) for i in range(2)]
        first, second = (
            one_map(head(own, x, 2 * pair + i), head(owner, context, HEADS + 2 * shared + i), may_see) for i in range(2)
        )
        mixed = (first - lambda_of(inner, init) * second) @ torch.cat(values, -1)
        out.append(rms(mixed, inner["subln.weight"], 1e-5) * (1 - init))
    return torch.cat(out, -1) @ own["out_proj.weight"].T + own["out_proj.bias"]


@pytest.mark.parametrize("layer", [1, 3, 5])
@torch.no_grad()
def test_layers_with_keys_of_their_own(layer: int, phi: Path) -> None:
    attention, x = phi4flash_attention(phi, layer), torch.randn(2, 9, WIDTH)
    assert type(attention.module) is DiffAttention
    assert attention.module.layer_idx == layer
    assert attention.context_layer is None
    assert attention.window == (WINDOW if layer < LAYERS // 2 else None)
    may_see = visible(9, attention.window)
    check(attention.module(x, attn_mask=may_see), forward(phi, layer, x, x, may_see))
    check(attention.module(x, is_causal=True), forward(phi, layer, x, x, visible(9, None)))


@torch.no_grad()
def test_a_layer_that_shares_keys(phi: Path) -> None:
    shared, attention = phi4flash_attention(phi, CONTEXT), phi4flash_attention(phi, 7)
    assert (attention.context_layer, attention.window) == (CONTEXT, None)
    x, context, causal = torch.randn(2, 9, WIDTH), torch.randn(2, 9, WIDTH), visible(9, None)
    expected = forward(phi, 7, x, context, causal)
    check(attention.module(x, context=context, attn_mask=causal), expected)
    kept = shared.module.project_context(context)
    check(attention.module(x, context=kept, attn_mask=causal), expected)
    assert (forward(phi, 7, x, x, causal) - expected).abs().max() > 0.1


def test_dtypes_and_gradients(phi: Path) -> None:
    weights = {key: x.bfloat16() for key, x in load_file(phi / "model.safetensors").items()}
    save_file(weights, phi / "model.safetensors")
    module = phi4flash_attention(str(phi), 3).module
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("lam.")} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if not name.startswith("lam.")} == {torch.bfloat16}
    module(torch.randn(1, 5, WIDTH).bfloat16(), is_causal=True).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_windows_as_a_list(phi: Path) -> None:
    write(phi, sliding_window=[None, 3, None, 2, None, None, None, None])
    assert [phi4flash_attention(phi, layer).window for layer in ATTENTION] == [3, 2, None, None]


@pytest.mark.parametrize(
    ("changes", "layer", "pattern"),
    [
        ({}, 2, r"Layer 2 of .* is a state-space layer, which nothing .* the odd numbers from 1 to 7\.$"),
        ({}, 8, r"layer must lie in 0 … 7, the layers of .*, got 8\."),
        ({}, -1, r"layer must lie in 0 … 7, .* got -1\."),
        ({"model_type": "phi3"}, 1, "model_type in .* must be 'phi4flash', got 'phi3'"),
        ({"num_attention_heads": None}, 1, "must have whole numbers hidden_size, .* got 24, None, 2, 8 and 2"),
        ({"mb_per_layer": 0}, 1, "mb_per_layer 2, got 24, 6, 2, 8 and 0"),
        ({"num_hidden_layers": 6}, 1, "4 the last, .*got 24, 6, 2, 6 and 2"),
        ({"hidden_size": 25}, 1, "the second divides the first .*got 25"),
        ({"num_key_value_heads": 3}, 1, "must be even .*, got 6 and 3"),
        ({"num_key_value_heads": 6}, 1, r"wrong shapes: .*1\.attn\.Wqkv\.weight is \(40, 24\), not \(72, 24\)"),
        ({"num_hidden_layers": 12}, 9, r"missing: model\.layers\.9\..*; wrong shapes: model\.layers\.7\."),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], layer: int, pattern: str, phi: Path) -> None:
    write(phi, **changes)
    with pytest.raises(ValueError, match=pattern) as refused:
        phi4flash_attention(phi, layer)
    assert "\n" not in str(refused.value)
