"""DiffTransformerConfig: one config for every attention type, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import KINDS, OPTIONS, PAIRED, SIZES


def test_defaults() -> None:
    config = DiffTransformerConfig()
    assert config.attention_type == "diff"
    assert config.lambda_init == "schedule"
    assert config.num_key_value_heads == config.num_attention_heads == 12
    assert config.head_dim == 64
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert not config.tie_word_embeddings
    for kind in (*KINDS, "dex"):
        config = DiffTransformerConfig(attention_type=kind, num_noise_heads=3)
        assert config.headwise_norm is None
        assert config.has_headwise_norm is (kind in PAIRED)
    assert DiffTransformerConfig(attention_type="dex", headwise_norm=False).has_headwise_norm is False


FULL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "attention_type": "diff_v2",
    "lambda_init": 0.5,
    "max_position_embeddings": 77,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "hidden_act": "poly_norm",
    "rms_norm_eps": 1e-6,
    "attention_norm_eps": 1e-5,
    "initializer_range": 0.01,
    "residual_initializer_range": 0.003,
    "sliding_window": 5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def test_round_trip(tmp_path: Path) -> None:
    config = DiffTransformerConfig(**FULL)
    config.save_pretrained(tmp_path)
    for loaded in (DiffTransformerConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DiffTransformerConfig
        for name, value in FULL.items():
            assert getattr(loaded, name) == value, name
    assert DiffTransformerConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("old", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}], ids=str)
def test_rope_theta_alone(old: dict[str, Any]) -> None:
    assert DiffTransformerConfig(**old).rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "attention type": ({"attention_type": "diff2"}, r"attention_type must be one of 'diff', .*, got 'diff2'\.$"),
    "headwise norm of dex": (
        {"attention_type": "dex", "headwise_norm": True},
        r"headwise_norm must be false or left out for attention_type 'dex', got True\.$",
    ),
    **{
        f"{name} of dex": (
            {"attention_type": "dex", name: value},
            re.escape(f"{name} must be left out for attention_type 'dex', got {value}"),
        )
        for name, value in (*OPTIONS.items(), ("attention_dropout", 0.1))
    },
    "λ of each token": (
        {"token_lambda": True},
        r"token_lambda must be false or left out for attention_type 'diff', got True\.$",
    ),
    "two numbers for a λ of each token": (
        {"attention_type": "diff_v2", "dual_lambda": True},
        r"dual_lambda must be false or left out for attention_type 'diff_v2', got True\.$",
    ),
    "a layer that is no number": ({"layers_without_rotary": [True]}, r"numbers of layers in 0 … 11, got \[True\]\.$"),
    "norm and clip": ({"qk_norm": True, "qk_clip": True}, "qk_norm and qk_clip exclude each other, got both"),
    "rotary of no layer": ({"layers_without_rotary": [12]}, r"numbers of layers in 0 … 11, got \[12\]\.$"),
    "odd heads": ({"num_attention_heads": 3, "hidden_size": 24}, r"must be even .*, got 3 and 3\.$"),
    "odd key/value heads": ({"num_key_value_heads": 3}, r"must be even .*, got 12 and 3\.$"),
    "heads not divisible": ({"num_key_value_heads": 8}, r"positive multiple of num_key_value_heads, got 12 and 8\.$"),
    "no heads": ({"num_attention_heads": 0}, r"num_attention_heads must be 1 or more, got 0\.$"),
    "width not divisible": ({"hidden_size": 100}, r"hidden_size must be a multiple .*, got 100 and 12\.$"),
    "odd head_dim": ({"head_dim": 7}, r"head_dim must be even for the rotary embedding, got 7\.$"),
    "λ_init": ({"lambda_init": "linear"}, r"lambda_init must be 'schedule' or a number, got 'linear'\.$"),
    "λ_init nan": ({"lambda_init": float("nan")}, r"lambda_init must be .* finite number, got nan\.$"),
    **{
        name: ({name: 0}, rf"{name} must be 1 or more, got 0\.$")
        for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "hidden_size")
    },
    "negative eps": ({"rms_norm_eps": -1e-5}, r"rms_norm_eps must be a finite number, 0 or more, got -1e-05\.$"),
    "padding": ({"pad_token_id": 64, "vocab_size": 64}, r"pad_token_id must lie in .*, got 64 of 64\.$"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act must be one of 'silu', 'poly_norm', got 'gelu'\.$"),
    "unknown rotary type": (
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}},
        r"rope_type.*'nonsense'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sizes(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        DiffTransformerConfig(**arguments)
    assert "\n" not in str(caught.value)


def test_odd_heads_are_fine_for_the_second_version() -> None:
    assert DiffTransformerConfig(attention_type="diff_v2", num_attention_heads=3, hidden_size=24).head_dim == 8


@pytest.mark.parametrize(
    ("set_afterwards", "message"),
    [
        ({"attention_type": "softmx"}, "attention_type must be one of .*, got 'softmx'"),
        ({"sliding_window": 0}, "sliding_window must be 2 or more, or None for no window, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types must name .* for each of 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"], "sliding_window": 4}, "layer_types must name"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "need a sliding_window, got None"),
        ({"lambda_init": "schedul"}, "lambda_init must be"),
        ({"attention_dropout": 1.0}, "attention_dropout must be"),
    ],
    ids=str,
)
def test_what_loading_sets_is_checked(set_afterwards: dict[str, Any], message: str, tmp_path: Path) -> None:
    DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        DiffTransformerForCausalLM.from_pretrained(tmp_path, **set_afterwards)


def test_types_of_layers_can_be_set_by_loading(tmp_path: Path) -> None:
    DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).save_pretrained(tmp_path)
    types = ["full_attention", "sliding_attention"]
    windowed = DiffTransformerForCausalLM.from_pretrained(tmp_path, layer_types=types, sliding_window=3)
    assert windowed.config.layer_types == types
