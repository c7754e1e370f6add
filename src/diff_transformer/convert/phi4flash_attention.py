"""Reads the attention layers of Phi-4-mini-flash, which are differential; docs/converting.md says why not the whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diff_transformer.convert.layout import CONFIG, Weights, check_headers, read_source_config
from diff_transformer.nn import DiffAttention
from diff_transformer.utils.suggestions import quoted

PHI4FLASH = "phi4flash"  # its model_type
WHAT_IS_COVERED = (
    "A Phi-4-mini-flash cannot become a model of this project, since half of its layers are state-space layers; "
    "covered are its attention layers, one at a time, by diff_transformer.convert.phi4flash_attention(SRC, layer)."
)
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
NORM_EPS = 1e-5  # fixed in its attention


@dataclass(frozen=True)
class Phi4FlashAttention:
    """An attention layer of a Phi-4-mini-flash, with the arguments of its module's calls.

    The module has no rotary embedding, as the layer has none. It takes what the layer's LayerNorm gives, (B, N, D).

    Attributes:
        module: the layer's weights. Causality is an argument of its ``forward``.
        window: how many tokens back the layer looks, the token itself included, or None for all: an ``attn_mask``.
        context_layer: None if keys and values are the layer's own. Else the number, counted from 0, of the layer whose
            keys and values it shares: W_K and W_V are that layer's, ``context`` is that layer's input (or its keys and
            values, from its module's ``project_context``), and causality a mask.

    Examples:
        >>> module = DiffAttention(64, num_attention_heads=4, layer=2, bias=True)
        >>> Phi4FlashAttention(module, window=512, context_layer=None).window
        512
    """

    module: DiffAttention
    window: int | None
    context_layer: int | None


def phi4flash_attention(source: str | Path, layer: int) -> Phi4FlashAttention:
    """Return an attention layer of a folder in the layout of microsoft/Phi-4-mini-flash-reasoning.

    Args:
        source: the folder with config.json and safetensors.
        layer: its number, counted from 0 as there. Layers with an odd number have attention. In the second half all of
            them have the keys and values of the first one there.

    Returns:
        The layer on the CPU in the dtype of its weights, λ in float32 at least.

    Raises:
        ValueError: a state-space layer, no such layer, or settings or weights of another kind.
        FileNotFoundError: there is no such folder, or no weights in it.

    Examples:
        >>> attention = phi4flash_attention("Phi-4-mini-flash-reasoning", layer=1)  # doctest: +SKIP
    """
    source = Path(source)
    raw = read_source_config(source)
    file = str(source / CONFIG)
    if raw.get("model_type") != PHI4FLASH:
        raise ValueError(f"model_type in {file!r} must be {PHI4FLASH!r}, got {quoted(raw.get('model_type'))}.")
    sizes: list[Any] = [raw.get(name) for name in SIZES]
    width, heads, kv_heads, layers = sizes
    are_whole = all(type(size) is int and size > 0 for size in sizes)
    if not are_whole or width % heads or layers % 4 or raw.get("mb_per_layer") != 2:
        raise ValueError(
            f"{file!r} must have whole numbers {', '.join(SIZES)}, of which the second divides the first and 4 the "
            f"last, and mb_per_layer 2, got {', '.join(map(quoted, sizes))} and {quoted(raw.get('mb_per_layer'))}."
        )
    if not 0 <= layer < layers:
        raise ValueError(f"layer must lie in 0 … {layers - 1}, the layers of {str(source)!r}, got {layer}.")
    if layer % 2 == 0:
        raise ValueError(
            f"Layer {layer} of {str(source)!r} is a state-space layer, which nothing here can hold; covered are its "
            f"attention layers, the odd numbers from 1 to {layers - 1}."
        )
    # Layers from here on attend to what the last one before them has kept.
    context_layer = layers // 2 + 1
    shares = layer > context_layer
    with torch.device("meta"):
        module = DiffAttention(width, heads, layer + 1, kv_heads, norm_eps=NORM_EPS, bias=True)
    queries, keys = heads * module.head_dim, kv_heads * module.head_dim
    own, owner = (f"model.layers.{number}.attn." for number in (layer, context_layer if shares else layer))
    # Parameters that have the same shape there; the projections of queries, keys and values are one matrix.
    names = {f"o_proj.{part}": f"{own}out_proj.{part}" for part in ("weight", "bias")}
    names |= {f"lam.{name}": f"{own}inner_cross_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")}
    names["head_norm.weight"] = f"{own}inner_cross_attn.subln.weight"
    parameters = module.state_dict()
    expected: dict[str, tuple[int, ...]] = {theirs: tuple(parameters[ours].shape) for ours, theirs in names.items()}
    for prefix, rows in {own: queries, owner: queries + 2 * keys}.items():
        expected |= {f"{prefix}Wqkv.weight": (rows, width), f"{prefix}Wqkv.bias": (rows,)}
    weights = Weights(source)
    try:
        check_headers(expected, {key: weights.headers[key] for key in expected if key in weights.headers})
    except ValueError as error:
        raise ValueError(f"The weights in {str(source)!r} do not fit attention layer {layer}: {error}") from None

    state = {ours: weights.read(theirs) for ours, theirs in names.items()}
    for part in ("weight", "bias"):
        state[f"q_proj.{part}"] = weights.read(f"{own}Wqkv.{part}")[:queries].clone()
        kept = weights.read(f"{owner}Wqkv.{part}")[queries:]
        state[f"k_proj.{part}"], state[f"v_proj.{part}"] = (half.clone() for half in kept.split(keys))
    module.load_state_dict(state, assign=True)  # λ keeps float32 at least
    # config.json has one number for the first half of the layers, or a list.
    window = raw.get("sliding_window") if layer < layers // 2 else None
    window = window[layer] if isinstance(window, list) else window
    return Phi4FlashAttention(module, window, context_layer if shares else None)
