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
from torch import Tensor

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.convert import convert_from, convert_to
from diff_transformer.convert.layout_tables import read_motif
from layers_by_hand import check, decoder_logits, lambda_of, one_map, rms, save_checkpoint, turned

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
        width, d = settings["hidden_size"], head_dim_of(settings)
        heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
        signal = heads - settings.get("num_noise_heads", heads // 2)
        of_layer: dict[str, Any] = {
            "self_attn.q_proj.weight": (heads * d, width, 2.0),
            "self_attn.k_proj.weight": (kv_heads * d, width, 2.0),
            "self_attn.v_proj.weight": (kv_heads * d, width, 1.0),
            "self_attn.o_proj.weight": (width, signal * 2 * d, 1.0),
            "self_attn.subln.weight": 2 * d,
            "mlp.act_fn.weight": 3,
            "mlp.act_fn.bias": 1,
            **{f"self_attn.lambda_{name}": d for name in ("q1", "k1", "q2", "k2")},
        }
        return save_checkpoint(tmp_path / "theirs", settings, of_layer, settings["tie_word_embeddings"])

    return save


def poly_norm(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    terms = [scale * rms(x**power, 1.0, 1e-6) for scale, power in zip(w["mlp.act_fn.weight"], (3, 2, 1), strict=True)]
    return sum(terms, w["mlp.act_fn.bias"])


def attention(x: Tensor, w: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """The attention of layer number `layer`, counted from 0."""
    d, heads, theta = head_dim_of(settings), settings["num_attention_heads"], settings["rope_theta"]
    groups, pairs = settings.get("num_noise_heads", heads // 2), settings["num_key_value_heads"] // 2
    ratio = heads // groups - 1

    def head(name: str, number: int) -> Tensor:
        part = x @ w[f"{name}_proj.weight"][number * d : (number + 1) * d].T
        return part if name == "v" else turned(part, theta, interleaved=False)

    init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    out = []
    for group in range(groups):
        pair = group // (groups // pairs)
        values = torch.cat((head("v", 2 * pair), head("v", 2 * pair + 1)), -1)
        noise = one_map(head("q", group * (ratio + 1) + ratio), head("k", 2 * pair + 1))
        for i in range(ratio):
            signal = one_map(head("q", group * (ratio + 1) + i), head("k", 2 * pair))
            mixed = (signal - lambda_of(w, init) * noise) @ values
            out.append(rms(mixed, w["subln.weight"], settings["attn_rms_norm_eps"]) * (1 - init))
    return torch.cat(out, -1) @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    ("layout", "settings"), [*(("motif", plain) for plain in PLAINS), *(("motif-2", grouped) for grouped in GROUPS)]
)
def test_from_motif(
    layout: str, settings: dict[str, Any], motif: Save, tokens: Tensor, logits: Any, tmp_path: Path
) -> None:
    source = motif(**settings)
    convert_from(layout, source, tmp_path / "new")
    check(logits(tmp_path / "new"), decoder_logits(source, tokens, attention, poly_norm))
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
def test_to_motif(kind: str, layout: str, config: Any, ours: Any, tokens: Tensor, logits: Any, tmp_path: Path) -> None:
    more = {"hidden_act": "poly_norm", "lambda_init_offset": -1, "attention_norm_eps": 1e-2}
    source = ours(kind, **{**config, "head_dim": 4}, **more)
    convert_to(layout, source, tmp_path / "new")
    check(decoder_logits(tmp_path / "new", tokens, attention, poly_norm), logits(source))
    settings = json.loads((tmp_path / "new/config.json").read_text(encoding="utf-8"))
    assert (settings["model_type"], settings["architectures"]) == ("Motif", ["MotifForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"kind": "diff_grouped"}, "missing: num_noise_heads, head_dim"),
        ({"kind": "diff_grouped", **GROUPED, "k_ratio": 3}, r"k_ratio must be 1, because .*; got 3"),
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
    settings = {"kind": "diff", **SETTINGS, **PLAIN, **changes}
    kind = settings.pop("kind")
    with pytest.raises(ValueError, match=pattern):
        read_motif(settings, kind)


def test_settings_as_later_releases_of_transformers_write_them() -> None:
    old, new = {**SETTINGS, **GROUPED}, {**SETTINGS, **GROUPED, "model_type": "motif", "dtype": "float32"}
    del new["rope_theta"], new["rope_scaling"], new["torch_dtype"]
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": SETTINGS["rope_theta"]}
    first, second = (read_motif(settings, "diff_grouped") for settings in (old, new))
    assert first.to_dict() == second.to_dict()
