"""The configuration as caches and servers read it: other head sizes, and no other difference."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from diff_transformer import DiffTransformerConfig
from diff_transformer.model.interface_attention import InterfaceAttention
from tiny_model import KINDS, PAIRED


class OtherConfig(DiffTransformerConfig):
    """A configuration class of somebody else's, made from ours."""

    model_type = "diff_transformer_of_another"


def config_of(attention_type: str, cls: type[DiffTransformerConfig] = DiffTransformerConfig) -> DiffTransformerConfig:
    return cls(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_noise_heads=2,
        head_dim=6,
        attention_type=attention_type,
    )


@pytest.mark.parametrize("attention_type", KINDS)
def test_it_has_the_heads_that_a_layer_sends_and_caches(attention_type: str) -> None:
    config = config_of(attention_type)
    model = AutoModelForCausalLM.from_config(config).eval()
    seen: list[tuple[int, ...]] = []
    cache = DynamicCache(config=config)
    layer = model.model.layers[0].self_attn
    assert isinstance(layer, InterfaceAttention)
    layer.q_proj.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model(input_ids=model.dummy_inputs["input_ids"] % 32, past_key_values=cache)
    view = config.get_text_config(decoder=True)
    assert view.num_key_value_heads is not None
    assert view.head_dim is not None
    for states in (cache.layers[0].keys, cache.layers[0].values):
        assert states is not None
        assert (states.shape[1], states.shape[-1]) == (view.num_key_value_heads, view.head_dim)
    assert layer.num_key_value_groups == view.num_attention_heads // view.num_key_value_heads
    # Queries that meet one of two keys are padded with as many zeros: the projection makes half of what the call sends.
    sent = view.num_attention_heads * view.head_dim // (2 if attention_type in PAIRED else 1)
    assert seen[0][-1] == sent
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 6)


@pytest.mark.parametrize("cls", [DiffTransformerConfig, OtherConfig])
@pytest.mark.parametrize("attention_type", KINDS)
def test_it_is_that_configuration_in_everything_else(
    attention_type: str, cls: type[DiffTransformerConfig], tmp_path: Any
) -> None:
    config = config_of(attention_type, cls)
    view = config.get_text_config()
    assert isinstance(view, cls)
    assert view == config
    assert config == view
    assert not view != config  # noqa: SIM202  # a server asks just this, to tell nested configurations
    assert view == config.get_text_config()
    assert view != config_of("softmax" if attention_type == "diff" else "diff", cls)
    assert view != "a configuration"
    assert view.get_text_config(decoder=True) is view
    assert repr(view) == repr(config)
    assert view.to_dict() == config.to_dict()
    assert view.to_diff_dict() == config.to_diff_dict()
    view.save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path).to_dict() | {"transformers_version": ""} == config.to_dict() | {
        "transformers_version": ""
    }
    assert type(type(view)(vocab_size=7)) is cls
    assert type(type(view).from_pretrained(tmp_path)) is cls
    assert GenerationConfig.from_model_config(view) == GenerationConfig.from_model_config(config)


@pytest.mark.parametrize("attention_type", KINDS)
def test_what_is_written_to_either_is_read_from_both(attention_type: str) -> None:
    config = config_of(attention_type)
    view = config.get_text_config()
    view.vocab_size, config.eos_token_id = 40, 7
    view._attn_implementation = "sdpa"
    assert (config.vocab_size, view.eos_token_id, config._attn_implementation) == (40, 7, "sdpa")
    model = AutoModelForCausalLM.from_config(config)
    model.resize_token_embeddings(50)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 50


def test_the_sizes_that_are_computed_cannot_be_written() -> None:
    config = config_of("diff")
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        with pytest.raises(AttributeError, match=name):
            setattr(config.get_text_config(), name, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 6)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_of_it_are_views_of_copies(duplicate: Callable[[Any], Any]) -> None:
    config = config_of("diff")
    view = config.get_text_config()
    duplicated = duplicate(view)
    assert duplicated == view
    assert (duplicated.num_key_value_heads, duplicated.head_dim) == (2, 12)
    duplicated.vocab_size = 40
    assert config.vocab_size == 32


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_pair_stays_a_pair_in_copies_and_in_other_processes(duplicate: Callable[[Any], Any]) -> None:
    config = config_of("diff")
    first, second = duplicate((config, config.get_text_config()))
    second.vocab_size = 40
    assert first.vocab_size == 40
    assert config.vocab_size == 32
