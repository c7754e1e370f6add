"""Checkpoints in the layouts of Motif-2.6B and Motif-2-12.7B compute what a forward does that is written down here.

That forward goes head by head, from what was published of the models: query heads in stripes, the noise head behind the
signal heads whose map it shares; keys in pairs; values in pairs that are one value; half-split rotary embedding; λ_init
from a layer's number, counted from 0, less 1; another eps inside attention; PolyNorm as the activation.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.convert import convert_from, convert_to
from diff_transformer.convert.layout_tables import read_motif

VOCABULARY = 29
SETTINGS: dict[str, Any] = {
    "architectures": ["MotifForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_motif.MotifForCausalLM"},
    "model_type": "Motif",
    "attn_rms_norm_eps": 1e-3,
    "hidden_act": "poly_norm",
    "hidden_size": 32,
    "initializer_range": 2e-5,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-2,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
PLAIN = {"num_attention_heads": 8, "num_key_value_heads": 8}
GROUPED = {"num_attention_heads": 10, "num_noise_heads": 2, "num_key_value_heads": 4, "head_dim": 6, "k_ratio": 1}
# As published, with keys for several groups, and with one signal head to a group, which is the plain attention.
GROUPS = (
    GROUPED,
    {**GROUPED, "num_attention_heads": 12, "num_noise_heads": 4},
    {**GROUPED, "num_attention_heads": 8, "num_noise_heads": 4, "num_key_value_heads": 8, "head_dim": 4},
    {**GROUPED, "tie_word_embeddings": False},
)
PLAINS = (PLAIN, {**PLAIN, "num_key_value_heads": 4}, {**PLAIN, "tie_word_embeddings": False})
Save = Callable[..., Path]


def head_dim_of(settings: Mapping[str, Any]) -> int:
    return settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]


@pytest.fixture
def motif(tmp_path: Path) -> Save:
    """(**settings) → a folder in Motif's layout with large random weights."""

    def save(**given: Any) -> Path:
        settings = {**SETTINGS, **given}
        width, inner, d = settings["hidden_size"], settings["intermediate_size"], head_dim_of(settings)
        heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
        signal = heads - settings.get("num_noise_heads", heads // 2)
        matrices = {
            "self_attn.q_proj": (heads * d, width, 2.0),
            "self_attn.k_proj": (kv_heads * d, width, 2.0),
            "self_attn.v_proj": (kv_heads * d, width, 1.0),
            "self_attn.o_proj": (width, signal * 2 * d, 1.0),
            "mlp.gate_proj": (inner, width, 1.0),
            "mlp.up_proj": (inner, width, 1.0),
            "mlp.down_proj": (width, inner, 1.0),
        }
        norms = {"input_layernorm": width, "post_attention_layernorm": width, "self_attn.subln": 2 * d, "mlp.act_fn": 3}
        weights = {
            "model.embed_tokens.weight": torch.randn(VOCABULARY, width),
            "model.norm.weight": torch.rand(width) + 0.5,
        }
        if not settings["tie_word_embeddings"]:
            weights["lm_head.weight"] = torch.randn(VOCABULARY, width) * 2 * width**-0.5
        for layer in range(settings["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, gain) in matrices.items():
                weights[f"{prefix}{name}.weight"] = torch.randn(rows, columns) * gain * columns**-0.5
            weights |= {f"{prefix}{name}.weight": torch.rand(size) + 0.5 for name, size in norms.items()}
            weights[f"{prefix}mlp.act_fn.bias"] = torch.rand(1) + 0.5
            for name in ("q1", "k1", "q2", "k2"):
                weights[f"{prefix}self_attn.lambda_{name}"] = torch.randn(d) * 0.8 * d**-0.25
        (tmp_path / "theirs").mkdir()
        save_file(weights, tmp_path / "theirs/model.safetensors")
        (tmp_path / "theirs/config.json").write_text(json.dumps(settings), encoding="utf-8")
        return tmp_path / "theirs"

    return save


def normed(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return sum(w * normed(x**power, 1.0, 1e-6) for w, power in zip(weight, (3, 2, 1), strict=True)) + bias


def turned(x: Tensor, theta: float) -> Tensor:
    """One head (B, N, d): channels i and i + d/2 are a complex number, turned by the angle n·θ^(−2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


def causal_map(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


def attention(x: Tensor, w: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """The attention of layer number `layer`, counted from 0."""
    d, heads, theta = head_dim_of(settings), settings["num_attention_heads"], settings["rope_theta"]
    groups, pairs = settings.get("num_noise_heads", heads // 2), settings["num_key_value_heads"] // 2
    ratio = heads // groups - 1

    def head(name: str, number: int) -> Tensor:
        return x @ w[f"{name}_proj.weight"][number * d : (number + 1) * d].T

    init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    lam = (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + init
    out = []
    for group in range(groups):
        pair = group // (groups // pairs)
        k1, k2 = (turned(head("k", 2 * pair + i), theta) for i in range(2))
        values = torch.cat((head("v", 2 * pair), head("v", 2 * pair + 1)), -1)
        noise = causal_map(turned(head("q", group * (ratio + 1) + ratio), theta), k2)
        for i in range(ratio):
            signal = causal_map(turned(head("q", group * (ratio + 1) + i), theta), k1)
            mixed = (signal - lam * noise) @ values
            out.append(normed(mixed, w["subln.weight"], settings["attn_rms_norm_eps"]) * (1 - init))
    return torch.cat(out, -1) @ w["o_proj.weight"].T


def part_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}


def forward(folder: Path, tokens: Tensor) -> Tensor:
    """The logits of the model in a folder in Motif's layout."""
    weights = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eps = settings["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(settings["num_hidden_layers"]):
        w = part_of(weights, f"model.layers.{layer}.")
        x = x + attention(normed(x, w["input_layernorm.weight"], eps), part_of(w, "self_attn."), settings, layer)
        y = normed(x, w["post_attention_layernorm.weight"], eps)
        gate = poly_norm(y @ w["mlp.gate_proj.weight"].T, w["mlp.act_fn.weight"], w["mlp.act_fn.bias"])
        x = x + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if settings["tie_word_embeddings"] else "lm_head.weight"]
    return normed(x, weights["model.norm.weight"], eps) @ head.T


@pytest.mark.parametrize(
    ("layout", "settings"), [*(("motif", plain) for plain in PLAINS), *(("motif-2", grouped) for grouped in GROUPS)]
)
def test_from_motif(
    layout: str, settings: dict[str, Any], motif: Save, tokens: Tensor, logits: Any, check: Any, tmp_path: Path
) -> None:
    source = motif(**settings)
    convert_from(layout, source, tmp_path / "new")
    check(logits(tmp_path / "new"), forward(source, tokens))
    config = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new").config
    assert config.attention_type == ("diff_grouped" if layout == "motif-2" else "diff")
    assert (config.rms_norm_eps, config.norm_eps_in_attention, config.lambda_init_offset) == (1e-2, 1e-3, -1)


@pytest.mark.parametrize(
    ("kind", "layout", "config"),
    [
        ("diff", "motif", {"num_key_value_heads": 4}),
        ("diff_grouped", "motif-2", {"num_attention_heads": 8, "num_noise_heads": 2, "num_key_value_heads": 4}),
    ],
)
def test_to_motif(
    kind: str,
    layout: str,
    config: dict[str, Any],
    ours: Any,
    tokens: Tensor,
    logits: Any,
    check: Any,
    tmp_path: Path,
) -> None:
    more = {"hidden_act": "poly_norm", "lambda_init_offset": -1, "attention_norm_eps": 1e-2}
    source = ours(kind, **{**config, "head_dim": 4}, **more)
    convert_to(layout, source, tmp_path / "new")
    check(forward(tmp_path / "new", tokens), logits(source))
    settings = json.loads((tmp_path / "new/config.json").read_text(encoding="utf-8"))
    assert (settings["model_type"], settings["architectures"]) == ("Motif", ["MotifForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"model_type": "llama"}, "model_type must be 'Motif', got 'llama'"),
        ({"num_noise_heads": 2}, "num_noise_heads 2 is for the layout 'motif-2'"),
        ({"hidden_act": "silu"}, "hidden_act must be 'poly_norm', because .*; got 'silu'"),
        ({"hidden_act": None, "rms_norm_eps": None}, "missing: rms_norm_eps, hidden_act"),
        ({"rope_theta": None}, "missing: rope_theta"),
        ({"head_dim": 8}, "head_dim must be hidden_size / num_attention_heads without groups, got 8, 32 and 8"),
        ({"use_bias": True}, "use_bias must be False"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window must be False"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling must be null, .*yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"kv_lora_rank": 512}, "kv_lora_rank must be None, because the latent attention of Motif-3 is not covered"),
        ({"num_experts": 384}, "num_experts must be 0, because the experts of Motif-3"),
        ({"mhc_enabled": True}, "mhc_enabled must be False, because the residual streams of Motif-3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        read_motif({**SETTINGS, **PLAIN, **changes}, "diff")


def test_settings_that_groups_need() -> None:
    with pytest.raises(ValueError, match="missing: num_noise_heads, head_dim"):
        read_motif({**SETTINGS, **PLAIN}, "diff_grouped")
    with pytest.raises(ValueError, match=r"k_ratio must be 1, because .*; got 3"):
        read_motif({**SETTINGS, **GROUPED, "k_ratio": 3}, "diff_grouped")


def test_settings_as_later_releases_of_transformers_write_them() -> None:
    old, new = {**SETTINGS, **GROUPED}, {**SETTINGS, **GROUPED, "model_type": "motif", "dtype": "float32"}
    del new["rope_theta"], new["rope_scaling"], new["torch_dtype"]
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": SETTINGS["rope_theta"]}
    first, second = (read_motif(settings, "diff_grouped") for settings in (old, new))
    assert first.to_dict() == second.to_dict()


@pytest.mark.parametrize(
    ("kind", "layout", "config", "pattern"),
    [
        ("diff", "motif", {}, "hidden_act must be 'poly_norm'"),
        ("diff", "motif", {"hidden_act": "poly_norm"}, "cannot hold lambda_init_offset 0"),
        ("diff", "motif-2", {}, "one kind of attention, our 'diff_grouped'"),
        ("diff_grouped", "motif", {"num_noise_heads": 2}, "one kind of attention, our 'diff'"),
        (
            "diff_grouped",
            "motif-2",
            {"num_noise_heads": 2, "hidden_act": "poly_norm", "token_lambda": True, "lambda_init_offset": -1},
            "cannot hold token_lambda True",
        ),
    ],
)
def test_models_that_motif_cannot_hold(
    kind: str, layout: str, config: dict[str, Any], pattern: str, ours: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=pattern):
        convert_to(layout, ours(kind, **config), tmp_path / "new")
    assert not (tmp_path / "new").exists()
