"""The configuration as caches and servers read it: other head sizes, and no other difference."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from diff_transformer import DiffTransformerConfig
from tiny_model import KINDS, sizes_for


class OtherConfig(DiffTransformerConfig):
    """A configuration class of somebody else's, made from ours."""

    model_type = "diff_transformer_of_another"


def config_of(attention_type: str, cls: type[DiffTransformerConfig] = DiffTransformerConfig) -> DiffTransformerConfig:
    return cls(**sizes_for(attention_type, vocab_size=32, head_dim=6), attention_type=attention_type)


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
    """And the two of a pair stay one, in other processes too."""
    config = config_of("diff")
    view = config.get_text_config()
    duplicated = duplicate(view)
    assert duplicated == view
    assert (duplicated.num_key_value_heads, duplicated.head_dim) == (2, 12)
    duplicated.vocab_size = 40
    if duplicate is not copy.copy:
        first, second = duplicate((config, view))
        second.vocab_size = 50
        assert first.vocab_size == 50
    assert config.vocab_size == 32
