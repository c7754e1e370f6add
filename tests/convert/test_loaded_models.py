"""A DiffLlama in memory becomes one of our models."""

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer.convert import as_our_model
from tiny_model import SIZES


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_computes_the_same_in_the_same_dtype(tied: bool, dtype: torch.dtype) -> None:
    theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0, tie_word_embeddings=tied)).to(dtype)
    ours = as_our_model(theirs.eval())
    assert not ours.training
    assert ours.lm_head.weight.dtype == dtype
    tokens = torch.randint(1, SIZES["vocab_size"], (2, 9))
    expected, answer = theirs(tokens).logits.double(), ours(tokens).logits.double()
    # DiffLlama's λ is in float32, or in the dtype of the model where that is narrower.
    torch.testing.assert_close(answer, expected, rtol=0, atol=1e-6 if dtype == torch.float64 else 0.02)
    with torch.no_grad():
        ours.lm_head.weight.zero_()
    assert torch.equal(theirs(tokens).logits.double(), expected), "the weights are copied"


def test_it_leaves_the_random_state_alone() -> None:
    theirs, before = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0)), torch.get_rng_state()
    as_our_model(theirs)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="Only a DiffLlama is converted without a folder, got LlamaForCausalLM"):
        as_our_model(LlamaForCausalLM(LlamaConfig(**SIZES)))
    biased = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0, attention_bias=True))
    with pytest.raises(ValueError, match="attention_bias must be False"):
        as_our_model(biased)


def test_it_keeps_the_settings_of_generation() -> None:
    theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0))
    theirs.generation_config.update(eos_token_id=[2, 5], do_sample=True)
    assert as_our_model(theirs).generation_config.to_dict() == theirs.generation_config.to_dict()
