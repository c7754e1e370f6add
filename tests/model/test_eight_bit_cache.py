"""A cache in eight bits: every attention type, all that a DiffCache does, and half the memory."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import QuantizedCache

from diff_transformer.model import cache as model_cache
from diff_transformer.model.cache import CACHE_NAME, DiffCache
from diff_transformer.ops import packed
from diff_transformer.ops.cpu import cpu_backend
from diff_transformer.ops.packed import pack, unpack
from tiny_model import NOT_LATENT, make, tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# In a second layer, whose keys are computed from attention, the last bit could round them to the next number of eight.
ONE: dict[str, Any] = {"dtype": torch.float32, "num_hidden_layers": 1}
NEAR = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("window", [None, 5])
def test_all_read_the_same_numbers(kind: str, window: int | None, options: dict[str, Any]) -> None:
    """A padded batch: the kernel, which reads the rows, and implementations for which they are unpacked."""
    settings: dict[str, Any] = {"cache_implementation": "quantized", "max_new_tokens": 8, "do_sample": False}
    settings |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    inputs, given = tokens(), []
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    for implementation in ("diff_attention", "sdpa", "eager"):
        model = make(kind, sliding_window=window, attn_implementation=implementation, **ONE)
        given.append(model.generate(inputs, attention_mask=mask, **settings, **options))
    assert {layer.keys.dtype for layer in given[0].past_key_values.layers} == {torch.int8}
    for other in given[1:]:
        assert torch.equal(other.sequences, given[0].sequences)
        for ours, theirs in zip(given[0].logits, other.logits, strict=True):
            torch.testing.assert_close(ours, theirs, **NEAR)


@torch.no_grad()
def test_operations_on_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordered, cut back, chosen from and repeated; the kernel is what reads it then."""
    model, inputs, order = make(kind, **ONE), tokens(), torch.tensor([1, 0])
    expected, cache = DiffCache(model.config, bits=8), DiffCache(model.config, bits=8)
    due = [model(part, past_key_values=expected).logits for part in inputs.split((7, 2), 1)][1]
    model(inputs[:, :7], past_key_values=cache)
    if kind not in ("softmax", "gdla") and "auto" in cpu_backend._loaded:
        for module in (packed, model_cache):
            monkeypatch.setattr(module, "unpack", None)
    cache.reorder_cache(order)
    torch.testing.assert_close(model(inputs[order, 7:], past_key_values=cache).logits, due[order], **NEAR)
    cache.crop(-2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    rows = [1, 1, 1]
    torch.testing.assert_close(model(inputs[rows, 7:], past_key_values=cache).logits, due[rows], **NEAR)


@torch.no_grad()
def test_latents_are_rounded_too() -> None:
    """They are never read as rows, and there are no values beside them."""
    inputs, given = tokens(), []
    for implementation in ("diff_attention", "sdpa"):
        model = make("gdla", attn_implementation=implementation, **ONE)
        cache = DiffCache(model.config, bits=8)
        given.append(torch.cat([model(part, past_key_values=cache).logits for part in inputs.split((7, 1, 1), 1)], 1))
        assert (cache.layers[0].keys.dtype, cache.layers[0].values.shape[-1]) == (torch.int8, 0)
    torch.testing.assert_close(*given, **NEAR)
    assert (given[0] - model(inputs).logits).abs().max() > 1e-4


def test_a_row_may_have_any_width() -> None:
    """The scale of a single row, which no stride tells from others, begins at any byte."""
    x = torch.randn(1, 1, 1, 14)
    assert (unpack(pack(x), torch.float32) - x).abs().max() <= x.abs().max() / 254


def test_gradients_pass_the_tokens_of_the_call() -> None:
    """As if they had not been rounded; a caller who could read rows gets numbers then. Tokens take 68 bytes for 64."""
    cache, weight = DiffCache(bits=8), torch.randn(2, 3, 9, 64)
    first, last = (torch.randn(2, 3, count, 64, requires_grad=True) for count in (7, 2))
    for new in (first, last):
        seen, _ = cache.update(new, new, 0, packed=True)
    (seen * weight).sum().backward()
    assert torch.equal(seen, unpack(pack(torch.cat((first, last), 2)), torch.float32))
    assert first.grad is None
    assert torch.equal(last.grad, weight[:, :, 7:])
    assert cache.layers[0].keys.nbytes == 2 * 3 * 9 * 68
    with pytest.raises(ValueError, match="bits must be 8 or None, got 4"):
        DiffCache(bits=4)


def test_others_take_it_and_theirs_stays() -> None:
    """Another model of transformers reads it by numbers; one of transformers' is made where its settings are given."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama, inputs = LlamaForCausalLM(LlamaConfig(vocab_size=29, **sizes)).eval(), tokens()
    with torch.no_grad():
        cache = DiffCache(llama.config, bits=8)
        parts = [llama(part, **{CACHE_NAME: cache}).logits for part in inputs.split((8, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), llama(inputs).logits, rtol=0.05, atol=0.05)
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "nobody's"}, "max_new_tokens": 2}
    with pytest.raises(ValueError, match="nobody's"):
        make().generate(inputs, attention_mask=torch.ones_like(inputs), **settings)


@pytest.mark.parametrize("kind", NOT_LATENT)  # whose values have no width
def test_that_of_transformers_rounds_what_it_was_given(kind: str) -> None:
    """In 4 bits by quanto, which rounds all but the newest tokens, after the prompt has been read unrounded."""
    pytest.importorskip("optimum.quanto")
    model, inputs = make(kind, dtype=torch.float32), tokens()
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings |= {"attention_mask": torch.ones_like(inputs), "return_dict_in_generate": True, "eos_token_id": None}
    rounding = {"backend": "quanto", "nbits": 4, "q_group_size": 4, "residual_length": 4}
    own = model.generate(inputs, **settings)
    theirs = model.generate(inputs, cache_implementation="quantized", cache_config=rounding, **settings)
    assert type(theirs[CACHE_NAME]) is QuantizedCache
    assert torch.equal(theirs.logits[0], own.logits[0])
    assert 0 < (theirs.logits[1] - own.logits[1]).abs().max() < 0.3 * own.logits[1].abs().max()
