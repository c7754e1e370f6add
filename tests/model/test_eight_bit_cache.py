"""A cache in eight bits: every attention type, all that a DiffCache does, and half the memory."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diff_transformer.model.cache import DiffCache, EightBitLayer, EightBitWindowLayer
from diff_transformer.ops import packed
from diff_transformer.ops.packed import pack, unpack
from tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SETTINGS: dict[str, Any] = {
    "cache_implementation": "quantized",
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("window", [None, 5])
def test_all_read_the_same_numbers(
    kind: str, window: int | None, options: dict[str, Any], make: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded batch and its beams: the kernel that reads the rows, and others for which they are unpacked.

    In one layer, whose keys come from the embeddings: those of a second one could be rounded to the next number.
    """
    inputs, answers = tokens(), []
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    answered = packed.fast_path_of

    def recorded(backend: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            answers.append(answered(backend)(*arguments, **more) is not None)
            return answered(backend)(*arguments, **more)

        return answered(backend) and call

    monkeypatch.setattr(packed, "fast_path_of", recorded)
    given = []
    for implementation in ("diff_attention", "sdpa", "eager"):
        sizes: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": window}
        model = make(kind, torch.float32, attn_implementation=implementation, **sizes)
        given.append(model.generate(inputs, attention_mask=mask, **SETTINGS, **options))
    layers = given[0].past_key_values.layers
    assert {type(layer) for layer in layers} == {EightBitLayer if window is None else EightBitWindowLayer}
    assert {layer.keys.dtype for layer in layers} == {torch.int8}
    if kind != "softmax" and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert answers.count(True) >= 6  # all tokens but the prompt
    for other in given[1:]:
        assert torch.equal(other.sequences, given[0].sequences)
        for ours, theirs in zip(given[0].logits, other.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_operations_on_a_cache(kind: str, make: Any, tokens: Any) -> None:
    """Reordered, cut back, chosen from and repeated, its rows are those of tokens that come in that order."""
    model, inputs = make(kind, torch.float32, num_hidden_layers=1), tokens()
    order, near = torch.tensor([1, 0]), {"rtol": 1e-3, "atol": 1e-3}
    with torch.no_grad():
        expected, cache = DiffCache(model.config, bits=8), DiffCache(model.config, bits=8)
        due = [model(part, past_key_values=expected).logits for part in inputs.split((7, 2), 1)][1]
        model(inputs[:, :7], past_key_values=cache)
        cache.reorder_cache(order)
        torch.testing.assert_close(model(inputs[order, 7:], past_key_values=cache).logits, due[order], **near)
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([0]))
        cache.batch_repeat_interleave(3)
        torch.testing.assert_close(model(inputs[[1, 1, 1], 7:], past_key_values=cache).logits, due[[1, 1, 1]], **near)


def test_layers_hold_half_of_bfloat16_and_round_once() -> None:
    keys, cache = torch.randn(2, 3, 40, 64, dtype=torch.bfloat16), DiffCache(bits=8, expected_length=40)
    with torch.no_grad():
        for part in keys.split((10, 1, 1, 28), 2):
            seen, _ = cache.update(part, part, 0)
    assert torch.equal(seen, unpack(pack(keys), torch.bfloat16))
    assert cache.layers[0].keys.untyped_storage().nbytes() == 2 * 3 * 40 * (64 + 4)
    with pytest.raises(ValueError, match="bits must be 8 or None, got 4"):
        DiffCache(bits=4)


def test_gradients_pass_the_tokens_of_the_call() -> None:
    """As if they had not been rounded; a caller who could read rows gets numbers then."""
    cache, weight = DiffCache(bits=8), torch.randn(2, 3, 9, 8)
    first, last = (torch.randn(2, 3, count, 8, requires_grad=True) for count in (7, 2))
    for new in (first, last):
        seen, _ = cache.update(new, new, 0, packed=True)
    (seen * weight).sum().backward()
    assert torch.equal(seen, unpack(pack(torch.cat((first, last), 2)), torch.float32))
    assert first.grad is None
    assert torch.equal(last.grad, weight[:, :, 7:])


def test_others_take_it_and_theirs_stays(make: Any, tokens: Any) -> None:
    """Another model of transformers reads it by numbers; one of transformers' is made where its settings are given."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama, inputs = LlamaForCausalLM(LlamaConfig(vocab_size=SIZES["vocab_size"], **sizes)).eval(), tokens()
    with torch.no_grad():
        cache = DiffCache(llama.config, bits=8)
        parts = [llama(part, past_key_values=cache).logits for part in inputs.split((8, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), llama(inputs).logits, rtol=0.05, atol=0.05)
    settings = {**SETTINGS, "cache_config": {"backend": "nobody's"}}
    with pytest.raises(ValueError, match="nobody's"):
        make().generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
